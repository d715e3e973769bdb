"""Evidence: a run folder -> a small JSON file that can be committed -> benchmarks/RESULTS.md.

    replaylab report runs/* --export benchmarks/results
    replaylab report benchmarks/results --out benchmarks/RESULTS.md

{"format": "replaylab-result-1", "name": "bc-hopper-medium", "system": "bc", "row": "bc", "task": "hopper-medium",
 "env": "d4rl/hopper", "preset": null, "settings": {...}, "seeds": [0, 1], "steps": 20000, "parameters": 70403,
 "data": {"paths": [...], "steps": 299470, "episodes": 663}, "command": "...", "machine": {...},
 "date": "2026-11-15", "seconds": 151.2, "status": "finished", "note": "",
 "scores": [{"settings": {}, "kind": "normalised", "last": [{"seed": 0, "step": 20000, "episodes": 100,
   "mean": 57.0, "std": 11.2, "min": 40.1, "max": 99.8, "return": 1833.2}], "best": [...]}]}
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from replaylab import stats
from replaylab.algos import system
from replaylab.compare.gather import NOT_A_SETTING, names_of, read_sweep
from replaylab.compare.tables import protocol, told_as
from replaylab.config import default_of
from replaylab.errors import DataError, UsageError
from replaylab.page import check_suffix, count, duration, number, plus_minus, span, write_page
from replaylab.published import ORIGINALS, published
from replaylab.results import BROKEN, UNREADABLE, Evaluations, Run, dictionary, read_runs, text
from replaylab.trainer import Options

FORMAT = "replaylab-result-1"
OPENING = """# Results

