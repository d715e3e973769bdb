"""The unit in which a log writes its actions does not matter: grams or kilograms, the same policy is learned."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from conftest import make_episodes

import replaylab

TINY = {
    "bc": {"steps": 30, "hidden": [16]},
    "dt": {"steps": 20, "width": 16, "context": 4},
    "bcq": {"steps": 20, "hidden": [8], "vae_hidden": [8]},
    "mopo": {"steps": 20, "hidden": [8], "rollout_every": 10, "max_epochs": 1},
    "diffusion-dice": {"behavior_steps": 20, "critic_steps": 20, "returns_steps": 5},
}


@pytest.mark.parametrize("system", TINY)
def test_the_unit_of_an_action_does_not_matter(system, tmp_path):
    log = make_episodes((20, 20, 20))
    found = []
    for unit in (np.array([1.0, 1.0]), np.array([2.0**-12, 2.0**6])):  # exact in floating point
        box = {"action_low": (-unit).tolist(), "action_high": unit.tolist()}
        scaled = replace(log, actions=(log.actions * unit).astype(np.float32), meta=log.meta | box)
        out = tmp_path / str(len(found))
        run = replaylab.train(system, scaled, out=out, preset="debug", device="cpu", **TINY[system])
        found.append(replaylab.load_policy(run).act(log.observations[:10]) / unit)
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4, atol=1e-5)
