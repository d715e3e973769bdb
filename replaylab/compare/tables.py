"""The comparison's table as Markdown and CSV: our scores first, then published ones."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

from replaylab.compare.gather import Comparison, Entry, hours
from replaylab.page import number, plus_minus, span
from replaylab.published import Published, canonical, published
from replaylab.results import Run, why_unscored
from replaylab.scores import reference

COLUMNS = (
    "row", "system", "task", "env", "status", "step", "score", "mean", "error", "error_is", "iqm", "iqm_low",
    "iqm_high", "seeds", "episodes", "best_mean", "best_error", "hours", "gpu_hours", "published", "protocol", "doubts",
)  # fmt: skip


def score(entry: Entry, which: str = "last") -> str:
    found = entry.summary(which)
    return plus_minus(found["mean"], found["error"])


def remark(entry: Entry, which: str = "last") -> str:
    """Step and status of what is not finished, so that nobody takes its score for final."""
    return f"step {entry.step(which):,}, {entry.status}" if entry.status != "finished" else ""


def amount(entries: Sequence[Entry], which: str = "last") -> str:
    """How many seeds and episodes are behind a table or a picture."""
    episodes = [len(scores) for e in entries for _, scores in getattr(e, which).values()]
    return f"{span([len(e.last) for e in entries], 'seed')}, {span(episodes, 'episode')} a seed"


def neighbours(found: Comparison, *, ours: bool) -> list[Published]:
    """Published scores for these tasks: of the systems in the comparison, or of everything else."""
    systems = {e.system for e in found.entries}
    # a score is shown beside ours only if it is of the same kind
    return [
        p
        for p in published(found.tasks)
        if (p.system in systems) == ours and any(_same(found, p, t) for t in found.tasks)
    ]


def _same(found: Comparison, other: Published, task: str) -> tuple[float, float | None] | None:
    """A published score on a task, in the form of our scores there; None if it cannot be converted."""
    kinds = {e.kind for e in found.entries if e.task == task}
    return told_as(other, task, kinds.pop()) if len(kinds) == 1 else None


def told_as(other: Published, task: str, kind: str) -> tuple[float, float | None] | None:
    """A published score as `kind`, or None. Papers on games give returns, which are normalised here like ours."""
    known = other.scores.get(canonical(task))
    if known is None or other.kind == kind:
        return known
    ends = reference(canonical(task)) if kind == "normalised" else None
    if ends is None:
        return None
    low, high = ends
    mean, spread = known
    return 100 * (mean - low) / (high - low), None if spread is None else 100 * spread / (high - low)


def protocol(other: Published, kinds: Iterable[str]) -> str:
    """The published protocol, and whether the numbers were normalised here."""
    return other.protocol + (", normalised here" if other.kind == "return" and "normalised" in kinds else "")


def protocols(found: Comparison, others: Sequence[Published]) -> list[str]:
    """The protocols of these scores, a line for each source."""
    pairs = [(p, {e.kind for e in found.entries if canonical(e.task) in p.scores}) for p in others]
    return list(dict.fromkeys(f"{p.source}: {protocol(p, kinds)}" for p, kinds in pairs))


def published_cells(found: Comparison, other: Published) -> list[str]:
    scores = [_same(found, other, task) for task in found.tasks]
    return ["–" if s is None else number(s[0]) if s[1] is None else f"{s[0]:.4g} ± {s[1]:.4g}" for s in scores]


def no_scores(found: Comparison) -> str:
    return why_unscored(run.config.get("env") for run in found.runs)


def markdown(found: Comparison) -> str:
    lines = _grid(found, "last")
    doubts = [f"- {line}" for line in found.doubts]
    if not found.entries:
        return "\n".join([*lines, "", no_scores(found), "", *doubts]) + "\n"
    others = neighbours(found, ours=True) + neighbours(found, ours=False)
    lines += [f"| *published:* {p.name} | {' | '.join(published_cells(found, p))} |" for p in others]
    error = "mean ± standard error over seeds (of one seed: over episodes)"
    lines += ["", f"{_kinds(found)} of the last checkpoint, {error}; {amount(found.entries)}.", "", *doubts]
    lines += [f"- published, {line}." for line in protocols(found, others)]
    caveat = f"optimistic, as chosen with the evaluations it is judged by; {amount(found.entries, 'best')}"
    lines += ["", f"Best checkpoint of each seed ({caveat}):", "", *_grid(found, "best")]
    return "\n".join(lines) + "\n"


def _grid(found: Comparison, which: str) -> list[str]:
    lines = [f"| | {' | '.join(found.tasks)} |", f"|---|{'---|' * len(found.tasks)}"]
    for row in found.rows:
        cells = []
        for task in found.tasks:
            entry = found.at(row, task)
            shown = found.instead(row, task) if entry is None else score(entry, which)
            cells.append(shown + (f" ({remark(entry, which)})" if entry and remark(entry) else ""))
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return lines


def _kinds(found: Comparison) -> str:
    kinds = {e.kind for e in found.entries}
    return "Normalised score" if kinds == {"normalised"} else "Return" if kinds == {"return"} else "Score (or return)"


def to_csv(found: Comparison) -> str:
    """One line for each system on each task, ours and published."""
    file = io.StringIO()
    writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for entry in found.entries:
        writer.writerow(_csv_row(entry))
    for (row, task, system), unscored in found.unscored.items():
        line = {"row": row, "system": system, "task": task, "status": unscored.status}
        writer.writerow(line | (_progress(unscored.runs) if unscored.runs else {}))
    for p in neighbours(found, ours=True) + neighbours(found, ours=False):
        for task in found.tasks:
            known = _same(found, p, task)
            if known:
                kind = next(e.kind for e in found.entries if e.task == task)
                about = {"row": p.name, "system": p.system, "task": task, "score": kind, "published": "yes"}
                rest = {"error_is": "as published", "protocol": protocol(p, [kind])}
                writer.writerow(about | rest | {"mean": known[0], "error": known[1]})
    return file.getvalue()


def _csv_row(entry: Entry) -> dict[str, Any]:
    last, best = entry.summary(), entry.summary("best")
    return {
        "row": entry.row, "system": entry.system, "task": entry.task, "env": entry.env, "status": entry.status,
        "step": entry.step(), "score": entry.kind,
        "mean": last["mean"], "error": last["error"], "error_is": f"standard error over {last['unit']}s",
        "iqm": last["iqm"], "iqm_low": last["low"], "iqm_high": last["high"], "seeds": last["seeds"],
        "episodes": last["episodes"], "best_mean": best["mean"], "best_error": best["error"],
        **_hours(entry.runs), "published": "", "protocol": "",
        "doubts": "; ".join(f"{run.name}: {line}" for run in entry.runs for line in run.doubts),
    }  # fmt: skip


def _hours(runs: Sequence[Run]) -> dict[str, float]:
    spent = [hours(run) for run in {run.path: run for run in runs}.values()]
    known = [(h, gpu) for h, gpu in spent if h is not None]
    return {"hours": round(sum(h for h, _ in known), 5), "gpu_hours": round(sum(h for h, gpu in known if gpu), 5)}


def _progress(runs: Sequence[Run]) -> dict[str, Any]:
    """Steps, seeds and hours of runs that were not evaluated."""
    steps = [run.step for run in runs if run.step is not None]
    seeds = [run.config.get("seeds") for run in runs]
    return {
        "step": min(steps, default=None), "seeds": sum(len(s) for s in seeds if isinstance(s, list)), **_hours(runs)
    }  # fmt: skip
