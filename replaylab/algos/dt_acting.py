"""How a trained Decision Transformer acts: it remembers the last K steps and counts down to its target."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from replaylab.step import Graph

if TYPE_CHECKING:
    from replaylab.algos.dt import Agent


class Context:
    """The memory of a batch of environments: their last K steps, oldest first, and the return-to-go.

    Choosing an action takes many small kernels, so on CUDA they are captured once as a graph and replayed. This is why
    all buffers are updated in place.
    """

    def __init__(self, agent: Agent, batch: int, targets: Tensor):  # targets: (batch,), not scaled
        self.agent, config, device = agent, agent.config, agent.device
        shape = (len(agent.seeds), batch, config.context)
        action = () if agent.discrete else (agent.shape.actions,)
        kind = torch.int64 if agent.discrete else torch.float32
        self.states = torch.zeros(*shape, config.width, device=device)  # embedded once, when they arrive
        self.actions = torch.zeros((*shape, *action), dtype=kind, device=device)
        self.returns = torch.zeros(shape, device=device)
        self.timesteps = torch.zeros(shape, dtype=torch.int64, device=device)
        self.start = (targets / agent.rtg_scale).expand(shape[:2])
        self.asked = self.start.clone()  # (seeds, batch)
        self.time = torch.zeros(shape[:2], dtype=torch.int64, device=device)
        self.slots = torch.arange(config.context, device=device)
        seen = torch.uint8 if agent.pixels else torch.float32
        self.observations = torch.zeros(*shape[:2], *agent.shape.observation, dtype=seen, device=device)
        self.chosen = torch.zeros((*shape[:2], *action), dtype=kind, device=device)
        self.answer = Graph(self._answer, device)

    def packed(self) -> Tensor:
        """The memory as one table, (seeds, batch, numbers); `unpack` reads it. A row of zeros is a new episode."""
        return torch.cat([part.reshape(*self.time.shape, -1).float() for part in self._parts()], -1)

    def unpack(self, numbers: Tensor) -> None:
        sizes = [part.shape[2:].numel() for part in self._parts()]
        for part, given in zip(self._parts(), numbers.split(sizes, -1), strict=True):
            part.copy_(given.reshape(part.shape))
        self.asked.copy_(torch.where(self.time > 0, self.asked, self.start))

    def _parts(self) -> list[Tensor]:
        return [self.states, self.actions, self.returns, self.timesteps, self.asked, self.time]

    def _answer(self) -> None:
        """Append the newest `observations` to the window and write the actions into `chosen`."""
        newest = self.time.clamp(max=len(self.slots) - 1)
        self._push(newest, self.agent.encode(self.observations))
        self.chosen.copy_(self.agent.choose(self.states, self.actions, self.returns, self.timesteps, newest))
        self._write("actions", newest, self.chosen)
        self.time += 1

    def _push(self, newest: Tensor, states: Tensor) -> None:
        """Append a step whose action is not known yet; a full window loses its oldest step."""
        full = self.time >= len(self.slots)
        for name in ("states", "returns", "timesteps", "actions"):
            self._shift(name, full)
        for name, value in {"states": states, "returns": self.asked, "timesteps": self.time}.items():
            self._write(name, newest, value)

    def _shift(self, name: str, which: Tensor) -> None:
        slots = getattr(self, name)
        slots.copy_(torch.where(_wide(which[..., None], slots), slots.roll(-1, 2), slots))

    def _write(self, name: str, place: Tensor, value: Tensor) -> None:
        slots = getattr(self, name)
        slots.copy_(torch.where(_wide(self.slots == place[..., None], slots), value.unsqueeze(2), slots))

    def receive(self, rewards: Tensor) -> None:
        """R_t+1 = R_t - r_t for rewards (seeds, batch), clipped if those of the data were. Where no step was taken
        since the reset, the reward is the last episode's."""
        if self.agent.config.mode == "normal":
            rewards = torch.where(self.agent.clipped > 0, rewards.clamp(-1, 1), rewards)
            self.asked -= torch.where(self.time > 0, rewards, 0.0) / self.agent.rtg_scale

    @property
    def waits(self) -> bool:
        """Whether the next step needs the rewards of the last one."""
        config = self.agent.config
        return config.mode == "normal" and config.condition == "return" and bool((self.time > 0).any())

    def reset(self, which: Tensor) -> None:
        """Start a new episode in the environments that `which`, (seeds, batch) booleans, marks."""
        self.time[which] = 0
        self.asked[which] = self.start[which]


def _wide(condition: Tensor, like: Tensor) -> Tensor:
    return condition.view(*condition.shape, *[1] * (like.ndim - condition.ndim))
