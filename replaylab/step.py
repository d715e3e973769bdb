"""Running updates: eagerly, compiled, or as one captured CUDA graph.

The update of a small network is a few dozen tiny kernels. Launched one by one from Python they take twenty times as
long as their work; captured once as a graph they are replayed with one launch. The batch indices of many updates are
copied to the device together, and a cursor on the device picks those of each update, so that the graph needs nothing
from the host.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from replaylab.algos import Phase
from replaylab.data.sample import BLOCK
from replaylab.fuse import fused

WARM_UP = 3  # uncaptured calls first, so that libraries and optimisers have allocated their memory


class Graph:
    """Runs a function without arguments that works in place on fixed tensors: on CUDA captured once, then replayed.
    Each call, also the uncaptured first ones, does the work exactly once."""

    def __init__(self, body: Callable[[], None], device: torch.device, capture: bool = True):
        self.body, self.capture = body, capture and device.type == "cuda"
        self.graph: torch.cuda.CUDAGraph | None = None
        self.warm = 0

    def __call__(self) -> None:
        if not self.capture:
            self.body()
        elif self.warm < WARM_UP:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self.body()
            torch.cuda.current_stream().wait_stream(side)
            self.warm += 1
        else:
            if self.graph is None:
                self.graph = torch.cuda.CUDAGraph()
                with _uncollected(), torch.cuda.graph(self.graph):
                    self.body()
            self.graph.replay()


@contextmanager
def _uncollected() -> Iterator[None]:
    """Python's collector waits: destroying an old graph, which it may come upon, breaks the capture of another."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class Stepper:
    def __init__(self, phase: Phase, device: torch.device, compile: str = "auto"):
        self.phase, self.device = phase, device
        self.update, self.gather = phase.update, phase.sampler.gather
        if compile == "on":
            self.update, self.gather = fused(self.update), fused(self.gather, phase.sampler.resident)
        self.step = Graph(self._body, device, capture=compile != "off")
        self.sums: dict[str, Tensor] = {}  # sums of the metrics since the last `read`
        self.total: Tensor | None = None  # the same as one table, (metrics, seeds), so that one kernel adds all
        self.broken: Tensor | None = None  # updates since each metric became NaN or infinite
        self.count = 0
        self.cursor = torch.zeros(1, dtype=torch.int64, device=device)
        self.indices: Tensor | None = None
        self.batch: dict[str, Tensor] = {}
        self.under_way: torch.cuda.Event | None = None  # the end of the last `run`

    def run(self, start: int, steps: int) -> None:
        """Run updates start, start + 1, ..., at most BLOCK of them. On CUDA they may still be under way afterwards, but
        those of the call before are done: the device need not wait for the host, nor gets the host far ahead."""
        drawn = torch.from_numpy(self.phase.sampler.draw(start, steps))
        if self.indices is None:
            self.indices = torch.zeros((BLOCK, *drawn.shape[1:]), dtype=torch.int64, device=self.device)
        cuda = self.device.type == "cuda"
        # a copy from ordinary memory would wait for all updates before it
        self.indices[:steps].copy_(drawn.pin_memory() if cuda else drawn, non_blocking=True)
        self.cursor.zero_()
        for _ in range(steps):
            if not self.phase.sampler.resident:
                self._load_batch()
            self.step()
        self.count += steps
        if cuda:
            done = torch.cuda.Event()
            done.record()
            if self.under_way is not None:
                self.under_way.synchronize()
            self.under_way = done

    def release(self) -> None:
        """Give back the graph's memory. It is part of a reference cycle, so Python's collector would do so some day."""
        self.step.graph = None

    def read(self) -> dict[str, list[float]]:
        """Mean of each metric per seed since the last call. Waits for the device."""
        means = {name: (total / max(self.count, 1)).tolist() for name, total in self.sums.items()}
        for total in self.sums.values():
            total.zero_()
        self.count = 0
        return means

    def first_broken(self) -> tuple[str, int] | None:
        """The metric that became NaN or infinite first, and how many updates ago. Waits for the device."""
        if self.broken is None or not self.broken.any():
            return None
        ago = self.broken.flatten(1).amax(1).tolist() if self.broken.ndim > 1 else self.broken.tolist()
        return list(self.sums)[ago.index(max(ago))], max(ago)

    def _body(self) -> None:
        if self.phase.sampler.resident:
            batch = self.gather(self._index())
        else:
            batch = self.batch
        metrics = self.update(batch)
        if self.total is None or self.broken is None:
            self.total = torch.stack([self.sums.get(name, torch.zeros_like(v)) for name, v in metrics.items()])
            self.sums = dict(zip(metrics, self.total, strict=True))
            self.broken = torch.zeros_like(self.total, dtype=torch.int64)
        self.total.add_(torch.stack(list(metrics.values())))
        self.broken.add_((self.total - self.total) != 0)  # true for NaN and infinity alone
        self.cursor.add_(1)

    def _index(self) -> Tensor:
        assert self.indices is not None
        return self.indices.index_select(0, self.cursor)[0]

    def _load_batch(self) -> None:
        """For data that stays on the host: copy the batch to where the graph expects it."""
        for name, value in self.gather(self._index()).items():
            if name in self.batch:
                self.batch[name].copy_(value)
            else:
                self.batch[name] = value.clone()