Made by `replaylab report {folder} --out {out}` from the files in `{folder}/`;
nothing here was typed by hand. Scores are those of the last checkpoint, the best one stands beside it for comparison:
normalised (0 random, 100 expert, in Atari a human), mean ± standard error over seeds. Published rows are other
people's numbers under their own protocols, on D4RL's data: beside `X-medium+X-expert`, our mix, stand those for
`X-medium-expert`.
"""
NOTES = "What data this is, learning curves of collecting, and what was tried besides: [NOTES.md](NOTES.md).\n"
HEAD = (
    "system", "settings", "score, last checkpoint", "best checkpoint", "IQM [95 %]", "seeds x episodes", "time",
    "machine", "date", "file",
)  # fmt: skip


def export(runs: str | Path | Iterable[str | Path], out: str | Path, *, note: str = "") -> list[Path]:
    """Write the results of each run (from run folders, or folders of them) to a file and return the files' paths.

    out: a folder, in which each run gets NAME.json, or for one run a .json file.
    """
    found = read_runs(runs)
    out = Path(out)
    if out.suffix == ".json" and len(found) > 1:
        raise UsageError(f"{out} is one file for {count(len(found), 'run')}: name a folder")
    results: dict[Path, dict[str, Any]] = {}
    for run in found:
        if run.info.get("status") == UNREADABLE:
            raise DataError(run.notes[0])
        path = out if out.suffix == ".json" else out / f"{run.path.resolve().name}.json"
        if path in results:
            raise UsageError(f"two of the runs would be {path}: export them to folders of their own")
        results[path] = _result(run, note)
        if path.exists():
            _check_replaced(path, results[path])
    return [write_page(path, json.dumps(result, indent=1) + "\n") for path, result in results.items()]


def _check_replaced(path: Path, result: dict[str, Any]) -> None:
    """Refuse to write over anything but an earlier result of the same training, perhaps a shorter one."""
    try:
        there = dictionary(json.loads(path.read_text()))
    except ValueError:
        there = {}
    was, now = _identity(there), _identity(json.loads(json.dumps(result)))
    changed = [key for key in now if was[key] != now[key]]
    if changed:
        what = f"the result of a run with another {changed[0]}" if there.get("format") == FORMAT else "something else"
        raise UsageError(f"{path} holds {what}: remove it, or export to another place")


def _identity(result: dict[str, Any]) -> dict[str, Any]:
    settings = dictionary(result.get("settings")) | {"steps": None}
    return {k: result.get(k) for k in ("format", "system", "task", "preset", "seeds")} | {"settings": settings}


def _result(found: Run, note: str) -> dict[str, Any]:
    config, info = found.config, found.info
    row, task, _ = names_of([found], read_sweep(found.path.parent)[0])[found.path]
    summary = dictionary(info.get("data"))
    return {
        "format": FORMAT,
        "name": found.path.resolve().name,
        "system": config.get("system"),
        "row": row,
        "task": task,
        "env": config.get("env"),
        "preset": config.get("preset"),
        "settings": _changed(config),
        "seeds": config.get("seeds"),
        "steps": config.get("steps"),
        "parameters": info.get("parameters"),
        "data": {"paths": config.get("data")} | {k: summary[k] for k in ("steps", "rows", "episodes") if k in summary},
        "command": info.get("command"),
        "machine": info.get("machine"),
        "date": str(info.get("finished") or info.get("started") or "")[:10],
        "seconds": info.get("seconds"),
        "status": info.get("status") or "unknown",
        "note": "; ".join([*([note] if note else []), *found.doubts]),
        "scores": [{"env": group.env, "settings": group.settings, **_score(group)} for group in found.evaluations],
    }


def _changed(config: dict[str, Any]) -> dict[str, Any]:
    """Settings that are neither the system's defaults nor the preset's."""
    module = system(str(config.get("system")))
    known = {f.name: default_of(f) for cls in (Options, module.Config) for f in fields(cls)}
    known |= module.PRESETS.get(str(config.get("preset")), {})
    return {k: v for k, v in config.items() if k in known and v != known[k] and k not in NOT_A_SETTING | {"preset"}}


def _score(group: Evaluations) -> dict[str, Any]:
    key = "normalized" if group.normalized else "returns"

    def about(seed: Any, step: int) -> dict[str, Any]:
        line = group.lines[step][seed]
        scores = np.asarray(line[key], np.float64)
        numbers = {"mean": scores.mean(), "std": scores.std(), "min": scores.min(), "max": scores.max()}
        numbers |= {"return": np.mean(line["returns"])}
        rounded = {k: round(float(v), 4) for k, v in numbers.items()}
        return {"seed": json.loads(seed), "step": step, "episodes": len(scores), **rounded}

    last = [about(seed, step) for seed, (step, _) in group.last().items()]
    steps = {seed: [s for s in group.lines if seed in group.lines[s]] for seed in group.seeds}
    top = {seed: max(at, key=lambda s: float(np.mean(group.lines[s][seed][key]))) for seed, at in steps.items()}
    kind = "normalised" if group.normalized else "return"
    return {"kind": kind, "last": last, "best": [about(seed, step) for seed, step in top.items()]}


# --- results as Markdown


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
            results.append(found | {"file": f"[{path.name}]({Path(inside, path.name)})"})
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
        _lines(result)
        _machines([result])
        _ = [text(result[key]) for key in ("system", "task", "name", "command")]
    except BROKEN as error:
        why = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise UsageError(f"{path} is no whole result ({why}): export its run again") from error


def _speed(benches: Sequence[dict[str, Any]]) -> str:
    """Figures of `replaylab bench`, by machine. A case's first figure is for the shapes at which its original was timed
    on an H200: there, the original's figure is shown beside it."""
    lines = ["## Speed", ""]
    machines = [tuple(bench["machine"][key] for key in ("device", "cores", "torch")) for bench in benches]
    for machine in dict.fromkeys(machines):
        device, cores, torch = machine
        rows = [r for bench, m in zip(benches, machines, strict=True) if m == machine for r in bench["rows"]]
        lines += [f"### {f'{cores} cores' if device == 'cpu' else device}, torch {torch}", ""]
        lines += ["| case | what | figure | the original there |", "|---|---|---|---|"]
        originals = dict(ORIGINALS) if "H200" in device else {}
        for row in rows:
            whose, figure = originals.pop(row["case"], ("", 0.0)) if row["unit"] == "ms" else ("", 0.0)
            beside = f"{figure:g} ms ({whose})" if whose else ""
            lines.append(f"| `{row['case']}` | {row['what']} | {row['figure']:,.4g} {row['unit']} | {beside} |")
        lines.append("")
    return "\n".join(lines)


