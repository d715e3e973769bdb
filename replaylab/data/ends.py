"""Find episode ends and check columns: plain functions on arrays, used by `episodes.from_rows` and the readers."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

import numpy as np

from replaylab.data.columns import pieces
from replaylab.errors import DataError

FLOAT32 = float(np.finfo(np.float32).max)


def more_ends(
    ends: np.ndarray, observations: np.ndarray, actions: np.ndarray, limit: int | None, split: str, notes: list[str]
) -> np.ndarray:
    """The known ends, plus those guessed from jumps, those at the step limit, and the last row."""
    if split == "discontinuity":
        guessed = jumps(observations, actions) & ~ends
        ends = ends | guessed
        notes.append(f"episode ends that were guessed, where the observation jumps: {guessed.sum()}")
    elif split != "flags":
        raise DataError(f"split must be 'flags' or 'discontinuity', not '{split}'")
    if limit is not None:
        ends = ends | limit_reached(ends, limit)
    ends = ends.copy()
    ends[-1] = True
    return ends


def as_observations(name: str, values: np.ndarray, rows: int) -> np.ndarray:
    values = as_numbers(name, values, rows)
    values = values[:, None] if values.ndim == 1 else values
    if values[0].size == 0:
        raise DataError(f"{name} has no columns: its shape is {values.shape}")
    return values


def as_actions(actions: np.ndarray, rows: int, notes: list[str]) -> np.ndarray:
    """Integers of shape (rows,) or (rows, 1) are discrete; anything else becomes (rows, dims) of floats."""
    actions = as_numbers("actions", actions, rows)
    if actions[0].size == 0:
        raise DataError(f"actions has no columns: its shape is {actions.shape}")
    actions = actions.reshape(rows, actions[0].size)
    if actions.dtype.kind == "f":
        return actions
    if actions.shape[1] > 1:
        notes.append(f"actions are {actions.shape[1]} whole numbers a row and are taken as amounts, not as choices")
        return actions.astype(np.float32)
    if actions.min() < 0:
        raise DataError(
            f"actions: discrete actions must not be negative, found {actions.min()}; store amounts as floating point"
        )
    return actions[:, 0].astype(np.uint8) if actions.dtype.kind == "b" else actions[:, 0]


def as_rewards(rewards: np.ndarray) -> np.ndarray:
    rewards = as_array("rewards", rewards)
    if rewards.ndim == 2 and rewards.shape[1] == 1:  # D4RL v1
        rewards = rewards[:, 0]
    if rewards.ndim != 1:
        raise DataError(f"rewards must be one number a row, not {rewards.dtype} of shape {rewards.shape}")
    if len(rewards) == 0:
        raise DataError("no rows: an episode needs at least one step")
    rewards = as_numbers("rewards", rewards, len(rewards))
    return rewards if rewards.dtype.kind == "f" else rewards.astype(np.float32)


def as_numbers(name: str, values: np.ndarray, rows: int) -> np.ndarray:
    """`values` as an array of `rows` numbers in this machine's byte order, or a DataError."""
    values = as_array(name, values)
    if values.ndim == 0 or len(values) != rows:
        raise DataError(f"{name} has {len(values) if values.ndim else 'no'} rows, rewards has {rows}")
    if values.dtype.kind not in "fiub" or values.dtype.itemsize > 8:
        raise DataError(f"{name} must be numbers of at most 64 bits, not {values.dtype}")
    if min(values.strides) < 0:  # a reversed view, which torch does not read
        values = values.copy()
    return values.astype(values.dtype.newbyteorder("="), copy=False)


def as_array(name: str, values: Any) -> np.ndarray:
    try:
        return np.asarray(values)
    except (ValueError, TypeError, RuntimeError) as error:  # lists of unequal length, tensors with gradients
        raise DataError(f"{name} cannot be read as an array: {error}") from error


def refuse_huge(name: str, values: np.ndarray) -> None:
    """Training uses float32, where a finite float64 out of range would become infinity: raise a DataError instead."""
    if values.dtype != np.float64:
        return
    for part in pieces(values):
        largest = np.abs(part, where=np.isfinite(part), out=np.zeros(part.shape)).max()
        if largest > FLOAT32:
            raise DataError(f"{name} reach {largest:.2g}, which float32 cannot hold")


def as_flags(name: str, flags: np.ndarray | None, rows: int) -> np.ndarray:
    """(rows,) bool from any array of one 0 or 1 per row; None means all false."""
    if flags is None:
        return np.zeros(rows, bool)
    flags = as_array(name, flags)
    if flags.size != rows:
        raise DataError(f"{name} has {flags.size} entries, rewards has {rows}")
    flags = as_numbers(name, flags.reshape(rows), rows)
    if not ((flags == 0) | (flags == 1)).all():
        raise DataError(f"{name} must be 0 or 1 in every row, found {flags[(flags != 0) & (flags != 1)][0]}")
    return flags.astype(bool)


