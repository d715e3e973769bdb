"""RealNVP (Dinh et al., 2017): an invertible network from data to a standard normal.

A coupling leaves every second column as it is and moves the others by functions of them:

    y = x exp(s) + t,   log |dy/dx| = sum s,   s = tanh(raw): a factor from 1/e to e

The columns that stay alternate from one coupling to the next. One network gives s and t of a coupling together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from replaylab.models.density.base import Density, log_normal, network


class RealNVP(Density):
    def __init__(self, dim: int, couplings: int = 6, hidden: Sequence[int] = (256, 256)):
        super().__init__(dim)
        if dim < 2:
            raise ValueError("a coupling needs two columns")
        kept = [len(range(i % 2, dim, 2)) for i in range(couplings)]  # coupling i keeps columns i % 2, i % 2 + 2, ...
        self.nets = nn.ModuleList(network([n, *hidden, 2 * (dim - n)]) for n in kept)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Data -> (latent, log |det|)."""
        halves = [x[:, 0::2], x[:, 1::2]]
        total = x.new_zeros(len(x))
        for i, net in enumerate(self.nets):
            scale, shift = net(halves[i % 2]).chunk(2, -1)
            scale = torch.tanh(scale)
            halves[1 - i % 2] = halves[1 - i % 2] * scale.exp() + shift
            total = total + scale.sum(-1)
        return self._interleave(halves), total

    def inverse(self, z: Tensor) -> Tensor:
        halves = [z[:, 0::2], z[:, 1::2]]
        for i, net in reversed(list(enumerate(self.nets))):
            scale, shift = net(halves[i % 2]).chunk(2, -1)
            halves[1 - i % 2] = (halves[1 - i % 2] - shift) * torch.exp(-torch.tanh(scale))
        return self._interleave(halves)

    def log_density(self, z: Tensor) -> Tensor:
        latent, log_det = self(z)
        return log_normal(latent) + log_det

    def _interleave(self, halves: list[Tensor]) -> Tensor:
        x = halves[0].new_empty(len(halves[0]), self.dim)
        x[:, 0::2], x[:, 1::2] = halves[0], halves[1]
        return x
