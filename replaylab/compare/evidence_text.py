"""The text of a folder of result files (see evidence.py): benchmarks/RESULTS.md.

A task's section has one row for each run, remarks on runs, and other people's scores; further evaluations of the same
policies and the runs' commands are folded away.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from replaylab import stats
from replaylab.compare.evidence import FORMAT
from replaylab.compare.tables import protocol, told_as
from replaylab.errors import UsageError
from replaylab.page import check_suffix, count, duration, number, plus_minus, span, write_page
from replaylab.published import ORIGINALS, published
from replaylab.results import BROKEN, settings_text, text

OPENING = """# Results

Made by `replaylab report {folder} --out {out}` from the files in `{folder}/`;
nothing here was typed by hand. Scores are those of the last checkpoint, the best one stands beside it for comparison:
normalised (0 random, 100 expert, in Atari a human), mean ± standard error over seeds. Published scores are other
people's numbers under their own protocols, on D4RL's data: beside `X-medium+X-expert`, our mix, stand those for
`X-medium-expert`.
"""
NOTES = "What data this is, learning curves of collecting, and what was tried besides: [NOTES.md](NOTES.md).\n"
RUNS = (
    "system", "settings", "score, last checkpoint", "best checkpoint", "IQM [95 %]", "seeds x episodes", "time",
    "machine", "date", "run",
)  # fmt: skip
OTHERS = ("run", "evaluated with", *RUNS[2:6])


def write_results(folder: str | Path, out: str | Path | None = None) -> Path:
    """Write `results_markdown` and return the file's path; default: FOLDER.md."""
    out = check_suffix(Path(folder).with_suffix(".md") if out is None else out, [".md"])
    return write_page(out, results_markdown(folder, out))


def results_markdown(folder: str | Path, out: str | Path) -> str:
    """The text from a folder's result files (a section per task) and its bench-*.json. Other files are ignored.

    out: where it will be written, which its links are relative to.
    """
    folder, out = Path(folder), Path(out)
    results, benches = [], []
    inside = os.path.relpath(folder, out.parent)
    for path in _files(folder):
        try:
            found = json.loads(path.read_text())
        except ValueError as error:
            raise UsageError(f"{path} is not valid JSON: {error}") from error
        if isinstance(found, dict) and found.get("format") == FORMAT:
            results.append(found | {"file": f"[{path.stem}]({Path(inside, path.name)})"})
            _check(path, results[-1])
        elif path.name.startswith("bench-") and isinstance(found, dict):
            benches.append(found)
    if not results:
        raise UsageError(f"{folder} holds no result files: make some with `replaylab report RUN --export {folder}`")
    tasks = list(dict.fromkeys(r["task"] for r in results))
    parts = [_section(task, [r for r in results if r["task"] == task]) for task in sorted(tasks)]
    notes = NOTES if (out.parent / "NOTES.md").exists() else ""
    opening = OPENING.format(folder=folder, out=out) + notes
    return "\n".join([opening, *parts, *([_speed(benches)] if benches else []), _machines(results)])


def holds_results(folder: str | Path) -> bool:
    """Whether a folder holds result files."""
    return any(f'"format": "{FORMAT}"' in path.read_text(errors="replace")[:200] for path in _files(Path(folder)))


def _files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.glob("*.json")) if path.is_file()]


def _check(path: Path, result: dict[str, Any]) -> None:
    """Refuse a file that was damaged after it was exported, by its name."""
    try:
        _ = _run(result), _others(result), _machines([result])
        _ = [text(result[key]) for key in ("system", "task", "name", "command")]
    except BROKEN as error:
        why = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise UsageError(f"{path} is no whole result ({why}): export its run again") from error


def _speed(benches: Sequence[dict[str, Any]]) -> str:
    """Figures of `replaylab bench`, by machine. A case's first figure is for the shapes at which its original was timed
    on an H200: there, the original's figure is shown beside it."""
    parts = ["## Speed"]
    machines = [tuple(bench["machine"][key] for key in ("device", "cores", "torch")) for bench in benches]
    for machine in dict.fromkeys(machines):
        device, cores, torch = machine
        rows = [r for bench, m in zip(benches, machines, strict=True) if m == machine for r in bench["rows"]]
        originals, cells = dict(ORIGINALS) if "H200" in device else {}, []
        for row in rows:
            whose, figure = originals.pop(row["case"], ("", 0.0)) if row["unit"] == "ms" else ("", 0.0)
            beside = f"{figure:g} ms ({whose})" if whose else ""
            cells.append((f"`{row['case']}`", row["what"], f"{row['figure']:,.4g} {row['unit']}", beside))
        parts.append(f"### {f'{cores} cores' if device == 'cpu' else device}, torch {torch}")
        parts.append(_table(("case", "what", "figure", "the original there"), cells))
    return "\n\n".join(parts) + "\n"


