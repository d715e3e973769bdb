"""Soft actor-critic (Haarnoja et al., 2018): maximise return plus entropy, with twin critics.

    critic   (Q_i(s, a) - y)^2,   y = r + gamma (1 - terminated) (min_i Qbar_i(s', a') - alpha log pi(a' | s'))
    actor    alpha log pi(a | s) - min_i Q_i(s, a),   a ~ pi(. | s)
    alpha    -log_alpha (log pi(a | s) + target entropy)

pi is a Gaussian squashed by tanh into the action box; Qbar are the target critics. All three gradients are taken at
the same parameters, so one backward pass and one optimiser step do the whole update. Every network has a leading axis
of seeds; the two critics of a seed are neighbours on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from replaylab.algos import Spaces
from replaylab.config import COUNT, RATE, SHARE, Settings, knob
from replaylab.models.adam import adam
from replaylab.models.mlp import MLP, generators, track

LOG_STD = (-5.0, 2.0)
NO_WIDTH = 1e-8  # half the range of an action that never varies; keeps divisions finite


@dataclass
class Config(Settings):
    """Soft actor-critic."""

    hidden: list[int] = knob([256, 256], "widths of the hidden layers of actor and critics", COUNT)
    batch_size: int = knob(256, "rows per batch", COUNT)
    gamma: float = knob(0.99, "discount factor", SHARE)
    tau: float = knob(0.005, "share by which the target critics move towards the critics per update", SHARE)
    actor_lr: float = knob(3e-4, "Adam's learning rate of the actor", RATE)
    critic_lr: float = knob(3e-4, "Adam's learning rate of the critics", RATE)
    alpha_lr: float = knob(3e-4, "Adam's learning rate of the temperature", RATE)
    target_entropy: float | None = knob(
        None, "entropy of the policy to aim for, of actions in [-1, 1]; default: minus their dimensions"
    )


class SAC(nn.Module):
    center: Tensor
    scale: Tensor
    log_scale: Tensor

    def __init__(
        self,
        config: Config,
        spaces: Spaces,
        seeds: Sequence[int],
        device: torch.device,
        *,
        alpha_max: float | None = None,  # upper limit of the temperature
        goal_min: float | None = None,  # lower limit of the target y
        actor_rate: Tensor | None = None,  # a learning rate that the caller changes
    ):
        super().__init__()
        self.config, self.seeds, self.device = config, list(seeds), device
        self.alpha_max, self.goal_min = alpha_max, goal_min
        observation, actions = spaces.observation_shape[0], spaces.action_dim
        self.actor = MLP(generators(seeds), observation, config.hidden, 2 * actions)
        self.critics = MLP(generators(seeds, copies=2), observation + actions, config.hidden, 1)
        self.targets = MLP(generators(seeds, copies=2), observation + actions, config.hidden, 1).requires_grad_(False)
        self.log_alpha = nn.Parameter(torch.zeros(len(seeds), 1))
        low, high = torch.tensor(spaces.action_low), torch.tensor(spaces.action_high)
        self.register_buffer("center", (high + low) / 2)
        half = (high - low) / 2
        self.register_buffer("scale", torch.where(half > 0, half, NO_WIDTH))
        log_scale = torch.where(half > 0, half.log(), 0.0)
        self.register_buffer("log_scale", log_scale, persistent=False)
        self.target_entropy = -float(actions) if config.target_entropy is None else config.target_entropy
        self.to(device)
        groups: list[dict[str, Any]] = [
            {"params": list(self.actor.parameters()), "lr": config.actor_lr if actor_rate is None else actor_rate},
            {"params": list(self.critics.parameters()), "lr": config.critic_lr},
            {"params": [self.log_alpha], "lr": config.alpha_lr},
        ]
        if actor_rate is None and config.actor_lr == config.critic_lr == config.alpha_lr:  # one group, one kernel
            groups = [{"params": [p for group in groups for p in group["params"]], "lr": config.actor_lr}]
        self.optimizers = {"all": adam(groups)}

    # --- the policy: a Gaussian squashed into the action box

    def distribution(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self.actor(observations).chunk(2, -1)
        return mean, log_std.clamp(*LOG_STD)

    def sample(self, observations: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Actions (..., dims) and their log-densities (...,); draws standard normal `noise` if none is given."""
        mean, log_std = self.distribution(observations)
        noise = torch.randn_like(mean) if noise is None else noise
        raw = mean + log_std.exp() * noise
        # log(1 - tanh(x)^2) = 2 (log 2 - x - softplus(-2x)), which does not underflow
        squash = 2 * (math.log(2) - raw - softplus(-2 * raw)) + self.log_scale
        log_prob = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi) - squash
        return self.center + self.scale * torch.tanh(raw), log_prob.sum(-1)

    def mode(self, observations: Tensor) -> Tensor:
        return self.center + self.scale * torch.tanh(self.distribution(observations)[0])

    # --- the critics

    def values(
        self, critics: Callable[[Tensor], Tensor], observations: Tensor, actions: Tensor
    ) -> Tensor:  # (seeds, 2, batch)
        inputs = torch.cat([observations, (actions - self.center) / self.scale], -1).repeat_interleave(2, 0)
        return critics(inputs).view(len(self.seeds), 2, -1)

    def update(self, batch: dict[str, Tensor], noise: Tensor | None = None) -> dict[str, Tensor]:
        """One update on (seeds, batch, ...) columns; `noise` is (seeds, 2 batch, dims). Metrics of shape (seeds,)."""
        observations, size = batch["observations"], batch["observations"].shape[1]
        alpha = self.log_alpha.detach().exp()  # (seeds, 1)
        if self.alpha_max is not None:
            alpha = alpha.clamp(max=self.alpha_max)
        both = torch.cat([observations, batch["next_observations"]], 1)
        actions, log_prob = self.sample(both, noise)
        log_prob = log_prob + self.log_scale.sum()  # in units of the box: in a narrow one none has the target entropy
        with torch.no_grad():
            following = self.values(self.targets, batch["next_observations"], actions[:, size:]).amin(1)
            soft = following - alpha * log_prob[:, size:]
            goal = batch["rewards"] + self.config.gamma * (1 - batch["terminated"]) * soft
            if self.goal_min is not None:
                goal = goal.clamp(min=self.goal_min)
        values = self.values(self.critics, observations, batch["actions"])
        critic_loss = (values - goal[:, None]).square().mean(2).sum(1)
        log_prob = log_prob[:, :size]
        actor_loss = (alpha * log_prob - self._frozen(observations, actions[:, :size]).amin(1)).mean(1)
        alpha_loss = -(self.log_alpha * (log_prob.detach() + self.target_entropy)).mean(1)
        self.optimizers["all"].zero_grad(set_to_none=True)
        (critic_loss + actor_loss + alpha_loss).sum().backward()
        self.optimizers["all"].step()
        track(self.targets, self.critics, self.config.tau)
        return {
            "critic_loss": critic_loss.detach(),
            "actor_loss": actor_loss.detach(),
            "value": values.detach().mean((1, 2)),
            "alpha": alpha[:, 0],
            "entropy": -log_prob.detach().mean(1),
        }

    def _frozen(self, observations: Tensor, actions: Tensor) -> Tensor:
        """Q_i(s, a) with gradients only to the actions."""
        fixed = {name: p.detach() for name, p in self.critics.named_parameters()}
        return self.values(lambda x: torch.func.functional_call(self.critics, fixed, (x,)), observations, actions)

    @torch.no_grad()
    def act(self, observations: Tensor, state: None = None) -> tuple[Tensor, None]:
        return self.mode(observations), state
