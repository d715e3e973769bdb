"""Shared by the cases: synthetic data with the real shapes, and a timer that waits for the device."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from replaylab.algos import Phase
from replaylab.data.episodes import Episodes
from replaylab.page import count
from replaylab.step import Stepper

Rows = Iterator[tuple[str, float, str]]  # (what, figure, unit)
Variants = Sequence[tuple[int, str, str]]  # (seeds, compile, precision)
WARM_UP = 1.5  # seconds


def hopper_like(rows: int = 299_470, episodes: int = 663) -> Episodes:
    """Noise with the shapes of hopper-medium."""
    rng = np.random.default_rng(0)
    offsets = np.linspace(0, rows, episodes + 1).astype(np.int64)
    terminated = np.zeros(rows, bool)
    terminated[offsets[1:] - 1] = True
    return Episodes(
        observations=rng.standard_normal((rows, 11)).astype(np.float32),
        actions=rng.uniform(-1, 1, (rows, 3)).astype(np.float32),
        rewards=rng.standard_normal(rows),
        terminated=terminated,
        truncated=np.zeros(rows, bool),
        offsets=offsets,
        final_observations=rng.standard_normal((episodes, 11)).astype(np.float32),
        final_known=np.ones(episodes, bool),
        meta={"env_id": "d4rl/hopper"},
    )


def time_updates(phase_of: Callable[[int, str], Phase], device: torch.device, what: str, variants: Variants) -> Rows:
    """Updates of a phase, which `phase_of(seeds, precision)` makes, in each variant; on a CPU only a plain one."""
    cuda = device.type == "cuda"
    calls, repeats = (200, 5) if cuda else (2, 1)
    for seeds, compile, precision in variants if cuda else [(1, "off", "fp32")]:
        if compile == "on":  # as in a new process: earlier compilations count against a limit
            torch.compiler.reset()
        stepper = Stepper(phase_of(seeds, precision), device, compile)
        spent = seconds_per_call(partial(stepper.run, 0, calls), device, 1, repeats) / calls
        how = {"auto": "captured", "on": "compiled + captured", "off": "eager"}[compile]
        yield f"{what}, {count(seeds, 'seed')}, {how}, {precision}", 1e3 * spent, "ms"


def seconds_per_call(call: Callable[[], Any], device: torch.device, calls: int, repeats: int = 5) -> float:
    """Median over repeats of the mean time per call, on a synchronised, warm device (its clocks rise for a second)."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    call()  # may compile
    wait()
    times: list[float] = []
    with _alone():
        warm = time.perf_counter() + WARM_UP
        while device.type == "cuda" and time.perf_counter() < warm:
            call()
            wait()
        for _ in range(repeats):
            wait()
            began = time.perf_counter()
            for _ in range(calls):
                call()
            wait()
            times.append((time.perf_counter() - began) / calls)
    return float(np.median(times))


@contextmanager
def _alone() -> Iterator[None]:
    """No other `bench` of this machine measures meanwhile, so that several may compile side by side."""
    place = os.open(tempfile.gettempdir(), os.O_RDONLY)  # a file there would be its first user's alone
    try:
        fcntl.flock(place, fcntl.LOCK_EX)
        yield
    finally:
        os.close(place)
