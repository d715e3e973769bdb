"""Run folders on a full disk, resumed when there is nothing left to do, and with damaged files."""

from __future__ import annotations

import os

import pytest
from conftest import make_episodes

import replaylab
from replaylab.errors import DataError
from replaylab.run import RunFolder

SMALL = {"steps": 30, "batch_size": 32, "hidden": [8], "device": "cpu"}


@pytest.fixture
def log():
    return make_episodes(lengths=(50, 30, 40))


@pytest.mark.parametrize("refused", ["save_tensors", "Path.mkdir"])
def test_a_disk_that_is_full_before_the_first_checkpoint(log, tmp_path, monkeypatch, refused):
    def full(path, *args, **given):
        if "step-30.part" in str(path):
            raise OSError(28, "No space left on device")
        os.makedirs(path, exist_ok=True)

    monkeypatch.setattr(f"replaylab.run.{refused}", full)
    with pytest.raises(DataError, match=r"step-30: .*No space left on device; no checkpoint was made before"):
        replaylab.train("bc", log, out=tmp_path / "r", **SMALL)


def test_resuming_a_finished_run_leaves_its_record(log, tmp_path):
    run = replaylab.train("bc", log, out=tmp_path / "r", **SMALL)
    RunFolder(run).write_info(seconds=1e6, started="long ago", command="as it was")
    kept = {name: (run / name).read_text() for name in ("run.json", "config.yaml", "metrics.jsonl")}
    replaylab.train("bc", log, out=run, resume=True, checkpoint_minutes=5.0, **SMALL)
    assert kept == {name: (run / name).read_text() for name in kept}
    replaylab.train("bc", log, out=run, resume=True, **SMALL | {"steps": 40})  # there is something left to do
    info = RunFolder(run).info()
    assert info["status"] == "finished" and info["planned"] == 40 and info["started"] != "long ago"
