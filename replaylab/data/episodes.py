"""Episodes: logged experience as flat arrays plus offsets.

This is the only place that knows where an episode ends. Row i holds (observation, action, reward); the observation
that follows it is row i + 1 of the same episode, or the episode's final observation. It is never another episode's
first observation, and a time limit is never a terminal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from replaylab.errors import DataError

MAX_NOTES = 20


@dataclass(frozen=True, eq=False)
class Episodes:
    observations: np.ndarray  # (rows, ...) any dtype; pixels are single uint8 frames
    actions: np.ndarray  # (rows, dims) floating, or (rows,) integers for discrete actions
    rewards: np.ndarray  # (rows,)
    terminated: np.ndarray  # (rows,) bool; true only on the last row of an episode
    truncated: np.ndarray  # (rows,) bool; likewise
    offsets: np.ndarray  # (episodes + 1,) int64; episode e is rows offsets[e]:offsets[e + 1]
    final_observations: np.ndarray  # (episodes, ...) what followed the last row
    final_known: np.ndarray  # (episodes,) bool; false: the log does not say, the last observation stands in
    extras: dict[str, np.ndarray] = field(default_factory=dict)  # further columns, one value a row
    attachments: dict[str, np.ndarray] = field(default_factory=dict)  # arrays that are not per row (policy weights)
    meta: dict[str, Any] = field(default_factory=dict)  # plain JSON: env_id, source, licence, action_low, notes, ...

    def __post_init__(self) -> None:
        rows, episodes = len(self.rewards), len(self.offsets) - 1
        if rows == 0 or episodes < 1:
            raise DataError("no rows: an episode needs at least one step")
        columns = {name: getattr(self, name) for name in ("observations", "actions", "rewards")} | self.extras
        for name, column in (columns | {"terminated": self.terminated, "truncated": self.truncated}).items():
            if column.ndim == 0 or len(column) != rows:
                raise DataError(f"{name} has {len(column) if column.ndim else 'no'} rows, rewards has {rows}")
            if column.dtype.kind not in "fiub" or column.dtype.itemsize > 8 or not column.dtype.isnative:
                raise DataError(f"{name} must be numbers of at most 64 bits, not {column.dtype}")
        if self.rewards.ndim != 1:
            raise DataError(f"rewards must be one number a row, not of shape {self.rewards.shape}")
        for name, dtype in (("terminated", bool), ("truncated", bool), ("final_known", bool), ("offsets", np.int64)):
            if getattr(self, name).dtype != dtype or getattr(self, name).ndim != 1:
                raise DataError(f"{name} must be one {np.dtype(dtype)} each, not {getattr(self, name).dtype}")
        if self.offsets[0] != 0 or self.offsets[-1] != rows or (np.diff(self.offsets) < 1).any():
            raise DataError("offsets must rise from 0 to the number of rows")
        if self.final_observations.shape != (episodes, *self.observations.shape[1:]):
            raise DataError(
                f"final_observations has shape {self.final_observations.shape}, "
                f"expected {(episodes, *self.observations.shape[1:])}"
            )
        if len(self.final_known) != episodes:
            raise DataError(f"final_known has {len(self.final_known)} entries for {episodes} episodes")
        ends = np.zeros(rows, bool)
        ends[self.last_rows] = True
        if ((self.terminated | self.truncated) != ends).any():
            raise DataError("terminated or truncated must be set on the last row of every episode, and nowhere else")

    # --- sizes and per-episode facts

    def __len__(self) -> int:
        return len(self.rewards)

    @property
    def num_episodes(self) -> int:
        return len(self.offsets) - 1

    @property
    def last_rows(self) -> np.ndarray:
        return self.offsets[1:] - 1

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    @cached_property
    def returns(self) -> np.ndarray:
        return np.add.reduceat(self.rewards.astype(np.float64), self.offsets[:-1])

    @cached_property
    def episode_ids(self) -> np.ndarray:
        """(rows,) which episode a row belongs to."""
        return np.repeat(np.arange(self.num_episodes), self.lengths)

    @cached_property
    def timesteps(self) -> np.ndarray:
        """(rows,) steps since the episode began."""
        return np.arange(len(self)) - np.repeat(self.offsets[:-1], self.lengths)

    # --- what the columns are

    @property
    def discrete(self) -> bool:
        return self.actions.ndim == 1 and self.actions.dtype.kind in "iu"

    @property
    def num_actions(self) -> int:
        """How many discrete actions there are: what the source declares, else the largest seen + 1."""
        return int(self.meta.get("num_actions") or int(self.actions.max()) + 1)

    @property
    def action_dim(self) -> int:
        return self.num_actions if self.discrete else self.actions.shape[1]

    @cached_property
    def action_bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """The action box: what the source declares; else [-1, 1] where the data fits, else the data's range."""
        if "action_low" in self.meta and "action_high" in self.meta:
            shape = self.actions.shape[1:]
            low, high = (np.asarray(self.meta[k], np.float32) for k in ("action_low", "action_high"))
            return np.broadcast_to(low, shape).copy(), np.broadcast_to(high, shape).copy()
        low, high = self.actions.min(0).astype(np.float32), self.actions.max(0).astype(np.float32)
        if low.min() >= -1 and high.max() <= 1:
            return -np.ones_like(low), np.ones_like(high)
        return low, high

    @property
    def env_id(self) -> str | None:
        return self.meta.get("env_id")

    @property
    def nbytes(self) -> int:
        arrays = [self.observations, self.actions, self.rewards, self.terminated, self.truncated]
        return sum(a.nbytes for a in [*arrays, self.offsets, self.final_observations, *self.extras.values()])

    # --- derived columns, each in one pass

    def returns_to_go(self) -> np.ndarray:
        """(rows,) float64: undiscounted sum of rewards from this row to the episode's end."""
        upto = np.cumsum(self.rewards, dtype=np.float64)
        return upto[self.last_rows][self.episode_ids] - upto + self.rewards

    def next_observations(self, rows: np.ndarray | None = None) -> np.ndarray:
        """What followed each row. Where `final_known` is false, the last row's successor is only a stand-in."""
        rows = np.arange(len(self)) if rows is None else np.asarray(rows)
        following = self.observations[np.minimum(rows + 1, len(self) - 1)]
        last = self.terminated[rows] | self.truncated[rows]
        following[last] = self.final_observations[self.episode_ids[rows[last]]]
        return following

    def observation_stats(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of each observation column, in float64, without a float64 copy of the data."""
        total = np.zeros(self.observations.shape[1:])
        squares = np.zeros_like(total)
        for part in np.array_split(self.observations, max(1, len(self) // 65536)):
            total += part.sum(0, dtype=np.float64)
        mean = total / len(self)
        for part in np.array_split(self.observations, max(1, len(self) // 65536)):
            squares += np.square(part - mean).sum(0)
        return mean, np.sqrt(squares / len(self))

    # --- pieces

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        """One dict an episode; `observations` there has one row more than `actions`."""
        for e in range(self.num_episodes):
            rows = slice(self.offsets[e], self.offsets[e + 1])
            yield {
                "observations": np.concatenate([self.observations[rows], self.final_observations[e : e + 1]]),
                "actions": self.actions[rows],
                "rewards": self.rewards[rows],
                "terminated": self.terminated[rows],
                "truncated": self.truncated[rows],
                **{name: column[rows] for name, column in self.extras.items()},
            }

    def select(self, episodes: Sequence[int] | np.ndarray) -> Episodes:
        """The named episodes, in the order given."""
        episodes = np.asarray(episodes, np.int64)
        if len(episodes) == 0:
            raise DataError("no episodes selected")
        lengths = self.lengths[episodes]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        rows = np.arange(offsets[-1]) + np.repeat(self.offsets[:-1][episodes] - offsets[:-1], lengths)
        return replace(
            self,
            observations=self.observations[rows],
            actions=self.actions[rows],
            rewards=self.rewards[rows],
            terminated=self.terminated[rows],
            truncated=self.truncated[rows],
            offsets=offsets,
            final_observations=self.final_observations[episodes],
            final_known=self.final_known[episodes],
            extras={name: column[rows] for name, column in self.extras.items()},
        )

    def cut(self, terminated: np.ndarray, truncated: np.ndarray) -> Episodes:
        """The same rows with these flags, which may add ends but keep the old ones. A new end is followed by its row
        + 1, which is known."""
        last = np.flatnonzero(terminated | truncated)
        known = np.ones(len(last), bool)
        known[(self.terminated | self.truncated)[last]] = self.final_known
        return replace(
            self,
            terminated=terminated,
            truncated=truncated,
            offsets=np.concatenate([[0], last + 1]).astype(np.int64),
            final_observations=self.next_observations(last),
            final_known=known,
        )

    def split(self, max_episode_steps: int | None = None, split: str = "flags") -> Episodes:
        """Cut further, as `from_rows` does: every `max_episode_steps`, or where the observation jumps."""
        if max_episode_steps is None and split == "flags":
            return self
        ends, notes = self.terminated | self.truncated, list(self.meta.get("notes", []))
        more = _more_ends(ends, self.observations, self.actions, max_episode_steps, split, notes) & ~ends
        part = self.cut(self.terminated, self.truncated | more)
        return replace(part, meta=self.meta | {"notes": notes[:MAX_NOTES]})

    def top_fraction(self, fraction: float) -> Episodes:
        """The best episodes by return, whole ones, while they fit into `fraction` of the rows; at least the best."""
        if not 0 < fraction <= 1:
            raise DataError(f"top fraction must be above 0 and at most 1, not {fraction}")
        order = np.argsort(self.returns, kind="stable")[::-1]
        used = np.cumsum(self.lengths[order])
        fits = used <= max(int(fraction * len(self)), 1)
        keep = max(1, int(np.argmin(fits)) if not fits.all() else len(order))  # stop at the first that does not fit
        return self if keep == self.num_episodes else self.select(np.sort(order[:keep]))


def concatenate(parts: Sequence[Episodes]) -> Episodes:
    """Several logs as one. Columns that not all of them have are left out."""
    first = parts[0]
    if len(parts) == 1:
        return first
    for part in parts[1:]:
        for name in ("observations", "actions"):
            a, b = getattr(first, name), getattr(part, name)
            if a.shape[1:] != b.shape[1:] or (a.dtype.kind == "f") != (b.dtype.kind == "f"):
                raise DataError(f"cannot join {name} of shape {a.shape[1:]} {a.dtype} and {b.shape[1:]} {b.dtype}")
    shared = set(first.extras).intersection(*(p.extras for p in parts[1:]))
    shared = {n for n in shared if len({p.extras[n].shape[1:] for p in parts}) == 1}
    starts = np.cumsum([0] + [len(p) for p in parts[:-1]])
    notes = [note for p in parts for note in p.meta.get("notes", [])]
    meta = {k: v for k, v in first.meta.items() if all(p.meta.get(k) == v for p in parts)}
    if first.discrete:
        meta["num_actions"] = max(p.num_actions for p in parts)
    meta |= {"source": [p.meta.get("source") for p in parts], "notes": notes[:MAX_NOTES]}

    def join(name: str) -> np.ndarray:
        return np.concatenate([getattr(p, name) for p in parts])

    return Episodes(
        observations=join("observations"),
        actions=join("actions"),
        rewards=join("rewards"),
        terminated=join("terminated"),
        truncated=join("truncated"),
        offsets=np.concatenate([[0], *(p.offsets[1:] + s for p, s in zip(parts, starts, strict=True))]),
        final_observations=join("final_observations"),
        final_known=join("final_known"),
        extras={name: np.concatenate([p.extras[name] for p in parts]) for name in sorted(shared)},
        meta=meta,
    )


# --- from flat rows: where does an episode end?


def from_rows(
    observations: np.ndarray,
    actions: np.ndarray,
    rewards: np.ndarray,
    terminated: np.ndarray | None = None,
    truncated: np.ndarray | None = None,
    next_observations: np.ndarray | None = None,
    *,
    episode: np.ndarray | None = None,
    max_episode_steps: int | None = None,
    split: str = "flags",
    extras: dict[str, np.ndarray] | None = None,
    attachments: dict[str, np.ndarray] | None = None,
    meta: dict[str, Any] | None = None,
) -> Episodes:
    """Rows in the order they were logged -> Episodes, with every boundary the rows can prove.

    An episode ends where `terminated` or `truncated` says so, where the id in `episode` changes, where
    `next_observations` is not the next row's observation (rows are missing, or a boundary was not marked), every
    `max_episode_steps`, with `split="discontinuity"` where the observation jumps, and at the last row. What the rows
    cannot say is written into `meta["notes"]`, which `data info` shows as warnings.
    """
    notes: list[str] = []
    rewards = as_rewards(rewards)
    rows = len(rewards)
    observations = _as_observations("observations", observations, rows)
    actions = as_actions(actions, rows, notes)
    silent = truncated is None and episode is None and max_episode_steps is None and split == "flags"
    flagless = silent and terminated is None
    terminated, truncated = as_flags("terminated", terminated, rows), as_flags("truncated", truncated, rows)
    ends = terminated | truncated
    if episode is not None:
        ends |= _id_changes(episode, rows)
    gaps = np.zeros(rows, bool)
    if next_observations is not None:
        next_observations = _as_observations("next_observations", next_observations, rows)
        if next_observations.shape != observations.shape:
            raise DataError(f"next_observations has shape {next_observations.shape}, observations {observations.shape}")
        gaps[:-1] = ~_same_rows(next_observations[:-1], observations[1:]) & ~ends[:-1]
    marked = ends.copy()
    ends = _more_ends(ends | gaps, observations, actions, max_episode_steps, split, notes)
    if max_episode_steps is not None:  # a time limit is not a gap that needs explaining
        gaps &= ~_limit_reached(marked, max_episode_steps)
    if gaps.any():
        notes.append(
            f"{gaps.sum()} rows are not followed by their next_observation and end an episode there: "
            "boundaries were not marked, or rows are missing"
        )
    last = np.flatnonzero(ends)
    final, known = _finals(observations, next_observations, last)
    if silent and (next_observations is None or not known.all()):
        what = "marks no episode ends" if flagless else "marks no time limits"
        notes.append(
            f"the file {what}, so an episode that ran out of time may be joined to the next one: "
            "pass --max-episode-steps N or --split discontinuity"
        )
    if not marked[-1]:
        notes.append("the rows after the last boundary are kept as a truncated episode")
    if not known.all():
        notes.append(f"the final observation of {(~known).sum()} of {len(last)} episodes is not in the file")
    meta = dict(meta or {})
    meta["notes"] = [*meta.get("notes", []), *notes][:MAX_NOTES]
    return Episodes(
        observations=observations,
        actions=actions,
        rewards=rewards,
        terminated=terminated,
        truncated=ends & (truncated | ~terminated),
        offsets=np.concatenate([[0], last + 1]).astype(np.int64),
        final_observations=final,
        final_known=known,
        extras=extras or {},
        attachments=attachments or {},
        meta=meta,
    )


def _more_ends(
    ends: np.ndarray, observations: np.ndarray, actions: np.ndarray, limit: int | None, split: str, notes: list[str]
) -> np.ndarray:
    """The ends known so far, and those that a guess by discontinuity, a step limit and the last row add."""
    if split == "discontinuity":
        jumps = _jumps(observations, actions) & ~ends
        ends = ends | jumps
        notes.append(f"{jumps.sum()} episode ends were guessed where the observation jumps")
    elif split != "flags":
        raise DataError(f"split must be 'flags' or 'discontinuity', not '{split}'")
    if limit is not None:
        ends = ends | _limit_reached(ends, limit)
    ends = ends.copy()
    ends[-1] = True
    return ends


def _as_observations(name: str, values: np.ndarray, rows: int) -> np.ndarray:
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
    rewards = np.asarray(rewards)
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
    values = np.asarray(values)
    if values.ndim == 0 or len(values) != rows:
        raise DataError(f"{name} has {len(values) if values.ndim else 'no'} rows, rewards has {rows}")
    if values.dtype.kind not in "fiub" or values.dtype.itemsize > 8:
        raise DataError(f"{name} must be numbers of at most 64 bits, not {values.dtype}")
    return values.astype(values.dtype.newbyteorder("="), copy=False)


def as_flags(name: str, flags: np.ndarray | None, rows: int) -> np.ndarray:
    """(rows,) bool of anything that holds one 0 or 1 a row; none at all is all false."""
    if flags is None:
        return np.zeros(rows, bool)
    flags = np.asarray(flags)
    if flags.size != rows:
        raise DataError(f"{name} has {flags.size} entries, rewards has {rows}")
    flags = as_numbers(name, flags.reshape(rows), rows)
    if not ((flags == 0) | (flags == 1)).all():
        raise DataError(f"{name} must be 0 or 1 in every row, found {flags[(flags != 0) & (flags != 1)][0]}")
    return flags.astype(bool)


def _id_changes(ids: np.ndarray, rows: int) -> np.ndarray:
    """(rows,) whether the next row belongs to another episode."""
    ids = np.asarray(ids).reshape(-1)
    if len(ids) != rows:
        raise DataError(f"episode has {len(ids)} entries, rewards has {rows}")
    if ids.dtype.kind == "f" and np.isnan(ids).any():
        raise DataError(f"episode holds NaN in row {np.isnan(ids).argmax() + 1}")
    return np.append(ids[1:] != ids[:-1], True)


def _limit_reached(ends: np.ndarray, limit: int) -> np.ndarray:
    """Rows at which an episode has run `limit` steps since the last known end."""
    if limit < 1:
        raise DataError(f"max_episode_steps must be at least 1, not {limit}")
    index = np.arange(len(ends))
    starts = np.concatenate([[0], index[:-1][ends[:-1]] + 1])
    since = index - starts[np.searchsorted(starts, index, side="right") - 1]
    return (since + 1) % limit == 0


def _same_rows(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """(rows,) whether two rows agree, up to float32 rounding. In pieces, so that big logs need no big temporaries."""
    exact = a.dtype.kind != "f" and b.dtype.kind != "f"
    same = np.ones(len(a), bool)
    width = a[:1].size or 1
    step = 262_144 // width + 1
    for start in range(0, len(a), step):
        x, y = (v[start : start + step].reshape(-1, width) for v in (a, b))
        equal = x == y if exact else np.isclose(x, y, rtol=1e-5, atol=1e-6, equal_nan=True)
        same[start : start + step] = equal.all(1)
    return same


def _jumps(observations: np.ndarray, actions: np.ndarray) -> np.ndarray:
    """(rows,) rows whose successor a linear model of the dynamics does not expect.

    A fast robot moves further in one step than a reset does, so the step alone says little; but (observation, action)
    predicts most of it. Errors are measured in each column's 97th percentile, as the root mean square over columns;
    a row above 2 is a jump, or above the valley between the two kinds of large errors where they lie further apart.
    Needs episodes of some 40 steps or more: shorter ones make resets part of the usual.
    """
    rows, width = len(observations), observations[0].size
    surprise = np.zeros(rows)
    if rows < 4:
        return surprise > 0

    def step(i: np.ndarray) -> list[np.ndarray]:  # what is known before, how the observation moves
        now, after = (observations[j].reshape(len(j), width).astype(np.float64) for j in (i, i + 1))
        known = np.column_stack([now, *([actions[i]] if actions.ndim == 2 else []), np.ones(len(i))])
        return [np.nan_to_num(v, posinf=0, neginf=0).clip(-1e12, 1e12) for v in (known, after - now)]

    piece = min(16384, 4_000_000 // width + 1)  # rows at a time: pixels are wide
    known, moved = step(np.arange(0, rows - 1, rows // piece + 1))
    weights = np.zeros((known.shape[1], width))
    if width <= 256:  # pixels: the step itself has to do
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
    for _ in range(20):  # two means, in the logarithm
        if large.size and large.min() <= cut < large.max():
            cut = (large[large <= cut].mean() + large[large > cut].mean()) / 2
    return surprise > max(np.exp(cut), 2)


def _finals(
    observations: np.ndarray, next_observations: np.ndarray | None, last: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Final observation of each episode, and whether the rows tell it."""
    if next_observations is None:
        return observations[last], np.zeros(len(last), bool)
    # d4rl's qlearning_dataset and its kin write the next episode's first observation here (np.roll: the very first)
    following = observations[(last + 1) % len(observations)]
    known = ~_same_rows(next_observations[last], following)
    if len(observations) == 1:
        known[:] = True
    final = next_observations[last].astype(observations.dtype)
    final[~known] = observations[last[~known]]
    return final, known
