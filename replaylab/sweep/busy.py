"""Measures how busy the GPUs are during a sweep, which helps to choose `per_device`."""

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
    """The driver's name for a device: cuda:0 is the first that CUDA_VISIBLE_DEVICES lists."""
    index = device.partition(":")[2] or "0"
    visible = [v for v in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if v]
    return visible[int(index)] if visible else index


class Busy:
    """Runs nvidia-smi in the background, which writes the utilisation of each GPU to a file every second: the per cent
    of the time in which any kernel ran. Without a GPU or nvidia-smi, nothing is measured."""

    def __init__(self, path: Path, devices: Iterable[str]):
        self.path = path
        self.asked = ",".join(physical(device) for device in devices if device.startswith("cuda"))
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Busy:
        if self.asked and shutil.which("nvidia-smi"):
            query = ["nvidia-smi", "-i", self.asked, "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
            with open(self.path, "wb") as file:
                self.process = subprocess.Popen([*query, "-l", str(EVERY)], stdout=file, stderr=subprocess.DEVNULL)
        return self

    def __exit__(self, *error: Any) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait()

    def share(self) -> float | None:
        """The mean over time and GPUs in per cent, None if nothing was measured."""
        words = self.path.read_text().split() if self.process is not None else []
        found = [float(word) for word in words if word.isdecimal()]
        return float(np.mean(found)) if found else None
