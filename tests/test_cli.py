"""The command line as a user types it, in this process and out of it."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from conftest import make_episodes

import replaylab
from replaylab.bench import bench
from replaylab.bench.common import seconds_per_call
from replaylab.cli import main
from replaylab.cli.parser import Parser
from replaylab.data.write import save
from replaylab.offpolicy import Budget
from replaylab.run import RunFolder, command_line


@pytest.fixture
def log(tmp_path):
    save(make_episodes(lengths=(40, 30, 50)), tmp_path / "log.npz")
    return str(tmp_path / "log.npz")


def run(capsys, *words):
    code = main(list(words))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_info_as_json(log, capsys):
    code, out, _ = run(capsys, "data", "info", log, "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["steps"], found["episodes"], found["terminated"], found["truncated"]) == (120, 3, 2, 1)
    assert {"mean", "std", "min", "max"} <= found["return"].keys() and isinstance(found["warnings"], list)


def test_info_plot_convert(log, tmp_path, capsys):
    assert run(capsys, "data", "info", log)[0] == 0
    assert run(capsys, "data", "plot", log, "--out", str(tmp_path / "p.html"))[0] == 0
    assert "<svg" in (tmp_path / "p.html").read_text()
    for target in ("a.hdf5", "b-v0", "c"):
        words = ["--to", "minari"] if target == "b-v0" else []
        code, out, err = run(capsys, "data", "convert", log, str(tmp_path / target), *words)
        assert code == 0 and "120 steps, 3 episodes" in out, err
        assert json.loads(run(capsys, "data", "info", str(tmp_path / target), "--json")[1])["steps"] == 120


def test_train_eval_report(log, tmp_path, capsys):
    out = str(tmp_path / "run")
    code, text, err = run(capsys, "train", "bc", "--data", log, "--preset", "debug", "--seeds", "3", "4", "--out", out)
    assert code == 0 and "run folder" in text, err
    assert run(capsys, "report", out, "--out", str(tmp_path / "r.html"))[0] == 0
    rows = json.loads(run(capsys, "report", out, "--json")[1])
    assert rows[0]["system"] == "bc"
    code, _, err = run(capsys, "eval", out, "--noise-rate", "0.5")
    assert code == 2 and "--noise-rate needs --noise-action" in err
    code, _, err = run(capsys, "eval", out)
    assert code == 2 and "name one with --env" in err
    code, _, err = run(capsys, "eval", out, "--env", "d4rl/hopper")
    assert code == 2 and "shows (11,), the data has observations of (4,)" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["train", "bc", "--data", "x", "--batch-sise", "3"],
            "unknown option --batch-sise; did you mean '--batch-size'?",
        ),
        (["train", "bcc", "--data", "x"], "bcc"),
        (["train", "bc"], "--data"),
        (["data", "inf", "x"], "inf"),
        (["train", "bc", "--data", "sample", "--preset", "debgu"], "did you mean 'debug'"),
        (["train", "bc", "--data", "sample", "--env", "d4rl/hoper", "--preset", "debug"], "d4rl/hopper"),
        (["data", "collect", "hopper", "--level", "medum", "--out", "/nowhere/x"], "did you mean 'medium'"),
        (["data", "collect", "hoppper", "--out", "/nowhere/x"], "hopper"),
        (["bench", "bc-updat"], "did you mean 'bc-update'"),
        (["report", "/nowhere"], "/nowhere"),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *words)
    assert code == 2 and out == ""
    assert message in err and len(err.strip().splitlines()) == 1


def test_a_bad_file_is_one_line_and_code_1(tmp_path, capsys):
    (tmp_path / "x.npz").write_bytes(b"PK\x03\x04 not really")
    code, out, err = run(capsys, "data", "info", str(tmp_path / "x.npz"))
    assert code == 1 and out == "" and len(err.strip().splitlines()) == 1 and "x.npz" in err


def test_a_missing_extra_names_the_install(tmp_path, capsys, log):
    code, _, err = run(
        capsys, "train", "bc", "--data", log, "--preset", "debug", "--track", "wandb", "--out", str(tmp_path / "r")
    )
    assert code == 1 and "pip install 'replaylab[track]'" in err


def test_negative_powers_of_ten_are_numbers():
    parser = Parser()
    parser.add_argument("--target", type=float, nargs="+")
    assert parser.parse_args(["--target", "-1e3", "-.5", "-2"]).target == [-1000.0, -0.5, -2.0]


def test_a_command_can_be_typed_again(log, tmp_path, capsys, monkeypatch):
    place = tmp_path / "my runs"
    words = ["train", "bc", "--data", log, "--preset", "debug", "--steps", "2", "--out", str(place)]
    monkeypatch.setattr(sys, "argv", ["/usr/bin/replaylab", *words])
    assert run(capsys, *words)[0] == 0
    assert shlex.split(RunFolder(place).info()["command"]) == ["replaylab", *words]
    monkeypatch.setattr(sys, "argv", ["/x/replaylab/distributed.py", "bc", "--out", "my runs"])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert command_line() == "torchrun --nproc-per-node 4 -m replaylab.distributed bc --out 'my runs'"


def test_yaml_under_the_command_line(log, tmp_path, capsys):
    (tmp_path / "c.yaml").write_text("# mine\nlr: 0.01\nsteps: 20\n")
    words = [
        "train",
        "bc",
        "--data",
        log,
        "--config",
        str(tmp_path / "c.yaml"),
        "--steps",
        "30",
        "--out",
        str(tmp_path / "r"),
    ]
    assert run(capsys, *words)[0] == 0
    text = (tmp_path / "r" / "config.yaml").read_text()
    assert "lr: 0.01" in text and "steps: 30" in text
    (tmp_path / "c.yaml").write_text(f"data: {log}\nsteps: 20\n")
    assert run(capsys, "train", "bc", *words[4:6], "--seed", "3", "--out", str(tmp_path / "s"))[0] == 0
    text = (tmp_path / "s" / "config.yaml").read_text()
    assert log in text and yaml.safe_load(text)["seeds"] == [3]
    code, _, err = run(capsys, "train", "bc", "--steps", "20")
    assert code == 2 and "name them with --data" in err
    (tmp_path / "c.yaml").write_text("learning: 1\n")
    code, _, err = run(capsys, *words, "--overwrite")
    assert code == 2 and "unknown key 'learning'" in err
    for text, told in (("preset: [debug]", "unknown preset"), ("data_options: 3", "data_options must be names")):
        (tmp_path / "c.yaml").write_text(f"data: {log}\n{text}\n")
        code, _, err = run(capsys, "train", "bc", *words[4:6], "--out", str(tmp_path / "t"))
        assert code == 2 and told in err


def test_a_run_s_own_settings_train_it_again(log, tmp_path, capsys):
    words = ["train", "bc", "--device", "cpu"]
    assert run(capsys, *words, "--data", log, "--preset", "debug", "--steps", "3", "--out", str(tmp_path / "a"))[0] == 0
    again = [*words, "--config", str(tmp_path / "a" / "config.yaml"), "--out", str(tmp_path / "b")]
    assert run(capsys, *again)[0] == 0
    assert RunFolder(tmp_path / "a").config() == RunFolder(tmp_path / "b").config()
    code, _, err = run(capsys, "train", "bcq", *again[2:])
    assert code == 2 and "is not of bcq" in err
    (tmp_path / "c.yaml").write_text(f"data: {log}\npreset: debug\nsteps: 2\n")
    assert run(capsys, *words, "--config", str(tmp_path / "c.yaml"), "--out", str(tmp_path / "c"))[0] == 0
    assert RunFolder(tmp_path / "c").config()["preset"] == "debug"
    (tmp_path / "c.yaml").write_text("preset: debugg\n")
    code, _, err = run(capsys, *words, "--config", str(tmp_path / "c.yaml"))
    assert code == 2 and "unknown preset 'debugg'; did you mean 'debug'" in err


def test_a_peer_is_timed_by_itself(capsys):
    code, _, err = run(capsys, "bench", "bc-update", "--against", "sb3")
    assert code == 2 and "name no cases beside it" in err


def test_help_names_every_default():
    done = subprocess.run([sys.executable, "-m", "replaylab", "train", "bc", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "(default: 256 256)" in done.stdout and "--top-fraction" in done.stdout


def test_ctrl_c_while_torch_is_imported_is_one_line(tmp_path):
    root = Path(__file__).parent.parent
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    module, function = project["scripts"]["replaylab"].split(":")
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
    path = f"import sys; sys.path.insert(0, {str(tmp_path)!r})"
    script = f"{path}; from {module} import {function}; sys.exit({function}())"
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "replaylab: stopped\n")


def test_a_damaged_file_leaves_nothing(tmp_path, capsys, log):
    (tmp_path / "cut.npz").write_bytes(Path(log).read_bytes()[:-200])
    before = sorted(p.name for p in tmp_path.iterdir())
    assert run(capsys, "data", "convert", str(tmp_path / "cut.npz"), str(tmp_path / "out.hdf5"))[0] == 1
    assert run(capsys, "train", "bc", "--data", str(tmp_path / "cut.npz"), "--out", str(tmp_path / "r"))[0] == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_nan_in_the_data_stops_training_in_one_line(tmp_path, capsys):
    log = make_episodes()
    log.observations[2, 1] = np.nan
    save(log, tmp_path / "nan.npz")
    code, out, _ = run(capsys, "data", "info", str(tmp_path / "nan.npz"), "--json")
    assert code == 0 and any("NaN" in w for w in json.loads(out)["warnings"])
    code, _, err = run(capsys, "train", "bc", "--data", str(tmp_path / "nan.npz"), "--out", str(tmp_path / "r"))
    assert code == 1 and "observations holds NaN" in err


def test_assess_and_play_by_the_command_line(tmp_path, capsys, monkeypatch):
    log = make_episodes(lengths=(30, 30, 30, 30))
    path = replaylab.train("bc", log, out=tmp_path / "r", preset="debug", steps=20, device="cpu")
    data = save(log, tmp_path / "log.npz")
    monkeypatch.setattr("replaylab.offpolicy.QUICK", Budget(2000, 30, (16, 16), 50))
    code, out, _ = run(capsys, "assess", str(path), "--data", str(data), "--quick", "--device", "cpu")
    assert code == 0 and "data: discounted return" in out and (path / "offpolicy.json").exists()
    code, out, _ = run(capsys, "assess", str(path), "--data", str(data), "--quick", "--device", "cpu", "--json")
    assert code == 0 and json.loads(out) == json.loads((path / "offpolicy.json").read_text())
    code, _, err = run(capsys, "assess", str(path), "--max-episode-steps", "5")
    assert code == 2 and "read as it was for training: name a log with --data" in err
    asked = []
    monkeypatch.setattr("replaylab.play.play", lambda *given: asked.append(given))
    assert run(capsys, "play", str(path), "--port", "8123")[0] == 0 and asked == [(str(path), 8123, "auto")]


def test_an_option_that_is_given_twice_is_joined(tmp_path, capsys):
    parts = [str(save(make_episodes(seed=i), tmp_path / f"{i}.npz")) for i in range(2)]
    words = ["--data", parts[0], "--data", parts[1], "--preset", "debug", "--device", "cpu", "--out"]
    assert run(capsys, "train", "bc", *words, str(tmp_path / "r"))[0] == 0
    assert RunFolder(tmp_path / "r").config()["data"] == parts


def test_what_cannot_be_assessed_is_trained_and_reported(tmp_path, capsys):
    log, folder = tmp_path / "log.csv", tmp_path / "r"
    log.write_text("\n".join(["trip,x,a,gain", *(f"{i},{i % 7},{i % 3 - 0.5},{i % 2}" for i in range(60))]))
    words = ["--columns", "observations=x", "actions=a", "rewards=gain", "episode=trip", "--steps", "3"]
    code, out, err = run(capsys, "train", "bc", "--data", str(log), *words, "--device", "cpu", "--out", str(folder))
    assert code == 0 and "not assessed: too few rows say what followed" in out, err
    assert (folder / "report.html").exists()


def test_a_log_to_assess_by_is_read_as_the_runs_own(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("replaylab.offpolicy.QUICK", Budget(2000, 30, (16, 16), 50))
    rows = [f"{i // 10},{i % 7},{i % 3 - 0.5},{i % 2}" for i in range(60)]
    log, folder = tmp_path / "my log.csv", str(tmp_path / "a run")
    log.write_text("\n".join(["trip,x,a,gain", *rows]))
    told = ["--columns", "observations=x", "actions=a", "rewards=gain", "episode=trip"]
    code, out, err = run(capsys, "train", "bc", "--data", str(log), *told, "--preset", "debug", "--out", folder)
    assert code == 0 and f"replaylab assess '{folder}'\n" in out, err  # to be pasted
    assert run(capsys, "assess", folder, "--quick", "--data", str(log))[0] == 0
    code, _, err = run(capsys, "assess", folder, "--quick", "--data", str(log), "--columns", "observations=y")
    assert code == 1 and "y" in err


def test_a_bench_that_is_stopped_keeps_what_it_measured(tmp_path, monkeypatch):
    def case(device):
        yield "first", 1.0, "ms"
        raise KeyboardInterrupt

    monkeypatch.setattr("replaylab.bench.all_cases", lambda: {"made-up": case})
    with pytest.raises(KeyboardInterrupt):
        bench(json_path=str(tmp_path / "b.json"), device="cpu")
    assert [row["what"] for row in json.loads((tmp_path / "b.json").read_text())["rows"]] == ["first"]
    with pytest.raises(FileNotFoundError):  # before anything is timed
        bench(json_path=str(tmp_path / "nowhere" / "b.json"), device="cpu")


def test_a_bench_leaves_no_lock_that_another_user_could_not_open(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    seconds_per_call(lambda: None, torch.device("cpu"), 1)
    assert not list(tmp_path.iterdir())


def test_work_goes_on_when_nobody_reads_what_it_says(log, tmp_path, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    train = ["train", "bc", "--data", log, "--preset", "debug", "--out", str(tmp_path / "run"), "--overwrite"]
    with open(writer, "w", buffering=1) as deaf:
        for stream in (deaf, None):  # a pipe without a reader; closed from the start
            monkeypatch.setattr(sys, "stderr", stream)
            assert main(["data", "info", str(tmp_path / "nothing.npz")]) == 1
            assert main(train) == 0
