"""What commonly spoils offline learning, looked for in a log: the warnings of `data info` and `train`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from replaylab.data.columns import Columns, column_statistics, pieces
from replaylab.data.ends import same_rows
from replaylab.data.episodes import Episodes
from replaylab.page import count, number

LARGE_PART = 0.2  # of the sum of |reward|
FLOAT32_STEPS = 100  # a column that spans fewer keeps less than two decimal digits in float32
HUGE = float(np.sqrt(np.finfo(np.float32).max))  # its square, as in a loss, is still finite in float32


def column_names(kind: str, shape: Sequence[int]) -> list[str]:
    return [f"{kind}[{','.join(map(str, index))}]" for index in np.ndindex(*shape)] if shape else [kind]


def _some(names: Sequence[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")


def number_warnings(episodes: Episodes, observations: Columns, actions: Columns, rewards: Columns) -> list[str]:
    found = []
    measured = [("observation", episodes.observations, observations), ("action", episodes.actions, actions)]
    measured += [("reward", episodes.rewards, rewards)]
    finals = episodes.final_observations[episodes.final_known]
    for name, array in {"final observation": finals, **episodes.extras}.items():
        if array.dtype.kind == "f" and array.size:
            measured.append((name, array, column_statistics(array)))
    for kind, array, columns in measured:
        for what, counts in (("NaN", columns.nan), ("infinity", columns.infinite)):
            if counts.any():
                names = column_names(kind, array.shape[1:])
                worst = [f"{names[i]} ({int(counts[i]):,})" for i in np.argsort(-counts, kind="stable") if counts[i]]
                total = int(counts.sum())
                found.append(f"{count(total, 'value')} {'is' if total == 1 else 'are'} {what}: {_some(worst)}")
    for kind, array, columns in measured[:3]:
        largest = np.where(columns.finite > 0, np.maximum(np.abs(columns.low), np.abs(columns.high)), 0)
        if (huge := np.flatnonzero(largest > HUGE)).size:
            names = column_names(kind, array.shape[1:])
            why = f"the square of {largest.max():.2g} overflows float32; scale it down before you train"
            found.append(f"huge: {_some([names[i] for i in huge])}: {why}")
    for kind, array, columns in measured[:2]:
        constant = np.flatnonzero(columns.low == columns.high)
        # some pixels of an image may well be constant, but not nearly all
        if len(constant) and len(episodes) > 1 and (array.ndim <= 2 or len(constant) > 0.9 * len(columns.low)):
            names = column_names(kind, array.shape[1:])
            found.append(f"constant: {_some([names[i] for i in constant])}: nothing can be learned from a constant")
    if rewards.low[0] == rewards.high[0]:
        found.append(f"every reward is {number(rewards.low[0])}: there is nothing to prefer")
    return found


def scale_warnings(observations: np.ndarray, columns: Columns) -> list[str]:
    """Training standardises in float32, which wipes out columns with a large offset."""
    if observations.ndim > 2:  # a pixel of an image may well hardly ever change
        return []
    varies = columns.low < columns.high
    largest = np.maximum(np.abs(columns.low), np.abs(columns.high))
    step = np.spacing(np.where(varies, largest, 1).clip(max=HUGE).astype(np.float32)).astype(np.float64)
    coarse = np.flatnonzero(varies & (columns.high - columns.low < FLOAT32_STEPS * step))
    if len(coarse):
        # float32 holds whole numbers exactly while its step is at most 1: counts and ids are fine
        whole = step[coarse] <= 1
        for part in pieces(observations):
            whole &= (part[:, coarse] == np.round(part[:, coarse])).all(0)
        coarse = coarse[~whole]
    found, names = [], column_names("observation", observations.shape[1:])
    if len(coarse):
        why = "values so far from 0 that float32 rounds most of their differences away; subtract an offset"
        found.append(f"large offset: {_some([names[i] for i in coarse])}: {why} before you train")
    return found


def reward_warnings(episodes: Episodes) -> list[str]:
    sizes = np.nan_to_num(np.abs(episodes.rewards.astype(np.float64)), posinf=0)
    lost = ~episodes.backup_known
    part = sizes[lost].sum() / max(sizes.sum(), np.finfo(np.float64).tiny)
    if part < LARGE_PART:
        return []
    where = f"{100 * part:.0f} % of the reward (as sum of |reward|) lies on {count(int(lost.sum()), 'row')} that"
    have = "has no known next observation and is" if lost.sum() == 1 else "have no known next observation and are"
    advice = "mark the last row of an episode as terminated, or give the next observations"
    return [f"{where} {have} not marked as terminated: methods that learn values cannot learn from them; {advice}"]


def boundary_warnings(episodes: Episodes) -> list[str]:
    found = []
    starts = episodes.offsets[1:-1]
    leaks = same_rows(episodes.final_observations[:-1], episodes.observations[starts]) if len(starts) else np.zeros(0)
    leaked = int((leaks * episodes.final_known[:-1]).sum())
    if leaked and (episodes.observations != episodes.observations[:1]).any():  # if all states are equal, none leaks
        who = f"the final observation of {count(leaked, 'episode')}"
        found.append(f"boundary leak: {who} is the first observation of the next one")
    unknown = int((~episodes.final_known).sum())
    notes = " ".join(map(str, episodes.meta.get("notes") or []))
    if unknown and "final observation" not in notes:
        found.append(f"the final observation of {unknown:,} of {count(episodes.num_episodes, 'episode')} is unknown")
    if episodes.num_episodes == 1 and not episodes.terminated.any():
        found.append("all rows are one episode that never terminates: are the episode boundaries missing?")
    short = int((episodes.lengths == 1).sum())
    if short:
        found.append(f"{count(short, 'episode')} of length 1")
    repeated = _duplicates(episodes)
    if repeated:
        found.append(f"{count(repeated, 'episode')} repeated: the same rows occur earlier in the data")
    return found


def _duplicates(episodes: Episodes) -> int:
    """Number of episodes equal to an earlier one; only those with the same length and return as another are hashed."""
    keys = episodes.lengths + 1j * np.nan_to_num(episodes.returns)  # complex: two numbers as one sortable key
    group, sizes = np.unique(keys, return_inverse=True, return_counts=True)[1:]
    seen, repeated = set(), 0
    for e in np.flatnonzero(sizes[group] > 1):
        rows = slice(episodes.offsets[e], episodes.offsets[e + 1])
        digest = hashlib.blake2b(digest_size=16)
        for column in (episodes.observations, episodes.actions, episodes.rewards):
            digest.update(np.ascontiguousarray(column[rows]).data)
        repeated += digest.digest() in seen
        seen.add(digest.digest())
    return repeated


def action_warnings(episodes: Episodes, action: dict[str, Any]) -> list[str]:
    if not episodes.discrete:
        found = []
        if action["whole"] and episodes.actions.dtype.kind == "f":
            found.append("actions are floating but all whole numbers: if they are choices, store them as integers")
        if action["outside"]:
            found.append(f"action values outside the declared bounds: {action['outside']:,}")
        return found
    if action["min"] < 0:
        return ["action ids below 0: discrete actions count from 0"]
    missing = action["num_actions"] - action["seen"]
    if missing <= 0:
        return []
    if action["num_actions"] > 10_000:
        return [f"{missing:,} of {action['num_actions']:,} action ids never occur: are these really discrete actions?"]
    never = np.setdiff1d(np.arange(action["num_actions"]), episodes.actions)
    return [f"action ids that never occur: {_some([str(i) for i in never], 10)}"]
