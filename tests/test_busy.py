"""How busy the GPUs are during a sweep, asked of a made-up nvidia-smi."""

from __future__ import annotations

import os
import time

from replaylab.sweep.busy import Busy, physical

SMI = """#!/bin/sh
echo "$@" > asked
while true; do echo 90; echo '[N/A]'; echo 50; sleep 0.02; done
"""


def test_the_mean_over_time_and_gpus(tmp_path, monkeypatch):
    (tmp_path / "nvidia-smi").write_text(SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-8f")
    with Busy(tmp_path / "gpu.txt", ["cuda:0", "cuda:1"]) as busy:
        until = time.monotonic() + 20
        while (tmp_path / "gpu.txt").stat().st_size < 200 and time.monotonic() < until:
            time.sleep(0.01)
    assert busy.process.poll() is not None and 65 < busy.share() < 75
    asked = (tmp_path / "asked").read_text()
    assert "-i 3,GPU-8f --query-gpu=utilization.gpu" in asked and asked.endswith("-l 1\n")
    with Busy(tmp_path / "none.txt", ["cpu"]) as busy:
        pass
    assert busy.share() is None and not (tmp_path / "none.txt").exists()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with Busy(tmp_path / "none.txt", ["cuda"]) as busy:
        pass
    assert busy.share() is None


def test_the_driver_s_name_of_a_device(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [physical(d) for d in ("cuda", "cuda:0", "cuda:2")] == ["0", "0", "2"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert [physical(d) for d in ("cuda", "cuda:1")] == ["5", "7"]
