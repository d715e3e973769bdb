"""RealNVP (Dinh et al., 2017): an invertible network from data to a standard normal.

A coupling leaves every second column as it is and moves the others by functions of them:

    y = x exp(s) + t,   log |dy/dx| = sum s,   s = tanh(raw): a factor from 1/e to e

The columns that stay alternate from one coupling to the next. One network gives s and t of a coupling together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from replaylab.errors import UsageError
from replaylab.models.density.base import Density, log_normal, network


class RealNVP(Density):
    def __init__(self, dim: int, couplings: int = 6, hidden: Sequence[int] = (256, 256)):
        super().__init__(dim)
        if dim < 2:
            raise UsageError("realnvp needs two columns at least: one coupling keeps some and moves the others")
        kept = [len(range(i % 2, dim, 2)) for i in range(couplings)]  # coupling i keeps columns i % 2, i % 2 + 2, ...
        self.nets = nn.ModuleList(network([n, *hidden, 2 * (dim - n)]) for n in kept)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Data -> (latent, log |det|)."""
        halves, log_det = self._halves(x)
        return self._interleave(halves), log_det

    def _halves(self, x: Tensor) -> tuple[list[Tensor], Tensor]:
        """The latent's even and odd columns, and log |det|."""
        halves, scales = [x[:, 0::2], x[:, 1::2]], []
        for i, net in enumerate(self.nets):
            scale, shift = net(halves[i % 2]).chunk(2, -1)
            scales.append(torch.tanh(scale))
            halves[1 - i % 2] = torch.addcmul(shift, halves[1 - i % 2], scales[-1].exp())
        return halves, torch.cat(scales, -1).sum(-1)

    def inverse(self, z: Tensor) -> Tensor:
        halves = [z[:, 0::2], z[:, 1::2]]
        for i, net in reversed(list(enumerate(self.nets))):
            scale, shift = net(halves[i % 2]).chunk(2, -1)
            halves[1 - i % 2] = (halves[1 - i % 2] - shift) * torch.exp(-torch.tanh(scale))
        return self._interleave(halves)

    def log_density(self, z: Tensor) -> Tensor:
        halves, log_det = self._halves(z)
        return log_normal(torch.cat(halves, -1)) + log_det

    def _interleave(self, halves: list[Tensor]) -> Tensor:
        x = halves[0].new_empty(len(halves[0]), self.dim)
        x[:, 0::2], x[:, 1::2] = halves[0], halves[1]
        return x
