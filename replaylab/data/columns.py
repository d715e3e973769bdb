"""Statistics of every column of an array in one pass, in pieces: the array may be larger than memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

PIECE = 2**20  # numbers held as float64 at a time


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

    @property
    def std(self) -> np.ndarray:
        return np.sqrt(self.squares / np.maximum(self.finite, 1))

    def rows(self) -> list[dict[str, Any]]:
        known = self.finite > 0
        values = {"mean": self.mean, "std": self.std, "min": self.low, "max": self.high}
        return [{k: plain_number(v[i]) if known[i] else None for k, v in values.items()} for i in range(len(known))]

    def together(self) -> dict[str, Any]:
        """All columns as if they were one."""
        n = self.finite.sum()
        if not n:
            return dict.fromkeys(["mean", "std", "min", "max"])
        mean = (self.mean * self.finite).sum() / n
        variance = (self.squares + self.finite * np.square(self.mean - mean)).sum() / n
        values = {"mean": mean, "std": np.sqrt(variance), "min": self.low.min(), "max": self.high.max()}
        return {k: plain_number(v) for k, v in values.items()}


def pieces(array: np.ndarray) -> Iterator[np.ndarray]:
    """(rows, columns) parts of an array, small enough to convert."""
    width = int(np.prod(array.shape[1:]))
    step = max(1, PIECE // max(width, 1))
    for start in range(0, len(array), step):
        yield np.asarray(array[start : start + step]).reshape(-1, width)


def column_statistics(array: np.ndarray) -> Columns:
    width = int(np.prod(array.shape[1:]))
    finite, nan, infinite, mean, squares = np.zeros((5, width))
    c = Columns(finite, nan, infinite, mean, squares, np.full(width, np.inf), np.full(width, -np.inf))
    with np.errstate(over="ignore", invalid="ignore"):  # squares of absurd values may overflow: std is then None
        for part in pieces(array):
            x = part.astype(np.float64)
            good: Any = True
            n: Any = len(x)
            if part.dtype.kind == "f" and not (good := np.isfinite(x)).all():
                n = good.sum(0)
                c.nan += np.isnan(x).sum(0)
                c.infinite += np.isinf(x).sum(0)
                x = np.where(good, x, 0)
            c.low = np.minimum(c.low, x.min(0, where=good, initial=np.inf))
            c.high = np.maximum(c.high, x.max(0, where=good, initial=-np.inf))
            mean = x.sum(0) / np.maximum(n, 1)
            x -= mean
            squares = np.square(x, out=x).sum(0, where=good)
            total = np.maximum(c.finite + n, 1)  # Chan's update: stable however far the mean is from zero
            c.squares += squares + np.square(mean - c.mean) * c.finite * n / total
            c.mean += (mean - c.mean) * n / total
            c.finite += n
    return c


def plain_number(value: Any) -> float | None:
    """A Python number for JSON, which knows no NaN and no infinity."""
    return float(value) if np.isfinite(value) else None
