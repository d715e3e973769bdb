"""A Diffusion-DICE agent small enough for a test."""

from __future__ import annotations

import torch
from conftest import make_episodes

from replaylab.algos import Spaces
from replaylab.algos import diffusion_dice as dice

CPU = torch.device("cpu")
TINY = {
    "behavior_steps": 6, "critic_steps": 8, "behavior_batch": 16, "behavior_width": 16, "batch_size": 8,
    "noise_copies": 3, "hidden": [16, 16], "guide_hidden": [16, 16], "ensemble": 3, "candidates": 4, "solver_steps": 5,
    "lr_decay": True, "min_lr": 1e-5, "normalize": False, "returns_steps": 0, "advantage": False,
}  # fmt: skip


def make_agent(log=None, seeds=(0,), **settings):
    log = make_episodes() if log is None else log
    agent = dice.Agent(dice.Config(**TINY | settings), Spaces.of(log), list(seeds), CPU)
    return agent, agent.phases(log)
