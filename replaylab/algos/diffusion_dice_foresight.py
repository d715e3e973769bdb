"""Diffusion-DICE that looks one step ahead: Q(s, a) = r + gamma V(s'), with r and s' logged or predicted by a model.

A Q learned from logged actions alone ranks the candidates of a state poorly: their values differ a hundred times less
than those of states. A model of one step only has to learn the physics; V does the rest. So there is no Q network:

    values      each V learns from r + gamma V(s') of logged rows, with the loss of models/sdice.py; V(s') is the mean
                of several target networks: a single V, which prefers its own optimistic errors, would climb on them
    models      an ensemble of Gaussians for (s' - s, r), as in MOPO; only the means are used
    selection   Q of a candidate by each model is its predicted reward plus gamma times V of its predicted state

Models of a step are not part of the paper. Like a Q, they are evaluated at candidates, which guidance keeps near the
data. They need nearly deterministic steps and episodes that never terminate: the models do not predict ends.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from replaylab.algos import Phase
from replaylab.data.episodes import Episodes
from replaylab.errors import DataError
from replaylab.models.dynamics import Dynamics, Fit
from replaylab.models.imagine import Logged
from replaylab.models.mlp import generators, track
from replaylab.models.sdice import Value, spread, value_loss
from replaylab.tensors import under

Descend = Callable[[str, Tensor, Tensor], None]  # optimiser's name, network's output, loss gradient in it


class Foresight(nn.Module):
    def __init__(self, config: Any, seeds: Sequence[int], state: int, action: int):
        super().__init__()
        self.config, self.seeds = config, list(seeds)
        self.value = Value(generators(seeds, config.values), state, config.hidden)
        self.slow = copy.deepcopy(self.value).requires_grad_(False)
        self.dynamics = Dynamics(seeds, state, action, config.model_hidden, config.models, config.models)
        self.fit: Fit | None = None  # None once the models are trained

    # --- the models

    def phase(self, episodes: Episodes, device: torch.device) -> Phase:
        ends = int(episodes.terminated.sum())
        if ends:
            raise DataError(
                f"{ends:,} episodes of this log end by themselves, which models of a step do not foresee: "
                "pass --backup data or values"
            )
        data = Logged(episodes, device)
        inputs = torch.cat([data.observations, data.actions], 1)
        targets = torch.cat([data.following - data.observations, data.rewards[:, None]], 1)
        self.fit = fit = Fit(self.dynamics, self.seeds, inputs, targets, max_epochs=self.config.model_epochs)
        hooks: dict[str, Any] = {"every": fit.batches, "hook": fit.hook, "stop": fit.stop, "finish": self._finish}
        return Phase("dynamics", fit.steps, fit, fit.update, evaluates=False, **hooks)

    def _finish(self) -> dict[str, Any]:
        assert self.fit is not None
        findings, self.fit = self.fit.finish(), None
        return findings

    def training_state(self) -> dict[str, Tensor]:
        return {} if self.fit is None else {f"fit.{k}": v for k, v in self.fit.state().items()}

    def load_training_state(self, tensors: dict[str, Tensor]) -> None:
        if self.fit is not None and "fit.best" in tensors:
            self.fit.load(under("fit.", tensors))
        else:
            self.fit = None  # the models are trained

    # --- the values

    def values(self, net: nn.Module, states: Tensor) -> Tensor:  # (seeds, rows, state) -> (seeds, values, rows)
        return net(states.repeat_interleave(self.config.values, 0)).view(len(states), self.config.values, -1)

    def learn(
        self, descend: Descend, batch: dict[str, Tensor], states: Tensor, following: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """One update of each V towards r + gamma V(s') with the target networks. Returns y of the rows, and metrics."""
        config = self.config
        goal = self.goal(batch["rewards"], batch["terminated"], following)
        values = self.values(self.value, states)
        now = values.detach()
        loss, slope, _ = value_loss(now.flatten(0, 1), goal.repeat_interleave(config.values, 0), config.alpha)
        descend("value", values, slope.view(values.shape))
        track(self.slow, self.value, config.tau)
        y = (goal - now.mean(1)) / config.alpha
        found = {"value_loss": loss.view(now.shape[:2]).mean(1), "value": now.mean((1, 2))}
        return y, found | spread("y", y)

    @torch.no_grad()
    def goal(self, rewards: Tensor, terminated: Tensor, following: Tensor) -> Tensor:  # (seeds, rows)
        return rewards + self.config.gamma * (1 - terminated) * self.values(self.slow, following).mean(1)

    # --- choosing

    def judge(self, observations: Tensor, actions: Tensor, seen: Callable[[Tensor], Tensor]) -> Tensor:
        """Q by each model: (seeds, rows, ...) -> (seeds, models, rows). `seen` standardises states for V."""
        seeds, models = len(observations), self.config.models
        inputs = self.dynamics.inputs(observations, actions).repeat_interleave(models, 0)
        means, _ = self.dynamics.predict(inputs, self.dynamics.networks(elites_only=True))
        change, rewards = means.unflatten(0, (seeds, models)).split([observations.shape[-1], 1], -1)
        following = seen(observations[:, None] + change)  # (seeds, models, rows, state)
        ahead = self.values(self.value, following.flatten(1, 2)).mean(1).view(rewards.shape[:3])
        return rewards[..., 0] + self.config.gamma * ahead
