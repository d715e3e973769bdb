from __future__ import annotations

import gc
import os
import signal
import sys
from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import make_episodes

import replaylab
from replaylab import trainer
from replaylab.algos import Spaces, bc
from replaylab.errors import DataError, MissingExtra, ReplaylabError, UsageError
from replaylab.run import RunFolder
from replaylab.step import WARM_UP, Graph, Stepper

SMALL = {"steps": 300, "batch_size": 32, "hidden": [32], "device": "cpu"}


def weights(run):
    return RunFolder(run).weights()


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.fixture
def log():
    return make_episodes(lengths=(50, 30, 40))


def test_it_learns_what_is_there_to_learn(log, tmp_path):
    run = replaylab.train("bc", log, out=tmp_path / "r", **SMALL | {"steps": 2000, "lr": 3e-3})
    policy = replaylab.load_policy(run)
    assert np.abs(policy.act(log.observations) - log.actions).mean() < 0.05
    lines = RunFolder(run).lines("metrics.jsonl")
    assert lines[-1]["step"] == 2000 and lines[-1]["loss"] < lines[0]["loss"] / 10
    assert RunFolder(run).info()["status"] == "finished"
    np.testing.assert_allclose(policy.act(log.observations[0]), policy.act(log.observations[:1])[0], rtol=1e-5)
    with pytest.raises(UsageError, match="NaN or infinity"):
        policy.act(np.full_like(log.observations[0], np.nan))


def test_the_learning_rate_falls_along_a_cosine(log):
    agent = bc.Agent(bc.Config(steps=100, lr=0.2, hidden=[4]), Spaces.of(log), [0], torch.device("cpu"))
    stepper = Stepper(agent.phases(log)[0], torch.device("cpu"))
    rates = []
    for step in range(100):
        stepper.run(step, 1)
        rates.append(float(agent.optimizers["policy"].param_groups[0]["lr"]))
    np.testing.assert_allclose(rates, 0.1 * (1 + np.cos(np.pi * np.arange(100) / 100)), rtol=1e-4, atol=1e-7)


def test_discrete_actions(tmp_path):
    log = make_episodes(lengths=(60, 60), discrete=True)
    run = replaylab.train("bc", log, out=tmp_path / "r", **SMALL | {"steps": 1500, "lr": 3e-3})
    assert (replaylab.load_policy(run).act(log.observations) == log.actions).mean() > 0.97


def test_top_fraction_clones_the_best_episode_only(tmp_path):
    log = make_episodes(lengths=(50, 50))
    best = int(log.returns.argmax())
    rows = slice(log.offsets[best], log.offsets[best + 1])
    log.actions[:] = -0.9
    log.actions[rows] = 0.9
    run = replaylab.train("bc", log, out=tmp_path / "r", top_fraction=0.5, **SMALL | {"lr": 1e-2})
    assert (replaylab.load_policy(run).act(log.observations) > 0).all()


def test_twice_the_same_and_other_seeds_differ(log, tmp_path):
    for name in "ab":
        replaylab.train("bc", log, out=tmp_path / name, seeds=[0, 1], **SMALL)
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))
    stacked = weights(tmp_path / "a")["policy.layers.0.weight"]
    assert not torch.equal(stacked[0], stacked[1])


def test_a_seed_does_not_depend_on_its_neighbours(log, tmp_path):
    replaylab.train("bc", log, out=tmp_path / "many", seeds=[3, 4, 5], **SMALL)
    replaylab.train("bc", log, out=tmp_path / "one", seeds=[4], **SMALL)
    many, one = replaylab.load_policy(tmp_path / "many", seed=4), replaylab.load_policy(tmp_path / "one")
    np.testing.assert_allclose(many.act(log.observations), one.act(log.observations), atol=1e-4)
    with pytest.raises(UsageError, match="has no seed 9"):
        replaylab.load_policy(tmp_path / "many", seed=9)


