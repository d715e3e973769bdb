"""Look at logged data before learning from it: `data info` and `data plot`.

`summarize` reads every row once or twice, in pieces, so that it also works on memory-mapped data larger than memory,
and returns plain JSON, with None for what is unknown or not finite. Its `warnings` name what commonly spoils offline
learning. Standard deviations divide by n. `format_summary` prints a summary, `summary_html` and `plot` draw it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from replaylab import charts, scores
from replaylab.data.columns import Columns, column_statistics, pieces, plain_number
from replaylab.data.doubts import (
    action_warnings,
    boundary_warnings,
    column_names,
    number_warnings,
    reward_warnings,
    scale_warnings,
)  # fmt: skip
from replaylab.data.episodes import Episodes
from replaylab.page import (
    Html,
    check_suffix,
    count,
    details,
    facts,
    grid,
    note,
    number,
    page,
    size_of,
    table,
    warning_list,
    write_page,
)

LISTED = 64  # wider arrays (pixels) are described as a whole, not by column
PRINTED = 12  # columns of each kind that a terminal shows
DRAWN = 24  # dimensions of the actions that a page draws
QUANTILES = {"5%": 0.05, "25%": 0.25, "50%": 0.5, "75%": 0.75, "95%": 0.95}


# --- the summary


def summarize(episodes: Episodes) -> dict[str, Any]:
    """Everything `data info` shows, as plain JSON."""
    observations, rewards = column_statistics(episodes.observations), column_statistics(episodes.rewards)
    actions = column_statistics(episodes.actions)
    action = _describe_actions(episodes, actions)
    lengths = episodes.lengths
    returns = episodes.returns
    return {
        "steps": len(episodes),
        "episodes": episodes.num_episodes,
        "return": _distribution(returns),
        "normalized_return": _normalized(episodes.env_id, returns),
        "length": _distribution(lengths),
        "terminated": int(episodes.terminated.sum()),
        "truncated": int(episodes.truncated.sum()),
        "reward": rewards.rows()[0],
        "observation": _describe("observation", episodes.observations, observations),
        "action": action,
        "extras": {name: f"{column.dtype}{list(column.shape[1:]) or ''}" for name, column in episodes.extras.items()},
        "source": episodes.meta.get("source"),
        "env_id": episodes.env_id,
        "licence": episodes.meta.get("licence"),
        "bytes": int(episodes.nbytes),
        "warnings": [
            *number_warnings(episodes, observations, actions, rewards),
            *scale_warnings(episodes.observations, observations),
            *boundary_warnings(episodes),
            *reward_warnings(episodes),
            *action_warnings(episodes, action),
            *[str(line) for line in episodes.meta.get("notes") or []],
        ],
    }


def _distribution(values: np.ndarray) -> dict[str, Any]:
    values = np.asarray(values, np.float64)
    values = values[np.isfinite(values)]
    if not len(values):
        return dict.fromkeys(["mean", "std", "min", "max"]) | {"quantiles": {}, "histogram": None}
    counts, edges = charts.bin_values(values)
    shape = {"mean": values.mean(), "std": values.std(), "min": values.min(), "max": values.max()}
    return {
        **{k: plain_number(v) for k, v in shape.items()},
        "quantiles": {name: float(np.quantile(values, q)) for name, q in QUANTILES.items()},
        "histogram": {"counts": counts.tolist(), "edges": edges.tolist()},
    }


def _normalized(env_id: str | None, returns: np.ndarray) -> dict[str, Any] | None:
    reference = scores.reference(env_id) if env_id else None
    if env_id is None or reference is None or not np.isfinite(returns).all():
        return None
    return {"mean": float(scores.normalize(env_id, returns).mean()), "random": reference[0], "expert": reference[1]}


def _describe(kind: str, array: np.ndarray, columns: Columns) -> dict[str, Any]:
    width = len(columns.mean)
    listed = zip(column_names(kind, array.shape[1:]), columns.rows(), strict=True) if width <= LISTED else []
    return {
        "shape": list(array.shape[1:]),
        "dtype": str(array.dtype),
        **columns.together(),
        "constant": int((columns.low == columns.high).sum()),
        "columns": [{"name": name, **row} for name, row in listed],
    }


def _describe_actions(episodes: Episodes, columns: Columns) -> dict[str, Any]:
    described = _describe("action", episodes.actions, columns) | {"discrete": episodes.discrete}
    if episodes.discrete:
        seen, counts = np.unique(episodes.actions, return_counts=True)
        order = np.argsort(counts, kind="stable")[::-1][:LISTED]
        frequent = {str(seen[i]): int(counts[i]) for i in sorted(order)}
        return described | {"num_actions": episodes.num_actions, "seen": len(seen), "counts": frequent}
    low, high, known = _bounds(episodes, columns)
    near, outside, whole = np.zeros(len(low)), np.zeros(len(low)), True
    margin = 0.01 * (high - low)
    for part in pieces(episodes.actions):
        near += ((part <= low + margin) | (part >= high - margin)).sum(0)
        outside += ((part < low - 1e-3 * margin) | (part > high + 1e-3 * margin)).sum(0)
        whole = whole and bool((part == np.round(part)).all())
    bounded = np.isfinite(margin) & (margin > 0)
    share = np.where(bounded, near / np.maximum(columns.finite, 1), np.nan)
    for row, value in zip(described["columns"], share, strict=False):
        row["saturation"] = plain_number(value)
    return described | {
        "low": [plain_number(v) for v in low],
        "high": [plain_number(v) for v in high],
        "bounds": known,
        "saturation": plain_number(share[bounded].mean()) if bounded.any() else None,
        "outside": int(outside[bounded].sum()) if known == "declared" else 0,
        "whole": whole,
    }


def _bounds(episodes: Episodes, columns: Columns) -> tuple[np.ndarray, np.ndarray, str]:
    """Flat action bounds, and where they come from: declared, assumed ([-1, 1]) or observed."""
    if {"action_low", "action_high"} <= episodes.meta.keys():
        low, high = episodes.action_bounds
        return low.ravel().astype(np.float64), high.ravel().astype(np.float64), "declared"
    if episodes.assumes_unit_box(columns.low, columns.high):
        return -np.ones_like(columns.low), np.ones_like(columns.high), "assumed"
    return columns.low, columns.high, "observed"


# --- text and HTML


def format_summary(summary: dict[str, Any]) -> str:
    """The summary for a terminal: facts, one table of numbers, warnings."""
    lines = [f"{name:<13} {value}" for name, value in _facts(summary)]
    rows, hidden = [(name, summary[name]) for name in ("return", "length", "reward")], 0
    for kind in ("observation", "action"):
        listed = [] if summary[kind].get("discrete") else summary[kind]["columns"]
        rows += [(row["name"], row) for row in listed[:PRINTED]]
        hidden += len(listed[PRINTED:])
    width = max(len(name) for name, _ in rows) + 1
    lines += ["", " " * width + "".join(f"{h:>10}" for h in ("mean", "std", "min", "median", "max"))]
    for name, row in rows:
        median = row.get("quantiles", {}).get("50%", "")
        cells = (row["mean"], row["std"], row["min"], median, row["max"])
        lines.append(f"{name:<{width}}" + "".join(f"{'' if c == '' else number(c):>10}" for c in cells))
    if hidden:
        lines.append(f"... and {count(hidden, 'more column')} (--json lists them)")
    if summary["warnings"]:
        lines += ["", f"{count(len(summary['warnings']), 'warning')}:"]
        lines += [f"  ! {text}" for text in summary["warnings"]]
    return "\n".join(lines)


def _facts(summary: dict[str, Any]) -> list[tuple[str, str]]:
    observation, action, score = summary["observation"], summary["action"], summary["normalized_return"]
    source = summary["source"]
    pairs = [
        ("source", ", ".join(map(str, source)) if isinstance(source, list) else source),
        ("environment", summary["env_id"]),
        ("licence", summary["licence"]),
        ("size", f"{_size(summary)}, {size_of(summary['bytes'])}"),
        ("ends", f"{summary['terminated']:,} terminated, {summary['truncated']:,} truncated"),
        ("observations", f"{_shape(observation)} {observation['dtype']}"),
        ("actions", _action_fact(action)),
        ("extra columns", ", ".join(summary["extras"])),
        ("normalised", f"the mean return is {score['mean']:.1f} (0 random, 100 expert)" if score else None),
    ]
    return [(name, str(value)) for name, value in pairs if value]


def _size(summary: dict[str, Any]) -> str:
    return f"{count(summary['steps'], 'step')} in {count(summary['episodes'], 'episode')}"


def _shape(described: dict[str, Any]) -> str:
    return " x ".join(map(str, described["shape"])) or "1"


def _action_fact(action: dict[str, Any]) -> str:
    if action["discrete"]:
        return f"{action['num_actions']:,} discrete, {action['seen']:,} of them taken"
    ends = [min((v for v in action["low"] if v is not None), default=None)]
    ends += [max((v for v in action["high"] if v is not None), default=None)]
    near = "" if action["saturation"] is None else f", {100 * action['saturation']:.1f}% within 1% of a bound"
    box = f"{action['bounds']} bounds {number(ends[0])} to {number(ends[1])}"
    return f"{_shape(action)} {action['dtype']}, {box}{near}"


def summary_html(summary: dict[str, Any], further: Sequence[Html] = ()) -> Html:
    """A section of a page: facts, warnings, histograms and `further` charts, column table."""
    pictures: list[Html] = []
    for name, unit in (("return", "return of an episode"), ("length", "steps in an episode")):
        bins = summary[name]["histogram"]
        if bins:
            caption = f"{count(summary['episodes'], 'episode')}; mean {number(summary[name]['mean'])}"
            caption += f", median {number(summary[name]['quantiles']['50%'])}"
            title = f"Episode {name}s"
            pictures.append(
                charts.histogram(
                    title, bins["counts"], bins["edges"], x_label=unit, y_label="episodes", caption=caption
                )
            )
    return Html(
        facts(_facts(summary))
        + warning_list(summary["warnings"])
        + grid([*pictures, *further])
        + _column_table(summary)
    )


def _column_table(summary: dict[str, Any]) -> Html:
    rows = [{"name": "reward", **summary["reward"]}]
    for kind in ("observation", "action"):
        described = summary[kind]
        if not described.get("discrete"):
            rows += described["columns"] or [described | {"name": f"all {kind} columns"}]
    cells = [[row["name"], *(number(row[k]) for k in ("mean", "std", "min", "max"))] for row in rows]
    for row, line in zip(rows, cells, strict=True):
        near = row.get("saturation")
        line.append("" if near is None else f"{100 * near:.1f}%")
    head = ["column", "mean", "std", "min", "max", "near a bound"]
    return details(f"Columns ({len(rows)})", table(head, cells))


def plot(episodes: Episodes, path: str | Path, title: str | None = None) -> Path:
    """Write a self-contained HTML page about the data."""
    path, summary = check_suffix(path), summarize(episodes)
    title = title or str(episodes.env_id or "Logged data")
    rows = _spread(len(episodes), 10**6)
    bins = charts.bin_values(episodes.rewards[rows])
    caption = f"{len(rows):,} steps, spread evenly over the data" if len(rows) < len(episodes) else ""
    rewards = charts.histogram("Rewards", *bins, x_label="reward of a step", y_label="steps", caption=caption)
    sections = [
        ("Data", summary_html(summary, [rewards])),
        ("Action support", _action_html(episodes, summary["action"], rows)),
        ("States", _state_html(episodes)),
    ]
    return write_page(path, page(title, _size(summary), sections))


def _spread(total: int, most: int) -> np.ndarray:
    """At most `most` row numbers, spread evenly over all rows."""
    return np.linspace(0, total - 1, min(total, most)).astype(np.int64)


def _action_html(episodes: Episodes, action: dict[str, Any], rows: np.ndarray) -> Html:
    actions = episodes.actions[rows]
    if episodes.discrete:
        return grid([charts.histogram("Actions", *charts.bin_values(actions), x_label="action id", y_label="steps")])
    names = column_names("action", actions.shape[1:])
    pictures = []
    for i, (name, values) in enumerate(zip(names[:DRAWN], actions.reshape(len(actions), -1).T, strict=False)):
        low, high = action["low"][i], action["high"][i]
        bounds = None if low is None or high is None or low == high else (low, high)
        pictures.append(charts.histogram(name, *charts.bin_values(values, within=bounds), size=charts.SMALL))
    left_out = f"The first {DRAWN} of {len(names)} dimensions. " if len(names) > DRAWN else ""
    about = note(f"{left_out}How often each value was taken; what the data never tries, it cannot teach.")
    return Html(about + grid(pictures, small=True))


def _state_html(episodes: Episodes) -> Html:
    found = project(episodes)
    if found is None:
        return charts.nothing("Fewer than two observation columns vary: there is nothing to project.")
    rows, points, share = found
    axes = [f"component {i + 1} ({100 * share[i]:.0f}% of the variance)" for i in range(2)]
    returns = episodes.returns[np.searchsorted(episodes.offsets, rows, side="right") - 1]
    caption = (
        f"Principal components of {len(rows):,} standardised observations, spread evenly over the data. "
        "More opaque: more of the data. Colour: the mean return of the episodes that pass there."
    )
    title, labels = "States in two dimensions", (axes[0], axes[1], "return")
    return grid([charts.density(title, points[:, 0], points[:, 1], returns, labels, caption=caption)])


def project(episodes: Episodes) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """(rows, points (n, 2), share of variance (2,)) by principal components; None if fewer than two columns vary."""
    width = int(np.prod(episodes.observations.shape[1:]))
    rows = _spread(len(episodes), max(1000, min(50_000, 2**24 // width)))
    x = episodes.observations[rows].reshape(len(rows), -1)[:, :: -(-width // 512)].astype(np.float64)
    finite = np.isfinite(x).all(1)
    rows, x = rows[finite], x[finite]
    if len(rows) < 3:
        return None
    std = x.std(0)
    x = ((x - x.mean(0)) / np.where(std > 0, std, 1))[:, std > 1e-12]
    if x.shape[1] < 2:
        return None
    values, vectors = np.linalg.eigh(x.T @ x / len(x))
    axes = vectors[:, [-1, -2]]
    axes *= np.sign(axes[np.abs(axes).argmax(0), [0, 1]])  # an eigenvector's sign is arbitrary: fix it
    return rows, x @ axes, values[[-1, -2]] / values.sum()
