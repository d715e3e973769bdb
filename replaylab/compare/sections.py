"""The comparison page's sections: table, aggregates, profiles, who beats whom, curves, time and cost."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

import numpy as np

from replaylab import charts, stats
from replaylab.compare.gather import Comparison, Entry, hours
from replaylab.compare.tables import amount, neighbours, no_scores, protocols, published_cells, remark, score
from replaylab.page import (
    Html,
    count,
    details,
    duration,
    escape,
    grid,
    moment,
    note,
    number,
    span,
    status_word,
    table,
    warning_list,
)
from replaylab.published import Published
from replaylab.results import Run, finite, text

AGGREGATES = {
    "iqm": ("Interquartile mean", "mean of the middle half of all seeds on all tasks; higher is better"),
    "median": ("Median", "of the tasks' means; higher is better"),
    "mean": ("Mean", "of the tasks' means; higher is better"),
    "gap": ("Optimality gap", "how far below 100 on average; lower is better"),
}


def sections(found: Comparison, out: Path) -> list[tuple[str, Html]]:
    rows, tasks, left_out = found.complete()
    here = [e for e in found.entries if e.row in rows and e.task in tasks]
    parts = [("Scores", _scores(found))]
    if rows and found.entries:
        parts += [("Over all tasks", _over_all(found, rows, tasks, left_out, here))]
    parts += [("Curves", _curves(found)), ("Time and cost", _cost(found, out))]
    return parts


# --- scores


def _scores(found: Comparison) -> Html:
    if not found.entries:
        parts = [charts.nothing(no_scores(found)), table(["", *found.tasks], _rows(found, "last"))]
    else:
        ours, others = neighbours(found, ours=True), neighbours(found, ours=False)
        parts = [
            table(["", *found.tasks], [*_rows(found, "last"), *_published(found, ours)]),
            note(
                f"Last checkpoint, never the best; normalised (0 random, 100 expert, in Atari a human) where reference "
                f"scores are known, otherwise the return. Mean ± standard error over seeds (over episodes where there "
                f"is one seed); {amount(found.entries)}. Small: seeds x episodes a seed."
            ),
            _protocols(found, ours),
            details(
                "Best checkpoint of each seed (chosen with the evaluations it is judged by: optimistic)",
                Html(
                    table(["", *found.tasks], _rows(found, "best"))
                    + note(f"Each seed's best evaluation; {amount(found.entries, 'best')}.")
                ),
            ),
        ]
        if others:
            more = table(["", *found.tasks], _published(found, others)) + _protocols(found, others)
            parts.append(details("What others have published on these tasks", Html(more)))
    warnings = found.doubts + [f"{run.name}: {line}" for run in found.runs for line in run.notes]
    parts.append(warning_list(list(dict.fromkeys(warnings))))
    return Html("".join(parts))


def _rows(found: Comparison, which: str) -> list[list[Html]]:
    return [
        [Html(f"<b>{escape(row)}</b>"), *(_cell(found, row, task, which) for task in found.tasks)] for row in found.rows
    ]


def _cell(found: Comparison, row: str, task: str, which: str) -> Html:
    entry = found.at(row, task)
    if entry is None:
        return escape(found.instead(row, task))
    episodes = sorted({len(scores) for _, scores in getattr(entry, which).values()})
    amounts = f"{len(entry.last)} x {'–'.join(str(n) for n in dict.fromkeys((episodes[0], episodes[-1])))}"
    more = ", ".join(filter(None, [amounts, "" if entry.normalized else "return", remark(entry, which)]))
    return Html(f"<b>{escape(score(entry, which))}</b><br><small>{escape(more)}</small>")


def _published(found: Comparison, others: Sequence[Published]) -> list[list[Html]]:
    return [
        [Html(f"{escape(p.name)}<br><small>published</small>"), *(escape(c) for c in published_cells(found, p))]
        for p in others
    ]


def _protocols(found: Comparison, others: Sequence[Published]) -> Html:
    return Html("".join(note(f"Published, {line}.") for line in protocols(found, others)))


# --- over all tasks


def _over_all(
    found: Comparison, rows: Sequence[str], tasks: Sequence[str], left_out: Sequence[str], here: Sequence[Entry]
) -> Html:
    scores = {row: [found.at(row, task).seed_means() for task in tasks] for row in rows}  # type: ignore[union-attr]
    told = f"{count(len(tasks), 'task')}, {amount(here)}"
    pictures = []
    for kind, (title, meaning) in AGGREGATES.items():
        values, low, high = zip(*(stats.aggregate(scores[row], kind) for row in rows), strict=True)
        pictures.append(
            charts.bars(
                title,
                rows,
                values,
                low,
                high,
                x_label="normalised score",
                caption=f"{meaning[0].upper()}{meaning[1:]}. Stratified 95% bootstrap interval; {told}.",
            )
        )
    pictures.append(_profiles(scores, told))
    parts = [grid(pictures), _improvement(scores, told)]
    going = [f"{e.row} on {e.task} ({remark(e)})" for e in here if remark(e)]
    if going:
        parts.insert(0, note(f"With scores of what is not finished: {'; '.join(going)}."))
    if others := [task for task in found.tasks if task not in tasks]:
        parts.insert(0, note(f"Without the tasks {', '.join(others)}: no normalised scores of these systems there."))
    if left_out:
        where = "every task" if len(tasks) == len(found.tasks) else ", ".join(tasks)
        parts.insert(0, note(f"Without {', '.join(left_out)}: not evaluated on {where}, or not normalised."))
    return Html("".join(parts))


def _profiles(scores: dict[str, list[list[float]]], told: str) -> Html:
    everything = [v for tasks in scores.values() for task in tasks for v in task]
    low, high = min(0.0, *everything), max(100.0, *everything)
    at = np.linspace(low, high, 101)
    series = [
        charts.Series(row, at, *stats.performance_profile(tasks, at), style=i)
        for i, (row, tasks) in enumerate(scores.items())
    ]
    caption = f"Share of seeds that score above x, averaged over tasks; 95% bootstrap band; {told}."
    return charts.lines("Performance profiles", series, x_label="normalised score", y_label="share", caption=caption)


def _improvement(scores: dict[str, list[list[float]]], told: str) -> Html:
    if len(scores) < 2:
        return Html("")

    def cell(first: str, second: str) -> str:
        if first == second:
            return "–"
        value, low, high = stats.probability_of_improvement(scores[first], scores[second])
        return f"{value:.2f}" if np.isnan(low) else f"{value:.2f} [{low:.2f}, {high:.2f}]"

    body = table(["better than", *scores], [[row, *(cell(row, other) for other in scores)] for row in scores])
    caption = note(
        f"How likely a seed of the row scores higher than one of the column on the same task, ties half, averaged over "
        f"tasks; stratified 95% bootstrap interval; {told}."
    )
    return Html(f"<h4>Probability of improvement</h4>{body}{caption}")


# --- curves


def _curves(found: Comparison) -> Html:
    styles = {row: i for i, row in enumerate(found.rows)}
    pictures = []
    for task in found.tasks:
        here = [e for e in found.entries if e.task == task]
        series = [s for e in here if (s := _curve(e, styles[e.row]))]
        if series:
            seeds = [by_step for e in here for by_step in e.curves.values()]
            before = [len(by_step[step]) for by_step in seeds for step in sorted(by_step)[:-1]]
            way = f" at the last step, {span(before, 'episode')} a seed before" if before else ""
            caption = f"Mean over seeds, 95% bootstrap interval; {amount(here)}{way}."
            label = here[0].kind if len({e.kind for e in here}) == 1 else "score"
            pictures.append(charts.lines(task, series, x_label="step", y_label=label, caption=caption))
    return grid(pictures) if pictures else charts.nothing("No evaluations to draw.")


def _curve(entry: Entry, style: int) -> charts.Series | None:
    common = set.intersection(*(set(by_step) for by_step in entry.curves.values()))
    steps = sorted(common)
    if not steps:
        return None
    scores = [[by_step[step] for by_step in entry.curves.values()] for step in steps]
    ends = np.array([stats.bootstrap_interval(s, stats.mean, resamples=500) for s in scores])
    middle = np.array([stats.independent_units(s)[0].mean() for s in scores])
    return charts.Series(entry.row, np.array(steps, float), middle, ends[:, 0], ends[:, 1], style)


# --- time and cost


def _cost(found: Comparison, out: Path) -> Html:
    lines, total, on_gpu = [], 0.0, 0.0
    for run in found.runs:
        spent, gpu = hours(run)
        total += spent or 0.0
        on_gpu += (spent or 0.0) if gpu else 0.0
        lines.append(_cost_row(run, spent, gpu, out))
    head = ["Run", "Time", "GPU hours", "Device", "Seeds", "Steps", "Parameters, all seeds", "Status", "Finished"]
    summary = note(
        f"{count(len(found.runs), 'run')}, {duration(3600 * total)} in all, {number(on_gpu)} GPU hours. A run's time "
        f"holds its training and its evaluations; processes that shared a GPU count their own hours each."
    )
    return Html(table(head, lines) + summary)


def _cost_row(run: Run, spent: float | None, gpu: bool, out: Path) -> list[Html | str]:
    machine, seeds = run.info.get("machine"), run.config.get("seeds")
    page, name = run.path / "report.html", escape(run.name)
    link = quote(os.path.relpath(page.resolve(), out.resolve().parent)) if page.exists() else ""
    return [
        Html(f'<a href="{escape(link)}">{name}</a>') if link else name,
        duration(None if spent is None else 3600 * spent),
        number(spent) if gpu else "–",
        text(machine.get("device") or "–") if isinstance(machine, dict) else "–",
        str(len(seeds)) if isinstance(seeds, list) else "–",
        number(run.step),
        "–" if (size := finite(run.info.get("parameters"))) is None else f"{size:,.0f}",
        status_word(str(run.info.get("status") or "unknown")),
        moment(run.info.get("finished")),
    ]
