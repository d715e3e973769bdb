"""Batches, gathered on the device.

A `Store` copies the data to the device once; a sampler draws indices on the host (`draw`) and gathers a batch from them
inside the training step (`gather`). Indices are a pure function of (seed, stream, step): a run resumed at step n draws
what an uninterrupted run would, and a seed draws the same rows whichever seeds train beside it. Logs too large for the
device stay on the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from replaylab.data.ends import refuse_huge
from replaylab.data.episodes import Episodes
from replaylab.errors import DataError

BLOCK = 1024  # steps whose indices are drawn together
PIECE = 2**24  # bytes copied to the device at a time
DEVICE_SHARE = 0.6  # of the free memory that the data may use


def draw(population: int, shape: tuple[int, ...], seed: int, stream: int, start: int, steps: int) -> np.ndarray:
    """(steps, *shape) indices below `population` for steps start, start + 1, ...; in parts or at once alike."""
    parts = []
    while steps > 0:
        block, skip = divmod(start, BLOCK)
        count = min(BLOCK - skip, steps)
        rng = np.random.default_rng([seed, stream, block])
        parts.append(rng.integers(0, population, (BLOCK, *shape), dtype=np.int64)[skip : skip + count])
        start, steps = start + count, steps - count
    return np.concatenate(parts)


def fits(nbytes: int, device: torch.device) -> bool:
    if device.type == "cuda":
        return nbytes < DEVICE_SHARE * torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as file:
            available = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return True
    return nbytes < DEVICE_SHARE * available


class Store:
    """The columns of a log on the device. Each episode's final observation is stored after its last row, so that the
    observation after row i is always the next entry."""

    def __init__(self, episodes: Episodes, device: torch.device | str, resident: bool | None = None):
        self.episodes, self.device = episodes, torch.device(device)
        self.resident = fits(2 * episodes.nbytes, self.device) if resident is None else resident
        self.actions = self._small(episodes.actions)
        self.rewards = self._small(episodes.rewards)
        self.terminated = self._small(episodes.terminated.astype(np.float32))
        self.episode_ids = torch.as_tensor(episodes.episode_ids, device=self.device)
        if self.resident:
            kind = torch.uint8 if episodes.observations.dtype == np.uint8 else torch.float32
            shape = (len(episodes) + episodes.num_episodes, *episodes.observations.shape[1:])
            self._observations = torch.empty(shape, dtype=kind, device=self.device)
            step = max(1, PIECE * len(episodes) // episodes.observations.nbytes)
            for start in range(0, len(episodes), step):  # in pieces, to avoid a second copy of the whole log
                self._fill(start, min(start + step, len(episodes)))

    def _fill(self, start: int, stop: int) -> None:
        """Copy rows start to stop to the device, with the final observations of the episodes that end there."""
        ends, finals = self.episodes.offsets[1:], self.episodes.final_observations
        first, last = np.searchsorted(ends, [start, stop], side="right")
        rows = np.insert(self.episodes.observations[start:stop], ends[first:last] - start, finals[first:last], axis=0)
        rows = rows if rows.dtype == np.uint8 else rows.astype(np.float32, copy=False)
        self._observations[start + first : start + first + len(rows)].copy_(torch.from_numpy(rows))

    def _small(self, column: np.ndarray) -> Tensor:
        kind = torch.int64 if column.dtype.kind in "iu" else torch.float32
        return torch.tensor(column, dtype=kind, device=self.device)

    def observations(self, rows: Tensor) -> Tensor:
        if self.resident:
            return self._observations[rows + self.episode_ids[rows]]
        return self._from_host(self.episodes.observations[rows.cpu().numpy()])

    def next_observations(self, rows: Tensor) -> Tensor:
        if self.resident:
            return self._observations[rows + self.episode_ids[rows] + 1]
        flat = rows.cpu().numpy()
        return self._from_host(self.episodes.next_observations(flat.reshape(-1)).reshape(*flat.shape, *self.shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.episodes.observations.shape[1:]

    def _from_host(self, rows: np.ndarray) -> Tensor:
        kind = torch.uint8 if rows.dtype == np.uint8 else torch.float32
        return torch.tensor(rows, dtype=kind, device=self.device)


def refuse_nonfinite(episodes: Episodes) -> None:
    """Before anything is computed from the log: statistics of infinite numbers warn, and mean nothing."""
    for name in ("observations", "actions", "rewards", "final_observations"):
        column = getattr(episodes, name)
        if column.dtype.kind != "f":
            continue
        for part in np.array_split(column, max(1, len(column) // 65536)):
            if not np.isfinite(part).all():
                raise DataError(f"{name} holds NaN or infinity: see `replaylab data info`; clean the log first")
        refuse_huge(name, column)


class Transitions:
    """Uniform draws of (observation, action[, reward, next_observation, terminated]) rows.

    With `next_observations`, rows without a logged successor are never drawn, except terminated ones: their next
    observation is a placeholder, whose value a bootstrap multiplies by zero.
    """

    def __init__(
        self, store: Store, seeds: Sequence[int], batch_size: int, stream: int = 0, next_observations: bool = True
    ):
        self.store, self.seeds, self.batch_size, self.stream = store, list(seeds), batch_size, stream
        self.next = next_observations
        episodes = store.episodes
        self.rows: Tensor | None = None
        self.population = len(episodes)
        if self.next and not episodes.backup_known.all():
            self.rows = torch.as_tensor(np.flatnonzero(episodes.backup_known), device=store.device)
            self.population = len(self.rows)
            if self.population == 0:
                raise DataError("the log tells no next observation, so there is no transition to learn from")

    @property
    def resident(self) -> bool:
        return self.store.resident

    def draw(self, start: int, steps: int) -> np.ndarray:
        """(steps, seeds, batch) indices."""
        parts = [draw(self.population, (self.batch_size,), s, self.stream, start, steps) for s in self.seeds]
        return np.stack(parts, axis=1)

    def gather(self, index: Tensor) -> dict[str, Tensor]:
        rows = index if self.rows is None else self.rows[index]
        batch = {"observations": self.store.observations(rows), "actions": self.store.actions[rows]}
        if self.next:
            batch["rewards"] = self.store.rewards[rows]
            batch["terminated"] = self.store.terminated[rows]
            batch["next_observations"] = self.store.next_observations(rows)
        return batch


def left_out(episodes: Episodes, learner: str) -> list[str]:
    """A note if `learner`, which predicts next observations, has to leave rows out."""
    unknown = int((~episodes.next_known).sum())
    if not unknown:
        return []
    return [f"{learner}: {unknown:,} of {len(episodes):,} rows left out, as the log does not tell what followed them"]


class Pair:
    """Two samplers drawn together; the columns of the second are prefixed with `second.`."""

    def __init__(self, first: Transitions, second: Transitions):
        self.first, self.second = first, second
        self.resident = first.resident and second.resident

    def draw(self, start: int, steps: int) -> np.ndarray:
        return np.concatenate([self.first.draw(start, steps), self.second.draw(start, steps)], -1)

    def gather(self, index: Tensor) -> dict[str, Tensor]:
        one, two = index.split([self.first.batch_size, self.second.batch_size], -1)
        other = {f"second.{name}": value for name, value in self.second.gather(two).items()}
        return self.first.gather(one) | other


class Numbered(Transitions):
    """Transitions with the index of each row, `row`, among those that can be drawn."""

    def gather(self, index: Tensor) -> dict[str, Tensor]:
        return super().gather(index) | {"row": index}


class Later:
    """A sampler that starts where another one has got to after `by` steps."""

    def __init__(self, sampler: Transitions, by: int):
        self.sampler, self.by, self.gather, self.resident = sampler, by, sampler.gather, sampler.resident

    def draw(self, start: int, steps: int) -> np.ndarray:
        return self.sampler.draw(start + self.by, steps)


class Windows:
    """Draws of `length` consecutive steps of one episode, padded on the right if the episode ends earlier.

    A draw is the window's first row, uniform over all rows; the share `starts` of a batch begins at an episode's start.
    `mask` is 1 for real steps; padded slots hold zeros. A causal model never looks to the right, so it needs the mask
    only in its loss. Returns-to-go run to the end of the episode. With `stack`, an observation is a stack of that many
    frames, and padded slots repeat the episode's last frame.
    """

    def __init__(
        self,
        store: Store,
        seeds: Sequence[int],
        batch_size: int,
        length: int,
        stream: int = 0,
        stack: int = 1,
        starts: float = 0.0,
    ):
        self.stack, self.starts = stack, round(starts * batch_size)
        self.store, self.seeds, self.batch_size, self.stream = store, list(seeds), batch_size, stream
        device, episodes = store.device, store.episodes
        self.timesteps = torch.as_tensor(episodes.timesteps, device=device)
        self.returns_to_go = torch.as_tensor(episodes.returns_to_go().astype(np.float32), device=device)
        self.last = torch.as_tensor(episodes.last_rows, device=device)  # (episodes,)
        self.slots = torch.arange(length, device=device)
        self.before = torch.arange(1 - stack, length, device=device)  # slots whose frames the stacks need
        self.first = torch.as_tensor(episodes.offsets[:-1], device=device)  # (episodes,) first rows

    @property
    def resident(self) -> bool:
        return self.store.resident

    def draw(self, start: int, steps: int) -> np.ndarray:
        """(steps, seeds, batch) first rows."""
        parts = [draw(len(self.timesteps), (self.batch_size,), s, self.stream, start, steps) for s in self.seeds]
        found, first = np.stack(parts, axis=1), self.store.episodes.offsets[:-1]
        if self.starts:
            begun = [draw(len(first), (self.starts,), s, self.stream + 1, start, steps) for s in self.seeds]
            found[..., : self.starts] = first[np.stack(begun, axis=1)]
        return found

    def gather(self, index: Tensor) -> dict[str, Tensor]:  # (seeds, batch) -> (seeds, batch, length, ...)
        rows, last = index[..., None] + self.slots, self.last[self.store.episode_ids[index]][..., None]
        real = rows <= last
        rows = torch.minimum(rows, last)

        def masked(column: Tensor) -> Tensor:
            return column * real.reshape(*real.shape, *[1] * (column.ndim - real.ndim)).to(column.dtype)

        return {
            "observations": masked(self.store.observations(rows)) if self.stack == 1 else self._stacks(index),
            "actions": masked(self.store.actions[rows]),
            "rewards": masked(self.store.rewards[rows]),
            "returns_to_go": masked(self.returns_to_go[rows]),
            "timesteps": masked(self.timesteps[rows]),
            "mask": real.float(),
        }

    def _stacks(self, index: Tensor) -> Tensor:  # -> (seeds, batch, length, stack, height, width), a view
        """Frames before the episode's first are blank. A frame is fetched once, although several stacks share it."""
        episode, wanted = self.store.episode_ids[index], index[..., None] + self.before
        first, last = self.first[episode][..., None], self.last[episode][..., None]
        rows = torch.minimum(torch.maximum(wanted, first), last)
        frames = self.store.observations(rows) * (wanted >= first)[..., None, None]
        return frames.unfold(2, self.stack, 1).movedim(-1, 3)


class FrameStacks:
    """The last `stack` frames up to a row, oldest first. Frames before the episode's first are blank, as at the start
    of a game."""

    def __init__(self, store: Store, stack: int = 4):
        self.store = store
        self.back = torch.arange(stack - 1, -1, -1, device=store.device)
        self.first = torch.as_tensor(store.episodes.offsets[:-1], device=store.device)  # (episodes,) first rows

    def __call__(self, rows: Tensor) -> Tensor:  # (...,) -> (..., stack, height, width), dtype as stored
        first = self.first[self.store.episode_ids[rows]][..., None]
        wanted = rows[..., None] - self.back
        frames = self.store.observations(torch.maximum(wanted, first))
        return frames * (wanted >= first)[..., None, None]
