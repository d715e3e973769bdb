"""The interface of density models: standardised columns in, log-densities out, thresholds from held-out data.

model.standardise(train)          # sets its mean and deviation
model.loss(batch)                 # scalar to minimise; `fit` for a model without gradients
model.log_prob(x)                 # (rows,) nats, of the standardised columns
model.calibrate(validation)       # table of quantiles of log_prob, so in the same space as every later score
model.threshold(1.0)              # the log_prob below which 1 % of the validation rows lie
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from replaylab.errors import DataError, UsageError
from replaylab.models.standard import divisors

INPUTS = ("sa", "nsa", "sas")  # (s, a), GORMPO's (s', a), the whole transition (s, a, s')
PERCENTILES = (0.1, 0.2, 0.5, 1, 2, 3, 5, 7, 10, 15, 20, 25, 30, 40, 50, 60, 70, 75, 80, 90, 95, 98, 99, 99.5, 99.9)
FLOOR = -1e9  # lowest score, finite: also that of rows whose log-density overflows or is NaN
CHUNK = 65_536  # rows scored together, so that memory stays bounded


class Density(nn.Module):
    mean: Tensor
    std: Tensor
    percentiles: Tensor
    quantiles: Tensor
    report: dict[str, Any]  # what `replaylab.density.fit` found
    needs_steps = True  # False: `fit` is the whole training

    def __init__(self, dim: int):
        super().__init__()
        self.dim = dim
        self.register_buffer("mean", torch.zeros(dim))
        self.register_buffer("std", torch.ones(dim))
        self.register_buffer("percentiles", torch.tensor(PERCENTILES))
        self.register_buffer("quantiles", torch.full((len(PERCENTILES),), torch.nan))  # until calibrated

    # --- defined by each kind

    def log_density(self, z: Tensor) -> Tensor:  # (rows, dim) standardised -> (rows,)
        raise NotImplementedError

    def loss(self, x: Tensor) -> Tensor:
        """Scalar to minimise; by default the negative mean log-likelihood."""
        return -self.log_density(self.blur(x)).mean()

    def fit(self, train: Tensor, validation: Tensor) -> None:
        """Learn what needs no gradients; nothing for most kinds."""

    # --- shared by all

    def standardise(self, train: Tensor) -> None:
        mean, std = train.double().mean(0), train.double().std(0, correction=0)
        self.mean.copy_(mean)
        self.std.copy_(divisors(mean, std))

    def blur(self, x: Tensor, scale: float = 0.02) -> Tensor:
        """Standardised rows for training, with a little noise: logged columns have atoms (a clipped action, a constant)
        on which a density would otherwise grow without bound."""
        z = (x - self.mean) / self.std
        return z + scale * torch.randn_like(z)

    def log_prob(self, x: Tensor) -> Tensor:  # (rows, dim) -> (rows,)
        parts = [self.log_density((part - self.mean) / self.std) for part in x.split(CHUNK)]
        return torch.nan_to_num(torch.cat(parts), nan=FLOOR, neginf=FLOOR).clamp(min=FLOOR)

    def calibrate(self, validation: Tensor) -> None:
        with torch.no_grad():
            scores = self.log_prob(validation)
        if not (scores > FLOOR).any():
            raise DataError("the density model gives every validation row no likelihood at all: training failed")
        self.quantiles.copy_(torch.as_tensor(_quantiles(scores, self.percentiles), device=scores.device))

    def threshold(self, percentile: float = 1.0) -> float:
        """The log_prob below which this percentage of the validation rows lies; linear between table entries."""
        if self.quantiles.isnan().any():
            raise DataError("this density model has no thresholds yet: call calibrate(validation)")
        check_percentile(percentile)
        table = self.quantiles.double()
        right = int(torch.searchsorted(self.percentiles, torch.tensor(percentile, device=table.device)).clamp(min=1))
        low, high = self.percentiles[right - 1].item(), self.percentiles[right].item()
        return torch.lerp(table[right - 1], table[right], (percentile - low) / (high - low)).item()


def check_percentile(percentile: float) -> None:
    if not isinstance(percentile, Real) or not PERCENTILES[0] <= percentile <= PERCENTILES[-1]:
        raise UsageError(f"percentile must be from {PERCENTILES[0]} to {PERCENTILES[-1]}, not {percentile}")


def _quantiles(scores: Tensor, percentiles: Tensor) -> Tensor:
    ordered = scores.double().sort().values  # torch.quantile refuses more than 16 million values
    place = percentiles.double() / 100 * (len(ordered) - 1)
    below = place.floor().long()
    return torch.lerp(ordered[below], ordered[(below + 1).clamp(max=len(ordered) - 1)], place - below)


def join(inputs: str, observations: Tensor, actions: Tensor, next_observations: Tensor) -> Tensor:
    """The input columns of a model: (..., dim)."""
    columns = {"sa": [observations, actions], "nsa": [next_observations, actions]}
    return torch.cat(columns.get(inputs, [observations, actions, next_observations]), -1)


def network(sizes: Sequence[int]) -> nn.Sequential:
    """A plain perceptron with ReLU between its layers."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def log_normal(z: Tensor) -> Tensor:
    """Log-density of the standard normal, summed over the last axis."""
    return -0.5 * (z.square() + 1.8378770664093453).sum(-1)  # log 2 pi