def test_half_and_resume_is_the_whole(log, tmp_path):
    """Train N, resume to 2N = train 2N: weights, optimiser and metric lines."""
    same_for_all = SMALL | {"seeds": [0, 1], "log_every": 70, "lr_decay": False}  # a schedule depends on the total
    replaylab.train("bc", log, out=tmp_path / "whole", **same_for_all)
    replaylab.train("bc", log, out=tmp_path / "half", **same_for_all | {"steps": 130})
    replaylab.train("bc", log, out=tmp_path / "half", resume=True, **same_for_all)
    whole, half = (RunFolder(tmp_path / name).load() for name in ("whole", "half"))
    assert same(whole[0], half[0]) and same(whole[1], half[1])
    last = [RunFolder(tmp_path / name).lines("metrics.jsonl")[-1]["loss"] for name in ("whole", "half")]
    assert last[0] == last[1]


def test_killed_in_its_last_evaluation_only_that_is_left(log, tmp_path, monkeypatch):
    settings = SMALL | {"steps": 30, "eval_every": -1, "final_episodes": 2}
    monkeypatch.setattr(trainer, "WORTH", 0.0)
    monkeypatch.setattr(trainer.Trainer, "_evaluate", lambda *_: exit(9))
    with pytest.raises(SystemExit):
        replaylab.train("bc", log, out=tmp_path / "r", **settings)
    played, trained = [], []
    monkeypatch.setattr(trainer.Trainer, "_evaluate", lambda self, episodes: played.append(episodes))
    monkeypatch.setattr(Stepper, "run", lambda *_: trained.append(1))
    replaylab.train("bc", log, out=tmp_path / "r", resume=True, **settings)
    assert played == [2] and trained == [] and RunFolder(tmp_path / "r").info()["status"] == "finished"


def test_resume_refuses_other_settings_and_fresh_runs_refuse_old_folders(log, tmp_path):
    replaylab.train("bc", log, out=tmp_path / "r", **SMALL)
    with pytest.raises(UsageError, match="batch_size was 32, now 64"):
        replaylab.train("bc", log, out=tmp_path / "r", resume=True, **SMALL | {"batch_size": 64})
    with pytest.raises(UsageError, match="--resume, --overwrite"):
        replaylab.train("bc", log, out=tmp_path / "r", **SMALL)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("dear")
    with pytest.raises(UsageError, match="not a run folder"):
        replaylab.train("bc", log, out=tmp_path / "other", overwrite=True, **SMALL)
    assert (tmp_path / "other" / "thesis.tex").read_text() == "dear"
    with pytest.raises(UsageError, match=f"did you mean '{tmp_path / 'r'}'"):
        replaylab.evaluate(tmp_path / "rr", "d4rl/hopper")


def test_resume_refuses_fewer_steps_and_other_data(log, tmp_path):
    run = replaylab.train("bc", log, out=tmp_path / "r", **SMALL)
    stored = (run / "config.yaml").read_text()
    with pytest.raises(UsageError, match="300 updates of clone are done, 100 were asked for"):
        replaylab.train("bc", log, out=run, resume=True, **SMALL | {"steps": 100})
    with pytest.raises(
        UsageError, match=r"with other data: it had 120 rows in 3 episodes .*, now 80 rows in 2 episodes"
    ):
        replaylab.train("bc", make_episodes(lengths=(50, 30)), out=run, resume=True, **SMALL)
    with pytest.raises(UsageError, match="with other data"):
        other = replace(log, rewards=log.rewards + 1)
        replaylab.train("bc", other, out=run, resume=True, **SMALL)
    swapped = replace(log, observations=log.observations[:, ::-1])  # the returns are the same
    for what, other in (
        ("observation", swapped),
        (
            "observation",
            replace(log, observations=log.observations[:, :3], final_observations=log.final_observations[:, :3]),
        ),
        ("action", replace(log, actions=-log.actions)),
        (
            "terminated",
            replace(log, terminated=np.zeros_like(log.terminated), truncated=log.terminated | log.truncated),
        ),
    ):
        with pytest.raises(UsageError, match=f"with other data: as many rows, but another {what} column"):
            replaylab.train("bc", other, out=run, resume=True, **SMALL)
    with pytest.raises(UsageError, match="pass one of them"):
        replaylab.train("bc", log, out=run, resume=True, overwrite=True, **SMALL)
    assert (run / "config.yaml").read_text() == stored


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"steps": -5}, "steps must be at least 1"),
        ({"seeds": [-1]}, "seeds must be from 0 to 1e"),
        ({"hidden": [0]}, "hidden must be at least 1"),
        ({"lr": -1.0}, "lr must be above 0"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"log_every": -1}, "log_every must be at least 0"),
        ({"final_episodes": -1}, "final_episodes must be at least 0"),
    ],
)
def test_numbers_that_cannot_be_are_refused(log, tmp_path, given, told):
    with pytest.raises(UsageError, match=told):
        replaylab.train("bc", log, out=tmp_path / "r", **SMALL | given)
    assert not (tmp_path / "r").exists()


