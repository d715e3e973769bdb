"""Read run folders: what was trained, how it scored, and the headline table as data.

Runs may be unfinished, killed or resumed, and their files may hold anything: what cannot be read as expected is left
out. The score of a run is its last evaluation, never its best.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from replaylab import stats
from replaylab.errors import ReplaylabError, UsageError
from replaylab.evaluate import MAX_STEPS
from replaylab.page import count
from replaylab.run import RunFolder

BROKEN = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)  # a file may hold anything
UNREADABLE = "unreadable"  # the status of a run whose config.yaml or run.json cannot be read


@dataclass
class Evaluations:
    """The scores of one run in one environment with one choice of settings: lines[step][seed]."""

    env: str
    settings: dict[str, Any]
    lines: dict[int, dict[Any, dict[str, Any]]] = field(default_factory=dict)
    label: str = ""  # the settings that distinguish it from the run's other evaluations

    @property
    def seeds(self) -> list[Any]:
        return list(dict.fromkeys(seed for by_seed in self.lines.values() for seed in by_seed))

    @property
    def normalized(self) -> bool:
        return all(line["normalized"] for by_seed in self.lines.values() for line in by_seed.values())

    def last(self) -> dict[Any, tuple[int, dict[str, Any]]]:
        """Each seed's last evaluation: seed -> (step, line)."""
        return {seed: (step, self.lines[step][seed]) for step in sorted(self.lines) for seed in self.lines[step]}

    def common_steps(self) -> list[int]:
        """Steps at which every seed was evaluated: elsewhere a mean would jump as seeds come and go."""
        return [step for step in sorted(self.lines) if len(self.lines[step]) == len(self.seeds)]


@dataclass
class Run:
    path: Path
    name: str
    config: dict[str, Any]
    info: dict[str, Any]
    metrics: list[dict[str, Any]]
    evaluations: list[Evaluations]
    notes: list[str] = field(default_factory=list)

    @property
    def doubts(self) -> list[str]:
        """The notes that cast doubt on the scores: all except those that training wrote to run.json."""
        said = self.info.get("notes")
        return [note for note in self.notes if not isinstance(said, list) or note not in map(text, said)]

    @property
    def step(self) -> int | None:
        """The last logged step, over all phases."""
        return max((int(line["step"]) for line in self.metrics), default=None)


def read_runs(paths: str | Path | Iterable[str | Path]) -> list[Run]:
    """Read each run once, however often it is named. If one of several is unreadable, it is kept with a note. What is
    no run is left out of several, with a note: `runs/*` may name a report too."""
    folders: dict[Path, RunFolder] = {}
    given = [RunFolder(path).path for path in ([paths] if isinstance(paths, str | Path) else paths)]
    for path in given:
        try:
            found = _folders(path)
        except UsageError as error:
            if len(given) == 1 or not path.exists():
                raise
            print(f"note: left out: {error}", file=sys.stderr)
            continue
        folders |= {folder.path.resolve(): folder for folder in found if folder.path.resolve() not in folders}
    if not folders:
        raise UsageError("none of these is a run folder" if given else "no run folders given")
    last = [path.name for path in folders]
    runs = []
    for path, folder in folders.items():
        name = path.name if last.count(path.name) == 1 else str(folder.path)
        try:
            runs.append(_read_run(folder, name))
        except ReplaylabError as error:
            if len(folders) == 1:
                raise
            runs.append(Run(folder.path, name, {}, {"status": UNREADABLE}, [], [], [str(error)]))
    return runs


def _read_run(folder: RunFolder, name: str) -> Run:
    config = folder.config()
    info = folder.info() if (folder.path / "run.json").exists() else {}
    metrics = [line for line in folder.lines("metrics.jsonl") if finite(dictionary(line).get("step")) is not None]
    run = Run(folder.path, name, config, info, metrics, [])
    if info.get("status") == "running":  # run.json gets the final status and time only when training ends
        times = [found for line in metrics if (found := finite(line.get("seconds"))) is not None]
        run.info = info | {"status": "killed" if folder.left() else "running", "seconds": max(times, default=None)}
    run.evaluations = _read_evaluations(folder.lines("eval.jsonl"), run)
    run.notes += _notes(run)
    return run


def _folders(path: Path) -> list[RunFolder]:
    """The run folders inside `path`, or `path` itself if it holds none."""
    inside = [RunFolder(p) for p in sorted(path.iterdir())] if path.is_dir() else []
    if (path / "sweep.json").exists() and not any(f.exists() for f in inside):
        raise UsageError(f"no cell of {path} has a run folder yet: see {path / 'status'}")
    return [f for f in inside if f.exists()] if any(f.exists() for f in inside) else [RunFolder(path).require()]


def dictionary(value: Any) -> dict[str, Any]:
    """The value if it is a dictionary, else an empty one."""
    return value if isinstance(value, dict) else {}


