"""Behaviour cloning: predict the logged action from the observation.

    continuous actions   |a - pi(s)|^2 in units of the action box,   pi(s) = a tanh network scaled to that box
    discrete actions     -log pi(a | s);   acts with the most likely action

With `top_fraction` it clones only the best episodes (%BC in the Decision Transformer paper), the baseline that every
return-conditioned method has to beat.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from replaylab.algos import Normalizer, Phase, Spaces, box_unit
from replaylab.config import COUNT, FROM_0, RATE, Settings, Within, knob
from replaylab.data.episodes import Episodes
from replaylab.data.sample import Store, Transitions
from replaylab.errors import UsageError
from replaylab.models.adam import adam, anneal
from replaylab.models.mlp import ACTIVATIONS, MLP, generators


@dataclass
class Config(Settings):
    """Behaviour cloning."""

    steps: int = knob(100_000, "training updates", COUNT)
    batch_size: int = knob(256, "rows per batch", COUNT)
    lr: float = knob(3e-4, "Adam's learning rate", RATE)
    lr_decay: bool = knob(True, "let the learning rate fall to zero along a cosine, so that the last weights settle")
    weight_decay: float = knob(0.0, "decoupled weight decay (AdamW); 0: none", FROM_0)
    hidden: list[int] = knob([256, 256], "widths of the hidden layers", COUNT)
    activation: str = knob("relu", "activation function between the layers", ACTIVATIONS)
    normalize: bool = knob(True, "standardise observations with the data's mean and deviation")
    top_fraction: float = knob(
        1.0, "clone only the best episodes, up to this fraction of the rows", Within(0, 1, above=True)
    )


PRESETS: dict[str, dict[str, Any]] = {
    "debug": {"steps": 500, "batch_size": 64, "hidden": [64, 64], "eval_episodes": 2, "final_episodes": 4},
}


class Agent(nn.Module):
    done: Tensor
    center: Tensor
    scale: Tensor
    unit: Tensor

    def __init__(self, config: Config, spaces: Spaces, seeds: Sequence[int], device: torch.device):
        super().__init__()
        if len(spaces.observation_shape) != 1:
            raise UsageError(f"bc takes vectors, not observations of shape {tuple(spaces.observation_shape)}")
        self.config, self.seeds, self.device, self.discrete = config, list(seeds), device, spaces.discrete
        self.normalizer = Normalizer(spaces.observation_shape)
        self.policy = MLP(
            generators(seeds), spaces.observation_shape[0], config.hidden, spaces.action_dim, config.activation
        )
        if not self.discrete:
            low, high = torch.tensor(spaces.action_low), torch.tensor(spaces.action_high)
            self.register_buffer("center", (high + low) / 2)
            self.register_buffer("scale", (high - low) / 2)
            self.register_buffer("unit", box_unit(self.scale), persistent=False)
        self.register_buffer("done", torch.zeros(()))  # updates so far
        self.to(device)
        rate = torch.tensor(config.lr, device=device)
        self.optimizers = {"policy": adam(self.policy.parameters(), rate, weight_decay=config.weight_decay)}

    def phases(self, episodes: Episodes) -> list[Phase]:
        if self.config.normalize:
            self.normalizer.fit(episodes)
        store = Store(episodes.top_fraction(self.config.top_fraction), self.device)
        rows = Transitions(store, self.seeds, self.config.batch_size, next_observations=False)
        return [Phase("clone", self.config.steps, rows, self.update)]

    def loss(self, batch: dict[str, Tensor]) -> Tensor:  # (seeds,)
        predicted = self.predict(batch["observations"])
        if self.discrete:
            logits, actions = predicted.flatten(0, 1), batch["actions"].flatten()
            return nn.functional.cross_entropy(logits, actions, reduction="none").view(len(self.seeds), -1).mean(1)
        return ((predicted - batch["actions"]) / self.unit).square().mean((1, 2))

    def predict(self, observations: Tensor) -> Tensor:  # (seeds, batch, observation) -> actions, or logits
        output = self.policy(self.normalizer(observations))
        return output if self.discrete else self.center + self.scale * torch.tanh(output)

    def update(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        optimizer = self.optimizers["policy"]
        if self.config.lr_decay:
            anneal(optimizer, self.config.lr, self.done, self.config.steps)
        self.done += 1
        optimizer.zero_grad(set_to_none=True)
        loss = self.loss(batch)
        loss.sum().backward()
        optimizer.step()
        return {"loss": loss.detach()}

    def act(self, observations: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        predicted = self.predict(observations)
        return (predicted.argmax(-1) if self.discrete else predicted), state
