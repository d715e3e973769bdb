"""How long a sweep takes: guessed before it starts, corrected while it runs."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from replaylab.algos import system
from replaylab.config import resolve
from replaylab.errors import ReplaylabError
from replaylab.progress import Progress, duration
from replaylab.run import RunFolder
from replaylab.sweep.plan import Cell
from replaylab.sweep.queue import Queue
from replaylab.train import Options

# milliseconds of one update for all seeds at the default settings, on two cores and on an H200; for systems that have
# never run here
UPDATE_MS: dict[str, tuple[float, float]] = {"bc": (3.0, 0.2), "dt": (60.0, 1.5)}
OTHER_MS = (20.0, 1.0)


def configured(cell: Cell) -> dict[str, Any]:
    """Every setting of the cell's system, resolved."""
    module = system(cell.system)
    preset = module.PRESETS.get(cell.preset or "", {})
    return vars(resolve([Options, module.Config], [("preset", preset), ("settings", cell.settings)])[1])


def updates(config: dict[str, Any]) -> int:
    """Updates asked for: every setting that counts them, warm-ups aside."""
    counts = (v for k, v in config.items() if (k == "steps" or k.endswith("_steps")) and "warm" not in k)
    return sum(v for v in counts if type(v) is int)


def finished_before(folder: Path) -> list[dict[str, Any]]:
    """Runs that ended well in this sweep and its neighbours: configuration and seconds."""
    found = []
    for path in sorted(folder.parent.glob("*/*/run.json")):
        run = RunFolder(path.parent)
        with contextlib.suppress(ReplaylabError, TypeError, KeyError, ValueError):
            info = run.info()
            if info["status"] == "finished":
                found.append(run.config() | {"seconds": float(info["seconds"]), "sweep": path.parent.parent.name})
    return found


def estimate(cell: Cell, before: Sequence[dict[str, Any]], cuda: bool) -> tuple[float, str]:
    """(seconds, where they come from)."""
    config = configured(cell)
    alike = [r for r in before if r.get("system") == cell.system]
    exact = [
        r
        for r in alike
        if (r.get("data"), len(r.get("seeds") or [])) == (cell.data or [], len(cell.seeds))
        and all(r.get(k) == v for k, v in config.items())
    ]
    if exact:
        return exact[-1]["seconds"], "the same run before"
    steps = updates(config)
    scaled = sorted(r["seconds"] / n * steps for r in alike if (n := updates(r)))
    if scaled and steps:
        return scaled[len(scaled) // 2], f"earlier runs of {cell.system}, scaled by updates"
    ms = UPDATE_MS.get(cell.system, OTHER_MS)[cuda]
    return steps * ms / 1e3, f"{steps:,} updates of {ms:g} ms, a table"


class Watch(Progress):
    """The progress line of a whole sweep."""

    def __init__(self, name: str, queue: Queue, cells: Sequence[Cell], seconds: dict[str, float], workers: int):
        super().__init__(name, len(cells), unit="cells")
        self.queue, self.cells, self.seconds, self.workers = queue, cells, seconds, workers
        self.told = {cell.name: self._ends(cell) for cell in cells}
        self.left: Sequence[Cell] = cells

    def _ends(self, cell: Cell) -> int:
        return sum(e["event"] in ("finished", "failed") for e in self.queue.events(cell))

    def show(self, left: Sequence[Cell]) -> None:
        """Say which cells ended since the last call, and redraw the line."""
        self.left = left
        for cell in self.cells:
            if cell in left or self._ends(cell) <= self.told[cell.name]:
                continue
            self.told[cell.name] = self._ends(cell)
            last = self.queue.events(cell)[-1]
            how = f"failed: {last.get('error')}" if last["event"] == "failed" else "finished"
            self.say(f"{cell.name}: {how} ({duration(last.get('seconds', 0))})")
            self._learn(cell, last)
        self.update(self.total - len(left))

    def _learn(self, done: Cell, last: dict[str, Any]) -> None:
        """What a cell took is the better guess for its like that are still to come."""
        if last["event"] == "finished" and self.seconds.get(done.name):
            factor = last["seconds"] / self.seconds[done.name]
            for cell in self.cells:
                if (cell.system, cell.preset) == (done.system, done.preset):
                    self.seconds[cell.name] *= factor

    def _line(self) -> str:
        events = [self.queue.events(cell)[-1:] for cell in self.left]
        running = [e[0]["event"] == "started" for e in events if e]
        rest = 0.0
        for cell, last in zip(self.left, events, strict=True):
            spent = time.time() - last[0]["time"] if last and last[0]["event"] == "started" else 0.0
            rest += max(self.seconds[cell.name] - spent, 0.0)
        failed = sum(self.queue.last_event(cell) == "failed" for cell in self.cells if cell not in self.left)
        share = self.done / self.total if self.total else 1.0
        bar = f"[{'#' * int(20 * share):20s}] " if self.live else ""
        told = f"{self.label} {bar}{self.done}/{self.total} cells  {sum(running)} running"
        return f"{told}{f'  {failed} failed' if failed else ''}  about {duration(rest / self.workers)} left"


def describe(cells: Sequence[Cell], queue: Queue, guesses: dict[str, tuple[float, str]], workers: int) -> str:
    """The plan as text: every cell, its seeds, its state, its time."""
    width = max(len(cell.name) for cell in cells)
    lines = []
    for cell in cells:
        seconds, source = guesses[cell.name]
        seeds = f"{len(cell.seeds)} seed{'s' if len(cell.seeds) != 1 else ''}"
        lines.append(f"{cell.name:{width}s}  {seeds:8s}  {queue.state(cell):11s}  {duration(seconds):>7s}  ({source})")
    left = [cell for cell in cells if not queue.finished(cell)]
    rest = sum(guesses[cell.name][0] for cell in left) / workers
    lines.append(
        f"{len(cells)} cells, {len(left)} to do, about {duration(rest)} with {workers} "
        f"process{'es' if workers != 1 else ''}"
    )
    return "\n".join(lines)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
