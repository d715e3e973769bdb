"""Run folders -> rows (systems) x tasks (datasets): the last score of every seed, and separately its best."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from replaylab import stats
from replaylab.errors import UsageError
from replaylab.published import canonical, dataset_name
from replaylab.results import UNREADABLE, Evaluations, Run, dictionary, differences, finite, read_runs, text
from replaylab.run import RunFolder
from replaylab.sweep.plan import Cell
from replaylab.sweep.queue import Queue

# settings that do not make two runs different systems
NOT_A_SETTING = {
    "data",
    "data_options",
    "env",
    "seeds",
    "device",
    "compile",
    "track",
    "checkpoint_minutes",
    "log_every",
}

Point = tuple[int, list[float]]  # step, and the score of each episode
Name = tuple[str, str, str]  # row, task, system


@dataclass
class Entry:
    """One system under one setting on one task."""

    row: str
    system: str
    task: str
    env: str
    normalized: bool
    last: dict[Any, Point] = field(default_factory=dict)  # by seed
    best: dict[Any, Point] = field(default_factory=dict)  # each seed's best evaluation: optimistic by construction
    curves: dict[Any, dict[int, list[float]]] = field(default_factory=dict)  # [seed][step]
    runs: list[Run] = field(default_factory=list)
    status: str = "finished"  # or the states of the runs that are not

    @property
    def kind(self) -> str:
        return "normalised" if self.normalized else "return"

    def summary(self, which: str = "last") -> dict[str, Any]:
        return stats.summarize_scores([scores for _, scores in getattr(self, which).values()])

    def step(self, which: str = "last") -> int:
        """The step of the evaluations, for the seed that is furthest behind."""
        return min(step for step, _ in getattr(self, which).values())

    def seed_means(self) -> list[float]:
        return [float(np.mean(scores)) for _, scores in self.last.values()]


@dataclass
class Unscored:
    """One system under one setting on one dataset that has no evaluation."""

    status: str
    runs: list[Run]  # the readable ones


@dataclass
class Comparison:
    name: str
    entries: list[Entry]
    runs: list[Run]
    unfinished: dict[str, str] = field(default_factory=dict)  # cell -> why
    unscored: dict[Name, Unscored] = field(default_factory=dict)
    names: list[Name] = field(default_factory=list)  # scored or not, in the sweep's order

    @property
    def rows(self) -> list[str]:
        rows = list(dict.fromkeys(e.row for e in self.entries))
        missing = dict.fromkeys(row for row, _, _ in self.unscored)
        rows += [row for row in missing if not any(_of(shown, row) for shown in rows)]
        return _ordered(rows, [row for row, _, _ in self.names], _of)

    @property
    def tasks(self) -> list[str]:
        tasks = list(dict.fromkeys(e.task for e in self.entries))
        missing = dict.fromkeys(task for _, task, _ in self.unscored)
        tasks += [task for task in missing if not any(_in(shown, task) for shown in tasks)]
        return _ordered(tasks, [task for _, task, _ in self.names], _in)

    @property
    def doubts(self) -> list[str]:
        """Reasons to doubt the scores."""
        lines = [f"{name}: {why}" for name, why in self.unfinished.items()]
        return list(dict.fromkeys(lines + [f"{run.name}: {line}" for run in self.runs for line in run.doubts]))

    def at(self, row: str, task: str) -> Entry | None:
        return next((e for e in self.entries if e.row == row and e.task == task), None)

    def instead(self, row: str, task: str) -> str:
        """What to show where a score is missing: the status of its runs."""
        found = [u.status for (r, t, _), u in self.unscored.items() if _in(task, t) and _of(row, r)]
        return found[0] if found else "–"

    def complete(self) -> tuple[list[str], list[str], list[str]]:
        """(rows, tasks, rows left out) for aggregates: only normalised scores, only rows that have every task. If no
        row has them all, the tasks are those of the row that makes rows x tasks largest."""
        kinds = {t: [e.normalized for e in self.entries if e.task == t] for t in self.tasks}
        tasks = [t for t, normalized in kinds.items() if normalized and all(normalized)]

        def with_all(wanted: list[str]) -> list[str]:
            return [row for row in self.rows if wanted and all(self.at(row, task) for task in wanted)]

        if not with_all(tasks):
            own = [[t for t in tasks if self.at(row, t)] for row in self.rows]
            tasks = max(own, key=lambda wanted: len(with_all(wanted)) * len(wanted), default=[])
        rows = with_all(tasks)
        return rows, tasks, [row for row in self.rows if row not in rows]


def _of(shown: str, row: str) -> bool:
    """Whether a row is shown under this name: its own, with or without a label."""
    return shown == row or shown.startswith(f"{row}, ")


def _in(shown: str, task: str) -> bool:
    """Whether a dataset is shown under this name: its own, with or without an environment."""
    return shown == task or shown.startswith(f"{task} in ")


def _ordered(shown: Iterable[str], names: Sequence[str], same: Callable[[str, str], bool]) -> list[str]:
    """In the sweep's order, not in that in which runs happened to end."""
    return sorted(shown, key=lambda s: next((i for i, name in enumerate(names) if same(s, name)), len(names)))


