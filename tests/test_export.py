"""Exported policies answer like those of the runs, in PyTorch and in ONNX Runtime, and need nothing of ours."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import zipfile
from functools import partial
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from conftest import make_episodes

import replaylab
from replaylab.cli import main
from replaylab.data.episodes import from_rows
from replaylab.errors import DataError, MissingExtra, UsageError

ONNX = pytest.mark.skipif(find_spec("onnxscript") is None or find_spec("onnxruntime") is None, reason="takes ONNX")
BOTH = pytest.mark.parametrize("suffix", ["pt2", pytest.param("onnx", marks=ONNX)])
IMAGINE = {"steps": 4, "max_epochs": 1, "rollout_batch": 20, "dynamics_hidden": [16], "hidden": [16]}
SMALL = {
    "bc": {"steps": 4},
    "bcq": {"steps": 4, "hidden": [16], "vae_hidden": [16], "act_samples": 3},
    "mopo": IMAGINE,
    "gormpo": IMAGINE | {"density_steps": 4},
    "dt": {"steps": 4, "width": 16, "context": 4, "target": 5.0, "rtg_scale": 1.0},
    "diffusion-dice": {"behavior_steps": 2, "critic_steps": 2, "returns_steps": 2, "candidates": 4, "solver_steps": 3},
}
DREAM = {
    "epochs": 1, "random_steps": 32, "collect_steps": 32, "world_steps": 2, "world_first": 1, "world_batch": 2,
    "rollout": 4, "reward_steps": 2, "agents": 4, "hidden": 8, "ppo_updates": 1,
}  # fmt: skip


def trained(system, log, out, seeds=(3, 4), **settings):
    settings = SMALL.get(system, {}) | {"final_episodes": 0, "eval_every": -1} | settings
    return replaylab.train(system, log, preset="debug", seeds=list(seeds), device="cpu", out=out, **settings)


def frames(rows=24):
    rng = np.random.default_rng(0)
    seen = rng.integers(0, 255, (rows, 4, 84, 84), dtype=np.uint8)
    return from_rows(seen, rng.integers(0, 3, rows), rng.normal(size=rows), truncated=np.arange(rows) % 12 == 11)


def played(path):
    """The file as a function of arrays."""
    if path.suffix == ".pt2":
        policy = torch.export.load(path).module()

        def play(*given):
            found = policy(*map(torch.from_numpy, given))
            return [x.numpy() for x in (found if isinstance(found, tuple) else [found])]

        return play
    import onnxruntime

    onnxruntime.set_seed(0)
    session = onnxruntime.InferenceSession(path)
    names = [entry.name for entry in session.get_inputs()]
    return lambda *given: session.run(None, dict(zip(names, given, strict=True)))


@BOTH
@pytest.mark.parametrize("system", ["bc", "bcq", "mopo", "gormpo"])
def test_it_answers_like_the_run(system, suffix, tmp_path):
    log = make_episodes((10,) * 10)
    run = trained(system, log, tmp_path / "run")
    play = played(replaylab.export(run, tmp_path / f"p.{suffix}", seed=4))
    for rows in (log.observations[:7], log.observations[:1]):  # any number of them
        expected = replaylab.load_policy(run, seed=4).act(rows)
        np.testing.assert_allclose(play(rows)[0], expected, atol=1e-5)
    assert np.abs(expected - replaylab.load_policy(run, seed=3).act(rows)).max() > 1e-3  # the other seed's


@BOTH
def test_choices_are_whole_numbers(suffix, tmp_path):
    log = make_episodes((30, 30), discrete=True)
    run = trained("bc", log, tmp_path / "run", steps=50)
    (found,) = played(replaylab.export(run, tmp_path / f"p.{suffix}"))(log.observations)
    assert found.dtype == np.int64 and set(found) == {0, 1}
    assert np.array_equal(found, replaylab.load_policy(run).act(log.observations))


@pytest.mark.parametrize(
    "kind, suffix",
    [
        ("vectors", "pt2"),
        ("clone", "pt2"),
        ("choices", "pt2"),
        ("frames", "pt2"),
        *(pytest.param(kind, "onnx", marks=ONNX) for kind in ("vectors", "frames")),
    ],
)
def test_a_memory_goes_in_and_comes_out(kind, suffix, tmp_path):
    """For more steps than it remembers; in between one of two environments begins a new episode."""
    log = frames() if kind == "frames" else make_episodes((30, 30), discrete=kind == "choices")
    settings = {"condition": "none", "target": None} if kind == "clone" else {}
    run = trained("dt", log, tmp_path / "run", **settings)
    target = {} if kind == "clone" else {"target": 2.0}
    path = replaylab.export(run, tmp_path / f"p.{suffix}", **target)
    play, policy = played(path), replaylab.load_policy(run, **target)
    memory, rewards = None, np.zeros(2, np.float32)
    for step in range(7):
        seen = log.observations[step : step + 2]
        if step == 4:
            policy.reset(np.array([False, True]))
            memory[1] = 0
        expected = policy.act(seen, rewards)
        if memory is None:
            memory = np.zeros((2, policy.state.packed().shape[-1]), np.float32)
        actions, memory = play(seen, rewards, memory)
        np.testing.assert_allclose(actions, expected, atol=1e-5, err_msg=f"step {step}")
        rewards = np.array([0.5 * step, 1], np.float32)
    if kind == "frames":  # of floats: another scale
        with pytest.raises(Exception, match=r"uint8|Byte"):
            play(seen.astype(np.float32) / 255, rewards, memory)
    with pytest.raises(Exception, match=r"match|[Gg]uard"):  # one row is not repeated
        play(seen, rewards[:1], memory)
    if kind != "clone":
        np.testing.assert_allclose(memory[:, -2], policy.state.asked[0])  # what is left of the target


@BOTH
def test_policies_that_draw_draw_anew(suffix, tmp_path):
    log = make_episodes((30, 30))
    run = trained("diffusion-dice", log, tmp_path / "run", filter="softmax", temperature=10.0, behavior_steps=300)
    play = played(replaylab.export(run, tmp_path / f"p.{suffix}", seed=3, guidance=0.0))
    same = np.repeat(log.observations[:1], 3000, 0)
    first, second = play(same)[0], play(same)[0]
    assert (first != second).any(1).mean() > 0.9 and len(np.unique(first, axis=0)) > 1000
    ours = replaylab.load_policy(run, seed=3, guidance=0.0).act(same)
    error = ours.std(0) / np.sqrt(len(same))
    assert (np.abs(first.mean(0) - ours.mean(0)) < 5 * error).all()
    np.testing.assert_allclose(first.std(0), ours.std(0), rtol=0.2)


@BOTH
def test_an_atari_policy(suffix, tmp_path):
    pytest.importorskip("ale_py")
    run = replaylab.train("mbarc", env="atari/freeway", preset="debug", out=tmp_path / "run", final_episodes=0, **DREAM)
    rng = np.random.default_rng(0)
    seen = np.repeat(rng.integers(0, 128, (1, 4, 105, 80), dtype=np.uint8), 500, 0)
    drawn = played(replaylab.export(run, tmp_path / f"d.{suffix}"))
    likeliest = played(replaylab.export(run, tmp_path / f"l.{suffix}", eval_temperature=0.0))
    assert len(set(drawn(seen)[0])) == 3
    with pytest.raises(Exception, match=r"uint8|Byte"):  # of floats
        drawn(seen[:2].astype(np.float32))
    assert set(likeliest(seen)[0]) == set(replaylab.load_policy(run, eval_temperature=0.0).act(seen))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained("mopo", make_episodes((30, 30)), tmp_path_factory.mktemp("m") / "run")


def test_the_file_needs_no_replaylab_and_says_what_it_is(run):
    path = replaylab.export(run)
    assert path == run / "policy.pt2"
    program = f"""if True:
        import json, sys, torch
        extra = {{"about.json": ""}}
        policy = torch.export.load({str(path)!r}, extra_files=extra).module()
        print(json.dumps([policy(torch.zeros(5, 4)).shape, json.loads(extra["about.json"])]))
        assert "replaylab" not in sys.modules"""
    shape, about = json.loads(
        subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, check=True).stdout
    )
    assert shape == [5, 2] and about["system"] == "mopo" and about["seed"] == 3 and about["memory"] == 0
    assert about["run"] == "run" and about["step"] == 5
    assert about["observation"] == [4] and len(about["actions"]["low"]) == 2


@BOTH
def test_nothing_tells_where_it_was_made(suffix, tmp_path):
    run = trained("bc", make_episodes((30, 30)), tmp_path / "run")
    file = replaylab.export(run, tmp_path / f"p.{suffix}").read_bytes()
    parts = [file]
    if suffix == "pt2":
        with zipfile.ZipFile(tmp_path / "p.pt2") as archive:
            parts = [archive.read(name) for name in archive.namelist()]
    assert not any(word in part for part in parts for word in (b"forward(self", b"export.py", b"bc.py"))


def test_how_it_acts_is_told(tmp_path):
    log = make_episodes((30, 30), discrete=True)
    run = trained("dt", log, tmp_path / "run", temperature=2.0)

    path = replaylab.export(run, target=np.float32(4), top_k=np.int64(1))
    about = {"about.json": ""}
    torch.export.load(path, extra_files=about)
    assert json.loads(about["about.json"])["acting"] == {"temperature": 2.0, "top_k": 1, "target": 4.0}


def test_weights_of_training_stay_behind(run):
    held = torch.export.load(replaylab.export(run)).state_dict
    assert held and all(
        name.startswith(("agent.sac.actor.", "agent.sac.center", "agent.sac.scale", "agent.normalizer."))
        for name in held
    ), list(held)


@ONNX
def test_onnx_files_say_what_they_are(run, tmp_path):
    import onnxruntime

    session = onnxruntime.InferenceSession(replaylab.export(run, tmp_path / "p.onnx"))
    about = session.get_modelmeta().custom_metadata_map
    assert json.loads(about["system"]) == "mopo" and json.loads(about["observation"]) == [4]
    assert [entry.name for entry in session.get_inputs()] == ["observations"]
    assert [entry.name for entry in session.get_outputs()] == ["actions"]


def test_a_file_that_answers_otherwise_is_not_written(run, tmp_path, monkeypatch):
    module = importlib.import_module("replaylab.export")  # `replaylab.export` is the function
    whole = module._pt2

    def off(by, *given):
        content, play = whole(*given)
        return content, lambda *seen: [play(*seen)[0] + by]

    monkeypatch.setattr(module, "_pt2", partial(off, np.float32(0.01)))
    with pytest.raises(DataError, match="100% of the time unlike the run"):
        replaylab.export(run, tmp_path / "p.pt2")
    assert not list(tmp_path.iterdir())


def test_a_policy_of_nan_is_not_written(run, tmp_path, monkeypatch):
    module = importlib.import_module("replaylab.export")
    policy = replaylab.load_policy(run)
    policy.agent.sac.center.fill_(np.nan)
    monkeypatch.setattr(module, "load_policy", lambda *args, **given: policy)
    with pytest.raises(DataError, match="the policy answers with NaN or infinity"):
        replaylab.export(run, tmp_path / "p.pt2")
    (tmp_path / "d.pt2").mkdir()
    with pytest.raises(UsageError, match="is a folder: name a file"):
        replaylab.export(run, tmp_path / "d.pt2")


def test_on_the_command_line(run, tmp_path, capsys):
    assert main(["export", str(run), "--out", str(tmp_path / "p.pt2"), "--seed", "4"]) == 0
    assert capsys.readouterr().out == f"wrote {tmp_path / 'p.pt2'}\n"


def test_what_onnx_takes_is_said(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingExtra, match=r"needs onnxruntime: pip install 'replaylab\[onnx\]'"):
        replaylab.export(run, tmp_path / "p.onnx")


@pytest.mark.parametrize(
    "given, message",
    [
        ({"out": 1}, "a file named by its path, not int"),
        ({"out": "."}, "ends in .pt2 or .onnx"),
        ({"out": "p.pth"}, "ends in .pt2 or .onnx, not to p.pth"),
        ({"out": "nowhere/p.pt2"}, "there is no folder nowhere"),
        ({"seed": 7}, "has no seed 7; it has 3, 4"),
        ({"target": 3.0}, "takes no target return"),
        ({"candidates": 3}, "does not act by 'candidates'"),
    ],
)
def test_what_cannot_be_exported_is_said(run, given, message):
    with pytest.raises(UsageError, match=message):
        replaylab.export(run, **given)
