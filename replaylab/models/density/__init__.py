"""Density models: how likely is a (state, action) under the data? One file per kind, with one interface (`base.py`)."""

from __future__ import annotations

import inspect
import math
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
    """A model of `dim` columns; `settings` go to its constructor. The same seed gives the same weights."""
    if kind not in KINDS:
        raise UsageError(f"unknown density '{kind}'{nearest(kind, KINDS)}")
    known = {name: p.default for name, p in inspect.signature(KINDS[kind]).parameters.items() if name != "dim"}
    for name, value in settings.items():
        if name not in known:
            raise UsageError(f"{kind}: unknown setting '{name}'{nearest(name, known)}")
        _check(name, value, known[name])
    with torch.random.fork_rng(devices=[]):  # does not affect other random numbers
        torch.default_generator.manual_seed(seed)  # the CPU's only
        return KINDS[kind](dim, **settings)


def _check(name: str, value: Any, default: Any) -> None:
    """By its default, a setting is a count, a list of counts, or (None) a positive number, fitted if not given."""
    if default is None:
        fits, wanted = value is None or (type(value) in (int, float) and 0 < value < math.inf), "a number above 0"
    elif isinstance(default, tuple):
        fits = isinstance(value, (list, tuple)) and all(map(_count, value))
        wanted = "a list of whole numbers, at least 1 each"
    else:
        fits, wanted = _count(value), "a whole number, at least 1"
    if not fits:
        raise UsageError(f"{name} must be {wanted}, not {value!r}")


def _count(value: Any) -> bool:
    return type(value) is int and value >= 1
