"""Kernel density: the mean of Gaussian kernels at the training rows, exact and properly normalised.

    log p(x) = log 1/n sum_i exp(-|x - c_i|^2 / 2 h^2) - dim/2 log(2 pi h^2)

The bandwidth h is the one that gives held-out rows the highest likelihood. All sums run on the device, a block of rows
at a time.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from replaylab.models.density.base import Density

BLOCK = 2**24  # distances in memory at a time
JUDGES = 1024  # held-out rows that choose the bandwidth


class KDE(Density):
    points: Tensor
    bandwidth: Tensor
    needs_steps = False

    def __init__(self, dim: int, centres: int = 50_000, bandwidth: float | None = None):
        super().__init__(dim)
        self.centres, self.fixed = centres, bandwidth
        self.register_buffer("points", torch.zeros(0, dim))
        self.register_buffer("bandwidth", torch.tensor(bandwidth or torch.nan))

    def fit(self, train: Tensor, validation: Tensor) -> None:
        """Make every n-th training row a centre (the rows are shuffled), and choose the bandwidth."""
        rows = torch.linspace(0, len(train) - 1, min(self.centres, len(train)), device=train.device).long()
        self.points = (train[rows] - self.mean) / self.std
        if self.fixed is None:
            z = (validation[:JUDGES] - self.mean) / self.std
            rule = len(rows) ** (-1 / (self.dim + 4))  # Scott's, for independent columns: near the upper end
            grid = rule * torch.logspace(-1.2, 0.1, 14, device=z.device)
            scores = torch.stack([log_kernels(z, self.points, h).mean() for h in grid])
            self.bandwidth.copy_(grid[scores.nan_to_num(nan=-torch.inf).argmax()])

    def log_density(self, z: Tensor) -> Tensor:
        return log_kernels(z, self.points, self.bandwidth)

    def _load_from_state_dict(self, state: dict, prefix: str, *rest: object) -> None:
        points = state.get(prefix + "points")
        if points is not None:  # their number is known only from the file
            self.points = points.to(self.points.device, copy=True)
        super()._load_from_state_dict(state, prefix, *rest)


def log_kernels(z: Tensor, points: Tensor, bandwidth: Tensor) -> Tensor:
    """(rows,) log of the mean Gaussian kernel; matrix products in full precision, since small distances matter."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    squares = points.square().sum(-1)
    rows = max(1, BLOCK // max(1, len(points)))
    sums = []
    for part in z.split(rows):
        distances = torch.addmm(squares, part, points.T, alpha=-2)  # |x - c|^2 - |x|^2
        exponents = distances.mul_(-0.5 / bandwidth.square())
        sums.append(exponents.logsumexp(-1) - 0.5 * part.square().sum(-1) / bandwidth.square())
    torch.set_float32_matmul_precision(precision)
    constant = math.log(len(points)) + 0.5 * z.shape[1] * torch.log(2 * math.pi * bandwidth.square())
    return torch.cat(sums) - constant