def finite(value: Any) -> float | None:
    """The value if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def or_nan(value: Any) -> float:
    """The value if it is a finite number, else NaN, which charts leave out."""
    found = finite(value)
    return math.nan if found is None else found


def _finites(values: Any) -> list[float]:
    found = [finite(v) for v in values] if isinstance(values, list) else []
    return [v for v in found if v is not None]


def _read_evaluations(lines: list[dict[str, Any]], run: Run) -> list[Evaluations]:
    found: dict[str, Evaluations] = {}
    empty = lost = cut = 0
    for line in lines:
        line = dictionary(line)
        step, returns = finite(line.get("step")), _finites(line.get("returns"))
        if step is None:
            continue
        if not returns:
            empty += 1
            continue
        lost += len(line["returns"]) - len(returns)  # of the evaluations that are kept
        cut += sum(length >= MAX_STEPS for length in _finites(line.get("lengths")))
        settings = dictionary(line.get("settings"))
        env, normalized = str(line.get("env")), _finites(line.get("normalized"))
        key = json.dumps([env, settings], sort_keys=True)
        group = found.setdefault(key, Evaluations(env, settings))
        seed = json.dumps(line.get("seed"))  # a key, whatever the file holds
        kept = group.lines.setdefault(int(step), {})
        # the line with most episodes counts; if several have as many, the last, as a resumed run may repeat a step
        if len(returns) >= len(kept.get(seed, {"returns": []})["returns"]):
            kept[seed] = {"returns": returns, "normalized": normalized if len(normalized) == len(returns) else []}
    if empty:
        run.notes.append(f"{count(empty, 'evaluation')} without a single finished episode")
    if lost:
        run.notes.append(f"{count(lost, 'return')} not finite and left out: scores are better than the policy")
    if cut:
        run.notes.append(f"{count(cut, 'episode')} cut off after {MAX_STEPS:,} steps and counted as they were")
    groups = list(found.values())
    differing = differences([g.settings for g in groups])[1]
    for group in groups:
        shown = {k: group.settings[k] for k in differing if k in group.settings}
        group.label = settings_text(shown)
    return groups


def _notes(run: Run) -> list[str]:
    said = run.info.get("notes")
    notes = [text(note) for note in said] if isinstance(said, list) else []
    status = run.info.get("status")
    if status != "finished":
        error = run.info.get("error") if status == "failed" else None
        why = f": {' '.join(text(error).split())}" if error else ""
        notes.append(f"not finished ({text(status or 'unknown')}{why}): this is what there is so far")
    wanted = run.config.get("seeds")
    for group in run.evaluations:
        where = f"{group.env} {group.label}".strip()
        if isinstance(wanted, list) and len(group.seeds) < len(wanted):
            notes.append(f"{where}: {len(group.seeds)} of {count(len(wanted), 'seed')} evaluated")
        steps = sorted({step for step, _ in group.last().values()})
        if len(steps) > 1:
            notes.append(f"{where}: seeds were last evaluated at different steps, {steps[0]:,} to {steps[-1]:,}")
    return notes


# --- the table


def summarize_runs(run_paths: str | Path | Iterable[str | Path]) -> list[dict[str, Any]]:
    """The headline table as plain JSON: one row per run, or per setting if a run was evaluated with several."""
    return [row for run in read_runs(run_paths) for row in rows_of(run)]


def rows_of(run: Run) -> list[dict[str, Any]]:
    data, seeds = run.config.get("data"), run.config.get("seeds")
    common = {
        "run": run.name,
        "path": str(run.path),
        "system": run.config.get("system"),
        "data": data if isinstance(data, list) else [data] if data else [],
        "steps": run.info.get("planned") or run.config.get("steps"),
        "parameters": run.info.get("parameters"),
        "seconds": finite(run.info.get("seconds")),
        "status": run.info.get("status"),
        "notes": run.notes,
    }
    if not run.evaluations:
        nothing: dict[str, Any] = {"env": run.config.get("env"), "settings": {}, "label": "", "step": run.step}
        nothing |= {"seeds": len(seeds) if isinstance(seeds, list) else None, "episodes": 0}
        return [common | nothing | {"return": None, "normalized": None}]
    return [common | _scored(group) for group in run.evaluations]


def _scored(group: Evaluations) -> dict[str, Any]:
    last = group.last()
    normalized = [line["normalized"] for _, line in last.values()]
    returns = stats.summarize_scores([line["returns"] for _, line in last.values()])
    return {
        "env": group.env,
        "settings": group.settings,
        "label": group.label,
        "step": max(step for step, _ in last.values()),
        "seeds": returns["seeds"],
        "episodes": returns["episodes"],
        "return": returns,
        "normalized": stats.summarize_scores(normalized) if all(normalized) else None,
    }


def why_unscored(envs: Iterable[Any]) -> str:
    """Says why runs with these environments have no scores."""
    known = list(envs)
    if any(known) or not known:
        return "No evaluation has finished yet."
    return "No environment was given: nothing was evaluated. `replaylab assess RUN` says what the log alone can tell."


def settings_text(settings: dict[str, Any]) -> str:
    """'target 3600, noise action_scale 0.1'."""
    flat = {f"{k} {name}": v for k, given in settings.items() if isinstance(given, dict) for name, v in given.items()}
    settings = {k: v for k, v in settings.items() if not isinstance(v, dict)} | flat
    return ", ".join(f"{k} {v:g}" if isinstance(v, float) else f"{k} {text(v)}" for k, v in settings.items())


def text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def differences(dicts: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """(entries that all dictionaries share, keys that differ)."""
    keys = list(dict.fromkeys(key for d in dicts for key in d))
    differing = [k for k in keys if len({json.dumps(d.get(k), sort_keys=True) + str(k in d) for d in dicts}) > 1]
    return {k: dicts[0][k] for k in keys if k not in differing}, differing
