"""Small data with known answers."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: tests run side by side

import numpy as np
import pytest
import torch

from replaylab.data.episodes import Episodes, from_rows
from replaylab.data.write import save


def make_episodes(lengths=(5, 3, 8), observation=4, action=2, seed=0, discrete=False) -> Episodes:
    """Episodes whose observation's first number is the row and whose next observation is therefore easy to check."""
    rng = np.random.default_rng(seed)
    rows = sum(lengths)
    ends = np.cumsum(lengths) - 1
    observations = rng.standard_normal((rows, observation)).astype(np.float32)
    observations[:, 0] = np.arange(rows) + np.repeat(np.arange(len(lengths)), lengths) * 100
    following = np.empty_like(observations)
    following[:-1] = observations[1:]
    following[ends] = rng.standard_normal((len(lengths), observation))
    following[ends, 0] = observations[ends, 0] + 1
    if discrete:
        actions = (observations[:, 1] > 0).astype(np.int64)
    else:
        actions = np.tanh(observations[:, 1 : 1 + action])
    terminated = np.zeros(rows, bool)
    terminated[ends[::2]] = True
    truncated = np.zeros(rows, bool)
    truncated[ends[1::2]] = True
    return from_rows(
        observations, actions, rng.standard_normal(rows).astype(np.float32), terminated, truncated, following
    )


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same numbers in every run: a test that draws fails always or never."""
    torch.manual_seed(0)
    np.random.seed(0)


@pytest.fixture
def episodes() -> Episodes:
    return make_episodes()


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with two tiny datasets, and in it we are."""
    monkeypatch.chdir(tmp_path)
    for i, name in enumerate(("one", "two")):
        save(make_episodes((30, 20, 30), seed=i), tmp_path / f"{name}.npz")
    return tmp_path
