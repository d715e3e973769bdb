"""Sections shared by the reports of all systems."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from replaylab import charts
from replaylab.offpolicy import FILE
from replaylab.page import Html, aligned, details, grid, note, number, table, warning_list
from replaylab.results import BROKEN, Run, finite, or_nan, text

TITLE = "Without a simulator"
MOST = 50  # rows, charts and sentences shown at most, in case the file is broken


def without_simulator(run: Run) -> list[tuple[str, Html]]:
    """What `replaylab assess` found, or nothing if it was not run."""
    path = run.path / FILE
    if not path.is_file():
        return []
    try:
        found = json.loads(path.read_text(errors="replace"))
        return [(TITLE, Html(_outdated(run, found.get("step")) + _body(found)))]
    except (*BROKEN, OSError, RecursionError):
        return [(TITLE, charts.nothing(f"{FILE} is not readable: run `replaylab assess` again."))]


def _outdated(run: Run, step: Any) -> Html:
    """A warning if the run was trained on after it was assessed."""
    if not isinstance(step, int) or run.step is None or step >= run.step:
        return Html("")
    return warning_list(
        [f"This is about the policy at step {step:,}; the run is at step {run.step:,}: run `replaylab assess` again."]
    )


def _body(found: dict[str, Any]) -> Html:
    fqe, support = found.get("fqe"), found.get("support")
    parts = []
    if fqe:
        parts += [_headline(fqe), _returns(fqe)]
    if support:
        parts.append(_support(support))
    if found.get("predicted"):
        parts.append(_predicted(found["predicted"]))
    limits = [text(line) for line in _list(found.get("limits"))]
    parts.append(Html("<h4>What cannot be known</h4>" + warning_list(limits)))
    amount = f"{number(found.get('episodes'))} episodes, {number(found.get('rows'))} rows"
    quick = ", a quick fit" if found.get("quick") is True else ""
    seen = "it is not known how many" if found.get("seen") is None else percent(found["seen"])
    parts.append(note(f"{amount}; {seen} of the episodes were trained on{quick}."))
    return Html("".join(parts))


def _list(values: Any) -> list[Any]:
    return values[:MOST] if isinstance(values, list) else []


def readable(show: Callable[..., Html], *given: Any) -> Html:
    """What `show` makes of a run's findings, or a word that they are not as expected."""
    try:
        return show(*given)
    except BROKEN:
        return charts.nothing("What the run found is not readable.")


def percent(share: Any) -> str:
    known = finite(share)
    return "–" if known is None else f"{100 * known:.1f} %"


def _interval(row: dict[str, Any]) -> str:
    known = [finite(row.get(k)) for k in ("mean", "low", "high")]
    values = [v for v in known if v is not None]
    if len(values) < 3:
        return number(row.get("mean"))
    middle, low, high = aligned(values, values[2] - values[1])
    return f"{middle} [{low}, {high}]"


# --- returns


def _headline(fqe: dict[str, Any]) -> Html:
    """The policy against the data's own actions, both judged by the same estimator, so that shared errors cancel."""
    policies = _list(fqe.get("policies"))
    gains = [v for v in (finite((p.get("gain") or {}).get("mean")) for p in policies) if v is not None]
    said = [text(p.get("verdict")) for p in policies]
    words = {
        "better": "Estimated to be better than what was done.",
        "worse": "Estimated to be worse than what was done.",
    }.get(said[0] if len(set(said)) == 1 else "", "Whether it is better than what was done cannot be told.")
    gain = float(np.mean(gains)) if gains else None
    return Html(
        f'<p class="hero">{"+" if gain and gain > 0 else ""}{number(gain)} <small>estimated change of the discounted '
        f"return, which is {number(fqe['data'].get('mean'))} in the data. {words}</small></p>"
    )


def _estimated(fqe: dict[str, Any]) -> str:
    """The part of the data's return that was not counted: what would have followed where episodes were cut off."""
    weight = finite(fqe["data"].get("cut_weight")) or 0.0
    return f" ({percent(weight)} of its weight, behind cut episodes, is estimated)" if weight else ""


