"""Report of Diffusion-DICE: the sweep over ways of acting, the critic's values, and pictures of bandits."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np

from replaylab import charts
from replaylab.algos.diffusion_dice import ACTING
from replaylab.data.toys import INNER
from replaylab.page import Html, escape, grid, number, plus_minus, table
from replaylab.results import Run, dictionary, finite, rows_of, text
from replaylab.sections.common import readable
from replaylab.sections.gormpo import ensemble

WAYS = ("data", "selection alone", "guidance alone", "both")
GRID = ("guidance", "candidates")
POINTS = 150  # of a curve


def sections(run: Run) -> list[tuple[str, Html]]:
    findings = dictionary(run.info.get("findings"))
    found, fitted = _joined(findings), dictionary(findings.get("dynamics"))
    parts = [
        ("One state, actions in the plane", _pictures(run, found)),
        ("Guidance and candidates", _sweep(run, finite(found.get("guidance")))),
        ("What the critic believes", _beliefs(run)),
        ("Models of one step", readable(ensemble, fitted) if fitted else Html("")),
    ]
    return [(title, body) for title, body in parts if body]


def _joined(findings: dict[str, Any]) -> dict[str, Any]:
    """The findings of all phases in one dict: which phase finds what depends on the schedule."""
    return {name: value for part in findings.values() for name, value in dictionary(part).items()}


# --- bandits


def points(rows: Any) -> np.ndarray:
    """(rows, 3) of x, y and Q; no rows if the file holds anything else."""
    try:
        found = np.array(rows, np.float64)
    except (TypeError, ValueError):
        return np.zeros((0, 3))
    return found if found.ndim == 2 and found.shape[1] == 3 else np.zeros((0, 3))


def _pictures(run: Run, found: dict[str, Any]) -> Html:
    shown = {way: points(found.get(way)) for way in WAYS}
    labels = ("action 1", "action 2", "Q")
    everything = np.concatenate([*shown.values()])
    good = everything[(np.abs(everything) < charts.HUGE).all(1)]
    if not len(good):
        return Html("")
    around, scale = (float(good[:, :2].min()), float(good[:, :2].max())), tuple(np.quantile(good[:, 2], [0.02, 0.98]))
    figures = [
        charts.density(way, p[:, 0], p[:, 1], p[:, 2], labels, bins=50, within=around, scale=scale)
        for way, p in shown.items()
        if len(p)
    ]
    note = (
        "Where the data's actions are, and where each way of acting goes, on the same axes. Colour, the same in all: "
        "the value Q that the critic expects, also where the data cannot tell it. Selection takes the best of several "
        "candidates; guidance bends the draws towards higher values."
    )
    ours = re.search("toy[-_]bandit", text(run.config.get("data")))
    rows = [[way, *(f"{share:.0%}" for share in ring(p))] for way, p in shown.items() if len(p)] if ours else []
    shares = table(["actions", "within 0.1 of the best circle", "in the hole"], rows) if rows else Html("")
    return Html(f"<p>{escape(note)}</p>{grid(figures, least=250)}{shares}")


def ring(actions: np.ndarray) -> tuple[float, float]:
    """For the toy bandit: the shares of actions within 0.1 of its best circle, and in its hole."""
    radius = np.linalg.norm(actions[:, :2], axis=1)
    return float((np.abs(radius - 1) < 0.1).mean()), float((radius < INNER).mean())


def picture(findings: dict[str, Any]) -> str:
    """The same as one SVG file for the docs, from all findings of a run: one panel per way, one dot per action."""
    size, reach, found = 170, 1.7, _joined(findings)
    panels = []
    for i, way in enumerate(WAYS):
        x, y, _ = (points(found.get(way)) * size / (2 * reach)).T
        dots = "".join(f"M{a:.1f} {-b:.1f}h0" for a, b in zip(x, y, strict=True))
        middle = f"{i * (size + 10) + size / 2:.0f} {size / 2 + 24:.0f}"
        panels.append(
            f'<g transform="translate({middle})">'
            f'<text y="{-size / 2 - 8:.0f}" text-anchor="middle">{escape(way)}</text>'
            f'<path d="M{-size / 2} {-size / 2}h{size}v{size}h{-size}z" fill="none" stroke="#8a94a3"/>'
            f'<path d="{dots}" stroke="#0072b2" stroke-width="2.6" stroke-linecap="round" opacity=".55"/></g>'
        )
    width, height = len(panels) * (size + 10), size + 30
    style = "text{font:13px system-ui,sans-serif;fill:#6b7686}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">'
    return f"{head}<style>{style}</style>{''.join(panels)}</svg>\n"


# --- the sweep


def _sweep(run: Run, usual: float | None) -> Html:
    """A table of guidance by candidates for each combination of the other settings."""
    own = {name: run.config.get(name) for name in ACTING}
    if own["guidance"] is None:
        own["guidance"] = usual
    tables: dict[str, dict[tuple, dict[str, Any]]] = {}
    for row in rows_of(run):
        settings = own | row["settings"]
        score = row["normalized"] or row["return"]
        if score is not None and all(finite(settings.get(key)) is not None for key in GRID):
            rest = {"env": row["env"]} | {k: v for k, v in settings.items() if k not in GRID}
            cells = tables.setdefault(json.dumps(rest, sort_keys=True), {})
            cells[settings["guidance"], settings["candidates"]] = score
    many = [(json.loads(rest), cells) for rest, cells in tables.items() if len(cells) > 1]
    many.sort(key=lambda pair: [(finite(v) or 0.0, text(v)) for v in pair[0].values()])
    common = [set(map(str, rest.items())) for rest, _ in many]
    parts = []
    for rest, cells in many:
        differs = {k: v for k, v in rest.items() if len(many) < 2 or any(str((k, v)) not in c for c in common)}
        parts.append(f"<h3>{escape(', '.join(f'{k} {text(v)}' for k, v in differs.items()))}</h3>{_cells(cells)}")
    note = (
        "Mean of the last evaluation ± standard error over seeds; rows: guidance, columns: candidates. No retraining."
    )
    return Html(f"<p>{escape(note)}</p>{''.join(parts)}") if parts else Html("")


def _cells(cells: dict[tuple, dict[str, Any]]) -> Html:
    guidances, candidates = (sorted({key[i] for key in cells}) for i in (0, 1))
    means = [cell["mean"] for cell in cells.values()]
    low, span = min(means), max(means) - min(means)

    def shown(guidance: Any, candidate: Any) -> Html:
        cell = cells.get((guidance, candidate))
        if cell is None:
            return Html("–")
        shade = int(min((cell["mean"] - low) / span, 0.999) * charts.SHADES) if span > 0 else 0
        value = plus_minus(cell["mean"], cell["error"])
        return Html(f'{escape(value)} <span class="scale"><span><i class="v{shade}"></i></span></span>')

    head = ["guidance", *(f"{number(k)} candidate{'' if k == 1 else 's'}" for k in candidates)]
    return table(head, [[number(g), *(shown(g, k) for k in candidates)] for g in guidances])


# --- the critic


def _beliefs(run: Run) -> Html:
    lines = [line for line in run.metrics if finite(line.get("y")) is not None]
    figures = []
    captions = {
        "y": (
            "(Q - V) / alpha",
            "Mean over a batch; the band runs from the smallest to the largest. Far below 0: few actions count.",
        ),
        "energy": ("guidance W", "Near 0 and flat: the guidance has not learnt yet. Below -50: alpha is too small."),
    }
    for name, (title, caption) in captions.items():
        steps, mean, low, high = _curve(lines, name)
        if len(steps):
            series = charts.Series("", steps, mean, low, high)
            figures.append(charts.lines(title, [series], x_label="update", caption=caption))
    return grid(figures) if figures else Html("")


def _curve(lines: list[dict[str, Any]], name: str) -> list[np.ndarray]:
    """Steps, and the means over seeds of a metric, its minimum and its maximum; thinned to about POINTS steps."""
    rows = []
    for line in lines:
        row = [finite(line.get(key)) for key in ("step", name, f"{name}_min", f"{name}_max")]
        if all(value is not None for value in row):
            rows.append(row)
    if not rows:
        return [np.zeros(0)] * 4
    found = np.array(rows, np.float64)
    steps = np.unique(found[:, 0])
    steps = steps[:: max(1, len(steps) // POINTS)]
    per_step = np.array([found[found[:, 0] == step].mean(0) for step in steps])
    return list(per_step.T)