def test_what_is_refused_leaves_no_folder_and_a_file_is_no_folder(log, tmp_path):
    with pytest.raises(UsageError, match="10 episodes"):
        replaylab.train("gormpo", log, out=tmp_path / "r", preset="debug", device="cpu")
    assert not (tmp_path / "r").exists()
    (tmp_path / "f").write_text("")
    with pytest.raises(UsageError, match="a file is in the way"):
        replaylab.train("bc", log, out=tmp_path / "f", **SMALL)


def test_whole_numbers_that_are_no_choices_are_refused(log, tmp_path):
    many = make_episodes(lengths=(5,), discrete=True)
    many.actions[0] = 2_000_000_000
    with pytest.raises(DataError, match="up to 2,000,000,000, too many to be choices"):
        replaylab.train("bc", many, out=tmp_path / "r", **SMALL)


def test_a_wrong_environment_is_told_before_training(log, tmp_path, capsys):
    with pytest.raises(UsageError, match="shows \\(11,\\), the data has observations of \\(4,\\)"):
        replaylab.train("bc", log, env="d4rl/hopper", out=tmp_path / "r", **SMALL)
    assert not (tmp_path / "r").exists()
    log.meta["env_id"] = "NoSuchThing-v0"  # what the data says is only a hint
    replaylab.train("bc", log, out=tmp_path / "r", **SMALL)
    assert "nothing will be evaluated: unknown environment 'NoSuchThing-v0'" in capsys.readouterr().err


def test_unknown_names(log, tmp_path):
    with pytest.raises(UsageError, match="did you mean 'batch_size'"):
        replaylab.train("bc", log, out=tmp_path / "r", batch_sise=3)
    with pytest.raises(UsageError, match="unknown preset 'debg'; did you mean 'debug'"):
        replaylab.train("bc", log, out=tmp_path / "r", preset="debg")
    with pytest.raises(UsageError, match="unknown system 'bcc'; did you mean 'bc'"):
        replaylab.train("bcc", log, out=tmp_path / "r")


def test_compiled_equals_eager(log):
    """torch.compile changes rounding, nothing else."""
    found = []
    for mode in ("off", "on"):
        agent = bc.Agent(bc.Config(steps=20, hidden=[16], batch_size=16), Spaces.of(log), [0, 1], torch.device("cpu"))
        stepper = Stepper(agent.phases(log)[0], torch.device("cpu"), compile=mode)
        stepper.run(0, 20)
        found.append((stepper.read()["loss"], agent.state_dict()))
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-4)
    for name, value in found[0][1].items():
        torch.testing.assert_close(value, found[1][1][name], rtol=1e-3, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_captured_equals_eager(log):
    device, found = torch.device("cuda"), []
    for mode in ("off", "auto"):
        agent = bc.Agent(bc.Config(steps=50, hidden=[16], batch_size=16), Spaces.of(log), [0, 1], device)
        stepper = Stepper(agent.phases(log)[0], device, compile=mode)
        stepper.run(0, 50)
        found.append(agent.state_dict())
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=1e-4, atol=1e-6)


