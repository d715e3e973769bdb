"""Running cells on a Ray cluster: a task a cell, with its share of a GPU.

The cell's folder is the unit of work. Ray runs a task again when its node is lost; the second attempt waits for the
cell's lock, which the first one may still hold for a moment, and goes on from the last checkpoint. So the sweep's
folder must be on a file system that all nodes share and that honours flock. Data is read by path on every node, or
read once and put into Ray's object store.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

from replaylab.data.read import load
from replaylab.errors import UsageError, require
from replaylab.sweep.estimate import Watch
from replaylab.sweep.plan import Cell, Plan
from replaylab.sweep.queue import Queue, missing
from replaylab.trainer import Interrupted

RETRIES = 5  # of a task whose node or process was lost
POLL = 0.5  # seconds


def do_cell(folder: str, cell: Cell, where: str, data: Any = None) -> str:
    """The task: whatever a lost attempt has left is taken up, and what another attempt finished is left alone."""
    os.chdir(where)
    queue = Queue(folder)
    while not queue.finished(cell):
        with queue.claim(cell) as mine:
            if mine and not queue.finished(cell):
                try:
                    return queue.work(cell, data)
                except (Interrupted, KeyboardInterrupt):
                    return "interrupted"
        time.sleep(POLL)
    return "finished"


def run_ray(
    plan: Plan,
    queue: Queue,
    watch: Watch,
    began: float,
    *,
    address: str | None = None,
    gpus: float | None = None,
    cpus: float = 1.0,
    data: str = "path",
) -> None:
    """Submit what is missing and wait. gpus: share of a GPU a cell; default: one where the cluster has any."""
    ray: Any = require("ray", "running on a Ray cluster")
    if data not in ("path", "store"):
        raise UsageError(f"data must be 'path' or 'store', not '{data}'")
    if not ray.is_initialized():
        ray.init(address=address, log_to_driver=False)
    if gpus is None:
        gpus = 1.0 if ray.cluster_resources().get("GPU") else 0.0
    watch.workers = max(1, int(ray.cluster_resources().get("CPU", 1) / cpus))
    if gpus:
        watch.workers = min(watch.workers, max(1, int(ray.cluster_resources().get("GPU", 1) / gpus)))
    task = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=RETRIES, retry_exceptions=False)(do_cell)
    todo = missing(queue, plan.cells)
    stored = _stored(ray, todo) if data == "store" else {}
    folder = str(queue.folder.resolve())

    def submit(cell: Cell) -> Any:
        return task.remote(folder, cell, str(Path.cwd()), stored.get(_key(cell)))

    tasks = {submit(cell): cell for cell in todo}
    again = Counter[str]()  # cells that a node asked to stop: they have saved, and go on elsewhere
    deadline = began + 60 * plan.budget if plan.budget else float("inf")
    try:
        while tasks:
            done, _ = ray.wait(list(tasks), num_returns=1, timeout=POLL)
            for found in done:
                cell = tasks.pop(found)
                if _settle(ray, queue, found, cell) == "interrupted" and again[cell.name] < RETRIES:
                    again[cell.name] += 1
                    tasks[submit(cell)] = cell
            watch.show(list(tasks.values()))
            if time.time() > deadline:
                watch.say(f"the budget of {plan.budget:g} minutes is spent; the same command goes on")
                return
    finally:
        for left in tasks:
            ray.cancel(left)  # a running one gets KeyboardInterrupt; its last checkpoint stays
        watch.close()


def _settle(ray: Any, queue: Queue, found: Any, cell: Cell) -> str:
    """How a task ended. One that Ray gave up on has recorded nothing itself."""
    try:
        return ray.get(found)
    except Exception as error:
        if not queue.finished(cell):
            queue.record(cell, "failed", error=f"Ray: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
        return "failed"


def _key(cell: Cell) -> str:
    return repr((cell.data, cell.options))


def _stored(ray: Any, cells: list[Cell]) -> dict[str, Any]:
    """Each dataset once into the object store. Arrays come out of it read-only and without a copy."""
    found = {}
    for cell in cells:
        # what was joined from several paths would lose their names in the run's configuration
        if cell.data and len(cell.data) == 1 and _key(cell) not in found:
            with contextlib.suppress(MemoryError):
                found[_key(cell)] = ray.put(load(cell.data, **cell.options))
    return found
