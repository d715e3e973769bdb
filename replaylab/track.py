"""Logs metrics to TensorBoard or Weights & Biases, in addition to metrics.jsonl, which is always written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from replaylab.errors import require

TRACKERS = {"tensorboard": "tracking with TensorBoard", "wandb": "tracking with Weights & Biases"}


class Trackers:
    def __init__(self, names: Sequence[str]):
        self.modules = {name: require(name, TRACKERS[name]) for name in names}
        self.logs: list[Callable[[int, dict[str, float]], None]] = []
        self.closes: list[Callable[[], None]] = []

    def open(self, folder: Path, config: dict[str, Any]) -> None:
        if "tensorboard" in self.modules:
            from torch.utils.tensorboard import SummaryWriter

            writer = SummaryWriter(str(folder / "tensorboard"))

            def log(step: int, values: dict[str, float]) -> None:
                for key, value in values.items():
                    writer.add_scalar(key, value, step)
                writer.flush()

            self.logs.append(log)
            self.closes.append(writer.close)
        if "wandb" in self.modules:
            init = self.modules["wandb"].init
            run = init(project="replaylab", name=folder.name, dir=str(folder), config=config)
            self.logs.append(lambda step, values: run.log(values, step=step))
            self.closes.append(run.finish)

    def log(self, step: int, values: dict[str, float]) -> None:
        for log in self.logs:
            log(step, values)

    def close(self) -> None:
        """Close all trackers: the next run of this process, as in a sweep, opens its own."""
        for close in self.closes:
            close()
