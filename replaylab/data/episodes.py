"""`Episodes`: logged experience as flat arrays plus offsets, with `concatenate` and `from_rows` to make them.

Row i holds (observation, action, reward). The observation that follows it is row i + 1 of the same episode or, on the
last row, the episode's final observation; it is never another episode's first one. A time limit sets `truncated`,
never `terminated`. Everything else asks this class where an episode ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from replaylab.data.ends import (
    as_actions,
    as_flags,
    as_numbers,
    as_observations,
    as_rewards,
    check_meta,
    finals,
    id_changes,
    limit_reached,
    more_ends,
    plain,
    same_rows,
)
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
    final_observations: np.ndarray  # (episodes, ...) the observation after the last row
    final_known: np.ndarray  # (episodes,) bool; false: not logged, the last observation is a placeholder
    extras: dict[str, np.ndarray] = field(default_factory=dict)  # further columns, one entry per row
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
        """(rows,) index of the episode that a row belongs to."""
        return np.repeat(np.arange(self.num_episodes), self.lengths)

    @cached_property
    def timesteps(self) -> np.ndarray:
        """(rows,) steps since the episode began."""
        return np.arange(len(self)) - np.repeat(self.offsets[:-1], self.lengths)

    @property
    def next_known(self) -> np.ndarray:
        """(rows,) whether the next observation is logged: a model that predicts it can learn from these rows only."""
        known = np.ones(len(self), bool)
        known[self.last_rows] = self.final_known
        return known

    @property
    def backup_known(self) -> np.ndarray:
        """(rows,) whether r + gamma (1 - terminated) V(s') can be computed: a terminated row does not need s'."""
        return self.next_known | self.terminated

    # --- observation and action spaces

    @property
    def discrete(self) -> bool:
        return self.actions.ndim == 1 and self.actions.dtype.kind in "iu"

    @property
    def num_actions(self) -> int:
        """Number of discrete actions: as the source declares, else the largest logged id + 1."""
        return int(self.meta.get("num_actions") or int(self.actions.max()) + 1)

    @property
    def action_dim(self) -> int:
        return self.num_actions if self.discrete else self.actions.shape[1]

    @cached_property
    def action_bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Lowest and highest action: as the source declares, else [-1, 1] if that may be assumed, else its range."""
        if "action_low" in self.meta and "action_high" in self.meta:
            shape = self.actions.shape[1:]
            low, high = (np.asarray(self.meta[k], np.float32) for k in ("action_low", "action_high"))
            return np.broadcast_to(low, shape).copy(), np.broadcast_to(high, shape).copy()
        low, high = self.actions.min(0).astype(np.float32), self.actions.max(0).astype(np.float32)
        if self.assumes_unit_box(low, high):
            return -np.ones_like(low), np.ones_like(high)
        return low, high

    def assumes_unit_box(self, low: np.ndarray, high: np.ndarray) -> bool:
        """Whether actions of this range, in each column, are taken to come from [-1, 1]: they fit into it, and either
        the data names its environment or a column has both signs and goes beyond a half. Doses of 0 to 0.1 fit too, but
        a policy with that box would answer negative ones."""
        fit = bool(low.min() >= -1 and high.max() <= 1)
        wide = (low < 0) & (high > 0) & (np.maximum(-low, high) > 0.5)
        return fit and (self.env_id is not None or bool(wide.any()))

    @property
    def env_id(self) -> str | None:
        return self.meta.get("env_id")

    @property
    def nbytes(self) -> int:
        arrays = [self.observations, self.actions, self.rewards, self.terminated, self.truncated]
        return sum(a.nbytes for a in [*arrays, self.offsets, self.final_observations, *self.extras.values()])

    # --- derived columns

    def returns_to_go(self, gamma: float = 1.0) -> np.ndarray:
        """(rows,) float64: discounted sum of rewards from this row to the episode's end."""
        if gamma == 1.0:
            upto = np.cumsum(self.rewards, dtype=np.float64)
            return upto[self.last_rows][self.episode_ids] - upto + self.rewards
        total, rows = self.rewards.astype(np.float64), self.last_rows
        while len(rows):  # goes back one step in all episodes at once
            rows = rows[rows > self.offsets[self.episode_ids[rows]]] - 1
            total[rows] += gamma * total[rows + 1]
        return total

    def next_observations(self, rows: np.ndarray | None = None) -> np.ndarray:
        """The observation after each row; after the last row of an episode without `final_known`, a placeholder."""
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

    # --- parts of the data

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        """One dict per episode; its `observations` include the final one, so they have one row more than `actions`."""
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
        """The episodes with these numbers, in this order, or those where a boolean mask over all episodes is true."""
        episodes = np.asarray(episodes)
        if episodes.dtype == bool:
            if episodes.shape != (self.num_episodes,):
                raise DataError(f"a mask of shape {episodes.shape} cannot select from {self.num_episodes} episodes")
            episodes = np.flatnonzero(episodes)
        if episodes.size == 0:
            raise DataError("no episodes selected")
        numbers = episodes.ndim == 1 and episodes.dtype.kind in "iu"
        if not numbers or episodes.min() < -self.num_episodes or episodes.max() >= self.num_episodes:
            raise DataError(f"episodes are selected by a list of their numbers, 0 to {self.num_episodes - 1}")
        episodes = episodes.astype(np.int64)
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
        """The same rows with these flags, which must keep the old ends and may add new ones. The final observation of
        a new end is known: it is the next row's."""
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
        """Split episodes further, with the same two options as `from_rows`; the new ends are truncated."""
        if max_episode_steps is None and split == "flags":
            return self
        ends, notes = self.terminated | self.truncated, list(self.meta.get("notes", []))
        more = more_ends(ends, self.observations, self.actions, max_episode_steps, split, notes) & ~ends
        part = self.cut(self.terminated, self.truncated | more)
        return replace(part, meta=self.meta | {"notes": notes[:MAX_NOTES]})

    def top_fraction(self, fraction: float) -> Episodes:
        """The episodes with the highest returns, as many as fit into `fraction` of the rows, but at least one."""
        if not 0 < fraction <= 1:
            raise DataError(f"top fraction must be above 0 and at most 1, not {fraction}")
        order = np.argsort(self.returns, kind="stable")[::-1]
        used = np.cumsum(self.lengths[order])
        fits = used <= max(int(fraction * len(self)), 1)
        keep = max(1, int(np.argmin(fits)) if not fits.all() else len(order))  # no shorter episode fills the gap
        return self if keep == self.num_episodes else self.select(np.sort(order[:keep]))


def concatenate(parts: Sequence[Episodes]) -> Episodes:
    """Several logs as one. Extra columns that some of them lack are left out, and so are attachments."""
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
    meta = {k: v for k, v in first.meta.items() if all(plain(p.meta.get(k)) == plain(v) for p in parts)}
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
    """Episodes from rows in logged order.

    An episode ends where `terminated` or `truncated` says so, where the id in `episode` changes, where
    `next_observations` is not the next row's observation (rows are missing, or a boundary was not marked), every
    `max_episode_steps`, with `split="discontinuity"` where the observation jumps, and at the last row. Whatever had to
    be guessed or is missing is noted in `meta["notes"]`, which `data info` shows as warnings.
    """
    notes: list[str] = []
    rewards = as_rewards(rewards)
    rows = len(rewards)
    observations = as_observations("observations", observations, rows)
    actions = as_actions(actions, rows, notes)
    check_meta(meta or {}, actions)
    silent = truncated is None and episode is None and max_episode_steps is None and split == "flags"
    flagless = silent and terminated is None
    terminated, truncated = as_flags("terminated", terminated, rows), as_flags("truncated", truncated, rows)
    ends = terminated | truncated
    if episode is not None:
        ends |= id_changes(episode, rows, notes)
    gaps = np.zeros(rows, bool)
    if next_observations is not None:
        next_observations = as_observations("next_observations", next_observations, rows)
        if next_observations.shape != observations.shape:
            raise DataError(f"next_observations has shape {next_observations.shape}, observations {observations.shape}")
        gaps[:-1] = ~same_rows(next_observations[:-1], observations[1:]) & ~ends[:-1]
    marked = ends.copy()
    ends = more_ends(ends | gaps, observations, actions, max_episode_steps, split, notes)
    if max_episode_steps is not None:  # a time limit is not a gap that needs explaining
        marked |= limit_reached(marked, max_episode_steps)
        gaps &= ~marked
    if gaps.any():
        notes.append(
            f"rows that are not followed by their next_observation, and so end an episode: {gaps.sum()}; "
            "boundaries were not marked, or rows are missing"
        )
    last = np.flatnonzero(ends)
    final, known = finals(observations, next_observations, last)
    if silent and not known.all():
        what = "marks no episode ends" if flagless else "marks no time limits"
        notes.append(
            f"the file {what}, so an episode that ran out of time may be joined to the next one: "
            "pass --max-episode-steps N or --split discontinuity"
        )
    if not marked[-1]:
        notes.append("the rows after the last boundary are kept as a truncated episode")
    if not known.all():
        who = f"the final observation of {(~known).sum()} of {len(last)} episodes"
        why = "their last next observation is the next episode's first, as simulators with automatic resets write it"
        notes.append(f"{who} is not in the file" if next_observations is None else f"{who} is not trusted: {why}")
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
        extras={name: as_numbers(name, column, rows) for name, column in (extras or {}).items()},
        attachments=attachments or {},
        meta=meta,
    )
