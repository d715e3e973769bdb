"""DPM-Solver++ (Lu et al., 2022): from noise to a sample in a handful of network evaluations.

A variance-preserving diffusion model blends data with noise, x_t = alpha_t x_0 + sigma_t z. Between two times s > t the
path back to the data is linear except for the model's guess D of x_0. With lambda = log(alpha / sigma) and
h = lambda_t - lambda_s, a step is

    order 1    x_t = (sigma_t / sigma_s) x_s - alpha_t (e^-h - 1) D(x_s, s)
    order 2    the same with D replaced by (1 - 1 / 2r) D(x_s, s) + (1 / 2r) D(x_m, m)

where x_m at a time m in between comes from a step of order 1, and r = (lambda_m - lambda_s) / h. The weights depend
only on the times and are tabulated once; the rest is a short loop that knows nothing of networks.

    sample = solve(guess, noise, plan(15, 2))        # guess(x, i): x_0 from x at the time plan.times[i]

The grid is uniform in time, and the last step is of order 1: 15 evaluations are seven steps of order 2 and one of
order 1. The last step is coarse and narrows the spread of samples a little. That is part of the method: a policy tuned
with this solver needs this solver. `power` above 1 makes steps near the data finer, which keeps more of the spread.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from replaylab.errors import UsageError

BETA = (0.1, 20.0)  # linear variance-preserving schedule: beta at times 0 and 1
FIRST, LAST = 1.0, 1e-3  # sampling goes from the first time to the last
ORDERS = (1, 2)


# --- the noise schedule


def log_alpha(time: float) -> float:
    return -(time**2) * (BETA[1] - BETA[0]) / 4 - time * BETA[0] / 2


def alpha_sigma(time: float) -> tuple[float, float]:
    """alpha_t and sigma_t."""
    log = log_alpha(time)
    return math.exp(log), math.sqrt(-math.expm1(2 * log))


def half_log_snr(time: float) -> float:
    alpha, sigma = alpha_sigma(time)
    return math.log(alpha / sigma)


def time_of(half_log_snr: float) -> float:
    """The inverse of `half_log_snr`."""
    slope, start = BETA[1] - BETA[0], BETA[0]
    noise = 2 * slope * math.log1p(math.exp(-2 * half_log_snr))
    return noise / (math.sqrt(start**2 + noise) + start) / slope


def blend(time: Tensor) -> tuple[Tensor, Tensor]:
    """alpha_t and sigma_t for a tensor of times."""
    log = -time.square() * ((BETA[1] - BETA[0]) / 4) - time * (BETA[0] / 2)
    return log.exp(), (-torch.expm1(2 * log)).sqrt()


# --- the plan: all numbers that the steps need


@dataclass(frozen=True)
class Step:
    """x <- keep x + use[0] D0 (+ use[1] D1): D0 is the guess at x, D1 the one at x_m, which the step `half` gives."""

    index: int  # of the time of D0; D1 has the next one
    keep: float
    use: tuple[float, ...]
    half: Step | None = None


@dataclass(frozen=True)
class Plan:
    times: tuple[float, ...]  # one per evaluation
    alphas: tuple[float, ...]
    sigmas: tuple[float, ...]
    steps: tuple[Step, ...]

    @lru_cache  # noqa: B019 - plans are few and live as long as the program
    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Times and sigmas on a device, cached: the host cannot send numbers while a CUDA graph is captured."""
        return torch.tensor(self.times, device=device), torch.tensor(self.sigmas, device=device)


def orders(evaluations: int, order: int) -> list[int]:
    """Orders of the steps: steps of order 2, then one step of order 1, or two if the number of evaluations is even."""
    if order == 1:
        return [1] * evaluations
    single = 1 if evaluations % 2 else 2
    return [2] * ((evaluations - single) // 2) + [1] * single


@lru_cache
def plan(evaluations: int = 15, order: int = 2, power: float = 1.0) -> Plan:
    if evaluations < 1 or order not in ORDERS:
        raise UsageError(f"the solver takes at least 1 step of order 1 or 2, not {evaluations} of order {order}")
    grid = [LAST + (FIRST - LAST) * (1 - i / evaluations) ** power for i in range(evaluations + 1)]
    steps, at = [], 0
    for size in orders(evaluations, order):
        steps.append(_step(grid, at) if size == 1 else _double(grid, at))
        at += size
    times = grid[:-1]
    alphas, sigmas = zip(*map(alpha_sigma, times), strict=True)
    return Plan(tuple(times), alphas, sigmas, tuple(steps))


def _step(grid: list[float], at: int) -> Step:
    (_, sigma), (alpha, to_sigma) = alpha_sigma(grid[at]), alpha_sigma(grid[at + 1])
    width = half_log_snr(grid[at + 1]) - half_log_snr(grid[at])
    return Step(at, to_sigma / sigma, (-alpha * math.expm1(-width),))


def _double(grid: list[float], at: int) -> Step:
    """A step of order 2 over two intervals of the grid, with the second guess at the time between them."""
    start, middle, end = (half_log_snr(t) for t in grid[at : at + 3])
    ratio = (middle - start) / (end - start)
    (_, sigma), (alpha, to_sigma) = alpha_sigma(grid[at]), alpha_sigma(grid[at + 2])
    whole = -alpha * math.expm1(start - end)
    second = whole / (2 * ratio)
    return Step(at, to_sigma / sigma, (whole - second, second), _step(grid, at))


def solve(guess: Callable[[Tensor, int], Tensor], x: Tensor, plan: Plan) -> Tensor:
    """The sample that the plan makes from noise x. `guess(x, i)` is the model's x_0 for x at time plan.times[i]."""
    for step in plan.steps:
        first = guess(x, step.index)
        moved = torch.add(step.keep * x, first, alpha=step.use[0])
        if step.half is not None:
            between = torch.add(step.half.keep * x, first, alpha=step.half.use[0])
            moved = torch.add(moved, guess(between, step.index + 1), alpha=step.use[1])
        x = moved
    return x
