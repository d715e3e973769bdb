"""Two processes with half the batch each are one process with the whole batch."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import make_episodes
from processes import Started
from test_dice_foresight import SMALL as FORESEES
from test_dice_foresight import endless
from tiny_dice import TINY as TINY_DICE
from tiny_dice import make_agent

import replaylab
from replaylab import distributed
from replaylab.algos import Spaces, bc, bcq, dt
from replaylab.algos import diffusion_dice as dice
from replaylab.errors import UsageError
from replaylab.run import RunFolder
from replaylab.step import Stepper

CPU = torch.device("cpu")
BREAKOUT = Path(__file__).parent / "data" / "dqn_replay" / "Breakout"
TINY = {"width": 16, "layers": 1, "dropout": 0.0}
FRAMES = dt.PRESETS["atari"] | TINY | {"batch_size": 4, "warmup_tokens": 1}
DICE = TINY_DICE | {"returns_steps": 6, "normalize": True}
CONFIGS = {
    "bc": (bc, bc.Config(steps=20, batch_size=16, hidden=[16])),
    "dt": (dt, dt.Config(**TINY, steps=20, batch_size=8, context=3, clip=0.1, warmup_steps=2)),
    "dt on frames": (dt, dt.Config(**FRAMES)),
    "bcq": (bcq, bcq.Config(steps=20, batch_size=8, hidden=[16], vae_hidden=[16], samples=3)),
    "diffusion-dice": (dice, dice.Config(**DICE)),
    "diffusion-dice together": (dice, dice.Config(**DICE, schedule="together")),
}


def updates(name, path=None, steps=6):
    """Some updates of each phase of a tiny system: {phase and metric, or weight: its numbers}, or saved to `path`."""
    module, config = CONFIGS[name]
    # short: many windows are padded, and the processes' parts differ in how much
    episodes = replaylab.load(BREAKOUT) if name == "dt on frames" else make_episodes((5, 3, 8, 6))
    torch.manual_seed(0)
    agent = module.Agent(config, Spaces.of(episodes), [0, 1], CPU)
    phases, found = agent.phases(episodes), {}
    distributed.join(agent, phases)
    for phase in phases:
        stepper = Stepper(phase, CPU)
        stepper.run(0, min(steps, phase.steps))
        found |= {f"{phase.name} {metric}": torch.tensor(values) for metric, values in stepper.read().items()}
        if phase.finish:
            phase.finish()
    found |= {key: value for key, value in agent.state_dict().items() if key != "kl"}  # bcq's, of its own part
    if path is None:
        return found
    torch.save(found, path)


def as_one_of_two(name, path, rank, port):
    os.environ |= {"WORLD_SIZE": "2", "RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    updates(name, path)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.timeout(100)
def test_two_processes_learn_what_one_with_the_whole_batch_learns(name, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    both = [Started(as_one_of_two, name, tmp_path / str(rank), rank, port) for rank in (0, 1)]
    assert [process.wait(90) for process in both] == [0, 0]
    first, second = (torch.load(tmp_path / str(rank), weights_only=True) for rank in (0, 1))
    whole = updates(name)
    for key, value in whole.items():
        assert torch.equal(first[key], second[key]), key
        # where a gradient is next to 0 Adam magnifies its rounding; six updates move a weight by 1e-3
        torch.testing.assert_close(first[key], value, rtol=1e-4, atol=1e-6 if " " in key else 1e-5)


def test_a_batch_that_cannot_be_shared_out_is_an_error(monkeypatch):
    module, config = CONFIGS["bc"]
    episodes = make_episodes()
    sampler = module.Agent(config, Spaces.of(episodes), [0], CPU).phases(episodes)[0].sampler
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(UsageError, match="a batch of 16 cannot be shared out to 3"):
        distributed.Part(sampler, torch.ones(1)).draw(0, 1)


def test_what_works_between_updates_is_not_shared_out(monkeypatch):
    agent, phases = make_agent(endless(), **FORESEES)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="phase 'dynamics' works between its updates and cannot be shared out"):
        distributed.join(agent, phases)


def test_a_process_that_resumes_drops_other_units_than_the_first(monkeypatch):
    module, config = CONFIGS["bc"]
    episodes = make_episodes()
    sampler = module.Agent(config, Spaces.of(episodes), [0], CPU).phases(episodes)[0].sampler
    monkeypatch.setenv("WORLD_SIZE", "2")
    drawn = {}
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        part = distributed.Part(sampler, torch.ones(1))
        torch.manual_seed(5)  # where the first process's checkpoint puts each of them
        for start in (3, 4):
            part.draw(start, 1)
            drawn[rank, start] = float(torch.rand(()))
    torch.manual_seed(5)
    assert [drawn["0", 3], drawn["0", 4]] == torch.rand(2).tolist()  # the first goes on as it was
    assert len(set(drawn.values())) == 4


def test_a_system_that_plays_is_not_shared_out(monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="mbarc plays while it learns, in one process: use `replaylab train mbarc`"):
        distributed.main(["mbarc", "--env", "atari/freeway", "--out", str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()


def torchrun(*words):
    """As a user types it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [*command, "-m", "replaylab.distributed", *map(str, words)], capture_output=True, text=True, timeout=100
    )


@pytest.fixture
def folder(tmp_path):
    logs = replace(make_episodes((30, 20, 30)), meta={"env_id": "no-such-robot"})  # which is worth a note
    replaylab.save(logs, tmp_path / "logs.npz")
    return tmp_path


def words(folder, steps):
    given = ["--preset", "debug", "--batch-size", 16, "--no-lr-decay", "--seeds", 0, 1, "--steps", steps]
    return ["bc", "--data", folder / "logs.npz", *given, "--out", folder / "two"]


def assert_as_one(folder, steps):
    given = {"batch_size": 16, "lr_decay": False, "seeds": [0, 1], "steps": steps}
    one = replaylab.train("bc", folder / "logs.npz", preset="debug", out=folder / "one", **given)
    assert RunFolder(folder / "two").info()["status"] == "finished"
    for a, b in zip(*(RunFolder(path).weights().values() for path in (folder / "two", one)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.timeout(100)
def test_by_the_command_line(folder):
    found = torchrun(*words(folder, 10))
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("report.html") == 1  # by the first process
    assert found.stderr.count("note: nothing will be evaluated: ") == 1
    assert_as_one(folder, 10)


def test_an_error_of_another_process_is_seen_and_its_notes_are_not(folder):
    words = ["bc", "--data", folder / "logs.npz", "--device", "abacus", "--out", folder / "none"]
    command = [sys.executable, "-m", "replaylab.distributed", *map(str, words)]
    found = subprocess.run(command, env=os.environ | {"RANK": "1"}, capture_output=True, text=True, timeout=60)
    assert found.returncode == 2
    assert found.stderr == "replaylab (process 1): unknown device 'abacus': use auto, cpu or cuda\n"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_resumes_and_a_mistake_is_one_line(folder):
    torchrun(*words(folder, 10))
    found = torchrun(*words(folder, 20), "--resume")  # both processes from the first one's checkpoint
    assert found.returncode == 0, found.stderr
    assert_as_one(folder, 20)
    found = torchrun("bc", "--data", "nowhere.npz", "--out", folder / "three")
    assert found.returncode and "\nreplaylab: nowhere.npz: no such file" in f"\n{found.stderr}"
    assert "DataError" not in found.stderr  # no traceback of ours
