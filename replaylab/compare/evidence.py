"""Evidence: a run folder -> a small JSON file that can be committed -> benchmarks/RESULTS.md (evidence_text.py).

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
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from replaylab.algos import system
from replaylab.compare.gather import NOT_A_SETTING, names_of, read_sweep
from replaylab.config import default_of
from replaylab.errors import DataError, UsageError
from replaylab.page import count, write_page
from replaylab.results import UNREADABLE, Evaluations, Run, dictionary, read_runs
from replaylab.sweep.plan import Cell
from replaylab.trainer import Options

FORMAT = "replaylab-result-1"


def export(runs: str | Path | Iterable[str | Path], out: str | Path, *, note: str = "") -> list[Path]:
    """Write the results of each run (from run folders, or folders of them) to a file and return the files' paths.

    out: a folder, in which each run gets NAME.json, or for one run a .json file.
    """
    found = read_runs(runs)
    out, cells = Path(out), {folder: read_sweep(folder)[0] for folder in {run.path.parent for run in found}}
    if out.suffix == ".json" and len(found) > 1:
        raise UsageError(f"{out} is one file for {count(len(found), 'run')}: name a folder")
    results: dict[Path, dict[str, Any]] = {}
    for run in found:
        if run.info.get("status") == UNREADABLE:
            raise DataError(run.notes[0])
        path = out if out.suffix == ".json" else out / f"{run.path.resolve().name}.json"
        if path in results:
            raise UsageError(f"two of the runs would be {path}: export them to folders of their own")
        results[path] = _result(run, cells[run.path.parent], note)
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


def _result(found: Run, cells: dict[str, Cell], note: str) -> dict[str, Any]:
    config, info = found.config, found.info
    row, task, _ = names_of([found], cells)[found.path]
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
        "data": {"paths": config.get("data")} | {k: summary[k] for k in ("steps", "episodes") if k in summary},
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
