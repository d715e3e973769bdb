"""The queue on disk: what became of each cell, and who works on it now.

SWEEP/sweep.json             the plan
SWEEP/CELL/                  the cell's run folder
SWEEP/status/CELL.jsonl      a line for each start and each end, never rewritten
SWEEP/status/CELL.lock       held while a process works on the cell; released when it ends, even if killed
SWEEP/status/CELL.log        what training printed
SWEEP/status/CELL.error.txt  the traceback of the last failure

A cell is finished when its run folder says so. Any number of processes may share the folder, also over a network file
system that honours flock.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from replaylab.config import write_whole
from replaylab.data.episodes import Episodes
from replaylab.errors import ReplaylabError, UsageError
from replaylab.run import RunFolder, append_lines, read_lines
from replaylab.sweep.plan import Cell, Plan
from replaylab.train import train
from replaylab.trainer import Interrupted

SPECIFIC = ("system", "data", "env", "preset", "settings", "seeds", "options")  # fixed once a cell has a checkpoint
MORE_SEEDS = (
    "the seeds of a cell train together; `split_seeds: true` trains each in a cell of its own (these anew too), "
    "to which others can be added; or "
)


class Queue:
    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.status = self.folder / "status"

    def check(self, plan: Plan) -> None:
        """Refuse a plan whose cells were run with other settings, rather than mix the two."""
        for cell in plan.cells:
            place, changed = RunFolder(self.folder / cell.name), self._changed(cell)
            if changed and place.checkpoints():
                shown = ", ".join(f"{key} was {was!r}, now {now!r}" for key, (was, now) in changed.items())
                more = MORE_SEEDS if [*changed] == ["seeds"] else ""
                raise UsageError(
                    f"{place.path} was run with other settings ({shown}): {more}rename the sweep, or remove that folder"
                )

    def write(self, plan: Plan) -> None:
        self.status.mkdir(parents=True, exist_ok=True)
        write_whole(self.folder / "sweep.json", plan.to_json())

    def _changed(self, cell: Cell) -> dict[str, tuple[Any, Any]]:
        """What has changed in the cell since its last start: key -> (then, now)."""
        start = next((e["run"] for e in reversed(self.events(cell)) if "run" in e), None)
        now = json.loads(json.dumps(asdict(cell)))
        return {k: (start.get(k), now[k]) for k in SPECIFIC if start and start.get(k) != now[k]}

    def plan(self) -> Plan:
        return Plan.from_json((self.folder / "sweep.json").read_text())

    # --- events

    def events(self, cell: Cell) -> list[dict[str, Any]]:
        return read_lines(self.status / f"{cell.name}.jsonl")

    def last(self, cell: Cell) -> dict[str, Any]:
        return (self.events(cell) or [{"event": "new"}])[-1]

    def record(self, cell: Cell, event: str, **more: Any) -> None:
        line = {"event": event, "time": time.time(), "host": platform.node(), "pid": os.getpid(), **more}
        append_lines(self.status / f"{cell.name}.jsonl", [line])

    def record_lost(self, cell: Cell, error: str) -> None:
        """Record the failure of a cell whose process could not do so."""
        begun = [e["time"] for e in self.events(cell) if e["event"] == "started"]
        self.record(cell, "failed", error=error, seconds=time.time() - begun[-1] if begun else 0.0)

    def finished(self, cell: Cell) -> bool:
        folder = RunFolder(self.folder / cell.name)
        with contextlib.suppress(ReplaylabError, AttributeError):
            return folder.exists() and folder.info().get("status") == "finished"
        return False

    def state(self, cell: Cell) -> str:
        """finished, running, failed, interrupted (or killed) or new."""
        if self.finished(cell):
            return "finished"
        last = str(self.last(cell)["event"])
        if last == "started":
            return "running" if self.busy(cell) else "interrupted"
        return last

    def failed_since(self, cell: Cell, began: float) -> bool:
        last = self.last(cell)
        return last["event"] == "failed" and last["time"] >= began

    def error(self, cell: Cell) -> str:
        failures = [e for e in self.events(cell) if e["event"] == "failed"]
        return str(failures[-1].get("error")) if failures else ""

    # --- work

    def log(self, cell: Cell) -> Path:
        return self.status / f"{cell.name}.log"

    def busy(self, cell: Cell) -> bool:
        with self.claim(cell) as mine:
            return not mine

    def holder(self, cell: Cell) -> str:
        """The process that began the cell last."""
        last = self.last(cell)
        return f"process {last['pid']} on {last['host']}"

    @contextlib.contextmanager
    def claim(self, cell: Cell) -> Iterator[bool]:
        """Lock the cell until the end of the block; False if another process works on it."""
        with open(self.status / f"{cell.name}.lock", "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                yield False
            else:
                yield True

    def work(self, cell: Cell, data: Episodes | None = None) -> str:
        """Train a claimed cell, from its last checkpoint if it has one, and record how it ended.

        data: the logs, if they have been read already.
        """
        anew = bool(self._changed(cell))  # settings were corrected before the first checkpoint
        self.record(cell, "started", run=asdict(cell))
        began = time.monotonic()
        sys.argv = cell.command(self.folder / cell.name)  # recorded as the command in run.json
        try:
            with _printing_to(self.log(cell)):
                train(**cell.arguments(), out=self.folder / cell.name, resume=not anew, overwrite=anew, logs=data)
        except (Interrupted, KeyboardInterrupt):
            self.record(cell, "interrupted", seconds=time.monotonic() - began)
            raise
        except Exception as error:
            message = str(error) if isinstance(error, ReplaylabError) else f"{type(error).__name__}: {error}"
            (self.status / f"{cell.name}.error.txt").write_text(traceback.format_exc())
            self.record(cell, "failed", error=" ".join(message.split()), seconds=time.monotonic() - began)
            return "failed"
        self.record(cell, "finished", seconds=time.monotonic() - began)
        return "finished"


@contextlib.contextmanager
def _printing_to(path: Path) -> Iterator[None]:
    """Redirect all output of this process, also that of C libraries, to a file."""
    kept = [os.dup(1), os.dup(2)]
    with open(path, "ab") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, old in zip((1, 2), kept, strict=True):
            os.dup2(old, number)
            os.close(old)
