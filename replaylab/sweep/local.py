"""Running cells on this machine: one process a device, which stays alive from cell to cell.

The process that was called only watches. Workers take cells from the queue on disk, so a second `replaylab sweep` of
the same file, in another terminal, shares the work instead of doubling it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from replaylab.errors import UsageError
from replaylab.sweep.busy import physical
from replaylab.sweep.estimate import Watch
from replaylab.sweep.plan import Cell, Plan
from replaylab.sweep.queue import Queue
from replaylab.trainer import Interrupted

POLL = 0.1  # seconds
PATIENCE = 120  # seconds a worker is given to end an evaluation and save


# --- the worker process


def work(folder: str, began: float) -> None:
    """Take one cell after another until none is left to take."""
    parent = os.getppid()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    queue = Queue(folder)
    cells, passes = queue.plan().cells, 0
    with contextlib.suppress(Interrupted):
        while passes < 2:  # a lock may be held for a blink by someone who only looks: see that twice
            passes += 1
            for cell in cells:
                if os.getppid() != parent:  # nobody watches any more
                    return
                with queue.claim(cell) as mine:
                    if mine and not queue.finished(cell) and not queue.failed_since(cell, began):
                        passes = 0
                        with _printing_to(queue.status / f"{cell.name}.log"):
                            if queue.work(cell) == "failed" and not _usable():
                                return  # the next process has a context of its own
            time.sleep(POLL)


def _usable() -> bool:
    """After some errors of a GPU everything that this process asks of it fails."""
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def _stop(signum: int, frame: FrameType | None) -> None:
    raise Interrupted("stopped")


@contextlib.contextmanager
def _printing_to(path: Path) -> Iterator[None]:
    """Send what this process prints, libraries' own printing included, to a file."""
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


# --- the process that watches


def run_local(plan: Plan, queue: Queue, watch: Watch, devices: Sequence[str], began: float) -> None:
    """Keep a worker on every device until nothing is left, the budget is spent, or Ctrl-C comes."""
    slots = [device for device in devices for _ in range(plan.per_device)]
    workers: dict[int, subprocess.Popen[bytes]] = {}
    deadline = began + 60 * plan.budget if plan.budget else float("inf")
    main = threading.current_thread() is threading.main_thread()  # no other may handle signals
    before = signal.signal(signal.SIGTERM, signal.default_int_handler) if main else None  # ends like Ctrl-C
    try:
        while True:
            left = [c for c in plan.cells if not queue.finished(c) and not queue.failed_since(c, began)]
            for slot, worker in list(workers.items()):
                if worker.poll() is not None and not _bury(queue, plan.cells, workers.pop(slot)):
                    raise UsageError(f"a worker ended before it began a cell: see {queue.status / 'workers.log'}")
            waiting = sum(queue.state(cell) != "running" for cell in left)
            for slot, device in enumerate(slots):
                if slot not in workers and len(workers) < len(left) and waiting > 0:
                    workers[slot] = _start(queue, device, began)
                    waiting -= 1
            watch.show(left)
            if not workers:
                return
            if time.time() > deadline:
                watch.say(f"the budget of {plan.budget:g} minutes is spent; the same command goes on")
                return
            time.sleep(POLL)
    finally:
        _end(workers.values())
        watch.close()
        if main:
            signal.signal(signal.SIGTERM, before)


def _start(queue: Queue, device: str, began: float) -> subprocess.Popen[bytes]:
    code = f"from replaylab.sweep.local import work; work({str(queue.folder)!r}, {began!r})"
    environment = dict(os.environ, CUDA_VISIBLE_DEVICES=physical(device) if device.startswith("cuda") else "")
    with open(queue.status / "workers.log", "ab") as log:
        return subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=log, stderr=log)


def _bury(queue: Queue, cells: Sequence[Cell], worker: subprocess.Popen[bytes]) -> bool:
    """A worker that was killed leaves its cell without an end: record it, so that the rest goes on. False where it died
    over no cell: the next one would too."""
    if worker.returncode == 0:
        return True
    for cell in cells:
        last: dict[str, Any] = (queue.events(cell) or [{"event": "new"}])[-1]
        if last["event"] == "started" and last["pid"] == worker.pid and not queue.finished(cell):
            code = worker.returncode
            how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
            queue.record(cell, "failed", error=f"its process died ({how}); see status/workers.log")
            return True
    return False


def _end(workers: Any) -> None:
    """Ask for a checkpoint, and wait for it."""
    for worker in workers:
        if worker.poll() is None:
            worker.terminate()
    for worker in workers:
        try:
            worker.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()
