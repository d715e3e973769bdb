"""How a trained Diffusion-DICE acts: draw candidates with score + guidance * grad W, then select one by Q."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from replaylab.algos.diffusion_dice_settings import ACTING
from replaylab.models.score import guided_sample
from replaylab.models.sdice import aggregated
from replaylab.models.solver import plan
from replaylab.step import Graph

SHAPES_KEPT = 4  # (batch size, acting settings) whose captured samplers are kept


def sampling(agent: Any, rows: int) -> Sampling:
    """The agent's for so many rows and its acting settings of now."""
    if torch.compiler.is_exporting():  # for any number of rows
        return Sampling(agent, rows)
    key = (rows, *(getattr(agent.config, name) for name in ACTING))
    if key not in agent.samplings:
        if len(agent.samplings) >= SHAPES_KEPT:
            del agent.samplings[next(iter(agent.samplings))]
        agent.samplings[key] = Sampling(agent, rows)
    return agent.samplings[key]


class Sampling:
    """Maps states to selected actions, for one batch size and one set of acting settings; on CUDA, one graph."""

    def __init__(self, agent: Any, rows: int):
        self.agent, config = agent, agent.config
        members, device = len(agent.seeds), agent.device
        self.candidates = 1 if agent.guide is None else config.candidates
        self.plan = plan(config.solver_steps, config.solver_order, config.solver_power)
        self.guide = None if config.guidance == 0 else agent.guide
        self.scale = agent.usual_guidance if config.guidance is None else torch.tensor(config.guidance, device=device)
        self.states = torch.zeros(members, rows, agent.sizes[0], device=device)
        self.noise = torch.zeros(members, rows * self.candidates, agent.sizes[1], device=device)
        self.races = torch.zeros(members, rows, self.candidates, device=device)  # exponential noise, for the softmax
        self.actions = torch.zeros(members, rows, agent.sizes[1], device=device)
        self.graph = Graph(self._body, device)

    def __call__(self, states: Tensor) -> Tensor:
        self.states.copy_(states)
        self.noise.normal_()
        if self.agent.config.filter == "softmax" and self.candidates > 1:
            self.races.exponential_()
        self.graph()
        return self.actions.clone()

    def _body(self) -> None:
        agent, config = self.agent, self.agent.config
        states = agent.seen(self.states)
        actions = guided_sample(agent.acting_score, self.guide, self.scale, states, self.noise, self.plan)
        if config.clip_actions == "before":
            actions = actions.clamp(agent.scaled(agent.low), agent.scaled(agent.high))
        if self.candidates > 1:
            actions = self.choose(states, actions)
        actions = agent.center + agent.unit * actions
        self.actions.copy_(actions.clamp(agent.low, agent.high))  # the original leaves this to its environments

    def choose(self, states: Tensor, actions: Tensor) -> Tensor:  # -> (seeds, rows, action)
        agent, config = self.agent, self.agent.config
        values = agent.judge(states.repeat_interleave(self.candidates, 1), actions)  # (seeds, judges, ...)
        score = aggregated(values, config.aggregate).view(self.races.shape)
        if config.filter == "softmax":  # argmax(score / temperature + Gumbel noise) is a sample
            score = score / config.temperature - self.races.log()
        best = score.argmax(-1)[..., None, None].expand(-1, -1, 1, actions.shape[-1])
        return actions.view(*self.races.shape, -1).gather(2, best)[:, :, 0]