def _section(task: str, results: Sequence[dict[str, Any]]) -> str:
    results = sorted(results, key=lambda r: (str(r["system"]), str(r["row"]), r["name"]))
    parts = [f"## {task}", _table(RUNS, map(_run, results))]
    parts += _published(task, {score["kind"] for r in results for score in r["scores"]})
    if others := [row for r in results for row in _others(r)]:
        parts.append(_folded(f"{count(len(others), 'further evaluation')} of these policies", _table(OTHERS, others)))
    if remarks := [f"- {r['name']}: {r['note']}" for r in results if r.get("note")]:
        parts.insert(2, "\n".join(remarks))
    commands = {r["name"]: str(r["command"] or "-") for r in results}
    if told := {k: v for k, v in commands.items() if not v.startswith("-")}:  # `python -` and `python -c` leave none
        parts.append(_folded("Commands", *(f"{name}\n```\n{command}\n```" for name, command in told.items())))
    return "\n\n".join(parts) + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join([f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(r)} |" for r in rows)])


def _folded(title: str, *parts: str) -> str:
    return "\n\n".join([f"<details><summary>{title}</summary>", *parts, "</details>"])


def _published(task: str, kinds: set[str]) -> list[str]:
    """A table of other people's scores, and their protocols, one for each source."""
    found = [(p, told_as(p, task, *kinds)) for p in published([task])] if len(kinds) == 1 else []
    rows, protocols = [], []
    for p, known in found:
        if known:
            rows.append((p.name, number(known[0]) if known[1] is None else f"{known[0]:.4g} ± {known[1]:.4g}"))
            protocols.append(f"- {p.source}: {protocol(p, kinds)}")
    return [_table(("published", "score"), rows), "\n".join(dict.fromkeys(protocols))] if rows else []


def _ordered(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The evaluations of a run, its own first; of several target returns the highest."""
    return sorted(result["scores"], key=lambda s: -float(s["settings"].get("target", 0)))


def _settings(result: dict[str, Any]) -> str:
    preset = [f"preset {result['preset']}"] if result.get("preset") else []
    shown = {k: v for k, v in result["settings"].items() if k not in ("final_episodes", "eval_every")}
    return ", ".join(preset + [f"`{k} {_plain(v)}`" for k, v in shown.items()])


def _cost(result: dict[str, Any]) -> list[str]:
    machine = result.get("machine") or {}
    where = f"{machine.get('cores', '?')} cores" if machine.get("device") == "cpu" else str(machine.get("device", "?"))
    return [duration(result["seconds"]), where, str(result.get("date") or ""), result["file"]]


def _run(result: dict[str, Any]) -> list[str]:
    """A run's row, with its own evaluation."""
    cut = "" if result["status"] == "finished" else f" ({result['status']})"
    if not result["scores"]:
        return [result["row"], _settings(result), f"not evaluated{cut}", "", "", "", *_cost(result)]
    score = _ordered(result)[0]
    cut = cut and f" (step {min(line['step'] for line in score['last']):,}, {result['status']})"
    name = ", ".join([result["row"], *([settings_text(score["settings"])] if score["settings"] else [])])
    last, *more = _score(score)
    return [name, _settings(result), last + cut, *more, *_cost(result)]


def _others(result: dict[str, Any]) -> list[list[str]]:
    return [[result["name"], settings_text(score["settings"]), *_score(score)] for score in _ordered(result)[1:]]


def _score(score: dict[str, Any]) -> list[str]:
    last, best = ([line["mean"] for line in score[which]] for which in ("last", "best"))
    low, high = stats.bootstrap_interval([[v] for v in last])
    game = f" (game score {np.mean([line['return'] for line in score['last']]):.4g})" if _plays_atari(score) else ""
    return [
        f"**{_mean(last)}**" + ("" if score["kind"] == "normalised" else " (return)") + game,
        _mean(best),
        f"{float(stats.iqm(last)):.1f}" + ("" if np.isnan(low) else f" [{low:.1f}, {high:.1f}]"),
        f"{len(last)} x {span([line['episodes'] for line in score['last']], 'episode').split(' episode')[0]}",
    ]


def _plays_atari(score: dict[str, Any]) -> bool:
    """Whether to show the game's own score too, as papers on Atari do."""
    return score["kind"] == "normalised" and str(score["env"]).startswith("atari")


def _mean(values: Sequence[float]) -> str:
    mean, error = stats.mean_and_error(values)
    return plus_minus(mean, None if np.isnan(error) else error)


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)


def _machines(results: Sequence[dict[str, Any]]) -> str:
    """Hardware and dates, each once."""
    keys = ("device", "cpu", "cores", "memory_gib", "python", "torch", "gymnasium", "mujoco", "ale_py")
    lines = dict.fromkeys(
        ", ".join(f"{k} {machine[k]}" for k in keys if k in machine)
        for machine in (r.get("machine") or {} for r in results)
    )
    dates = sorted({r["date"] for r in results if r.get("date")})
    ends = f"{dates[0]} to {dates[-1]}" if len(dates) > 1 else "".join(dates)
    return "\n".join(["## Machines", "", *(f"- {line}" for line in lines if line), "", f"Run on {ends}."]) + "\n"
