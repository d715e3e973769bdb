"""What a column is divided by when it is standardised: one rule for policies, ensembles, densities and fitted Q."""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDING = 1e-6  # of a column's mean: float32 keeps hardly more
NOTHING = 1e-12  # simulators leave such numbers where a zero is meant


def divisors(mean: Tensor, std: Tensor, least: float = 1.0) -> Tensor:
    """The deviation, whatever the unit of the column. At least `least` if the column is constant but for rounding:
    divided by that, any other value would be huge."""
    constant = std <= (ROUNDING * mean.abs()).clamp(min=NOTHING)
    return torch.where(constant, std.clamp(min=least), std)
