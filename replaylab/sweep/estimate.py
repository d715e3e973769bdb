"""Estimates how long a sweep takes: before it starts, and corrected by finished cells while it runs."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from replaylab.algos import system
from replaylab.config import resolve
from replaylab.data.episodes import concatenate
from replaylab.data.read import SAMPLES, TOYS, detect, load
from replaylab.errors import ReplaylabError
from replaylab.page import count
from replaylab.progress import Progress, duration
from replaylab.run import RunFolder
from replaylab.sweep.plan import Cell
from replaylab.sweep.queue import Queue
from replaylab.trainer import Options

# Milliseconds per update at the default sizes on hopper's shapes (mbarc: on frames): for one seed on one core of an AMD
# EPYC, and for all seeds of a cell together on an H200 (benchmarks/results, benchmarks/NOTES.md; bcq and mbarc were
# timed beside other work). For gormpo and mopo: per policy update, including its share of the density and dynamics
# updates on hopper-medium.
UPDATE_MS: dict[str, dict[str, tuple[float, float]]] = {
    "bc": {"steps": (2.3, 0.19)},
    "dt": {"steps": (220.0, 1.9)},
    "mopo": {"steps": (28.0, 0.8)},
    "gormpo": {"steps": (31.0, 0.97)},
    "bcq": {"steps": (47.0, 2.7)},
    "diffusion-dice": {"returns_steps": (3.6, 0.15), "behavior_steps": (560.0, 4.4), "critic_steps": (190.0, 1.6)},
    "mbarc": {"world": (10_400.0, 7.2), "reward": (6_300.0, 2.4), "policy": (630_000.0, 196.0)},
}
SMALL = 2**24  # bytes that are read in a tenth of a second
EVALUATION = ("eval_every", "eval_episodes", "final_episodes")
# seconds of a whole run of the debug preset in benchmarks/smoke.yaml, evaluation included, on two cores
DEBUG_SECONDS = {
    "bc": 1.6, "dt": 0.6, "mopo": 2.7, "gormpo": 6.5, "bcq": 5.5, "diffusion-dice": 2.0, "mbarc": 7.3,
}  # fmt: skip


def configured(cell: Cell) -> tuple[dict[str, Any], dict[str, Any]]:
    """All settings of a cell, resolved: (those of training and evaluation, those of its system)."""
    module = system(cell.system)
    preset = module.PRESETS.get(cell.preset or "", {})
    options, config = resolve([Options, module.Config], [("preset", preset), ("settings", cell.settings)])
    return vars(options), vars(config)


def usual_preset(cell: Cell) -> str | None:
    """The cell's preset or, if it has none, the one that its system will choose for its data. A large file in another
    format than ours takes too long to read for an estimate: None, for the bare defaults."""
    module, parts = system(cell.system), []
    if cell.preset or not cell.data or not hasattr(module, "usual_preset"):
        return cell.preset
    with contextlib.suppress(ReplaylabError):
        for path in cell.data:
            known = Path(path) if Path(path).exists() else SAMPLES.get(path, Path(path))
            small = path in TOYS or (known.is_file() and known.stat().st_size < SMALL)
            if not small and detect(known) != "native":
                return None
            log = load(path, **cell.options)
            # one episode will do, a terminated one if there is any: joining single episodes copies little data
            parts.append(log.select([int(log.terminated[log.last_rows].argmax())]))
        log = concatenate(parts)
        env = cell.env or configured(cell)[0]["env"] or log.env_id
        return module.usual_preset(replace(log, meta=log.meta | {"env_id": env}))
    return None


def training_seconds(name: str, config: Mapping[str, Any], seeds: int, cuda: bool) -> float | None:
    """By UPDATE_MS, None if it has no entry. On a GPU all seeds take hardly longer than one; on a CPU they add up."""
    module, prices = system(name), UPDATE_MS.get(name, {})
    amounts = config
    if hasattr(module, "counters"):  # the number of updates is not itself a setting
        known = {f.name for f in fields(module.Config)}
        amounts = module.counters(module.Config(**{k: v for k, v in config.items() if k in known}))
    if not prices:
        return None
    spent = sum((amounts.get(kind) or 0) * price[cuda] for kind, price in prices.items())
    return spent / 1e3 * (1 if cuda else seeds)


def sizes(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings on which an update's time may depend, such as batch sizes and widths: whole numbers that count no
    updates."""
    return {k: v for k, v in config.items() if type(v) in (int, list) and k not in UPDATE_MS.get(name, {})}


