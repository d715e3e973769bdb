"""Phases with work between the updates: hooks, early stops, findings, notes and state of their own."""

from __future__ import annotations

import json
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest
import torch
from conftest import make_episodes
from torch import nn

import replaylab
from replaylab import algos, trainer
from replaylab.algos import Phase, Spaces
from replaylab.cli import main
from replaylab.config import knob
from replaylab.data.sample import Store, Transitions
from replaylab.errors import UsageError
from replaylab.run import RunFolder

toy = types.ModuleType("toy")


@dataclass
class Config:
    """Toy."""

    world: int = knob(40, "updates of the world at most")
    policy: int = knob(30, "updates of the policy")
    stop_at: int = knob(20, "the world is good enough then")
    scale: float = knob(1.0, "of the actions")


class Agent(nn.Module):
    def __init__(self, config, spaces, seeds, device):
        super().__init__()
        self.config, self.seeds, self.spaces = config, list(seeds), spaces
        self.weight = nn.Parameter(torch.zeros(len(seeds), 1))
        self.optimizers = {"all": torch.optim.SGD([self.weight], lr=0.1)}
        self.ring = torch.zeros(len(seeds))  # neither parameter nor buffer
        self.events, self.notes = [], []

    def training_state(self):
        return {"ring": self.ring}

    def load_training_state(self, tensors):
        self.ring = tensors["ring"].clone()

    def phases(self, source):
        toy.agents.append(self)
        rows = Transitions(Store(source, torch.device("cpu")), self.seeds, 4)
        world = Phase(
            "world", self.config.world, rows, self.update, begin=lambda: self.events.append("begin"), every=5,
            hook=self.hook, stop=lambda: self.events[-1] == self.config.stop_at, finish=self.finish, evaluates=False,
        )  # fmt: skip
        policy = Phase("policy", self.config.policy, rows, self.update, every=10, hook=self.hook)
        return [world, policy]

    def hook(self, step):
        self.events.append(step)
        self.ring += torch.rand(len(self.seeds))  # what comes next depends on the generator and on the ring
        if step == 10:
            self.notes.append("half way")
        return {"ring": self.ring.clone()}

    def finish(self):
        self.events.append("finish")
        return {"error": [float(x) for x in self.ring], "film.gif": b"GIF89a"}

    def update(self, batch):
        self.optimizers["all"].zero_grad()
        loss = (self.weight - self.ring[:, None] - batch["rewards"]).square().mean(1)
        loss.sum().backward()
        self.optimizers["all"].step()
        return {"loss": loss.detach()}

    def act(self, observations, state=None):
        return observations.new_full((*observations.shape[:2], self.spaces.action_dim), self.config.scale), state


toy.Config, toy.Agent, toy.PRESETS, toy.ACTING, toy.agents = Config, Agent, {"debug": {}}, ("scale",), []


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    toy.agents.clear()
    monkeypatch.setitem(sys.modules, "toy", toy)
    monkeypatch.setitem(algos.SYSTEMS, "toy", "toy")


def state(path):
    return RunFolder(path).load()


def test_hooks_stops_and_findings(tmp_path, capsys):
    run = replaylab.train("toy", make_episodes(), out=tmp_path / "r", seeds=[0, 1], device="cpu", log_every=7)
    assert toy.agents[0].events == ["begin", 0, 5, 10, 15, 20, "finish", 0, 10, 20]
    info = RunFolder(run).info()
    assert len(info["findings"]["world"]["error"]) == 2 and info["findings"]["world"]["film.gif"] == "media/film.gif"
    assert (run / "media" / "film.gif").read_bytes() == b"GIF89a"
    assert info["notes"] == ["half way"] and capsys.readouterr().err.count("note: half way") == 1  # said once
    lines = RunFolder(run).lines("metrics.jsonl")
    assert [line["step"] for line in lines if line["seed"] == 0] == [7, 14, 20, 21, 28, 35, 42, 49, 50]
    assert {line["phase"] for line in lines if line["step"] <= 20} == {"world"}
    assert all("ring" in line and "loss" in line for line in lines)
    assert "half way" in replaylab.report([run], tmp_path / "page.html").read_text()


@pytest.mark.parametrize("at", [3, 5, 12, 20, 23, 30, 49])
def test_a_stop_anywhere_and_a_resume_is_the_whole(tmp_path, monkeypatch, at):
    log, settings = make_episodes(), {"seeds": [0, 1], "device": "cpu", "log_every": 7}
    replaylab.train("toy", log, out=tmp_path / "whole", **settings)
    original = trainer.Stepper.run
    done = [0]

    def counted(self, start, steps):
        original(self, start, steps)
        done[0] += steps
        if done[0] >= at:
            entered[0].stopped = True

    entered = []
    enter = trainer.Trainer.__enter__
    monkeypatch.setattr(trainer.Trainer, "__enter__", lambda self: (entered.append(self), enter(self))[1])
    monkeypatch.setattr(trainer.Stepper, "run", counted)
    with pytest.raises(trainer.Interrupted):
        replaylab.train("toy", log, out=tmp_path / "cut", **settings)
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "toy", toy)
    monkeypatch.setitem(algos.SYSTEMS, "toy", "toy")
    replaylab.train("toy", log, out=tmp_path / "cut", resume=True, **settings)
    whole, cut = state(tmp_path / "whole"), state(tmp_path / "cut")
    for a, b in zip(whole[:2], cut[:2], strict=True):
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    assert whole[2]["findings"] == cut[2]["findings"]
    losses = [[x.get("loss") for x in RunFolder(tmp_path / n).lines("metrics.jsonl")] for n in ("whole", "cut")]
    assert losses[0] == losses[1]


