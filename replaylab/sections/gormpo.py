"""Report of GORMPO and MOPO: errors of the dynamics ensemble, quality of the density, support of the policy."""

from __future__ import annotations

from typing import Any

import numpy as np

from replaylab import charts
from replaylab.page import Html, facts, grid, note, number, table
from replaylab.results import Run, dictionary
from replaylab.sections.common import percent, readable


def sections(run: Run) -> list[tuple[str, Html]]:
    findings = dictionary(run.info.get("findings"))
    dynamics, policy = dictionary(findings.get("dynamics")), dictionary(findings.get("policy"))
    parts = [
        ("Dynamics ensemble", ensemble, dynamics),
        ("Density", _density, dictionary(dynamics.get("density") or policy.get("density"))),
        ("Support of the policy", _support, dictionary(policy.get("support"))),
    ]
    return [(title, readable(show, found)) for title, show, found in parts if found]


def ensemble(found: dict[str, Any]) -> Html:
    errors, elites, coverage = found["error"], found["elites"], dictionary(found.get("coverage"))
    members = len(errors[0])
    head = ["Seed", *(f"Member {m}" for m in range(members)), "Guessing the mean", "Epochs"]
    rows = []
    for i, seed in enumerate(found["seeds"]):
        marks = ["*" if m in elites[i] else "" for m in range(members)]
        cells = [number(error) + mark for error, mark in zip(errors[i], marks, strict=True)]
        rows.append([seed, *cells, number(found["error_of_the_mean"][i]), found["epochs"][i]])
    shares = [[seed, *(percent(by_seed[i]) for by_seed in coverage.values())] for i, seed in enumerate(found["seeds"])]
    return Html(
        table(head, rows)
        + note(
            f"Mean squared error on {number(found.get('holdout_rows'))} held-out rows, in the data's units, of state "
            "change and reward; * marks the elites, which are used."
        )
        + table(["Seed", *(f"{number(p)} % intervals hold" for p in coverage)], shares)
        + note("Held-out numbers inside the elites' own intervals: calibration.")
    )


def _density(found: dict[str, Any]) -> Html:
    threshold = float(found["threshold"])
    pairs = [("kind", found.get("kind")), ("looks at", found.get("inputs"))]
    pairs += [("threshold", f"{number(threshold)} ({number(found.get('percentile'))} % of held-out rows lie below)")]
    tests = [t for t in found.get("tests") or [] if isinstance(t, dict)]
    head = ["Shifted by", "AUROC", "shifted rows found", "real rows left alone"]
    rows = [[number(t.get("distance")), *(number(t.get(k)) for k in ("auroc", "tpr", "tnr"))] for t in tests]
    pictures = [_histogram(t, threshold) for t in tests[:: max(1, len(tests) - 1)]]
    about = Html(
        "Held-out rows of the data, as they are and shifted. How much of what was imagined is below the threshold: "
        "<i>penalised</i> under Training."
    )
    return Html(facts(pairs) + (table(head, rows) + grid(pictures) if tests else "") + note(about))


def _histogram(test: dict[str, Any], threshold: float) -> Html:
    edges = np.array(test["histogram"]["edges"], float)
    shares = {str(name): np.array(share, float) for name, share in test["histogram"]["shares"].items()}
    middle, top = (edges[1:] + edges[:-1]) / 2, max(share.max() for share in shares.values())
    series = [charts.Series(name, middle, share, style=i) for i, (name, share) in enumerate(shares.items())]
    series.append(charts.Series("threshold", np.full(2, threshold), np.array([0.0, top]), style=7))
    title = f"Shifted by {number(test.get('distance'))}"
    return charts.lines(title, series, x_label="log-density (nats)", y_label="share of rows")


def _support(found: dict[str, Any]) -> Html:
    logged, imagined = (np.array(found[key], float).reshape(-1, 2) for key in ("logged", "imagined"))
    both = np.concatenate([logged, imagined])
    far = np.quantile(np.abs(logged), 0.99) * 3
    shown = np.abs(both).max(1) <= far  # a few outliers must not shrink the rest to a dot
    kind = np.repeat([0.0, 1.0], [len(logged), len(imagined)])
    explained = [percent(share) for share in found.get("explained") or [None, None]]
    caption = (
        f"{len(logged):,} logged and {len(imagined):,} imagined (next state, action) rows on the data's two main axes; "
        f"{np.count_nonzero(~shown):,} lie outside the picture. A cell's colour is the share of imagined rows in it: "
        "where only they are, the policy has left the data, or the ensemble has."
    )
    labels = (f"axis 1 ({explained[0]})", f"axis 2 ({explained[1]})", "share imagined")
    picture = charts.density(
        "Logged and imagined", both[shown, 0], both[shown, 1], kind[shown], labels, caption=caption
    )
    return grid([picture])