def finished_before(folder: Path, results: Path, cuda: bool) -> list[dict[str, Any]]:
    """Configuration and seconds of the finished runs on the same kind of device: first those of exported result files
    (`report --export`), then those of this sweep and its neighbours."""
    found = []
    for path in sorted(results.glob("*.json")):
        with contextlib.suppress(ReplaylabError, AttributeError, TypeError, KeyError, ValueError):
            kept = json.loads(path.read_text())
            if kept["status"] == "finished" and (kept["machine"]["device"] != "cpu") == cuda:
                module = system(kept["system"])
                preset = module.PRESETS.get(kept["preset"] or "", {})
                resolved = resolve([Options, module.Config], [("preset", preset), ("file", kept["settings"])])
                about = {k: kept[k] for k in ("system", "preset", "seeds", "env")}
                about |= {"data": kept["data"]["paths"], "seconds": float(kept["seconds"])}
                found.append(vars(resolved[0]) | vars(resolved[1]) | about)
    for path in sorted(folder.parent.glob("*/*/run.json")):
        run = RunFolder(path.parent)
        with contextlib.suppress(ReplaylabError, AttributeError, TypeError, KeyError, ValueError):
            info = run.info()
            if info["status"] == "finished" and (info["machine"]["device"] != "cpu") == cuda:
                found.append(run.config() | {"seconds": float(info["seconds"])})
    return found


