"""Sweeps: systems x datasets x seeds x settings from one small file, on this machine or on a Ray cluster.

`run("benchmarks/locomotion.yaml")` trains the missing cells of sweeps/locomotion. A cell is one run folder. If a cell
fails, its error is recorded and the rest go on; the same call again trains only what is missing. plan.py reads the
file, queue.py keeps the cells' state on disk, local.py and cluster.py run them. See docs/sweep.md.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from replaylab.errors import UsageError, nearest
from replaylab.page import count
from replaylab.sweep.busy import Busy
from replaylab.sweep.estimate import Watch, describe, estimate, finished_before, say
from replaylab.sweep.local import run_local
from replaylab.sweep.plan import Cell, Plan, read_plan
from replaylab.sweep.queue import Queue
from replaylab.trainer import Interrupted

__all__ = ["Cell", "Outcome", "Plan", "read_plan", "run"]

WHERE = ("local", "ray")


@dataclass
class Outcome:
    folder: Path
    cells: int
    finished: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # cell -> error
    left: list[str] = field(default_factory=list)  # interrupted, or not begun


def run(
    path: str | Path,
    out: str | Path | None = None,
    *,
    dry_run: bool = False,
    on: str = "local",
    devices: Sequence[str] | None = None,
    per_device: int | None = None,
    address: str | None = None,
    gpus: float | None = None,
    cpus: float | None = None,
    data: str | None = None,
) -> Outcome:
    """Train the missing cells of a sweep and return the state of all its cells. With `dry_run`, only print the plan.

    out: the sweep's folder (default: sweeps/NAME). devices: ["cuda:0", "cuda:1"] or ["cpu"]; default: all GPUs, else
    the CPU. per_device: processes that share each device, instead of the file's number. on="ray" uses the Ray
    cluster at `address`, and takes `gpus` and `cpus` (the share of each cell) and `data` ("path" or "store").
    """
    if on not in WHERE:
        raise UsageError(f"cannot run on '{on}'{nearest(on, WHERE)}")
    given = {"address": address, "gpus": gpus, "cpus": cpus, "data": data}
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if options and on != "ray":
        raise UsageError(f'{next(iter(options))} is for a Ray cluster: add --on ray, in Python on="ray"')
    if on == "ray" and (devices or per_device is not None):
        raise UsageError(
            "devices and per_device are for this machine; on Ray cells share a GPU with `gpus`, such as 0.5"
        )
    plan = read_plan(path, per_device)
    queue = Queue(out or Path("sweeps") / plan.name)
    places = [_known(name) for name in devices or _devices()]
    workers = len(places) * plan.per_device if on == "local" else None  # a cluster's number is known once connected
    cuda = places[0].startswith("cuda") if gpus is None else gpus > 0
    before = finished_before(queue.folder, Path(path).parent / "results", cuda)
    queue.check(plan)
    guesses = {cell.name: estimate(cell, before, cuda) for cell in plan.cells}
    if dry_run:
        print(describe(plan.cells, queue, guesses, workers, cuda))
        return outcome(queue, plan.cells)
    queue.write(plan)
    began = time.time()
    watch = Watch(plan.name, queue, plan.cells, {name: guess[0] for name, guess in guesses.items()}, workers or 1)
    busy = None
    try:
        if on == "ray":
            from replaylab.sweep.cluster import run_ray

            run_ray(plan, queue, watch, began, **options)
        else:
            with Busy(queue.status / "gpu.txt", places) as meter:
                run_local(plan, queue, watch, places, began)
            busy = meter.share()
    except KeyboardInterrupt:
        raise Interrupted("stopped: what ran is saved, run the same command again to go on") from None
    found = outcome(queue, plan.cells)
    said = "" if busy is None else f", GPU {busy:.0f} % busy"
    say(
        f"{plan.name}: {len(found.finished)} of {count(found.cells, 'cell')} finished, {len(found.failed)} failed, "
        f"{len(found.left)} left, {time.time() - began:.0f} s{said}; compare them with: replaylab report "
        f"{shlex.quote(str(queue.folder))}"
    )
    return found


def outcome(queue: Queue, cells: Sequence[Cell]) -> Outcome:
    found = Outcome(queue.folder, len(cells))
    for cell in cells:
        state = queue.state(cell)
        if state == "finished":
            found.finished.append(cell.name)
        elif state == "failed":
            found.failed[cell.name] = queue.error(cell)
        else:
            found.left.append(cell.name)
    return found


def _known(device: str) -> str:
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or not (index or "0").isdecimal():
        raise UsageError(f"unknown device '{device}': use cpu, cuda, or cuda:0 and so on")
    seen = torch.cuda.device_count()
    if kind == "cuda" and int(index or 0) >= seen:
        raise UsageError(
            f"device {device} was asked for, but torch sees {count(seen, 'GPU') if seen else 'no GPU'} here"
        )
    return device


def _devices() -> list[str]:
    return [f"cuda:{i}" for i in range(torch.cuda.device_count())] or ["cpu"]
