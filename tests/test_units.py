"""The unit in which a log writes its actions does not matter: grams or kilograms, the same policy is learned."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import make_episodes

import replaylab
from replaylab.algos import Normalizer, Spaces
from replaylab.models.density import make
from replaylab.models.dynamics import Dynamics
from replaylab.models.imagine import widen
from replaylab.offpolicy.fitted import Log

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
    for unit in (np.array([1.0, 1.0]), np.array([2.0**-32, 2.0**6])):  # exact in floating point
        box = {"action_low": (-unit).tolist(), "action_high": unit.tolist()}
        scaled = replace(log, actions=(log.actions * unit).astype(np.float32), meta=log.meta | box)
        out = tmp_path / str(len(found))
        run = replaylab.train(system, scaled, out=out, preset="debug", device="cpu", **TINY[system])
        found.append(replaylab.load_policy(run).act(log.observations[:10]) / unit)
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4, atol=1e-5)


def test_the_unit_of_an_observation_does_not_matter(tmp_path):
    """Nor do columns that never change: another value there is nothing that was learned about."""
    log = make_episodes((20, 20, 20))
    found = []
    for unit in (1.0, 2.0**-30):
        columns = np.concatenate([unit * log.observations, np.full((60, 1), 0.1)], 1).astype(np.float32)
        last = np.concatenate([unit * log.final_observations, np.full((3, 1), 0.1)], 1).astype(np.float32)
        scaled = replace(log, observations=columns, final_observations=last)
        run = replaylab.train("bc", scaled, out=tmp_path / str(unit), preset="debug", device="cpu", steps=200)
        found.append(replaylab.load_policy(run).act(columns))
        columns[:, -1] = 0.2
        np.testing.assert_allclose(replaylab.load_policy(run).act(columns), found[-1], atol=0.1)
    np.testing.assert_allclose(found[1], found[0], atol=0.01)


def test_the_unit_of_a_column_does_not_matter_to_the_ensemble():
    model, rows = Dynamics([0], 1, 1, [4], 1, 1), torch.randn(50, 2)
    rows[:, 1] *= 1e-8
    model.standardise(rows, rows, scale_targets=True)
    torch.testing.assert_close(model.target_std, rows.std(0, correction=0), rtol=1e-4, atol=0)
    model.standardise(0 * rows + 0.1, 0 * rows + 0.1, scale_targets=True)
    assert model.input_std.tolist() == [1, 1] and model.target_std.tolist() == pytest.approx([1e-6, 1e-6])


def test_the_unit_of_a_column_does_not_matter_to_densities_fitted_q_and_the_limits_of_imagined_rows():
    """Where it did, they were blind to a column of nanometres."""
    log = make_episodes((20, 20, 20))
    rows = torch.as_tensor(log.actions).double()
    density, looked = make("kde", 2), Log(log, Spaces.of(log), torch.device("cpu"), 2)
    for unit in (1.0, 1e-9):
        density.standardise(unit * rows)
        for std in (density.std, looked.standard(unit * rows)[1]):
            torch.testing.assert_close(std, (unit * rows.std(0, correction=0)).float(), rtol=1e-5, atol=0)
        low, high = widen(unit * rows.amin(0), unit * rows.amax(0))
        torch.testing.assert_close(high - low, 11 * unit * (rows.amax(0) - rows.amin(0)), rtol=1e-5, atol=0)


def test_a_column_that_hardly_changes_is_neither_blown_up_nor_left_large():
    z = np.random.default_rng(0).normal(size=60)
    seconds, zero, level = 1.7e9 + 300 * z, 1e-17 * z, 1000 + 5e-4 * z  # of a clock; as simulators leave it; a reward
    columns = np.stack([seconds, zero], 1)
    log = replace(make_episodes((20, 20, 20)), observations=columns, final_observations=columns[:3])
    normalizer = Normalizer([2])
    normalizer.fit(log)
    assert normalizer.std.tolist() == pytest.approx([seconds.std(), 1])
    model, rows = Dynamics([0], 1, 1, [4], 1, 1), torch.as_tensor(np.stack([zero, level], 1))
    model.standardise(rows, rows, scale_targets=True)
    assert model.input_std.tolist() == [1, 1] and model.target_std.tolist() == pytest.approx([1e-6, level.std()])