def estimate(cell: Cell, before: Sequence[dict[str, Any]], cuda: bool) -> tuple[float | None, str]:
    """(seconds or None, where they come from); None if the system was never timed."""
    cell = replace(cell, preset=usual_preset(cell))
    options, config = configured(cell)
    alike = [r for r in before if (r.get("system"), r.get("preset")) == (cell.system, cell.preset)]
    evaluations = {k: v for k, v in options.items() if k in EVALUATION}
    exact = [
        r
        for r in alike
        if (r.get("data"), len(r.get("seeds") or [])) == (cell.data or [], len(cell.seeds))
        and cell.env in (None, r.get("env"))
        and all(r.get(k) == v for k, v in (config | evaluations).items())
    ]
    if exact:
        return exact[-1]["seconds"], "the same run before"
    mine = training_seconds(cell.system, config, len(cell.seeds), cuda)
    alike_in_size = [r for r in alike if sizes(cell.system, config).items() <= r.items()]
    for runs, which in ((alike_in_size, "the same sizes"), (alike, "other sizes")):
        theirs = [(r["seconds"], training_seconds(cell.system, r, len(r.get("seeds") or [0]), cuda)) for r in runs]
        # not from much shorter runs: most of their time is startup and evaluation, which do not grow with updates
        scaled = sorted(seconds / n * mine for seconds, n in theirs if n and mine and n >= mine / 10)
        if scaled:
            return scaled[len(scaled) // 2], f"earlier runs of {cell.system} with {which}, scaled by updates"
    plain = training_seconds(cell.system, configured(replace(cell, settings={}))[1], len(cell.seeds), cuda)
    if cell.preset == "debug" and mine and plain:
        return DEBUG_SECONDS[cell.system] * mine / plain, "a debug run on two cores, scaled by updates"
    if mine is None:
        return None, f"{cell.system} was not timed yet"
    return mine, "updates at the default sizes, as measured; evaluation apart"


class Watch(Progress):
    """The progress line of a whole sweep."""

    def __init__(self, name: str, queue: Queue, cells: Sequence[Cell], seconds: dict[str, float | None], workers: int):
        super().__init__(name, len(cells), unit="cells")
        self.queue, self.cells, self.seconds, self.workers = queue, cells, seconds, workers
        self.told = {cell.name: self._ends(cell) for cell in cells}
        self.ended = {cell.name: "finished" for cell in cells if queue.finished(cell)}  # their files are not read again
        self.left: Sequence[Cell] = cells
        self.timed: list[tuple[Any, ...]] = []  # kinds of the cells that have ended

    def _ends(self, cell: Cell) -> int:
        return sum(e["event"] in ("finished", "failed") for e in self.queue.events(cell))

    def show(self, left: Sequence[Cell]) -> None:
        """Say which cells ended since the last call, and redraw the line."""
        self.left = left
        still = {cell.name for cell in left}
        for cell in self.cells:
            if cell.name in still or cell.name in self.ended or self._ends(cell) <= self.told[cell.name]:
                continue
            last = self.queue.last(cell)
            self.ended[cell.name] = last["event"]
            how = f"failed: {last.get('error')}" if last["event"] == "failed" else "finished"
            self.say(f"{cell.name}: {how} ({duration(last.get('seconds', 0))})")
            self._learn(cell, last)
        self.update(self.total - len(left))

    def _learn(self, done: Cell, last: dict[str, Any]) -> None:
        """Use the time that a cell took to correct the estimates for cells like it, and for those of other sizes of
        which none has ended."""
        if last["event"] != "finished":
            return
        guessed, ended = self.seconds[done.name], _kind(done)
        self.timed.append(ended)
        for cell in self.cells:
            kind = _kind(cell)
            if kind == ended or (kind[:2] == ended[:2] and kind not in self.timed):
                known = self.seconds[cell.name]
                self.seconds[cell.name] = last["seconds"] * (known / guessed if known and guessed else 1.0)

    def _line(self) -> str:
        running = 0
        rest: list[float | None] = []
        for cell in self.left:
            last, known = self.queue.last(cell), self.seconds[cell.name]
            started = last["event"] == "started"
            spent = time.time() - last["time"] if started else 0.0
            rest.append(None if known is None else max(known - spent, 0.0))
            running += started
        failed = sum(event == "failed" for event in self.ended.values())
        share = self.done / self.total if self.total else 1.0
        bar = f"[{'#' * int(20 * share):20s}] " if self.live else ""
        told = f"{self.label} {bar}{self.done}/{count(self.total, 'cell')}  {running} running"
        return f"{told}{f'  {failed} failed' if failed else ''}  {together(rest, self.workers)} left"


def _kind(cell: Cell) -> tuple[Any, ...]:
    return cell.system, cell.preset, sizes(cell.system, configured(cell)[1])


def together(seconds: Sequence[float | None], workers: int) -> str:
    """The time that cells take in all, in words."""
    known = [s for s in seconds if s is not None]
    more = len(seconds) - len(known)
    unknown = f" and {count(more, 'cell')} of unknown length" if more else ""
    return f"about {duration(max([sum(known) / workers, *known]))}{unknown}"


def describe(
    cells: Sequence[Cell], queue: Queue, guesses: dict[str, tuple[float | None, str]], workers: int | None, cuda: bool
) -> str:
    """The plan as text: every cell, its seeds, its state, its time. workers: None for a cluster of unknown size."""
    width = max(len(cell.name) for cell in cells)
    lines = []
    for cell in cells:
        seconds, source = guesses[cell.name]
        shown = "?" if seconds is None else duration(seconds)
        seeds = count(len(cell.seeds), "seed")
        lines.append(f"{cell.name:{width}s}  {seeds:8s}  {queue.state(cell):11s}  {shown:>7s}  ({source})")
    left = [guesses[cell.name][0] for cell in cells if not queue.finished(cell)]
    if workers is None:
        how = f"one after another on a {'GPU' if cuda else 'CPU'}; Ray runs as many at once as the cluster has room for"
    else:
        how = f"with {workers} process{'es' if workers != 1 else ''}"
    lines.append(f"{count(len(cells), 'cell')}, {len(left)} to do, {together(left, workers or 1)} {how}")
    return "\n".join(lines)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
