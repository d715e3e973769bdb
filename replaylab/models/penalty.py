"""Penalties w on imagined rewards, r - coefficient * w: pure functions of tensors.

From a density (GORMPO), with l the log-density of an imagined step, tau the threshold, gap = tau - l (> 0 if unlikely):

    tanh          max(0, tanh(gap / 10))              from 0 to 1; the default
    signed-tanh   tanh(gap / 10)                      from -1 to 1: inside the data a bonus
    linear        clip(gap, 0, Q3 + 1.5 IQR)          quartiles of the gap over the batch, so that no row dominates;
                                                      0 everywhere while nearly all rows are inside the data
    inverse       1 / (e^-gap + 1e-6) where l < tau   1 at the threshold, rising to a million
    exponential   e^min(gap, 5) - 1 where l < tau     0 at the threshold, rising to 147
    softplus      ln(1 + e^-l)                        no threshold
    indicator     1 where l < tau

From the dynamics ensemble (MOPO), with means mu_i and deviations sigma_i (members, rows, dims):

    aleatoric     max_i |sigma_i|
    pairwise      max_i |mu_i - mean of all mu|
    ensemble-std  root of the mean, over the dims, of the variance of mu_i over the members
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import softplus

from replaylab.errors import UsageError, nearest

BOUNDED = ("tanh", "signed-tanh", "indicator")  # at most 1, so that a coefficient on the scale of a reward fits
CAP = 5.0  # limit of the exponential's exponent, so that the penalty does not drown every reward


def linear(log_prob: Tensor, threshold: Tensor | float, live: Tensor | None = None) -> Tensor:
    """The quartiles are taken over the last axis, among `live` rows, whose rollout has not ended."""
    gap = threshold - log_prob
    live = torch.ones_like(gap, dtype=torch.bool) if live is None else live
    ordered = torch.where(live, gap, torch.inf).sort(-1).values
    last = (live.sum(-1, keepdim=True) - 1).clamp(min=0)

    def quartile(share: float) -> Tensor:  # torch.quantile has no mask, and a limit of 16 million
        place = share * last
        below = place.floor().long()
        above = torch.minimum(below + 1, last)
        return torch.lerp(ordered.gather(-1, below), ordered.gather(-1, above), (place - below).to(gap.dtype))

    low, high = quartile(0.25), quartile(0.75)
    return torch.minimum(gap, high + 1.5 * (high - low)).clamp(min=0)


def inverse(log_prob: Tensor, threshold: Tensor | float) -> Tensor:
    """GORMPO adds 1e-6 to e^l itself. In ten dimensions e^l and e^tau are far below that, so the penalty would silently
    vanish. Here 1e-6 is relative to e^tau, which is the same where tau = 0."""
    return torch.where(log_prob < threshold, 1 / (torch.exp(log_prob - threshold) + 1e-6), 0.0)


DENSITY: dict[str, Callable[[Tensor, Tensor | float], Tensor]] = {
    "tanh": lambda l, tau: torch.tanh(0.1 * (tau - l)).clamp(min=0),  # noqa: E741
    "signed-tanh": lambda l, tau: torch.tanh(0.1 * (tau - l)),  # noqa: E741
    "linear": linear,
    "inverse": inverse,
    "exponential": lambda l, tau: torch.expm1((tau - l).clamp(0, CAP)),  # noqa: E741
    "softplus": lambda l, tau: softplus(-l),  # noqa: E741
    "indicator": lambda l, tau: (l < tau).to(l.dtype),  # noqa: E741
}


def penalty(kind: str, log_prob: Tensor, threshold: Tensor | float) -> Tensor:
    """Penalty (rows,) of imagined steps with these log-densities."""
    if kind not in DENSITY:
        raise UsageError(f"unknown penalty '{kind}'{nearest(kind, DENSITY)}")
    return DENSITY[kind](log_prob, threshold)


# --- MOPO's penalties


def aleatoric(means: Tensor, stds: Tensor) -> Tensor:
    return stds.norm(dim=-1).amax(0)


def pairwise(means: Tensor, stds: Tensor) -> Tensor:
    return (means - means.mean(0)).norm(dim=-1).amax(0)


def ensemble_std(means: Tensor, stds: Tensor) -> Tensor:
    return means.var(0, correction=0).mean(-1).sqrt()


ENSEMBLE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "aleatoric": aleatoric,
    "pairwise": pairwise,
    "ensemble-std": ensemble_std,
}


def ensemble_penalty(kind: str, means: Tensor, stds: Tensor) -> Tensor:
    """Penalty (rows,) from the predictions of the members, (members, rows, dims) each."""
    if kind not in ENSEMBLE:
        raise UsageError(f"unknown uncertainty '{kind}'{nearest(kind, ENSEMBLE)}")
    return ENSEMBLE[kind](means, stds)