def _section(task: str, results: Sequence[dict[str, Any]]) -> str:
    lines = [
        f"## {task}",
        "",
        f"| {' | '.join(HEAD)} |",
        f"|{'---|' * len(HEAD)}",
    ]
    for result in sorted(results, key=lambda r: (str(r["system"]), str(r["row"]), r["name"])):
        lines += _lines(result)
    kinds = {score["kind"] for r in results for score in r["scores"]}
    for p in published([task]):
        known = told_as(p, task, *kinds) if len(kinds) == 1 else None
        if known:
            mean, spread = known
            shown = number(mean) if spread is None else f"{mean:.4g} ± {spread:.4g}"
            cells = [f"*published:* {p.name}", protocol(p, kinds), shown, *[""] * (len(HEAD) - 3)]
            lines.append(f"| {' | '.join(cells)} |")
    commands = dict.fromkeys(str(r["command"]) for r in results if not str(r["command"] or "-").startswith("-"))
    lines += ["", *(["```", *commands, "```"] if commands else [])]  # `python -` and `python -c` leave no command
    lines += [f"- {r['name']}: {r['note']}" for r in results if r.get("note")]
    return "\n".join(lines) + "\n"


def _lines(result: dict[str, Any]) -> list[str]:
    by_target = sorted(result["scores"], key=lambda score: -float(score["settings"].get("target", 0)))
    return [_row(result, score) for score in by_target] or [_unscored(result)]


def _settings(result: dict[str, Any]) -> str:
    preset = [f"preset {result['preset']}"] if result.get("preset") else []
    shown = {k: v for k, v in result["settings"].items() if k not in ("final_episodes", "eval_every")}
    return ", ".join(preset + [f"`{k} {_plain(v)}`" for k, v in shown.items()])


def _cost(result: dict[str, Any]) -> list[str]:
    machine = result.get("machine") or {}
    where = f"{machine.get('cores', '?')} cores" if machine.get("device") == "cpu" else str(machine.get("device", "?"))
    return [duration(result["seconds"]), where, str(result.get("date") or ""), result["file"]]


def _unscored(result: dict[str, Any]) -> str:
    cut = "" if result["status"] == "finished" else f" ({result['status']})"
    cells = [result["row"], _settings(result), f"not evaluated{cut}", "", "", "", *_cost(result)]
    return f"| {' | '.join(cells)} |"


def _row(result: dict[str, Any], score: dict[str, Any]) -> str:
    last, best = ([line["mean"] for line in score[which]] for which in ("last", "best"))
    low, high = stats.bootstrap_interval([[v] for v in last]) if len(last) > 1 else (np.nan, np.nan)
    reached = min(line["step"] for line in score["last"])
    cut = "" if result["status"] == "finished" else f" (step {reached:,}, {result['status']})"
    game = f" (game score {np.mean([line['return'] for line in score['last']]):.4g})" if _plays_atari(score) else ""
    cells = [
        ", ".join([result["row"], *(f"{k} {_plain(v)}" for k, v in score["settings"].items())]),
        _settings(result),
        f"**{_mean(last)}**" + ("" if score["kind"] == "normalised" else " (return)") + game + cut,
        _mean(best),
        f"{float(stats.iqm(last)):.1f}" + ("" if np.isnan(low) else f" [{low:.1f}, {high:.1f}]"),
        f"{len(last)} x {span([line['episodes'] for line in score['last']], 'episode').split(' episode')[0]}",
        *_cost(result),
    ]
    return f"| {' | '.join(cells)} |"


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
