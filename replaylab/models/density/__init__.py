"""Density models: how likely is a (state, action) under the data? One file a kind, one small interface (`base.py`)."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from replaylab.errors import UsageError, nearest
from replaylab.models.density.base import INPUTS, Density, join
from replaylab.models.density.diffusion import Diffusion
from replaylab.models.density.kde import KDE
from replaylab.models.density.ode import NeuralODE
from replaylab.models.density.realnvp import RealNVP
from replaylab.models.density.vae import VAE

KINDS: dict[str, type[Density]] = {
    "realnvp": RealNVP,
    "vae": VAE,
    "kde": KDE,
    "diffusion": Diffusion,
    "neuralode": NeuralODE,
}

__all__ = ["INPUTS", "KINDS", "Density", "join", "make"]


def make(kind: str, dim: int, seed: int = 0, **settings: Any) -> Density:
    """A model of `dim` columns; `settings` are its constructor's. The same seed makes the same weights."""
    if kind not in KINDS:
        raise UsageError(f"unknown density '{kind}'{nearest(kind, KINDS)}")
    known = [name for name in inspect.signature(KINDS[kind]).parameters if name != "dim"]
    for name in settings:
        if name not in known:
            raise UsageError(f"{kind}: unknown setting '{name}'{nearest(name, known)}")
    with torch.random.fork_rng(devices=[]):  # nobody else's random numbers move
        torch.default_generator.manual_seed(seed)  # the CPU's alone
        return KINDS[kind](dim, **settings)
