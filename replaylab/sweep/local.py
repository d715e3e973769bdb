"""Runs cells on this machine: `per_device` worker processes per device, which stay alive from cell to cell.

The calling process only watches. Workers take cells from the queue on disk, so a second `replaylab sweep` of the same
file, in another terminal, shares the work instead of repeating it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
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
WORKERS = "workers.log"  # what workers print outside of cells
PATIENCE = 120  # seconds for a worker to finish an evaluation and save


# --- the worker process


def work(folder: str, began: float) -> None:
    """Train one cell after another until none is left to claim."""
    parent = os.getppid()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    queue = Queue(folder)
    cells, passes = queue.plan().cells, 0
    with contextlib.suppress(Interrupted):
        while passes < 2:  # `Queue.busy` holds a lock for a moment to check it, so look twice
            passes += 1
            for cell in cells:
                if os.getppid() != parent:  # the watching process has ended
                    return
                with queue.claim(cell) as mine:
                    if mine and not queue.finished(cell) and not queue.failed_since(cell, began):
                        passes = 0
                        if queue.work(cell) == "failed" and not _usable():
                            return  # the next process gets a new CUDA context
            time.sleep(POLL)


def _usable() -> bool:
    """False after a GPU error that makes all further CUDA calls of this process fail."""
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def _stop(signum: int, frame: FrameType | None) -> None:
    raise Interrupted("stopped")


# --- the process that watches


def run_local(plan: Plan, queue: Queue, watch: Watch, devices: Sequence[str], began: float) -> None:
    """Keep workers on every device until no cell is left, the budget is spent, or Ctrl-C is pressed. Also wait for
    cells that another process trains: of a second sweep, or of one whose watcher was killed."""
    slots = [device for device in devices for _ in range(plan.per_device)]
    workers: dict[int, subprocess.Popen[bytes]] = {}
    left, announced = plan.cells, set[str]()
    deadline = began + 60 * plan.budget if plan.budget else float("inf")
    main = threading.current_thread() is threading.main_thread()  # only this one may handle signals
    before = signal.signal(signal.SIGTERM, signal.default_int_handler) if main else None  # treated like Ctrl-C
    try:
        while True:
            for slot, worker in list(workers.items()):
                if worker.poll() is not None and not _bury(queue, plan.cells, workers.pop(slot)):
                    raise UsageError(f"a worker ended before it began a cell: see {queue.status / WORKERS}")
            states = {cell.name: queue.state(cell) for cell in left}  # files of ended cells are not read again
            left = [c for c in left if states[c.name] != "finished" and not queue.failed_since(c, began)]
            waiting = sum(states[cell.name] != "running" for cell in left)
            for slot, device in enumerate(slots):
                if slot not in workers and len(workers) < len(left) and waiting > 0:
                    workers[slot] = _start(queue, device, began)
                    waiting -= 1
            watch.show(left)
            if not workers and not left:
                return
            for cell in [] if workers else left:
                if cell.name not in announced:
                    announced.add(cell.name)
                    watch.say(f"{cell.name}: {queue.holder(cell)} has it; waiting for that")
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
    with open(queue.status / WORKERS, "ab") as log:
        return subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=log, stderr=log)


def _bury(queue: Queue, cells: Sequence[Cell], worker: subprocess.Popen[bytes]) -> bool:
    """Record the failure of the cell that a dead worker was training, so that the rest go on. False if it had begun no
    cell: then the next worker would die too."""
    if worker.returncode == 0:
        return True
    for cell in cells:
        last = queue.last(cell)
        if last["event"] == "started" and last["pid"] == worker.pid and not queue.finished(cell):
            code = worker.returncode
            how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
            logs = [log for log in (queue.log(cell), queue.status / WORKERS) if log.exists() and log.stat().st_size]
            see = f"; see status/{logs[0].name}" if logs else ""
            queue.record_lost(cell, f"its process died ({how}){see}")
            return True
    return False


def _end(workers: Any) -> None:
    """Stop the workers, and wait while they save a checkpoint."""
    for worker in workers:
        if worker.poll() is None:
            worker.terminate()
    for worker in workers:
        try:
            worker.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()
