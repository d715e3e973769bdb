"""How busy the GPUs are during a sweep: whoever sets `per_device` wants to know."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

EVERY = 1  # seconds


def physical(device: str) -> str:
    """The driver's name of a device: cuda:0 is the first that CUDA_VISIBLE_DEVICES lists."""
    index = device.partition(":")[2] or "0"
    visible = [v for v in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if v]
    return visible[int(index)] if visible else index


class Busy:
    """Asks nvidia-smi while it is open, and writes what it says to a file: in how much of the last moment, in per cent,
    any kernel ran, a line a GPU. Without a GPU, or without nvidia-smi, it knows nothing."""

    def __init__(self, path: Path, devices: Iterable[str]):
        self.path = path
        self.asked = ",".join(physical(device) for device in devices if device.startswith("cuda"))
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Busy:
        if self.asked and shutil.which("nvidia-smi"):
            asks = ["nvidia-smi", "-i", self.asked, "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
            with open(self.path, "wb") as file:
                self.process = subprocess.Popen([*asks, "-l", str(EVERY)], stdout=file, stderr=subprocess.DEVNULL)
        return self

    def __exit__(self, *error: Any) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait()

    def share(self) -> float | None:
        """Per cent, the mean over time and GPUs."""
        said = self.path.read_text().split() if self.process is not None else []
        found = [float(word) for word in said if word.isdecimal()]
        return float(np.mean(found)) if found else None
