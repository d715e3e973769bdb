"""The pages of `replaylab density fit` and `density score`."""

from __future__ import annotations

from typing import Any

import numpy as np

from replaylab import charts
from replaylab.page import Html, facts, grid, number, page, table, warning_list


def _picture(title: str, result: dict[str, Any], threshold: float) -> Html:
    edges, shares = np.array(result["histogram"]["edges"]), result["histogram"]["shares"]
    middle, top = (edges[1:] + edges[:-1]) / 2, max(map(max, shares.values()))
    series = [charts.Series(name, middle, np.array(share), style=i) for i, (name, share) in enumerate(shares.items())]
    series.append(charts.Series("threshold", np.full(2, threshold), np.array([0.0, top]), style=7))
    caption = "What lies further left is counted in the leftmost bin."
    return charts.lines(title, series, x_label="log-density (nats)", y_label="share of rows", caption=caption)


def summary(result: dict[str, Any]) -> Html:
    pairs = [("rows", f"{result['rows']:,}"), ("mean log-density", number(result["mean"]))]
    pairs += [("threshold", f"{number(result['threshold'])} ({result['percentile']} % of validation rows lie below)")]
    pairs += [("rows below it", f"{100 * result['flagged']:.1f} %")]
    names = {"auroc": "AUROC", "tpr": "shifted rows found", "tnr": "real rows left alone", "accuracy": "accuracy"}
    pairs += [(name, f"{result[key]:.3f}") for key, name in names.items() if key in result]
    return Html(facts(pairs) + grid([_picture("Log-density of the rows", result, result["threshold"])]))


def fit_page(report: dict[str, Any]) -> Html:
    tests, threshold = report["tests"], report["threshold"]
    pairs = [("kind", report["kind"]), ("inputs", report["inputs"]), ("seconds", number(report["seconds"]))]
    pairs += [("rows (train, validation, test)", " / ".join(f"{n:,}" for n in report["rows"]))]
    pairs += [("mean log-density of validation rows", number(report["validation"]))]
    pairs += [("threshold", f"{number(threshold)} ({report['percentile']} % of validation rows lie below)")]
    head = ["distance", "AUROC", "shifted rows found", "real rows left alone", "accuracy"]
    lines = [[t["distance"], *(f"{t[k]:.3f}" for k in ("auroc", "tpr", "tnr", "accuracy"))] for t in tests]
    shown = tests[:: max(1, len(tests) - 1)]  # smallest and largest distance
    pictures = [_picture(f"Shifted by {t['distance']}", t, threshold) for t in shown]
    sections = [
        ("Model", Html(facts(pairs) + warning_list(report["notes"]))),
        ("Held-out episodes, real and shifted", Html(table(head, lines) + grid(pictures))),
    ]
    if report["curve"]:
        step = np.array([c["step"] for c in report["curve"]], float)
        curves = [charts.Series("validation", step, np.array([-c["validation"] for c in report["curve"]]), style=0)]
        picture = charts.lines("Training", curves, x_label="step", y_label="minus mean log-density")
        sections.append(("Training", grid([picture])))
    return page(f"{report['kind']} density of {report['env_id'] or 'data'}", "replaylab density fit", sections)