def gather(runs: str | Path | Iterable[str | Path]) -> Comparison:
    """Read a sweep's folder, or run folders."""
    paths = [Path(runs)] if isinstance(runs, (str, Path)) else [Path(p) for p in runs]
    cells, states, why = read_sweep(paths[0]) if len(paths) == 1 else ({}, {}, {})
    begun = not cells or any(RunFolder(folder).exists() for folder in paths[0].iterdir())
    found = read_runs(paths) if begun else []
    for run in found if cells else []:
        if run.path.name not in cells:
            run.notes.append("in the sweep's folder, but not in its file")
    broken = [run for run in found if run.info.get("status") == UNREADABLE]
    states |= {run.path.name: UNREADABLE for run in broken}
    why |= {run.name: run.notes[0] for run in broken}
    names = names_of(found, cells)
    status = _status(found, names, cells, states)
    played: dict[str, set[str]] = {}  # dataset -> environments
    for run in found:
        played.setdefault(names[run.path][1], set()).update(_game(group.env) for group in run.evaluations)
    parts: dict[tuple[str, str], list[tuple[Run, Evaluations]]] = {}
    for run in found:
        row, task, _ = names[run.path]
        for group, label in zip(run.evaluations, labels(run.evaluations), strict=True):
            where = task if len(played[task]) == 1 else f"{task} in {_game(group.env)}"
            key = (f"{row}, {label}" if label else row, where)
            parts.setdefault(key, []).append((run, group))
    entries = [_entry(*key, part, names[part[0][0].path], status) for key, part in parts.items()]
    scored = {names[run.path] for run in found if run.evaluations}
    unscored = {
        name: Unscored(known, [run for run in found if names[run.path] == name and run not in broken])
        for name, known in status.items()
        if name not in scored
    }
    title = paths[0].resolve().name if len(paths) == 1 else "runs"
    return Comparison(title, entries, found, why, unscored, list(status))


def read_sweep(folder: Path) -> tuple[dict[str, Cell], dict[str, str], dict[str, str]]:
    """(cells by name, the state of each, why some are not finished); empty where `folder` holds no sweep."""
    queue = Queue(folder)
    if not (folder / "sweep.json").exists():
        return {}, {}, {}
    try:
        cells = queue.plan().cells
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{folder / 'sweep.json'} is not readable: {error}") from error
    states = {cell.name: queue.state(cell) for cell in cells}
    why = {c.name: queue.error(c) if states[c.name] == "failed" else states[c.name] for c in cells}
    why = {name: reason for name, reason in why.items() if states[name] != "finished"}
    return {cell.name: cell for cell in cells}, states, why


def name_of(cell: Cell) -> Name:
    task = cell.dataset if cell.data else canonical(cell.env or cell.dataset)
    return f"{cell.label} {cell.setting}".strip(), task, cell.system


def names_of(runs: Sequence[Run], cells: dict[str, Cell]) -> dict[Path, Name]:
    """The name of each run: as in the sweep, else from the settings that differ between the runs."""
    tasks = tasks_of([run for run in runs if run.path.name not in cells])
    systems = {run.path: text(run.config.get("system") or "unknown") for run in runs}
    settings: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        own = {k: v for k, v in run.config.items() if k not in NOT_A_SETTING}
        settings.setdefault(systems[run.path], []).append(own)
    differing = {system: differences(configs)[1] for system, configs in settings.items()}

    def name(run: Run) -> Name:
        if cell := cells.get(run.path.name):
            return name_of(cell)
        system = systems[run.path]
        label = ", ".join(f"{k} {text(run.config.get(k))}" for k in differing[system])
        return f"{system} ({label})" if label else system, tasks[run.path], system

    return {run.path: name(run) for run in runs}


def tasks_of(runs: Sequence[Run]) -> dict[Path, str]:
    """The dataset of each run, else its environment: by its canonical name. Where that would put different data under
    one name, by the dataset's own, else by its paths, else with a number."""
    found = {run.path: task_of(run) for run in runs}
    for name in (dataset_name, str):
        found |= {run.path: "+".join(map(name, _paths(run))) for run, _ in _mixed(runs, found) if _paths(run)}
    return found | {run.path: f"{found[run.path]} #{number}" for run, number in _mixed(runs, found)}


