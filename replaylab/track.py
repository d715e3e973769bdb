"""Metrics to TensorBoard or Weights & Biases, beside the metrics.jsonl that is always written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from replaylab.errors import require

Log = Callable[[int, dict[str, float]], None]
TRACKERS = ("tensorboard", "wandb")


def open_tracker(name: str, folder: Path, config: dict[str, Any]) -> Log:
    if name == "tensorboard":
        require("tensorboard", "tracking with TensorBoard")
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(folder / "tensorboard"))

        def log(step: int, values: dict[str, float]) -> None:
            for key, value in values.items():
                writer.add_scalar(key, value, step)
            writer.flush()

        return log
    wandb = require("wandb", "tracking with Weights & Biases")
    run = wandb.init(project="replaylab", name=folder.name, dir=str(folder), config=config)
    return lambda step, values: run.log(values, step=step)


def open_trackers(names: Sequence[str], folder: Path, config: dict[str, Any]) -> Log:
    logs = [open_tracker(name, folder, config) for name in names]

    def log(step: int, values: dict[str, float]) -> None:
        for one in logs:
            one(step, values)

    return log