def test_the_collector_waits_for_a_capture(monkeypatch):
    """It may find an old graph; to destroy one breaks the capture of another."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Mock)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: nullcontext())
    seen = []
    step = Graph(lambda: seen.append(gc.isenabled()), torch.device("cuda"))
    step.warm = WARM_UP
    step()
    assert seen == [False]
    assert gc.isenabled()


def test_each_phase_gives_back_its_graph(log, tmp_path, monkeypatch):
    """MBARC has forty-five phases; their memory must not pile up."""
    holding, release = [], Stepper.release

    def noted(self):
        self.step.graph = "a graph"
        release(self)
        holding.append(self.step.graph)

    monkeypatch.setattr(Stepper, "release", noted)
    replaylab.train("mopo", log, preset="debug", out=tmp_path / "r", device="cpu", eval_every=-1, final_episodes=0)
    assert holding == [None, None]  # dynamics, policy


def test_data_too_large_for_the_device_stays_on_the_host(log, tmp_path, monkeypatch):
    replaylab.train("bc", log, out=tmp_path / "resident", **SMALL)
    monkeypatch.setattr("replaylab.data.sample.fits", lambda *a: False)
    replaylab.train("bc", log, out=tmp_path / "host", **SMALL)
    assert same(weights(tmp_path / "resident"), weights(tmp_path / "host"))


def test_a_full_disk_keeps_the_last_good_checkpoint(log, tmp_path, monkeypatch):
    replaylab.train("bc", log, out=tmp_path / "r", **SMALL | {"steps": 100})
    good = weights(tmp_path / "r")

    def full(path, tensors):
        path.write_bytes(b"half of")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("replaylab.run.save_tensors", full)
    with pytest.raises(DataError, match="No space left on device; the last good checkpoint is kept"):
        replaylab.train("bc", log, out=tmp_path / "r", resume=True, **SMALL)
    assert same(good, weights(tmp_path / "r"))
    assert [p.name for p in (tmp_path / "r" / "checkpoints").iterdir()] == ["step-100"]
    assert RunFolder(tmp_path / "r").info()["status"] == "failed"


def test_what_a_kill_left_of_a_checkpoint_is_cleared_away(log, tmp_path):
    run = replaylab.train("bc", log, out=tmp_path / "r", **SMALL | {"steps": 5})
    (run / "checkpoints" / "step-7.part").mkdir()
    RunFolder(run).save(99, {}, {}, {})
    assert not list((run / "checkpoints").glob("*.part")) and RunFolder(run).checkpoints()[-1].name == "step-99"


def test_an_unreadable_checkpoint_falls_back_to_the_one_before(log, tmp_path, capsys):
    for steps in (100, 200):
        replaylab.train("bc", log, out=tmp_path / "r", resume=True, **SMALL | {"steps": steps})
    newest = RunFolder(tmp_path / "r").checkpoints()[-1] / "weights.safetensors"
    newest.write_bytes(newest.read_bytes()[:50])
    assert RunFolder(tmp_path / "r").load()[2]["step"] == 100
    assert "going on from step-100, as step-200 is not readable" in capsys.readouterr().err
    (newest.parent.parent / "step-100" / "state.json").write_text("{")
    with pytest.raises(DataError, match=r"no checkpoint of .* is left: step-200 .*--overwrite starts anew"):
        replaylab.train("bc", log, out=tmp_path / "r", resume=True, **SMALL | {"steps": 300})


@pytest.mark.parametrize("log_every", [1, 2000])
def test_a_loss_that_is_not_a_number_stops_the_run(log, tmp_path, monkeypatch, log_every):
    loss = bc.Agent.loss
    monkeypatch.setattr(bc.Agent, "loss", lambda self, batch: loss(self, batch) / (self.done < 100))
    settings = SMALL | {"log_every": log_every, "checkpoint_minutes": 0.0}
    with pytest.raises(DataError, match=r"loss became NaN or infinite at step 100:"):
        replaylab.train("bc", log, out=tmp_path / "r", **settings)
    weights, _, state = RunFolder(tmp_path / "r").load()
    assert state["step"] < 100 and all(w.isfinite().all() for w in weights.values())
    assert "became NaN" in RunFolder(tmp_path / "r").info()["error"]


def test_a_weight_that_is_not_a_number_is_not_saved(log, tmp_path, monkeypatch):
    def ruin(self, batch):
        with torch.no_grad():
            next(self.parameters()).mul_(torch.where(self.done < 100, 1.0, torch.nan))
        return kept(self, batch) | {"loss": torch.zeros(len(self.seeds))}

    kept = bc.Agent.update
    monkeypatch.setattr(bc.Agent, "update", ruin)
    with pytest.raises(DataError, match=r"weight became NaN"):
        replaylab.train("bc", log, out=tmp_path / "r", **SMALL | {"checkpoint_minutes": 0.0})
    assert all(w.isfinite().all() for w in RunFolder(tmp_path / "r").weights().values())


def test_tensorboard_when_asked(log, tmp_path):
    replaylab.train("bc", log, out=tmp_path / "r", track=["tensorboard"], **SMALL)
    assert list((tmp_path / "r" / "tensorboard").glob("events*"))


def test_a_run_ends_what_it_began_at_weights_and_biases(log, tmp_path, monkeypatch):
    begun = [Mock(), Mock()]
    monkeypatch.setitem(sys.modules, "wandb", Mock(init=Mock(side_effect=begun)))
    for number, run in enumerate(begun):
        replaylab.train("bc", log, out=tmp_path / f"r{number}", track=["wandb"], **SMALL)
        assert run.log.called and run.finish.call_count == 1


def test_a_missing_tracker_costs_no_old_run(log, tmp_path):
    replaylab.train("bc", log, out=tmp_path / "r", **SMALL)
    with pytest.raises(MissingExtra):
        replaylab.train("bc", log, out=tmp_path / "r", overwrite=True, track=["wandb"], **SMALL)
    assert RunFolder(tmp_path / "r").load()[2]["step"] == 300


@pytest.mark.parametrize("when", ["last step", "evaluation"])
def test_a_stop_at_the_very_end_is_heard(tmp_path, monkeypatch, when):
    def stop(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGTERM)

    def last(self, batch):
        if self.done == 299:
            stop()
        return update(self, batch)

    update = bc.Agent.update
    if when == "last step":
        monkeypatch.setattr(bc.Agent, "update", last)
    else:
        monkeypatch.setattr(trainer, "evaluate_agent", stop)
    log = make_episodes(lengths=(50, 30, 40), observation=11, action=3)
    settings = SMALL | {"out": tmp_path / "r", "env": "d4rl/hopper", "final_episodes": 2, "eval_every": -1}
    with pytest.raises(trainer.Interrupted, match="stopped at step 300"):
        replaylab.train("bc", log, **settings)
    assert RunFolder(tmp_path / "r").info()["status"] == "interrupted"
    monkeypatch.undo()
    replaylab.train("bc", log, resume=True, **settings)
    assert len(RunFolder(tmp_path / "r").lines("eval.jsonl")) == 1


def test_a_second_ctrl_c_does_not_wait(log, tmp_path, monkeypatch, capfd):
    def twice(self, batch):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(bc.Agent, "update", twice)
    with pytest.raises(KeyboardInterrupt):
        replaylab.train("bc", log, out=tmp_path / "r", **SMALL)
    assert "Ctrl-C again stops at once" in capfd.readouterr().err
    assert RunFolder(tmp_path / "r").info()["status"] == "interrupted"


@pytest.mark.parametrize("name, setting", [("bc", "batch_size"), ("mopo", "rollout_batch")])
def test_out_of_memory_names_the_settings(log, tmp_path, name, setting):
    settings = {"preset": "debug", "device": "cpu", setting: 10**11}
    with pytest.raises(UsageError, match=f"too little memory for this training: .*--{setting.replace('_', '-')}"):
        replaylab.train(name, log, out=tmp_path / "r", **settings)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"system_name": 3}, "unknown system '3'"),
        ({"config": {"steps": 3}}, "config is the path of a YAML file"),
        ({"data_options": "columns"}, "data_options must be names with values, not 'columns'"),
        ({"out": 3}, "a run is named by the path of its folder, not int"),
        ({"out": "/proc/nothing"}, "cannot make the run folder /proc/nothing"),
        ({"data": replace(make_episodes((5,)), meta={"env_id": 3})}, "env_id must be a name"),
    ],
)
def test_arguments_of_the_wrong_kind_are_one_line(tmp_path, given, told):
    usual = {"system_name": "bc", "data": make_episodes((5,)), "out": tmp_path / "run", "preset": "debug", "steps": 1}
    with pytest.raises(ReplaylabError, match=told):
        replaylab.train(**usual | given)


def test_save_and_report_name_what_they_take(tmp_path):
    with pytest.raises(UsageError, match="save takes Episodes and a path"):
        replaylab.save(np.zeros(3), tmp_path / "x.npz")
    with pytest.raises(UsageError, match="a run is named by the path of its folder, not int"):
        replaylab.report([3], tmp_path / "x.html")
    with pytest.raises(UsageError, match="a page is written to a path, not NoneType"):
        replaylab.report([tmp_path], None)