def _mixed(runs: Sequence[Run], tasks: dict[Path, str]) -> list[tuple[Run, int]]:
    """The runs whose task has the name of one with other data too, and which of its data each has, from 1."""
    kinds: dict[str, dict[Any, int]] = {}
    for run in runs:
        known = kinds.setdefault(tasks[run.path], {})
        known.setdefault(_contents(run), len(known) + 1)
    return [(run, kinds[tasks[run.path]][_contents(run)]) for run in runs if len(kinds[tasks[run.path]]) > 1]


def task_of(run: Run) -> str:
    env = text(run.config.get("env") or "unknown")
    return "+".join(canonical(dataset_name(p)) for p in _paths(run)) or canonical(_game(env))


def _paths(run: Run) -> list[str]:
    data = run.config.get("data")
    return [text(p) for p in (data if isinstance(data, list) else [data] if data else [])]


def _contents(run: Run) -> tuple[Any, ...]:
    """Equal for runs on the same data, wherever it lies: rows, episodes and mean return (sums differ a little between
    machines). The name of the data where they are not known."""
    summary = dictionary(run.info.get("data")) if _paths(run) else {}
    mean = finite(dictionary(summary.get("return")).get("mean"))
    if mean is None:
        return tuple(map(dataset_name, _paths(run)))
    return summary.get("steps"), summary.get("episodes"), f"{mean:.4g}"


def _game(env: str) -> str:
    return env.replace("atari-rgb/", "atari/")  # the same game, in colour


def labels(groups: Sequence[Evaluations]) -> list[str]:
    """What distinguishes a run's evaluations. Targets are named by rank: rows must not differ from task to task."""
    targets = sorted({t for g in groups if (t := finite(g.settings.get("target"))) is not None}, reverse=True)
    ranks = {t: ("highest target", "second target", "third target")[i] for i, t in enumerate(targets[:3])}
    found = []
    for group in groups:
        rest = {k: v for k, v in group.settings.items() if k != "target"}
        target = finite(group.settings.get("target"))
        rank = [ranks.get(target, f"target {target:g}")] if target is not None and len(targets) > 1 else []
        found.append(", ".join(rank + [f"{k} {json.dumps(v)}" for k, v in rest.items()]))
    return found


def _status(
    runs: Sequence[Run], names: dict[Path, Name], cells: dict[str, Cell], states: dict[str, str]
) -> dict[Name, str]:
    """`finished`, or the states of the runs that are not, including cells that have not begun."""
    found: dict[Name, list[str]] = {}
    for cell in cells.values():
        found.setdefault(name_of(cell), []).append(states[cell.name])
    for run in runs:
        if run.path.name not in cells:
            found.setdefault(names[run.path], []).append(text(run.info.get("status") or "unknown"))
    return {
        name: ", ".join(dict.fromkeys(s for s in known if s != "finished")) or "finished"
        for name, known in found.items()
    }


def _entry(row: str, task: str, parts: Sequence[tuple[Run, Evaluations]], name: Name, status: dict[Name, str]) -> Entry:
    """All seeds of one system under one setting on one task, which may be spread over several runs."""
    normalized = all(group.normalized for _, group in parts)  # else returns: the two must not be mixed
    key = "normalized" if normalized else "returns"
    entry = Entry(row, name[2], task, parts[0][1].env, normalized, status=status[name])
    for run, group in parts:
        if again := [seed for seed in group.seeds if seed in entry.curves]:
            others = [str(r.path) for r, theirs in parts if r in entry.runs and not {*again}.isdisjoint(theirs.seeds)]
            told = f"seed {', '.join(again)} is in {', '.join(others)} too"
            run.notes.append(f"{told}: where both have a step, this run's counts")
        for seed in group.seeds:
            steps = {step: line[seed][key] for step, line in sorted(group.lines.items()) if seed in line}
            entry.curves.setdefault(seed, {}).update(steps)
        entry.runs.append(run)
    for seed, by_step in entry.curves.items():
        last = max(by_step)
        best = max(by_step, key=lambda step: float(np.mean(by_step[step])))
        entry.last[seed], entry.best[seed] = (last, by_step[last]), (best, by_step[best])
    return entry


def hours(run: Run) -> tuple[float | None, bool]:
    """(hours the run took, whether on a GPU)."""
    seconds, machine = finite(run.info.get("seconds")), run.info.get("machine")
    device = machine.get("device") if isinstance(machine, dict) else None
    return (None if seconds is None else seconds / 3600), device not in (None, "cpu")
