"""A decision transformer small enough for a test."""

from __future__ import annotations

import torch

from replaylab.algos import Spaces, dt

CPU = torch.device("cpu")
TINY = {"context": 4, "width": 16, "layers": 2, "heads": 2, "batch_size": 8, "warmup_steps": 1, "steps": 20}


def make_agent(log, seeds=(0,), **settings):
    agent = dt.Agent(dt.Config(**TINY | settings), Spaces.of(log), list(seeds), CPU)
    return agent, agent.phases(log)[0]
