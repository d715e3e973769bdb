"""Densities by an ordinary differential equation: the neural ODE, and the parts it shares with diffusion.

A row moves along dx/dt = v(x, t) from the data (t = 0) to a standard normal (t = 1), and

    log p(x(0)) = log N(x(1)) + integral of div v dt        (Chen et al., 2018)

The divergence is usually the costly part: `dim` derivatives, or a random estimate of their sum. A network with two
hidden layers has it in closed form. With W1, W2, W3 its weights and d1, d2 the slopes of its activations,

    tr(W3 diag(d2) W2 diag(d1) W1) = d2' M d1,    M = W2 * (W1 W3)'

so one more matrix product of the hidden width gives it exactly, with its gradient: no estimator, no noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from replaylab.models.density.base import Density, log_normal

FREQUENCIES = 4


class TraceNet(nn.Module):
    """x, time -> output of x's size, and the trace of its Jacobian in x."""

    frequencies: Tensor

    def __init__(self, dim: int, width: int):
        super().__init__()
        self.first = nn.Linear(dim, width, bias=False)
        self.second = nn.Linear(width, width, bias=False)
        self.last = nn.Linear(width, dim)
        self.time = nn.Sequential(nn.Linear(1 + 2 * FREQUENCIES, width), nn.SiLU(), nn.Linear(width, 2 * width))
        self.register_buffer("frequencies", math.pi * 2.0 ** torch.arange(FREQUENCIES), persistent=False)
        nn.init.zeros_(self.last.weight)  # initially nothing moves
        nn.init.zeros_(self.last.bias)

    def layers(self, x: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        """The inputs of the two activations. `time` is (rows, 1) or (1, 1)."""
        angles = time * self.frequencies
        early, late = self.time(torch.cat([time, angles.sin(), angles.cos()], -1)).chunk(2, -1)
        a = self.first(x) + early
        return a, self.second(a * a.sigmoid()) + late

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        _, b = self.layers(x, time)
        return self.last(b * b.sigmoid())

    def mixing(self) -> Tensor:
        """M of the formula above: the same at every point, so computed once per call."""
        return self.second.weight * (self.first.weight @ self.last.weight).T

    def with_trace(self, x: Tensor, time: Tensor, mixing: Tensor) -> tuple[Tensor, Tensor]:
        a, b = self.layers(x, time)
        return self.last(b * b.sigmoid()), (linear(_slope(a), mixing) * _slope(b)).sum(-1)


def _slope(a: Tensor) -> Tensor:
    """Derivative of a sigmoid(a)."""
    s = a.sigmoid()
    return s * (1 + a * (1 - s))


Motion = Callable[[Tensor, float], tuple[Tensor, Tensor]]  # (x, time) -> velocity (rows, dim), divergence (rows,)


def travel(motion: Motion, x: Tensor, start: float, end: float, steps: int) -> tuple[Tensor, Tensor]:
    """Where x arrives, and the integral of the divergence along the path, by the classical Runge-Kutta method."""
    total, h = x.new_zeros(len(x)), (end - start) / steps
    for i in range(steps):
        t = start + i * h
        v1, d1 = motion(x, t)
        v2, d2 = motion(x + h / 2 * v1, t + h / 2)
        v3, d3 = motion(x + h / 2 * v2, t + h / 2)
        v4, d4 = motion(x + h * v3, t + h)
        x = x + h / 6 * (v1 + 2 * (v2 + v3) + v4)
        total = total + h / 6 * (d1 + 2 * (d2 + d3) + d4)
    return x, total


class NeuralODE(Density):
    """A continuous flow, trained by its exact likelihood."""

    def __init__(self, dim: int, width: int = 256, ode_steps: int = 8):
        super().__init__(dim)
        self.net, self.ode_steps = TraceNet(dim, width), ode_steps

    def log_density(self, z: Tensor) -> Tensor:
        mixing = self.net.mixing()

        def motion(x: Tensor, t: float) -> tuple[Tensor, Tensor]:
            return self.net.with_trace(x, x.new_full((1, 1), t), mixing)

        latent, log_det = travel(motion, z, 0.0, 1.0, self.ode_steps)
        return log_normal(latent) + log_det
