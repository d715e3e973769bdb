"""Reward shaping for Diffusion-DICE: replace r by r + gamma b(s') - b(s), where b(s) is the return of the log.

b is the expected discounted return of the logged behaviour, learned first. Shaping by a potential (Ng et al., 1999)
does not change the optimal policy. Q and V then only learn corrections to b. Without it they would have to tell apart
actions that differ by less than one among states that differ by a hundred, and would start far below the truth.

With `backup data` the shaped rewards become their own discounted sums (advantages over b), so b is fitted accurately.
Where V continues from b, a rough fit can be better: in a maze the true return is -100 nearly everywhere, and a V that
starts there has a long way to climb.
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

PART = 65536  # rows per forward pass


class UsualReturn:
    """b(s): observations (1, batch, dims) -> (1, batch)."""

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
        if exact:  # the network learns standardised returns, so their scale does not matter
            self.mean, self.scale = float(to_go.mean()), max(float(to_go.std()), 1e-6)
        # a truncated episode would have gone on, so its return is bootstrapped with b of its last state
        last, ids = episodes.last_rows, episodes.episode_ids
        ends = np.where(episodes.final_known[:, None], episodes.final_observations, episodes.observations[last])
        left = self.gamma ** (last[ids] - np.arange(len(episodes)) + 1.0) * ~episodes.terminated[last][ids]
        device = store.rewards.device
        self.to_go, self.left = (torch.as_tensor(x.astype(np.float32), device=device) for x in (to_go, left))
        self.ends = torch.as_tensor(ends, dtype=torch.float32, device=device)

    def __call__(self, observations: Tensor) -> Tensor:
        return self.mean + self.scale * self.network(observations)

    def error(self, observations: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """b(s) of these rows, and its error: b(s) - return of the log."""
        estimate = self(observations)
        with torch.no_grad():
            beyond = self(self.ends[self.store.episode_ids[rows]])
        return estimate, estimate.detach() - self.to_go[rows] - self.left[rows] * beyond

    @torch.no_grad()
    def shape(self) -> None:
        """Replace the rewards in the store by the shaped ones."""
        store = self.store
        for part in torch.arange(len(self.rewards), device=self.rewards.device).split(PART):
            here, there = self(torch.cat([store.observations(part), store.next_observations(part)])[None])[0].chunk(2)
            left = self.gamma * (1 - store.terminated[part])
            store.rewards[part] = self.rewards[part] + left * there - here
        if self.backup == "data":
            gains = self._gains(store.rewards.cpu().numpy().copy())
            store.rewards.copy_(torch.as_tensor((gains / max(gains.std(), 1e-6)).astype(np.float32)))

    def _gains(self, surprises: np.ndarray) -> np.ndarray:
        """Advantages over b (GAE, lambda = trace): the sum of (gamma trace)^k times the shaped reward k steps later."""
        log = self.episodes
        surprises[log.last_rows[~log.final_known & ~log.terminated[log.last_rows]]] = 0  # their next state is unknown
        return replace(log, rewards=surprises).returns_to_go(self.gamma * self.trace)
