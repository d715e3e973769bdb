"""Statistics of scores: mean with its error, interquartile mean, bootstrap intervals; aggregates over many tasks.

The question behind every number here is "what would change if the experiment were run again?". So the unit is the
thing that would be drawn again: with several seeds a seed (its mean over episodes counts once, however many episodes
it has), with a single seed one of its episodes. Episodes of one seed share one trained policy; counting them as
independent evidence about an algorithm would make every interval too narrow.

A statistic is a function that reduces the last axis of an array, so that thousands of resamples are one call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Statistic = Callable[[np.ndarray], np.ndarray]
Scores = Sequence[Any] | np.ndarray  # one array of episode scores for each seed, or a (seeds, episodes) matrix

CHUNK = 2**21  # resampled values in memory at a time


def mean(values: Any) -> np.ndarray:
    return np.asarray(values, np.float64).mean(-1)


def iqm(values: Any) -> np.ndarray:
    """Interquartile mean: the mean of the middle half of the sorted values.

    Each of n values owns 1/n of the mass; what lies between 25 % and 75 % of it counts, so that a value across an edge
    counts in part: for n = 5 the weights are 0, 0.75, 1, 0.75, 0 (over 2.5). Nothing is rounded to whole values.
    """
    values = np.sort(np.asarray(values, np.float64), -1)
    n = values.shape[-1]
    place = np.arange(n)
    weights = np.clip(np.minimum(place + 1, 0.75 * n) - np.maximum(place, 0.25 * n), 0, None)
    return values @ weights / weights.sum()


def mean_and_error(values: Any) -> tuple[float, float]:
    """The mean and its standard error s / sqrt(n), where s divides by n - 1. The error of a single value is NaN."""
    values = np.asarray(values, np.float64)
    error = values.std(ddof=1) / np.sqrt(len(values)) if len(values) > 1 else np.nan
    return float(values.mean()), float(error)


def independent_units(scores: Scores, groups: Sequence[Any] | None = None) -> tuple[np.ndarray, np.ndarray, str]:
    """(values, strata, "seed" or "episode"): the values to resample, the stratum of each, and what a value stands for.

    `groups` names the stratum of each seed, such as its task. The unit is the episode only where no stratum has a
    second seed.
    """
    seeds = [np.asarray(s, np.float64).reshape(-1) for s in scores]
    if not seeds or any(s.size == 0 for s in seeds):
        raise ValueError("every seed needs at least one score")
    if groups is not None and len(groups) != len(seeds):
        raise ValueError(f"{len(groups)} groups for {len(seeds)} seeds")
    strata = np.zeros(len(seeds), np.int64) if groups is None else np.unique(np.asarray(groups), return_inverse=True)[1]
    if np.bincount(strata).max() > 1:
        return np.array([s.mean() for s in seeds]), strata, "seed"
    return np.concatenate(seeds), np.repeat(strata, [s.size for s in seeds]), "episode"


def bootstrap_interval(
    scores: Scores,
    statistic: Statistic = iqm,
    *,
    groups: Sequence[Any] | None = None,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """Percentile bootstrap interval of a statistic of the independent units, resampled within each stratum.

    Every resample keeps each stratum's size. With nothing to resample (one value in each stratum) both ends are NaN.
    """
    values, strata, _ = independent_units(scores, groups)
    members = [np.flatnonzero(strata == s) for s in np.unique(strata)]
    if max(map(len, members)) < 2:
        return np.nan, np.nan
    rng = np.random.default_rng(seed)
    step = max(1, CHUNK // len(values))
    parts = []
    for start in range(0, resamples, step):
        count = min(step, resamples - start)
        picks = [m[rng.integers(len(m), size=(count, len(m)))] for m in members]
        parts.append(statistic(values[np.concatenate(picks, axis=1)]))
    low, high = _interval(np.concatenate(parts), confidence)
    return float(low), float(high)


def summarize_scores(scores: Scores, *, confidence: float = 0.95, seed: int = 0) -> dict[str, Any]:
    """The numbers that a table shows for one policy, as plain JSON; None where one cannot be known."""
    values, _, unit = independent_units(scores)
    average, error = mean_and_error(values)
    low, high = bootstrap_interval(scores, iqm, confidence=confidence, seed=seed)
    numbers = {"mean": average, "error": error, "iqm": float(iqm(values)), "low": low, "high": high}
    known = {name: value if np.isfinite(value) else None for name, value in numbers.items()}
    return known | {"unit": unit, "seeds": len(scores), "episodes": sum(np.size(s) for s in scores)}


# --- many tasks: all tasks count equally, and seeds are resampled within their task

Tasks = Sequence[Any]  # for each task, one score per seed; the number of seeds may differ


def median(values: Any) -> np.ndarray:
    return np.median(np.asarray(values, np.float64), -1)


def optimality_gap(values: Any, goal: float = 100.0) -> np.ndarray:
    """How far below `goal` a score lies on average; a score above it counts as a gap of 0."""
    return np.clip(goal - np.asarray(values, np.float64), 0, None).mean(-1)


def _pooled_iqm(tasks: Sequence[np.ndarray]) -> np.ndarray:
    """Interquartile mean of all seeds of all tasks. A seed owns 1 / (its task's seeds) of the mass of its task."""
    weights = np.concatenate([np.full(t.shape[-1], 1 / (len(tasks) * t.shape[-1])) for t in tasks])
    values = np.concatenate(tasks, -1)
    order = np.argsort(values, -1)
    ends = np.cumsum(weights[order], -1)
    inside = np.clip(np.minimum(ends, 0.75) - np.maximum(ends - weights[order], 0.25), 0, None)
    return (np.take_along_axis(values, order, -1) * inside).sum(-1) / inside.sum(-1)


def _task_means(tasks: Sequence[np.ndarray]) -> np.ndarray:
    return np.stack([t.mean(-1) for t in tasks], -1)


# each takes one array per task, whose last axis is the seeds
AGGREGATES: dict[str, Callable[[Sequence[np.ndarray]], np.ndarray]] = {
    "iqm": _pooled_iqm,
    "median": lambda tasks: median(_task_means(tasks)),
    "mean": lambda tasks: mean(_task_means(tasks)),
    "gap": lambda tasks: np.stack([optimality_gap(t) for t in tasks], -1).mean(-1),
}


def _resampled(tasks: Sequence[np.ndarray], rng: np.random.Generator, resamples: int) -> list[np.ndarray]:
    return [t[rng.integers(len(t), size=(resamples, len(t)))] for t in tasks]


def _arrays(tasks: Tasks) -> list[np.ndarray]:
    found = [np.asarray(t, np.float64).reshape(-1) for t in tasks]
    if not found or any(t.size == 0 for t in found):
        raise ValueError("every task needs at least one score")
    return found


def _interval(values: np.ndarray, confidence: float) -> tuple[np.ndarray, np.ndarray]:
    tail = (1 - confidence) / 2
    low, high = np.quantile(values, [tail, 1 - tail], axis=0)
    return low, high


def aggregate(
    tasks: Tasks, kind: str = "iqm", *, confidence: float = 0.95, resamples: int = 2000, seed: int = 0
) -> tuple[float, float, float]:
    """(value, low, high) over many tasks: "iqm" of all seeds, "median" or "mean" of the tasks' means, or "gap" to 100.

    The interval is a stratified bootstrap: seeds are drawn again within their task. Where no task has a second seed
    nothing is known about other seeds, and both ends are NaN.
    """
    arrays, statistic = _arrays(tasks), AGGREGATES[kind]
    value = float(statistic(arrays))
    if max(map(len, arrays)) < 2:
        return value, np.nan, np.nan
    low, high = _interval(statistic(_resampled(arrays, np.random.default_rng(seed), resamples)), confidence)
    return value, float(low), float(high)


def performance_profile(
    tasks: Tasks, thresholds: Any, *, confidence: float = 0.95, resamples: int = 1000, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(share, low, high) at each threshold: the share of seeds that score above it, averaged over tasks."""
    arrays, thresholds = _arrays(tasks), np.asarray(thresholds, np.float64)

    def share(parts: Sequence[np.ndarray]) -> np.ndarray:  # (..., thresholds)
        return np.mean([(p[..., None, :] > thresholds[:, None]).mean(-1) for p in parts], axis=0)

    middle = share(arrays)
    if max(map(len, arrays)) < 2:
        unknown = np.full(len(thresholds), np.nan)
        return middle, unknown, unknown
    low, high = _interval(share(_resampled(arrays, np.random.default_rng(seed), resamples)), confidence)
    return middle, low, high


def probability_of_improvement(
    first: Tasks, second: Tasks, *, confidence: float = 0.95, resamples: int = 2000, seed: int = 0
) -> tuple[float, float, float]:
    """(value, low, high): how likely a seed of `first` beats one of `second` on the same task, averaged over tasks.

    Ties count half. Tasks are matched by position.
    """
    ours, theirs = _arrays(first), _arrays(second)
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} tasks against {len(theirs)}")

    def wins(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> np.ndarray:
        pairs = [np.sign(x[..., :, None] - y[..., None, :]).mean((-2, -1)) for x, y in zip(a, b, strict=True)]
        return (1 + np.mean(pairs, axis=0)) / 2

    value = float(wins(ours, theirs))
    if max(map(len, ours + theirs)) < 2:
        return value, np.nan, np.nan
    rng = np.random.default_rng(seed)
    low, high = _interval(wins(_resampled(ours, rng, resamples), _resampled(theirs, rng, resamples)), confidence)
    return value, float(low), float(high)
