"""What a logged step is worth to Diffusion-DICE: how much better it went than usual.

b(s) is the discounted return of the log itself, learnt first, and r + gamma b(s') - b(s) takes the place of r. Such a
potential (Ng et al., 1999) changes no policy. Q and V are then corrections to b; otherwise they have to tell apart
actions that differ by less than one where states differ by a hundred, and begin far below the truth.

With `backup data`, where Q is measured against b alone, b is learnt as well as can be. Where V goes on from b, a rough
one may be better: in a maze the truth is -100 nearly everywhere, and V, which starts there, has all the way to climb.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from replaylab.data.episodes import Episodes
from replaylab.data.sample import Store

PART = 65536  # rows at a time


class UsualReturn:
    """b(s), from observations (1, batch, dims) to (1, batch)."""

    def __init__(
        self,
        network: Callable[[Tensor], Tensor],
        episodes: Episodes,
        store: Store,
        config: Any,
        exact: bool,
    ):
        self.network, self.episodes, self.store = network, episodes, store
        self.gamma, self.backup, self.trace = config.gamma, config.backup, config.trace
        self.rewards = store.rewards.clone()
        to_go = episodes.returns_to_go(self.gamma).astype(np.float32)
        self.mean, self.scale = 0.0, 1.0
        if exact:  # the network's own numbers are near one: it learns a thousand no slower than a tenth
            self.mean, self.scale = float(to_go.mean()), max(float(to_go.std()), 1e-6)
        # an episode that was cut goes on unseen: what its end is worth is part of the return
        last, ids = episodes.last_rows, episodes.episode_ids
        ends = np.where(episodes.final_known[:, None], episodes.final_observations, episodes.observations[last])
        left = self.gamma ** (last[ids] - np.arange(len(episodes)) + 1.0) * ~episodes.terminated[last][ids]
        device = store.rewards.device
        self.to_go, self.left = (torch.as_tensor(x.astype(np.float32), device=device) for x in (to_go, left))
        self.ends = torch.as_tensor(ends, dtype=torch.float32, device=device)

    def __call__(self, observations: Tensor) -> Tensor:
        return self.mean + self.scale * self.network(observations)

    def error(self, observations: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """What it tells of these rows, and how far off that is."""
        told = self(observations)
        with torch.no_grad():
            beyond = self(self.ends[self.store.episode_ids[rows]])
        return told, told.detach() - self.to_go[rows] - self.left[rows] * beyond

    @torch.no_grad()
    def shape(self) -> None:
        """Change the store's rewards."""
        store = self.store
        for part in torch.arange(len(self.rewards), device=self.rewards.device).split(PART):
            here, there = self(torch.cat([store.observations(part), store.next_observations(part)])[None])[0].chunk(2)
            left = self.gamma * (1 - store.terminated[part])
            store.rewards[part] = self.rewards[part] + left * there - here
        if self.backup == "data":
            gains = self._gains(store.rewards.cpu().numpy().copy())
            store.rewards.copy_(torch.as_tensor((gains / max(gains.std(), 1e-6)).astype(np.float32)))

    def _gains(self, surprises: np.ndarray) -> np.ndarray:
        """How much better than b all went that followed, a sum that fades with the trace."""
        log = self.episodes
        surprises[log.last_rows[~log.final_known & ~log.terminated[log.last_rows]]] = 0  # what came next is not known
        return replace(log, rewards=surprises).returns_to_go(self.gamma * self.trace)
