"""Our SAC update against that of Stable-Baselines3 on the same shapes, in one run."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from replaylab.bench.common import Rows, seconds_per_call
from replaylab.bench.foundation import sac_update
from replaylab.errors import require


def against(device: torch.device) -> Rows:
    sb3 = require("stable_baselines3", "timing against Stable-Baselines3")
    gymnasium: Any = require("gymnasium", "timing against Stable-Baselines3")

    class Noise(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(-1, 1, (11,), np.float32)
        action_space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
            return self.observation_space.sample(), {}

        def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
            return self.observation_space.sample(), 0.0, False, False, {}

    theirs = sb3.SAC("MlpPolicy", Noise(), batch_size=256, buffer_size=100_000, device=device, learning_starts=500)
    theirs.learn(600)  # fills the replay and warms up
    updates = 100 if device.type == "cuda" else 20
    spent = seconds_per_call(partial(theirs.train, updates, 256), device, 1) / updates
    (_, ours, _), *_ = sac_update(device)
    for whose, time in ((f"stable-baselines3 {sb3.__version__}", 1e3 * spent), ("replaylab, one seed", ours)):
        yield f"sac update of {whose}", time, "ms"
        yield f"sac update of {whose}", 1e3 / time, "updates/s"
    yield "their time over ours", 1e3 * spent / ours, "x"
