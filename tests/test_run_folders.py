"""Run folders on a full disk, resumed when there is nothing left to do, and with damaged files."""

from __future__ import annotations

import json
import os
import shutil

import pytest
from conftest import make_episodes

import replaylab
from replaylab.cli import main
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


def test_data_is_summarised_once_also_where_it_is_compared(log, tmp_path, monkeypatch):
    made = []
    real = replaylab.data.inspect.boundary_warnings
    monkeypatch.setattr(replaylab.data.inspect, "boundary_warnings", lambda log: made.append(log) or real(log))
    replaylab.train("bc", log, out=tmp_path / "r", **SMALL)
    assert len(made) == 1
    replaylab.train("bc", log, out=tmp_path / "r", resume=True, **SMALL | {"steps": 40})
    assert len(made) == 2


# --- damaged files


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run with two checkpoints, and the command that resumes it."""
    folder = tmp_path_factory.mktemp("whole")
    replaylab.save(make_episodes(lengths=(20, 30), observation=3, action=1), folder / "log.npz")
    words = f"train bc --data {folder}/log.npz --batch-size 8 --hidden 8 --device cpu --env Pendulum-v1 --eval-every -1"
    words += " --final-episodes 1 --preset debug --resume"
    for steps in (20, 30):
        assert main([*words.split(), "--steps", str(steps), "--out", str(folder / "run")]) == 0
    return folder / "run", f"{words} --steps 30"


@pytest.fixture
def run(whole, tmp_path):
    return shutil.copytree(whole[0], tmp_path / "run")


GARBAGE = {
    "empty": b"",
    "cut": None,
    "bytes": b"\xff\xfe\x00{",
    "list": b"[1]",
    "nothing": b"{}",
    "deep": b"[" * 100_000,
}


def damage(path, how):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2] if GARBAGE[how] is None else GARBAGE[how])


@pytest.mark.parametrize("how", GARBAGE)
@pytest.mark.parametrize(
    ("file", "verbs"), [("config.yaml", "eval resume policy"), ("run.json", "eval policy"), ("state.json", "resume")]
)
def test_damaged_files_are_named_with_what_to_do(whole, run, capsys, file, verbs, how):
    for path in run.rglob(file):
        damage(path, how)
    for verb in verbs.split():
        if verb == "policy":
            with pytest.raises(DataError) as error:
                replaylab.load_policy(run)
            told = str(error.value)
        else:
            words = f"eval {run} --episodes 1 --device cpu" if verb == "eval" else f"{whole[1]} --out {run}"
            assert main(words.split()) == 1
            told = capsys.readouterr().err.splitlines()[-1]
        assert file in told and str(run) in told and ("--overwrite" in told or "--resume" in told)
    assert main(["report", str(run)]) in (0, 1) and "(--debug" not in capsys.readouterr().err


@pytest.mark.parametrize("how", GARBAGE)
@pytest.mark.parametrize("file", ["metrics.jsonl", "eval.jsonl"])
def test_damaged_lines_are_left_out(whole, run, file, how):
    kept = RunFolder(run).lines(file)
    with open(run / file, "ab") as lines:
        lines.write(GARBAGE[how] if how != "cut" else b'{"step": 30, "se')
    assert main(["report", str(run)]) == 0
    assert main(f"eval {run} --episodes 1 --device cpu".split()) == 0  # its line does not continue a damaged one
    lines = [line for line in RunFolder(run).lines(file) if line]
    assert lines[: len(kept)] == kept and len(lines) == len(kept) + (file == "eval.jsonl")
    assert main([*whole[1].split(), "--out", str(run)]) == 0
    assert RunFolder(run).lines(file) == lines


def test_a_damaged_checkpoint_is_not_the_last_and_other_folders_are_none(whole, run, capsys):
    (run / "checkpoints" / "step-abc").mkdir()
    damage(run / "checkpoints" / "step-30" / "state.json", "cut")
    assert [path.name for path in RunFolder(run).checkpoints()] == ["step-20", "step-30"]
    assert main([*whole[1].split(), "--out", str(run)]) == 0
    assert "going on from step-20, as step-30 is not readable (state.json is not JSON" in capsys.readouterr().err


def test_an_evaluation_names_the_weights_it_took(run, capsys):
    damage(run / "checkpoints" / "step-30" / "weights.safetensors", "cut")
    assert [record["step"] for record in replaylab.evaluate(run, episodes=1)] == [20]
    assert "the weights of step-20" in capsys.readouterr().err


def test_a_record_without_what_is_needed_is_damaged(whole, run, capsys):
    info = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(info | {"data": {"steps": 50}, "spaces": 3}))
    for words, what in ((f"eval {run}", "spaces"), (f"{whole[1]} --out {run}", "data")):
        assert main(words.split()) == 1
        assert f"run.json does not tell the run's {what}: delete it" in capsys.readouterr().err
    (run / "run.json").unlink()
    for state in run.rglob("state.json"):
        state.write_text(json.dumps(json.loads(state.read_text()) | {"notes": ["said"], "findings": {"clone": 1}}))
    assert main(f"eval {run}".split()) == 1
    assert "run.json cannot be read (No such file or directory): train on with --resume" in capsys.readouterr().err
    assert main([*whole[1].split(), "--out", str(run)]) == 0
    found = RunFolder(run).info()
    assert (found["notes"], found["findings"], found["planned"]) == (["said"], {"clone": 1}, 30)
    assert main(f"eval {run} --episodes 1 --device cpu".split()) == 0
