"""How well scores separate shifted rows from real ones."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def auroc(scores: Any, labels: Any) -> float:
    """The probability that a random row labelled true scores above a random one labelled false; ties count half."""
    scores, labels = np.asarray(scores, np.float64), np.asarray(labels, bool)
    positives, negatives = int(labels.sum()), int((~labels).sum())
    if not positives or not negatives:
        return math.nan
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2  # from 1; ties share their mean rank
    return float((ranks[place][labels].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def detection(log_prob: np.ndarray, labels: np.ndarray, threshold: float) -> dict[str, float]:
    """AUROC, and at the threshold: shares of shifted rows flagged, of real rows not flagged, of rows judged right."""
    flagged, labels = log_prob < threshold, np.asarray(labels, bool)
    found, kept = flagged[labels].mean(), (~flagged[~labels]).mean()
    accuracy = (flagged == labels).mean()
    return {"auroc": auroc(-log_prob, labels), "tpr": float(found), "tnr": float(kept), "accuracy": float(accuracy)}


def doubts(kind: str, tests: list[dict[str, Any]], percentile: float) -> list[str]:
    """Notes on a model that fails the easiest test, that of the largest shift (a small one may well look real), or on a
    threshold, of a percentile of the validation rows, that far more of the unseen real rows lie below."""
    easiest = max(tests, key=lambda test: abs(test["distance"]))
    found = []
    if easiest["auroc"] < 0.6:
        found.append(
            f"this {kind} hardly tells shifted rows from real ones (AUROC {easiest['auroc']:.2f} at distance "
            f"{easiest['distance']:g}): a penalty from it would mean little"
        )
    if (below := 1 - easiest["tnr"]) > max(0.05, percentile / 20):
        found.append(
            f"{below:.0%} of the rows of unseen episodes lie below a threshold meant for {percentile:g} %: episodes "
            "differ, or are few, so a penalty also charges for what the log holds"
        )
    return found


def binned(log_prob: np.ndarray, labels: np.ndarray | None, threshold: float, bins: int = 40) -> dict[str, Any]:
    """Histogram of log_prob, as shares of rows. Rows far below the threshold are counted in the lowest bin."""
    high = float(np.percentile(log_prob, 99.9))
    low = max(float(log_prob.min()), threshold - 3 * max(high - threshold, 1.0))
    edges = np.linspace(low, max(high, low + 1e-6), bins + 1)
    groups = {"rows": log_prob} if labels is None else {"real": log_prob[~labels], "shifted": log_prob[labels]}
    counts = {name: np.histogram(np.clip(v, low, edges[-1]), edges)[0] / max(len(v), 1) for name, v in groups.items()}
    return {"edges": edges.tolist(), "shares": {name: share.tolist() for name, share in counts.items()}}