def _returns(fqe: dict[str, Any]) -> Html:
    rows: list[tuple[str, dict[str, Any]]] = [("the data", fqe["data"])]
    rows += [(f"policy, seed {text(p.get('seed'))}", p) for p in _list(fqe.get("policies"))]
    rows += [("check: the data's own actions", fqe["behaviour"]), ("check: a clone of the data", fqe["clone"])]
    cells = [
        [
            name,
            _interval(r),
            number(r.get("spread")),
            "" if r is fqe["behaviour"] else _interval(r.get("gain") or {}),
            text(r.get("verdict") or ""),
        ]
        for name, r in rows
    ]
    shown = [(name, r) for name, r in rows if finite(r.get("mean")) is not None]
    chart = charts.bars(
        "Discounted return", [name for name, _ in shown], [r["mean"] for _, r in shown],
        [finite(r.get("low")) for _, r in shown], [finite(r.get("high")) for _, r in shown],
        x_label=f"gamma {number(fqe.get('gamma'))}",
        caption=f"The data's return was counted{_estimated(fqe)}; all others are estimates by fitted-Q evaluation.",
    )  # fmt: skip
    curves = [_curve(name, r, i) for i, (name, r) in enumerate(rows) if i]
    fit = charts.lines(
        "Estimates while the fit ran", [c for c in curves if len(c.x)] or [_curve("", {}, 0)],
        x_label="per cent of the updates", caption="Lines that still climb or fall at the end are not final.",
    )  # fmt: skip
    calibration = fqe["calibration"]
    good = "within chance" if calibration.get("good") is True else "more than chance: do not rely on the estimates"
    return Html(
        "<h4>Return, estimated from the log</h4>"
        + table(["", "Return [95%]", "Spread of fits", "Over the data's actions [95%]", "Verdict"], cells)
        + note(
            f"The estimator misses the data's own return by {number(calibration.get('error'))}; "
            f"{number(calibration.get('room'))} would be chance: {good}. Intervals are over first states; they do not "
            "hold errors that all fits share."
        )
        + grid([chart, fit])
    )


def _curve(name: str, row: dict[str, Any], style: int) -> charts.Series:
    values = np.array([or_nan(v) for v in _list(row.get("curve"))])
    return charts.Series(name, np.linspace(10, 100, len(values)), values, style=style)


# --- support


def _support(support: dict[str, Any]) -> Html:
    rows = [("logged actions", support["data"])]
    rows += [(f"policy, seed {text(p.get('seed'))}", p) for p in _list(support.get("policies"))]
    cells = [
        [name, number(r.get("median")), *(percent(r.get(k)) for k in ("beyond_95", "beyond_99", "at_edge"))]
        for name, r in rows
    ]
    head = ["", "Median distance", "Beyond the data's 95 %", "Beyond its 99 %", "At the box's edge"]
    parts = [
        Html("<h4>How far its actions leave the data</h4>"),
        table(head, cells),
        note(
            f"Distance to the nearest action among the {number(support.get('k'))} most similar logged states of other "
            "episodes, in deviations of the logged actions. A policy that does what was done has 5 % and 1 %."
        ),
    ]
    states = support.get("states")
    if isinstance(states, dict):
        parts.append(_states(states))
    names = [name for name, _ in rows]
    figures = [_histogram(d, h, names) for d, h in enumerate(_list(support.get("actions")))]
    parts += [grid(figures[:4]), details(f"{len(figures) - 4} more", grid(figures[4:])) if figures[4:] else Html("")]
    return Html("".join(parts))


def _states(states: dict[str, Any]) -> Html:
    said = []
    if finite(states.get("held_out_beyond")) is not None:
        said.append(
            f"{percent(states['held_out_beyond'])} of the states here lie beyond where 95 % of training states do."
        )
    imagined = [percent(v) for v in _list(states.get("imagined_beyond"))]
    if imagined:
        said.append(f"Of the states that the world model imagines for the policy: {', '.join(imagined)}.")
    return note(" ".join(said))


def _histogram(dim: int, found: dict[str, Any], names: list[str]) -> Html:
    edges = np.array([float(v) for v in found["edges"]])
    middle = (edges[1:] + edges[:-1]) / 2
    shares = [found["data"], *_list(found["policies"])]
    series = [
        charts.Series(name, middle, np.array([float(v) for v in values])[: len(middle)], style=i)
        for i, (name, values) in enumerate(zip(names, shares, strict=False))
        if len(values) == len(middle)
    ]
    return charts.lines(f"Action {dim}", series, x_label="action", y_label="share of the states")


# --- the world model


def _predicted(found: list[dict[str, Any]]) -> Html:
    rows = [
        [number(h.get("horizon")), number(h.get("data")), text(p.get("seed"))]
        + [number(p.get(k)) for k in ("mean", "disagreement")]
        for h in _list(found)
        for p in _list(h.get("policies"))
    ]
    return Html(
        "<h4>What the run's own world model predicts</h4>"
        + table(["Steps", "Return in the data", "Seed", "Predicted return", "Disagreement of its members"], rows)
        + note("Undiscounted, from the logged first states. Members that agree can still be wrong together.")
    )
