"""Look at logged data before learning from it: `data info` and `data plot`.

`summarize` reads every row once or twice, in pieces, so that it also works on memory-mapped data larger than memory,
and returns plain JSON, with None for what is unknown or not finite. Its `warnings` name what commonly spoils offline
learning. Standard deviations divide by n. `format_summary` prints a summary, `summary_html` and `plot` draw it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from replaylab import charts
from replaylab.data.columns import Columns, column_statistics, pieces, plain_number
from replaylab.data.episodes import Episodes, _same_rows
from replaylab.page import (
    Html,
    check_suffix,
    count,
    details,
    facts,
    grid,
    number,
    page,
    size_of,
    table,
    warning_list,
    write_page,
)

LARGE_PART = 0.2  # of the sum of |reward|
FLOAT32_STEPS = 100  # a column that spans fewer keeps less than two decimal digits in float32
TINY = 1e-4  # of a smaller standard deviation, the 1e-6 that standardising adds is more than a hundredth
HUGE = float(np.sqrt(np.finfo(np.float32).max))  # its square, as in a loss, is still finite in float32
LISTED = 64  # wider arrays (pixels) are described as a whole, not by column
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
            *_number_warnings(episodes, observations, actions, rewards),
            *_scale_warnings(episodes.observations, observations),
            *_boundary_warnings(episodes),
            *_reward_warnings(episodes),
            *_action_warnings(episodes, action),
            *[str(note) for note in episodes.meta.get("notes") or []],
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
    from replaylab import scores  # imported here, as the data layer does not depend on it

    reference = scores.reference(env_id) if env_id else None
    if env_id is None or reference is None or not np.isfinite(returns).all():
        return None
    return {"mean": float(scores.normalize(env_id, returns).mean()), "random": reference[0], "expert": reference[1]}


def _names(kind: str, shape: Sequence[int]) -> list[str]:
    return [f"{kind}[{','.join(map(str, index))}]" for index in np.ndindex(*shape)] if shape else [kind]


def _describe(kind: str, array: np.ndarray, columns: Columns) -> dict[str, Any]:
    width = len(columns.mean)
    listed = zip(_names(kind, array.shape[1:]), columns.rows(), strict=True) if width <= LISTED else []
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


# --- warnings


def _some(names: Sequence[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")


def _number_warnings(episodes: Episodes, observations: Columns, actions: Columns, rewards: Columns) -> list[str]:
    found = []
    measured = [("observation", episodes.observations, observations), ("action", episodes.actions, actions)]
    measured += [("reward", episodes.rewards, rewards)]
    finals = episodes.final_observations[episodes.final_known]
    for name, array in {"final observation": finals, **episodes.extras}.items():
        if array.dtype.kind == "f" and array.size:
            measured.append((name, array, column_statistics(array)))
    for kind, array, columns in measured:
        for what, counts in (("NaN", columns.nan), ("infinity", columns.infinite)):
            if counts.any():
                names = _names(kind, array.shape[1:])
                worst = [f"{names[i]} ({int(counts[i]):,})" for i in np.argsort(-counts, kind="stable") if counts[i]]
                total = int(counts.sum())
                found.append(f"{count(total, 'value')} {'is' if total == 1 else 'are'} {what}: {_some(worst)}")
    for kind, array, columns in measured[:3]:
        largest = np.where(columns.finite > 0, np.maximum(np.abs(columns.low), np.abs(columns.high)), 0)
        if (huge := np.flatnonzero(largest > HUGE)).size:
            names = _names(kind, array.shape[1:])
            why = f"the square of {largest.max():.2g} overflows float32; scale it down before you train"
            found.append(f"huge: {_some([names[i] for i in huge])}: {why}")
    for kind, array, columns in measured[:2]:
        constant = np.flatnonzero(columns.low == columns.high)
        # some pixels of an image may well be constant, but not nearly all
        if len(constant) and len(episodes) > 1 and (array.ndim <= 2 or len(constant) > 0.9 * len(columns.low)):
            names = _names(kind, array.shape[1:])
            found.append(f"constant: {_some([names[i] for i in constant])}: nothing can be learned from a constant")
    if rewards.low[0] == rewards.high[0]:
        found.append(f"every reward is {number(rewards.low[0])}: there is nothing to prefer")
    return found


def _scale_warnings(observations: np.ndarray, columns: Columns) -> list[str]:
    """Training standardises in float32, which wipes out columns with a large offset or a tiny unit."""
    if observations.ndim > 2:  # a pixel of an image may well hardly ever change
        return []
    varies = columns.low < columns.high
    largest = np.maximum(np.abs(columns.low), np.abs(columns.high))
    step = np.spacing(np.where(varies, largest, 1).clip(max=HUGE).astype(np.float32)).astype(np.float64)
    coarse = np.flatnonzero(varies & (columns.high - columns.low < FLOAT32_STEPS * step))
    if len(coarse):
        # float32 holds whole numbers exactly while its step is at most 1: counts and ids are fine
        whole = step[coarse] <= 1
        for part in pieces(observations):
            whole &= (part[:, coarse] == np.round(part[:, coarse])).all(0)
        coarse = coarse[~whole]
    found, names = [], _names("observation", observations.shape[1:])
    if len(coarse):
        why = "values so far from 0 that float32 rounds most of their differences away; subtract an offset"
        found.append(f"large offset: {_some([names[i] for i in coarse])}: {why} before you train")
    if (tiny := np.flatnonzero(varies & (columns.std < TINY))).size:
        why = "standardising adds 1e-6 to the standard deviation, which here is not small beside it; rescale the column"
        found.append(f"tiny unit: {_some([names[i] for i in tiny])}: {why} before you train")
    return found


def _reward_warnings(episodes: Episodes) -> list[str]:
    sizes = np.nan_to_num(np.abs(episodes.rewards.astype(np.float64)), posinf=0)
    lost = ~episodes.backup_known
    part = sizes[lost].sum() / max(sizes.sum(), np.finfo(np.float64).tiny)
    if part < LARGE_PART:
        return []
    where = f"{100 * part:.0f} % of the reward (as sum of |reward|) lies on {count(int(lost.sum()), 'row')} that"
    have = "has no known next observation and is" if lost.sum() == 1 else "have no known next observation and are"
    advice = "mark the last row of an episode as terminated, or give the next observations"
    return [f"{where} {have} not marked as terminated: methods that learn values cannot learn from them; {advice}"]


def _boundary_warnings(episodes: Episodes) -> list[str]:
    found = []
    starts = episodes.offsets[1:-1]
    leaks = _same_rows(episodes.final_observations[:-1], episodes.observations[starts]) if len(starts) else np.zeros(0)
    leaked = int((leaks * episodes.final_known[:-1]).sum())
    if leaked and (episodes.observations != episodes.observations[:1]).any():  # if all states are equal, none leaks
        who = f"the final observation of {count(leaked, 'episode')}"
        found.append(f"boundary leak: {who} is the first observation of the next one")
    unknown = int((~episodes.final_known).sum())
    notes = " ".join(map(str, episodes.meta.get("notes") or []))
    if unknown and "final observation" not in notes:
        found.append(f"the final observation of {unknown:,} of {count(episodes.num_episodes, 'episode')} is unknown")
    if episodes.num_episodes == 1 and not episodes.terminated.any():
        found.append("all rows are one episode that never terminates: are the episode boundaries missing?")
    short = int((episodes.lengths == 1).sum())
    if short:
        found.append(f"{count(short, 'episode')} of length 1")
    repeated = _duplicates(episodes)
    if repeated:
        found.append(f"{count(repeated, 'episode')} repeated: the same rows occur earlier in the data")
    return found


def _duplicates(episodes: Episodes) -> int:
    """Number of episodes equal to an earlier one; only those with the same length and return as another are hashed."""
    keys = episodes.lengths + 1j * np.nan_to_num(episodes.returns)  # complex: two numbers as one sortable key
    group, sizes = np.unique(keys, return_inverse=True, return_counts=True)[1:]
    seen, repeated = set(), 0
    for e in np.flatnonzero(sizes[group] > 1):
        rows = slice(episodes.offsets[e], episodes.offsets[e + 1])
        digest = hashlib.blake2b(digest_size=16)
        for column in (episodes.observations, episodes.actions, episodes.rewards):
            digest.update(np.ascontiguousarray(column[rows]).data)
        repeated += digest.digest() in seen
        seen.add(digest.digest())
    return repeated


def _action_warnings(episodes: Episodes, action: dict[str, Any]) -> list[str]:
    if not episodes.discrete:
        found = []
        if action["whole"] and episodes.actions.dtype.kind == "f":
            found.append("actions are floating but all whole numbers: if they are choices, store them as integers")
        if action["outside"]:
            found.append(f"action values outside the declared bounds: {action['outside']:,}")
        return found
    if action["min"] < 0:
        return ["action ids below 0: discrete actions count from 0"]
    missing = action["num_actions"] - action["seen"]
    if missing <= 0:
        return []
    if action["num_actions"] > 10_000:
        return [f"{missing:,} of {action['num_actions']:,} action ids never occur: are these really discrete actions?"]
    never = np.setdiff1d(np.arange(action["num_actions"]), episodes.actions)
    return [f"action ids that never occur: {_some([str(i) for i in never], 10)}"]


# --- text and HTML


def format_summary(summary: dict[str, Any], *, columns: int = 12) -> str:
    """The summary for a terminal: facts, one table of numbers, warnings. Lists up to `columns` columns of each kind."""
    lines = [f"{name:<13} {value}" for name, value in _facts(summary)]
    rows, hidden = [(name, summary[name]) for name in ("return", "length", "reward")], 0
    for kind in ("observation", "action"):
        listed = [] if summary[kind].get("discrete") else summary[kind]["columns"]
        rows += [(row["name"], row) for row in listed[:columns]]
        hidden += len(listed[columns:])
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


def _action_html(episodes: Episodes, action: dict[str, Any], rows: np.ndarray, most: int = 24) -> Html:
    actions = episodes.actions[rows]
    if episodes.discrete:
        return grid([charts.histogram("Actions", *charts.bin_values(actions), x_label="action id", y_label="steps")])
    names = _names("action", actions.shape[1:])
    pictures = []
    for i, (name, values) in enumerate(zip(names[:most], actions.reshape(len(actions), -1).T, strict=False)):
        low, high = action["low"][i], action["high"][i]
        bounds = None if low is None or high is None or low == high else (low, high)
        pictures.append(charts.histogram(name, *charts.bin_values(values, within=bounds), size=charts.SMALL))
    left_out = f"The first {most} of {len(names)} dimensions. " if len(names) > most else ""
    note = f"{left_out}How often each value was taken; what the data never tries, it cannot teach."
    return Html(f'<p class="note">{note}</p>{grid(pictures, small=True)}')


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
