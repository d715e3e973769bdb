"""Run folders -> one self-contained HTML page, or the same table as data.

`results.py` reads the folders and `stats.py` computes the numbers; this file lays out the page, a function for each
section. Text from a folder is escaped, never taken as HTML.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from replaylab import charts, stats
from replaylab.data.inspect import summary_html
from replaylab.page import (
    Html,
    aligned,
    check_suffix,
    count,
    details,
    duration,
    escape,
    facts,
    grid,
    moment,
    note,
    number,
    page,
    plus_minus,
    span,
    status_word,
    table,
    warning_list,
    write_page,
)
from replaylab.results import (
    BROKEN,
    Evaluations,
    Run,
    dictionary,
    differences,
    finite,
    or_nan,
    read_runs,
    rows_of,
    summarize_runs,
    text,
    why_unscored,
)
from replaylab.sections import sections_of
from replaylab.sections.metrics import meaning

__all__ = ["report", "summarize_runs"]

NOT_METRICS = {"step", "phase", "seed", "seconds"}
POINTS = 150  # per training curve; longer ones are averaged in groups
SHOWN = 6  # charts of a phase that are visible at once; the rest unfolds on a click
MANY = 12  # if there are more evaluations, only those with the runs' own settings are drawn


def report(run_paths: str | Path | Iterable[str | Path], out: str | Path) -> Path:
    """Write the page, an .html file, and return its path."""
    out = check_suffix(out)
    runs = read_runs(run_paths)
    rows = [row for run in runs for row in rows_of(run)]
    styles = _styles(runs)
    sections = [
        ("Scores", _score_html(runs, rows, styles)),
        *sections_of(runs),
        ("Training", _training_html(runs, styles)),
        *([("Data", _data_html(logged))] if (logged := [run for run in runs if run.config.get("data") != []]) else []),
        ("Configuration", _config_html(runs)),
        ("Machine and time", _machine_html(runs)),
    ]
    systems = list(dict.fromkeys(text(r["system"]) for r in rows if r["system"]))
    envs = list(dict.fromkeys(text(r["env"]) for r in rows if r["env"]))
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared"
    return write_page(out, page(title, " · ".join([*systems, *envs, "replaylab report"]), sections))


def _name(run: str, label: str) -> str:
    return f"{run} ({label})" if label else run


def _styles(runs: list[Run]) -> dict[str, int]:
    """Name of a curve -> its colour and dash, the same in every chart."""
    named = {run.name: i for i, run in enumerate(runs)}
    for run in runs:
        for group in run.evaluations:
            named.setdefault(_name(run.name, group.label), len(named))
    return named


# --- sections


def _score(score: dict[str, Any] | None) -> str:
    return "–" if score is None else plus_minus(score["mean"], score["error"])


def _iqm(score: dict[str, Any] | None) -> str:
    if score is None or score["low"] is None:
        return "–" if score is None else number(score["iqm"])
    middle, low, high = aligned([score["iqm"], score["low"], score["high"]], score["high"] - score["low"])
    return f"{middle} [{low}, {high}]"


def _score_html(runs: list[Run], rows: list[dict[str, Any]], styles: dict[str, int]) -> Html:
    curves = _curves(runs, styles)
    kept = _own(rows, [(row["path"], row["label"]) for row in rows])
    rest = [row for row in rows if not any(row is other for other in kept)]
    scored = [row for row in kept if row["return"]]
    parts = []
    if not scored:
        parts.append(charts.nothing(why_unscored(row["env"] for row in rows)))
    elif len(scored) == 1:
        parts.append(grid([_hero(scored[0], _in_the_data(runs)), *curves]))
    else:
        parts += [grid([*_score_charts(scored, styles), *curves]), *map(note, _in_the_data(runs))]
    head = ["Run", "Score", "IQM [95%]", "Return", "Seeds", "Episodes", "System", "Data", "Step", "Time", "Status"]
    parts.append(table(head, [_score_cells(row) for row in kept]))
    if rest:
        body = table(head, [_score_cells(row) for row in rest])
        parts.append(details(f"{count(len(rest), 'evaluation')} with other settings", body))
    if scored:
        parts.append(
            note(
                "The score is the last evaluation, never the best: normalised (0 random, 100 expert, in Atari a human) "
                "where reference scores are known, otherwise the return. ± is the standard error. IQM is the mean of "
                "the middle half, with its 95% bootstrap interval. Both are over seeds, each seed counted once with "
                "its mean; where there is one seed, over its episodes, which says nothing about other seeds."
            )
        )
    parts.append(warning_list([_of(run, runs) + line for run in runs for line in run.doubts]))
    told = [_of(run, runs) + line for run in runs for line in run.notes if line not in run.doubts]
    parts += [note(f"Training noted: {line}.") for line in told]
    return Html("".join(parts))


def _of(run: Run, runs: Sequence[Run]) -> str:
    return f"{run.name}: " if len(runs) > 1 else ""


def _in_the_data(runs: Iterable[Run]) -> list[str]:
    """What the episodes that were learned from reach, in the environment of the run, which a score is held against."""
    said: dict[str, None] = {}
    for run in runs:
        data, env = dictionary(run.info.get("data")), run.config.get("env")
        returns, known = dictionary(data.get("return")), dictionary(data.get("normalized_return"))
        mean, best = finite(returns.get("mean")), finite(returns.get("max"))
        if mean is None or best is None or env is None or data.get("env_id") != env:
            continue
        low, high = finite(known.get("random")), finite(known.get("expert"))
        kind = "return"
        if low is not None and high is not None and high > low:
            kind, mean, best = "normalised score", *(100 * (v - low) / (high - low) for v in (mean, best))
        paths = run.config.get("data")
        label = ", ".join(_short_path(p) for p in paths) if isinstance(paths, list) else "the data"
        said[f"For comparison, the episodes of {label}: {kind} {mean:,.1f} on average, {best:,.1f} at best."] = None
    return list(said)


def _own(found: Sequence[Any], names: Sequence[tuple[str, str]]) -> list[Any]:
    """All evaluations or, if there are too many to look at, each run's evaluations without a label (its own settings);
    for a run without any such, the first. `names` holds (run, label) of each evaluation."""
    if len(found) <= MANY:
        return list(found)
    plain = {run for run, label in names if not label}
    first = {run: i for i, (run, _) in reversed([*enumerate(names)])}
    return [x for i, (x, (run, label)) in enumerate(zip(found, names, strict=True))
            if not label or (run not in plain and first[run] == i)]  # fmt: skip


def _hero(row: dict[str, Any], beside: Sequence[str]) -> Html:
    score, kind = row["normalized"] or row["return"], "normalised score" if row["normalized"] else "return"
    over = f"{count(row['seeds'], 'seed')}, {count(row['episodes'], 'episode')}"
    mean, _, error = _score(score).partition(" ")
    about = f"{row['env']}, {over}, step {row['step']:,}; interquartile mean {_iqm(score)}"
    said = "".join(map(note, [about, *beside]))
    return Html(f'<div><p class="hero">{mean} <small>{error} {kind}</small></p>{said}</div>')


def _score_charts(rows: list[dict[str, Any]], styles: dict[str, int]) -> list[Html]:
    pictures = []
    for env in dict.fromkeys(row["env"] for row in rows):
        here = [row for row in rows if row["env"] == env]
        kind = "normalized" if all(row["normalized"] for row in here) else "return"
        scores = [row[kind] for row in here]
        names = [_name(row["run"], row["label"]) for row in here]
        middle, low, high = ([score[key] for score in scores] for key in ("iqm", "low", "high"))
        pictures.append(
            charts.bars(
                f"Last score in {env}",
                names,
                middle,
                low,
                high,
                styles=[styles[name] for name in names],
                x_label="normalised score" if kind == "normalized" else "return",
                caption=f"Interquartile mean and 95% bootstrap interval; {_amount(here)}.",
            )
        )
    return pictures


def _amount(rows: Sequence[dict[str, Any]]) -> str:
    seeds, episodes = ({row[key] for row in rows} for key in ("seeds", "episodes"))
    return f"{span(seeds, 'seed')} and {span(episodes, 'episode')} a run"


def _score_cells(row: dict[str, Any]) -> list[Any]:
    score = row["normalized"] or row["return"]
    kind = f"<br><small>{'normalised' if row['normalized'] else 'return'}</small>" if score else ""
    where = text(row["env"]) if row["env"] else "no environment"
    where += f", {row['label']}" if row["label"] else ""
    status = str(row["status"] or "unknown")
    of = "" if status == "finished" else f" of {number(row['steps'])}"  # phases can end early
    return [
        Html(f"<b>{escape(row['run'])}</b><br><small>{escape(where)}</small>"),
        Html(f"<b>{_score(score)}</b>{kind}"),
        _iqm(score),
        _score(row["return"]),
        "–" if row["seeds"] is None else row["seeds"],
        row["episodes"],
        row["system"] or "–",
        ", ".join(_short_path(p) for p in row["data"]),
        number(row["step"]) + of,
        duration(row["seconds"]),
        status_word(status),
    ]


def _short_path(path: Any) -> str:
    return "/".join(Path(text(path)).parts[-2:])


def _curves(runs: list[Run], styles: dict[str, int]) -> list[Html]:
    """A learning curve for each environment, with all runs that were evaluated there."""
    pictures = []
    everything = [(run, group) for run in runs for group in run.evaluations]
    everything = _own(everything, [(str(run.path), group.label) for run, group in everything])
    everything = [(run, group) for run, group in everything if len(group.lines) > 1]  # one point is no curve
    for env in dict.fromkeys(group.env for _, group in everything):
        here = [(run, group) for run, group in everything if group.env == env]
        key = "normalized" if all(group.normalized for _, group in here) else "returns"
        series = [_curve(_name(run.name, group.label), group, key, styles) for run, group in here]
        counts = [len(line["returns"]) for _, g in here for by_seed in g.lines.values() for line in by_seed.values()]
        caption = (
            f"Mean over seeds and its 95% bootstrap interval (over episodes where a run has one seed); "
            f"{span([len(g.seeds) for _, g in here], 'seed')}, {span(counts, 'episode')} a seed at each point."
        )
        label = "normalised score" if key == "normalized" else "return"
        pictures.append(
            charts.lines(f"Learning curve in {env}", series, x_label="step", y_label=label, caption=caption)
        )
    return pictures


def _curve(name: str, group: Evaluations, key: str, styles: dict[str, int]) -> charts.Series:
    steps = group.common_steps() or sorted(group.lines)
    scores = [[line[key] for line in group.lines[step].values()] for step in steps]
    ends = np.array([stats.bootstrap_interval(s, stats.mean, resamples=1000) for s in scores])
    middle = [stats.independent_units(s)[0].mean() for s in scores]
    shown = name if len(styles) > 1 else ""
    return charts.Series(shown, np.array(steps, np.float64), np.array(middle), ends[:, 0], ends[:, 1], styles[name])


def _training_html(runs: list[Run], styles: dict[str, int]) -> Html:
    curves: dict[str, dict[str, dict[str, dict[Any, dict[float, float]]]]] = {}  # [phase][metric][run][seed][step]
    for run in runs:
        for line in run.metrics:
            phase, seed = text(line.get("phase") or "training"), text(line.get("seed"))
            for metric, value in line.items():
                if metric not in NOT_METRICS and isinstance(value, int | float) and not isinstance(value, bool):
                    by_seed = curves.setdefault(phase, {}).setdefault(metric, {}).setdefault(run.name, {})
                    by_seed.setdefault(seed, {})[line["step"]] = or_nan(value)
    parts = []
    for phase, metrics in curves.items():
        pictures = [_metric_chart(phase, metric, by_run, styles) for metric, by_run in metrics.items()]
        shown = grid(pictures[:SHOWN])
        if len(pictures) > SHOWN:
            shown = Html(shown + details(f"{len(pictures) - SHOWN} more of {phase}", grid(pictures[SHOWN:])))
        wide = min(len(pictures), 3)
        parts.append(f'<div style="flex:{wide} 1 {330 * wide}px"><h4>Phase: {escape(phase)}</h4>{shown}</div>')
    if not parts:
        return charts.nothing("No training metrics were logged.")
    return Html(f'<div class="phases">{"".join(parts)}</div>')


def _metric_chart(
    phase: str, metric: str, by_run: dict[str, dict[Any, dict[float, float]]], styles: dict[str, int]
) -> Html:
    series, grouped, seeds = [], 1, []
    for name, by_seed in by_run.items():
        steps = sorted({step for by_step in by_seed.values() for step in by_step})
        values = np.array([[by_step.get(step, math.nan) for step in steps] for by_step in by_seed.values()])
        grouped = max(grouped, math.ceil(len(steps) / POINTS))
        parts = np.array_split(np.arange(len(steps)), min(len(steps), POINTS))
        values = np.stack([_mean(values[:, part], 1) for part in parts], 1)  # (seeds, points)
        x = np.array([np.mean([steps[i] for i in part]) for part in parts])
        low, high = (values.min(0), values.max(0)) if len(values) > 1 else (None, None)
        shown_name = name if len(styles) > 1 else ""
        series.append(charts.Series(shown_name, x, _mean(values, 0), low, high, styles[name]))
        seeds.append(len(by_seed))
    shown = np.concatenate([s.y for s in series])
    shown = shown[np.isfinite(shown)]
    log = bool(len(shown)) and shown.min() > 0 and shown.max() / 30 > shown.min()
    known = meaning(phase, metric)
    caption = f"{known}. " if known else ""
    caption += f"Mean over {span(seeds, 'seed')}; band: lowest to highest" if max(seeds) > 1 else "One seed"
    caption += (f"; a point is the mean of up to {grouped} logged values" if grouped > 1 else "") + "."
    return charts.lines(metric, series, x_label="step", y_label="log scale" if log else "", caption=caption, log=log)


def _mean(values: np.ndarray, axis: int) -> np.ndarray:
    """Mean of the finite values, NaN where there are none."""
    known = np.isfinite(values)
    return np.where(known, values, 0).sum(axis) / np.where(known.any(axis), known.sum(axis), np.nan)


def _data_html(runs: list[Run]) -> Html:
    found: dict[str, tuple[Any, list[str], list[str]]] = {}  # by summary, to show each once
    for run in runs:
        summary, paths = run.info.get("data"), run.config.get("data")
        labels = [_short_path(p) for p in (paths if isinstance(paths, list) else [paths] if paths else ["arrays"])]
        found.setdefault(json.dumps(summary, sort_keys=True), (summary, labels, []))[2].append(run.name)
    parts = []
    for summary, labels, names in found.values():
        who = f" <small>used by {escape(', '.join(names))}</small>" if len(found) > 1 else ""
        parts.append(Html(f"<h4>{escape(', '.join(labels))}{who}</h4>"))
        try:
            parts.append(summary_html(summary) if summary else charts.nothing("The run folder holds no data summary."))
        except BROKEN:
            parts.append(charts.nothing("The data summary in run.json is not readable."))
    return Html("".join(parts))


def _difference_table(runs: list[Run], dicts: Sequence[dict[str, Any]], differing: Sequence[str]) -> Html:
    rows = [[key, *(text(d[key]) if key in d else "" for d in dicts)] for key in differing]
    return table(["Setting", *(run.name for run in runs)], rows)


def _config_html(runs: list[Run]) -> Html:
    configs = [run.config for run in runs]
    differing = differences(configs)[1]
    parts = []
    if differing:
        shared = [key for key in differing if all(key in config for config in configs)]
        own = [key for key in differing if key not in shared]
        if shared:
            parts += [note("What differs between the runs:"), _difference_table(runs, configs, shared)]
        if own:
            title = f"{count(len(own), 'setting')} that not all of them have"
            parts.append(details(title, _difference_table(runs, configs, own)))
    elif len(runs) > 1:
        parts.append(charts.nothing("All runs have the same configuration."))
    for run in runs:
        rows = [[key, Html(f'<span class="wide">{escape(text(value))}</span>')] for key, value in run.config.items()]
        parts.append(details(f"All settings of {run.name}" if len(runs) > 1 else "All settings", table([], rows)))
    return Html("".join(parts))


def _machine_html(runs: list[Run]) -> Html:
    machines = []
    for run in runs:
        described: dict[str, Any] = {"time": duration(finite(run.info.get("seconds")))}
        described |= {key: moment(run.info[key]) for key in ("started", "finished") if key in run.info}
        described |= {"command": run.info["command"]} if "command" in run.info else {}
        parameters = finite(run.info.get("parameters"))
        described |= {} if parameters is None else {"parameters, all seeds": f"{parameters:,.0f}"}
        machine = dict(dictionary(run.info.get("machine")))
        if memory := machine.pop("memory_gib", None):
            machine["memory"] = f"{text(memory)} GiB"
        machines.append(described | machine)
    shared, differing = differences(machines)
    parts = facts((key, text(value)) for key, value in shared.items())
    return Html(parts + (_difference_table(runs, machines, differing) if differing else ""))
