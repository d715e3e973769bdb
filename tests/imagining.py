"""A log of a world that is known, and tiny agents that learn to imagine it."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import torch

from replaylab.algos import Spaces, gormpo
from replaylab.data.episodes import from_rows
from replaylab.step import Stepper

CPU = torch.device("cpu")
TINY = {
    "steps": 12,
    "batch_size": 20,
    "hidden": [8, 8],
    "density_steps": 40,  # as in the preset `debug`: these pass where the density takes none
    "dynamics_hidden": [8, 8],
    "dynamics_batch": 64,
    "members": 3,
    "elites": 2,
    "max_epochs": 2,
    "rollout_batch": 30,
    "rollout_every": 4,
    "rollout_length": 3,
    "real_ratio": 0.1,
}


def make_log(rows=400, length=20, action=1, seed=0, env_id=None):
    """A point that is pushed: s' = 0.9 s + push, r = -|s|; no episode ends by itself."""
    rng = np.random.default_rng(seed)
    observations, following = np.zeros((rows, 2), np.float32), np.zeros((rows, 2), np.float32)
    actions = rng.uniform(-1, 1, (rows, action)).astype(np.float32)
    for i in range(rows):
        observations[i] = rng.normal(0, 1, 2) if i % length == 0 else following[i - 1]
        following[i] = 0.9 * observations[i] + 0.3 * actions[i].mean() + rng.normal(0, 0.05, 2)
    truncated = np.arange(rows) % length == length - 1
    rewards = -np.abs(observations).sum(1)
    log = from_rows(observations, actions, rewards, np.zeros(rows, bool), truncated, following)
    return dataclasses.replace(log, meta=log.meta | {"env_id": env_id} if env_id else log.meta)


def make_agent(log, seeds=(0,), module=gormpo, **settings):
    agent = module.Agent(module.Config(**TINY | settings), Spaces.of(log), list(seeds), CPU)
    return agent, agent.phases(log)


def train(agent, phases, stop=None, at=(0, 0)):
    """Phases as the trainer runs them, from `at` to (phase, step) `stop`."""
    for index in range(at[0], len(phases)):
        phase, done = phases[index], at[1] if index == at[0] else 0
        stepper = Stepper(phase, CPU)
        if phase.begin and done == 0:
            phase.begin()
        while done < phase.steps:
            if stop == (index, done):
                return
            if phase.hook and done % phase.every == 0:
                phase.hook(done)
                if phase.stop and phase.stop():
                    break
            stepper.run(done, 1)
            done += 1
        if phase.finish:
            json.dumps(phase.finish())