def plain(value: Any) -> Any:
    """NumPy's numbers and arrays as Python's, which compare as a whole and can be written as JSON."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def check_meta(meta: Any, actions: np.ndarray) -> None:
    """Meta comes from a file or a user and may hold anything: check the entries that the package relies on."""
    if not isinstance(meta, Mapping):
        raise DataError(f"meta must be names with values, not {meta!r:.40}")
    if not isinstance(meta.get("env_id"), str | None):
        raise DataError("env_id must be a name")
    notes = meta.get("notes", [])
    if not isinstance(notes, list) or not all(isinstance(note, str) for note in notes):
        raise DataError("notes must be a list of sentences")
    discrete = actions.ndim == 1
    told = meta.get("num_actions") if discrete else None
    if told is not None and (not isinstance(told, Integral) or isinstance(told, bool) or told <= actions.max()):
        raise DataError(f"num_actions is {told!s:.20}, but action {actions.max()} occurs")
    if not discrete and ("action_low" in meta or "action_high" in meta):
        low, high = (_bound(meta.get(key), key, actions.shape[1]) for key in ("action_low", "action_high"))
        if not (low <= high).all():
            raise DataError("action_low is above action_high")


def _bound(value: Any, key: str, width: int) -> np.ndarray:
    try:
        bound = np.asarray(value, np.float64)
    except (ValueError, TypeError):
        bound = np.full((), np.nan)
    if bound.shape not in ((), (width,)) or not np.isfinite(bound).all():
        raise DataError(f"{key} must be {width} finite numbers")
    return bound


def id_changes(ids: np.ndarray, rows: int, notes: list[str]) -> np.ndarray:
    """(rows,) whether the next row belongs to another episode."""
    ids = as_array("episode", ids).reshape(-1)
    if len(ids) != rows:
        raise DataError(f"episode has {len(ids)} entries, rewards has {rows}")
    if ids.dtype.kind == "f" and np.isnan(ids).any():
        raise DataError(f"episode holds NaN in row {np.isnan(ids).argmax() + 1}")
    changes = np.append(ids[1:] != ids[:-1], True)
    try:
        again = int(changes.sum()) - len(np.unique(ids))
    except TypeError as error:
        raise DataError(f"episode must be all numbers or all names: {error}") from error
    if again:
        notes.append(
            f"ids of episodes come back after other ids ({again} x), and each time begin a new episode: "
            "rows must be sorted by episode"
        )
    return changes


def limit_reached(ends: np.ndarray, limit: int) -> np.ndarray:
    """(rows,) whether a multiple of `limit` steps has passed since the last known end."""
    if not isinstance(limit, Real) or limit < 1 or limit % 1:
        raise DataError(f"max_episode_steps must be a whole number of at least 1, not {limit}")
    index = np.arange(len(ends))
    starts = np.concatenate([[0], index[:-1][ends[:-1]] + 1])
    since = index - starts[np.searchsorted(starts, index, side="right") - 1]
    return (since + 1) % limit == 0


def same_rows(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """(rows,) whether row i of `a` and of `b` agree up to float32 rounding; in pieces, to keep temporaries small."""
    exact = a.dtype.kind != "f" and b.dtype.kind != "f"
    same = np.ones(len(a), bool)
    width = a[:1].size or 1
    step = 262_144 // width + 1
    for start in range(0, len(a), step):
        x, y = (v[start : start + step].reshape(-1, width) for v in (a, b))
        equal = x == y if exact else np.isclose(x, y, rtol=1e-5, atol=1e-6, equal_nan=True)
        same[start : start + step] = equal.all(1)
    return same


def jumps(observations: np.ndarray, actions: np.ndarray) -> np.ndarray:
    """(rows,) whether the next observation is far from what a linear model of the dynamics predicts.

    A fast robot can move further in one step than a reset moves it, so the size of the step says little; but most of it
    is predictable from (observation, action). Errors are divided by their 97th percentile in each column and averaged
    over columns (root mean square). A row is a jump if this is above 2 and above the cut between the two clusters of
    large errors. This needs episodes of about 40 steps or more, as resets must be rare.
    """
    rows, width = len(observations), observations[0].size
    surprise = np.zeros(rows)
    if rows < 4:
        return surprise > 0

    def step(i: np.ndarray) -> list[np.ndarray]:  # inputs of the linear model, change of the observation
        now, after = (observations[j].reshape(len(j), width).astype(np.float64) for j in (i, i + 1))
        known = np.column_stack([now, *([actions[i]] if actions.ndim == 2 else []), np.ones(len(i))])
        return [np.nan_to_num(v, posinf=0, neginf=0).clip(-1e12, 1e12) for v in (known, after - now)]

    piece = min(16384, 4_000_000 // width + 1)  # rows at a time; fewer for images
    known, moved = step(np.arange(0, rows - 1, rows // piece + 1))
    weights = np.zeros((known.shape[1], width))
    if width <= 256:  # wider observations (images): no model, errors are the steps themselves
        weights = np.linalg.lstsq(known, moved, rcond=None)[0]
    spread = known[:, :width].std(0)
    usual = np.maximum(np.quantile(np.abs(moved - known @ weights), 0.97, axis=0), 1e-6 * spread)
    moves = spread > 0
    for start in range(0, rows - 1, piece):
        index = np.arange(start, min(start + piece, rows - 1))
        known, moved = step(index)
        error = (moved - known @ weights)[:, moves] / usual[moves]
        surprise[index] = np.sqrt(np.square(error).sum(1) / max(moves.sum(), 1))
    large, cut = np.log(surprise[surprise > 1.3]), np.log(2)
    for _ in range(20):  # 2-means clustering of the logarithms
        if large.size and large.min() <= cut < large.max():
            cut = (large[large <= cut].mean() + large[large > cut].mean()) / 2
    return surprise > max(np.exp(cut), 2)


def finals(
    observations: np.ndarray, next_observations: np.ndarray | None, last: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The final observation of each episode, and whether it is known; if not, the last observation is a placeholder."""
    if next_observations is None:
        return observations[last], np.zeros(len(last), bool)
    # d4rl's qlearning_dataset and the like store the next episode's first observation here (np.roll: the log's first)
    following = observations[(last + 1) % len(observations)]
    known = ~same_rows(next_observations[last], following)
    if len(observations) == 1:
        known[:] = True
    final = next_observations[last].astype(observations.dtype)
    final[~known] = observations[last[~known]]
    return final, known
