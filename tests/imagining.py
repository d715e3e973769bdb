"""A log of a world that is known, for those that imagine."""

from __future__ import annotations

import dataclasses

import numpy as np

from replaylab.data.episodes import from_rows


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