def test_a_phase_that_had_ended_early_is_not_trained_again(tmp_path, monkeypatch):
    """Killed right after the checkpoint at the end of a phase."""
    log, settings = make_episodes(), {"seeds": [0, 1], "device": "cpu", "log_every": 7}
    replaylab.train("toy", log, out=tmp_path / "whole", **settings)
    monkeypatch.setattr(trainer, "WORTH", -1)
    update = Agent.update
    with monkeypatch.context() as patch:
        patch.setattr(Agent, "update", lambda self, batch: 1 / 0 if "finish" in self.events else update(self, batch))
        with pytest.raises(ZeroDivisionError):
            replaylab.train("toy", log, out=tmp_path / "cut", **settings)
    replaylab.train("toy", log, out=tmp_path / "cut", resume=True, **settings)
    assert toy.agents[-1].events == [0, 10, 20]  # of the policy alone
    whole, cut = state(tmp_path / "whole"), state(tmp_path / "cut")
    assert all(torch.equal(whole[0][k], cut[0][k]) for k in whole[0]) and whole[2]["findings"] == cut[2]["findings"]


@pytest.mark.parametrize("thrift, times", [(0.0, 2), (1e9, 1)])
def test_the_end_of_a_phase_is_not_saved_where_that_takes_long(tmp_path, monkeypatch, thrift, times):
    saved, save = [], RunFolder.save
    monkeypatch.setattr(RunFolder, "save", lambda self, step, *rest: (saved.append(step), save(self, step, *rest)))
    monkeypatch.setattr(trainer, "WORTH", 0.0)
    monkeypatch.setattr(trainer, "THRIFT", thrift)
    replaylab.train("toy", make_episodes(), out=tmp_path / "r", device="cpu", checkpoint_minutes=0)
    assert saved.count(20) == times  # once by the clock, and as the first phase's end
    assert saved[-1] == 50


def test_a_checkpoint_is_made_when_the_last_one_is_too_old(tmp_path, monkeypatch):
    saved, save, run, now = [], RunFolder.save, trainer.Stepper.run, [0.0]
    monkeypatch.setattr(RunFolder, "save", lambda self, step, *rest: (saved.append(step), save(self, step, *rest)))
    monkeypatch.setattr(trainer, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(trainer.Stepper, "run", lambda *given: (run(*given), now.append(now.pop() + 30)))
    replaylab.train("toy", make_episodes(), out=tmp_path / "r", device="cpu", log_every=1, checkpoint_minutes=1)
    assert saved[:3] == [3, 6, 9]  # an update takes half a minute


def test_a_run_in_a_thread_leaves_signals_alone(tmp_path):
    """Only the main thread may handle them."""
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(replaylab.train, "toy", make_episodes(), out=tmp_path / "r", device="cpu").result()


def test_only_phases_with_a_policy_are_evaluated(tmp_path):
    log = make_episodes(observation=3, action=1, lengths=(30, 30))
    settings = {"env": "Pendulum-v1", "eval_every": 10, "eval_episodes": 1, "final_episodes": 2, "device": "cpu"}
    run = replaylab.train("toy", log, out=tmp_path / "r", **settings)
    assert [line["step"] for line in RunFolder(run).lines("eval.jsonl")] == [30, 40, 50]


def test_the_end_of_every_phase_with_a_policy_is_evaluated_once(tmp_path, monkeypatch):
    phases = Agent.phases
    monkeypatch.setattr(Agent, "phases", lambda *given: [replace(p, evaluates=True) for p in phases(*given)])
    settings = {"env": "Pendulum-v1", "eval_every": 10, "eval_episodes": 1, "final_episodes": 2, "device": "cpu"}
    log = make_episodes(observation=3, action=1, lengths=(30, 30))
    run = replaylab.train("toy", log, out=tmp_path / "r", world=20, stop_at=99, policy=20, **settings)
    assert [line["step"] for line in RunFolder(run).lines("eval.jsonl")] == [10, 20, 30, 40]


def test_acting_settings_are_swept_without_training(tmp_path, capsys):
    log = make_episodes(observation=3, action=1, lengths=(30, 30))
    run = replaylab.train(
        "toy", log, out=tmp_path / "r", env="Pendulum-v1", eval_every=-1, final_episodes=1, device="cpu"
    )
    assert main(["eval", str(run), "--episodes", "2", "--scale", "0", "0.5", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["settings"] for row in rows] == [{"scale": 0.0}, {"scale": 0.5}]
    assert rows[0]["mean"] != rows[1]["mean"]
    with pytest.raises(UsageError, match="scale must be float"):
        replaylab.evaluate(run, acting={"scale": ["much"]})


def test_a_system_that_makes_its_own_data(tmp_path, monkeypatch):
    log = make_episodes(observation=3, action=1, lengths=(30, 30))
    monkeypatch.setattr(toy, "ONLINE", True, raising=False)
    monkeypatch.setattr(toy, "spaces", lambda env: Spaces.of(log), raising=False)
    monkeypatch.setattr(toy, "environment", lambda env: f"{env}-v1", raising=False)
    phases, given = Agent.phases, []
    monkeypatch.setattr(Agent, "phases", lambda self, source: (given.append(source), phases(self, log))[1])
    run = replaylab.train("toy", env="Pendulum", out=tmp_path / "r", eval_every=-1, final_episodes=1, device="cpu")
    assert given == ["Pendulum-v1"] and RunFolder(run).config()["env"] == "Pendulum-v1"
    assert RunFolder(run).info()["data"] is None and replaylab.report([run], tmp_path / "p.html").exists()
    with pytest.raises(UsageError, match="name an environment"):
        replaylab.train("toy", out=tmp_path / "x")
    with pytest.raises(UsageError, match="leave --data out"):
        replaylab.train("toy", log, env="Pendulum", out=tmp_path / "x")
