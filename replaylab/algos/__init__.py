"""The learning systems, one file each: Config, losses, update, act.

A system is a module with `Config`, `PRESETS` and `Agent`. An agent is an nn.Module that trains all seeds of a run at
once, made by `Agent(config, spaces, seeds, device)`. Seeds are the first axis of its weights, of batches, of
observations and of what `update` returns. `phases(episodes)` lists what is trained in which order,
`act(observations, state)` returns actions and the state. It keeps its `config`, and a dict `optimizers`, which
checkpoints save; what else resume needs is a buffer. Random numbers of an update come from models/draws.py.
An agent with a memory also has `begin(batch, targets)`, which makes the state, and `targets`, its default target
returns; its state has `receive(rewards)`, `reset(which)`, and `packed()` and `unpack(numbers)`, by which `export` hands
it to whoever acts: a table with a row for each environment, where zeros are a new episode.

A module may also have
    ACTING                    fields of its Config that affect only acting, so that `eval` can sweep them
    ONLINE, spaces(env_id)    it collects its own data, with one seed per run: `phases` then gets the environment's id,
                              translated by `environment(env_id)` if the module has that
    usual_preset(episodes)    the preset when the user names none
    SMALLER                   preset -> a smaller one, suggested to users without a GPU
    needs(config)             run folders that must exist before a run starts
    COPIES                    fields of its Config that may name a folder: a run copies it, and resumes by the copy
    counters(config)          number of updates of a whole run by kind, where no single setting says it
and an agent
    notes                     lines for the user
    idle                      those of `ACTING` that have no effect on it
    effort                    cost of an action in network passes
    training_state(), load_training_state(tensors)    checkpoint contents besides weights and optimisers
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from replaylab.data.episodes import Episodes
from replaylab.errors import DataError, UsageError, nearest
from replaylab.models.standard import divisors

MOST_CHOICES = 100_000  # discrete actions; networks have one output for each

SYSTEMS = {
    "bc": "replaylab.algos.bc",
    "dt": "replaylab.algos.dt",
    "mopo": "replaylab.algos.mopo",
    "gormpo": "replaylab.algos.gormpo",
    "bcq": "replaylab.algos.bcq",
    "diffusion-dice": "replaylab.algos.diffusion_dice",
    "mbarc": "replaylab.algos.mbarc",
}


def system(name: str) -> ModuleType:
    if not isinstance(name, str) or name not in SYSTEMS:
        raise UsageError(f"unknown system '{name}'{nearest(str(name), SYSTEMS)}")
    return importlib.import_module(SYSTEMS[name])


@dataclass(frozen=True)
class Spaces:
    """Observation and action spaces; enough to rebuild an agent without the data."""

    observation_shape: list[int]
    observation_dtype: str
    action_dim: int  # dimensions, or number of discrete actions
    discrete: bool
    action_low: list[float] | None = None
    action_high: list[float] | None = None
    frame_stack: int = 1  # single frames are logged; the agent sees this many at once

    @staticmethod
    def of(episodes: Episodes) -> Spaces:
        if episodes.discrete and episodes.action_dim > MOST_CHOICES:
            raise DataError(
                f"actions are whole numbers up to {episodes.action_dim - 1:,}, too many to be choices: "
                "if they are amounts, store them as real numbers"
            )
        low, high = (None, None) if episodes.discrete else (b.tolist() for b in episodes.action_bounds)
        shape, dtype = list(episodes.observations.shape[1:]), str(episodes.observations.dtype)
        stack = int(episodes.meta.get("frame_stack") or 1) if len(shape) == 2 and dtype == "uint8" else 1
        return Spaces(shape, dtype, episodes.action_dim, episodes.discrete, low, high, stack)

    def require_vectors(self, name: str) -> None:
        """For a system that learns from vectors and continuous actions alone."""
        if len(self.observation_shape) != 1:
            raise UsageError(f"{name} needs vectors, not observations of shape {tuple(self.observation_shape)}")
        if self.discrete:
            advice = "amounts must be stored as real numbers, choices are learnt by bc and dt"
            raise UsageError(f"{name} needs continuous actions, and the data's are whole numbers: {advice}")

    @property
    def seen(self) -> list[int]:
        """Shape of the observations that the agent gets when acting."""
        return [self.frame_stack, *self.observation_shape] if self.frame_stack > 1 else self.observation_shape


def box_unit(half: Tensor) -> Tensor:
    """What an action is divided by, given half the width of its box, so that its unit (grams or kilograms) does not
    matter to what is learned; 1 for an action that never varies."""
    return torch.where(half > 0, half, 1.0)


@dataclass
class Phase:
    """One stage of training: `update(sampler.gather(indices))`, at most `steps` times.

    `update` stays on the device: it returns tensors of shape (seeds,), never Python numbers. Work that needs the
    host is done in the hooks, between updates.
    """

    name: str
    steps: int
    sampler: Any  # data.sample.Transitions, Windows, ...
    update: Callable[[dict[str, Tensor]], dict[str, Tensor]]
    begin: Callable[[], str | None] | None = None  # before the first update; may return a line for the user
    every: int = 0  # `hook(k)` runs before update k if k is a multiple of this, 0 included
    hook: Callable[[int], dict[str, Tensor] | None] | None = None  # may return metrics of shape (seeds,)
    stop: Callable[[], bool] | None = None  # called after each hook; True ends the phase
    finish: Callable[[], dict[str, Any] | None] | None = None  # after the last update; returns findings for the report
    evaluates: bool = True  # False: there is no policy worth evaluating yet


class Normalizer(torch.nn.Module):
    """(x - mean) / std, from statistics of the data; the identity until fitted."""

    mean: Tensor
    std: Tensor

    def __init__(self, shape: Sequence[int]):
        super().__init__()
        self.register_buffer("mean", torch.zeros(*shape))
        self.register_buffer("std", torch.ones(*shape))

    def fit(self, episodes: Episodes) -> None:
        mean, std = map(torch.as_tensor, episodes.observation_stats())
        self.mean.copy_(mean)
        self.std.copy_(divisors(mean, std + (1e-3 * std).clamp(max=1e-6)))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std
