"""Statistics of every column of an array in one pass, in pieces: the array may be larger than memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

PIECE = 2**20  # numbers held as float64 at a time
SPANS = 16  # parts of an array processed in parallel


@dataclass
class Columns:
    """Statistics of each column over its finite values."""

    finite: np.ndarray
    nan: np.ndarray
    infinite: np.ndarray
    mean: np.ndarray
    squares: np.ndarray  # sum of squared distances from the mean
    low: np.ndarray
    high: np.ndarray

    def join(self, other: Columns) -> None:
        """Add the statistics of further rows by Chan's update, which is stable however far the mean is from zero."""
        total = np.maximum(self.finite + other.finite, 1)
        away = other.mean - self.mean
        self.squares += other.squares + np.square(away) * self.finite * other.finite / total
        self.mean += away * other.finite / total
        self.finite += other.finite
        self.nan += other.nan
        self.infinite += other.infinite
        self.low, self.high = np.minimum(self.low, other.low), np.maximum(self.high, other.high)

    @property
    def std(self) -> np.ndarray:
        return np.sqrt(self.squares / np.maximum(self.finite, 1))

    def rows(self) -> list[dict[str, Any]]:
        known = self.finite > 0
        values = {"mean": self.mean, "std": self.std, "min": self.low, "max": self.high}
        return [{k: plain_number(v[i]) if known[i] else None for k, v in values.items()} for i in range(len(known))]

    def together(self) -> dict[str, Any]:
        """Statistics of all columns taken as one."""
        n = self.finite.sum()
        if not n:
            return dict.fromkeys(["mean", "std", "min", "max"])
        mean = (self.mean * self.finite).sum() / n
        variance = (self.squares + self.finite * np.square(self.mean - mean)).sum() / n
        values = {"mean": mean, "std": np.sqrt(variance), "min": self.low.min(), "max": self.high.max()}
        return {k: plain_number(v) for k, v in values.items()}


def pieces(array: np.ndarray) -> Iterator[np.ndarray]:
    """(rows, columns) parts of an array, small enough to convert to float64."""
    width = int(np.prod(array.shape[1:]))
    step = max(1, PIECE // max(width, 1))
    for start in range(0, len(array), step):
        yield np.asarray(array[start : start + step]).reshape(-1, width)


def column_statistics(array: np.ndarray) -> Columns:
    """Large arrays are cut into spans for parallel threads. Neither cuts nor result depend on the machine."""
    count = min(SPANS, array.size // (4 * PIECE) + 1)
    spans = [array[len(array) * i // count : len(array) * (i + 1) // count] for i in range(count)]
    with ThreadPoolExecutor(min(count, os.cpu_count() or 1)) as pool:
        first, *others = pool.map(_span, spans)
    for other in others:
        first.join(other)
    return first


def _span(array: np.ndarray) -> Columns:
    width = int(np.prod(array.shape[1:]))
    finite, nan, infinite, mean, squares = np.zeros((5, width))
    c = Columns(finite, nan, infinite, mean, squares, np.full(width, np.inf), np.full(width, -np.inf))
    with np.errstate(over="ignore", invalid="ignore"):  # squares of huge values may overflow; std is then None
        for part in pieces(array):
            c.join(_bytes(part) if part.dtype == np.uint8 and len(part) <= 256 else _numbers(part))
    return c


def _numbers(part: np.ndarray) -> Columns:
    x, nothing = part.astype(np.float64), np.zeros(part.shape[1])
    n, nan, infinite, good = nothing + len(x), nothing, nothing, np.array(True)
    if part.dtype.kind == "f" and not (good := np.isfinite(x)).all():
        n, nan, infinite = good.sum(0), np.isnan(x).sum(0), np.isinf(x).sum(0)
        x = np.where(good, x, 0)
    low, high = x.min(0, where=good, initial=np.inf), x.max(0, where=good, initial=-np.inf)
    mean = x.sum(0) / np.maximum(n, 1)
    x -= mean
    return Columns(n, nan, infinite, mean, np.square(x, out=x).sum(0, where=good), low, high)


def _bytes(part: np.ndarray) -> Columns:
    """For frames: sums of at most 256 squared bytes are exact in float32, which is four times as fast."""
    x, ones, nothing = part.astype(np.float32), np.ones(len(part), np.float32), np.zeros(part.shape[1])
    mean = (ones @ x).astype(np.float64) / len(x)
    squares = (ones @ np.square(x, out=x)).astype(np.float64) - len(x) * np.square(mean)
    return Columns(nothing + len(x), nothing, nothing, mean, squares, part.min(0), part.max(0))


def plain_number(value: Any) -> float | None:
    """A float for JSON, or None for NaN and infinity, which JSON lacks."""
    return float(value) if np.isfinite(value) else None
