"""Runs cells on a Ray cluster: one task per cell, each with its share of a GPU.

The cell's folder is the unit of work. Ray runs a task again when its node is lost; the second attempt waits for the
cell's lock, which the first one may still hold for a moment, and goes on from the last checkpoint. So the sweep's
folder must be on a file system that all nodes share and that honours flock. Data is read by path on every node, or
read once and put into Ray's object store, where the cells of a node share it.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from replaylab.data.episodes import Episodes
from replaylab.data.read import load, one_line
from replaylab.errors import ReplaylabError, UsageError, require
from replaylab.sweep.estimate import Watch
from replaylab.sweep.plan import Cell, Plan
from replaylab.sweep.queue import Queue
from replaylab.trainer import Interrupted

RETRIES = 5  # of a task whose node or process was lost
POLL = 0.5  # seconds


def do_cell(folder: str, cell: Cell, where: str, data: Any = None) -> str:
    """The task: train the cell from where a lost attempt stopped, unless another attempt has finished it."""
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
    """Submit the missing cells and wait for them. gpus: share of a GPU per cell; default: 1 if the cluster has any.
    data: cells read their data by "path", or get it from Ray's object "store"."""
    ray: Any = require("ray", "running on a Ray cluster")
    if data not in ("path", "store"):
        raise UsageError(f"data must be 'path' or 'store', not '{data}'")
    # what tasks print is in status/CELL.log
    context = ray.init(address=address, log_to_driver=False, ignore_reinit_error=True)
    if context.dashboard_url:
        watch.say(f"Ray's dashboard: http://{context.dashboard_url}")
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if gpus is None:
        gpus = 1.0 if any(node.get("GPU") for node in nodes) else 0.0
    watch.workers = room(nodes, {"CPU": cpus, "GPU": gpus})
    task = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=RETRIES, retry_exceptions=False)(do_cell)
    todo = [cell for cell in plan.cells if not queue.finished(cell)]
    stored = _stored(ray, todo, watch) if data == "store" else {}
    folder = str(queue.folder.resolve())

    def submit(cell: Cell) -> Any:
        named = task.options(name=cell.name)  # shown in the dashboard
        return named.remote(folder, cell, str(Path.cwd()), stored.get(_key(cell)))

    tasks = {submit(cell): cell for cell in todo}
    again = Counter[str]()  # cells that their node stopped: they have saved, and go on elsewhere
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
    """How a task ended. If Ray gave up on it, the failure is recorded here, as the task could not."""
    try:
        return ray.get(found)
    except Exception as error:
        if not queue.finished(cell):
            queue.record_lost(cell, f"Ray: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
        return "failed"


def room(nodes: Sequence[Mapping[str, float]], wanted: Mapping[str, float]) -> int:
    """How many cells fit at once; an error if no node is large enough for one, as Ray would wait forever."""
    wanted = {kind: amount for kind, amount in wanted.items() if amount}
    found = sum(min((int(node.get(k, 0) / n + 1e-9) for k, n in wanted.items()), default=1) for node in nodes)
    if found < 1:
        asked = " and ".join(f"{amount:g} {kind}" for kind, amount in wanted.items())
        largest = ", ".join(f"{max((n.get(k, 0) for n in nodes), default=0):g} {k}" for k in wanted)
        raise UsageError(f"a cell wants {asked}, and no node of the Ray cluster has that (the most of each: {largest})")
    return found


def _key(cell: Cell) -> str:
    return repr((cell.data, cell.options))


def _stored(ray: Any, cells: list[Cell], watch: Watch) -> dict[str, Any]:
    """Put each dataset (or joined ones) into the object store once. Cells get its arrays read-only, without a copy."""
    found: dict[str, Any] = {}
    full = (MemoryError, ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError)
    for cell in cells:
        if cell.data and _key(cell) not in found:
            try:
                found[_key(cell)] = ray.put(_plain(load(cell.data, **cell.options)))
            except (ReplaylabError, *full) as error:  # reading by path, a cell reports the error or needs less memory
                found[_key(cell)] = None
                watch.say(f"{cell.dataset} is read by path, not put into the object store: {one_line(error)}")
    return found


def _plain(log: Episodes) -> Episodes:
    """The log with memory-mapped columns as plain views: Ray would pickle a map and copy it for every cell."""

    def view(value: Any) -> Any:
        return {name: view(column) for name, column in value.items()} if isinstance(value, dict) else np.asarray(value)

    return replace(log, **{f.name: view(getattr(log, f.name)) for f in fields(log) if f.name != "meta"})
