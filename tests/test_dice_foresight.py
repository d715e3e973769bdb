"""Diffusion-DICE with `--backup model`: values of foretold states, by hand, cut and resumed, and whether it helps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import make_episodes
from test_dice import train
from test_dice_runs import FRONT, cut_and_resumed
from tiny_dice import make_agent

import replaylab
from replaylab.algos import diffusion_dice as dice
from replaylab.data.episodes import from_rows
from replaylab.errors import DataError
from replaylab.models.sdice import weights
from replaylab.run import RunFolder
from replaylab.step import Stepper

SMALL = {"backup": "model", "values": 3, "models": 2, "model_hidden": [16, 16], "model_epochs": 2}


def endless(**settings):
    log = make_episodes(**settings)
    return replace(log, terminated=np.zeros_like(log.terminated), truncated=log.terminated | log.truncated)


def test_one_update_by_hand():
    """Each V by plain autograd and AdamW, towards the mean of the slow ones; guidance by the logged y."""
    settings = SMALL | {"lr_decay": False, "tau": 0.1, "gamma": 0.9}
    (agent, phases), (other, _) = make_agent(endless(), **settings), make_agent(endless(), **settings)
    assert [p.name for p in phases] == ["dynamics", "behavior", "critic"]
    batch = phases[2].sampler.gather(torch.from_numpy(phases[2].sampler.draw(0, 1)[0]))
    states, following = batch["observations"], batch["next_observations"]
    with torch.no_grad():
        for each in (agent, other):
            each.foresight.slow.layers[-1].bias += 1  # behind the others
        goal = batch["rewards"] + 0.9 * other.foresight.slow(following.expand(3, -1, -1)).mean(0)
    values = other.foresight.value(states.expand(3, -1, -1))
    y = (goal - values) / 0.5
    loss = (torch.where(y >= 0, y**2 / 4 + y, y.exp() - 1) + values / 0.5).mean(1)
    optimizer = torch.optim.AdamW(other.foresight.value.parameters(), 3e-4, weight_decay=1e-4)
    loss.sum().backward()
    optimizer.step()
    with torch.no_grad():
        for slow, fast in zip(other.foresight.slow.parameters(), other.foresight.value.parameters(), strict=True):
            slow.copy_(0.9 * slow + 0.1 * fast)
    w = weights((goal - values.detach().mean(0)) / 0.5)
    energy = other.energies(states, batch["actions"]).detach()
    m = (-energy).max().clamp(min=-1)
    found = agent.critic_update(batch)
    torch.testing.assert_close(found["value_loss"], loss.mean()[None].detach())
    torch.testing.assert_close(
        found["guide_loss"], (w[..., None] * (-energy - m).exp() + (-m).exp() * energy).mean()[None]
    )
    for part in ("value", "slow"):
        mine, theirs = (getattr(a.foresight, part).state_dict() for a in (agent, other))
        for name in mine:
            torch.testing.assert_close(mine[name], theirs[name], rtol=1e-4, atol=1e-6, msg=name)
    assert set(found) == {
        "value_loss", "guide_loss", "value", "y", "y_min", "y_max", "energy", "energy_min", "energy_max",
    }  # fmt: skip


def test_what_a_model_thinks_of_an_action():
    """r + gamma V(s'), network by network; states are standardised for V, not for the models."""
    agent, phases = make_agent(endless(), (0, 5), normalize=True, gamma=0.9, **SMALL)
    train(phases)
    assert agent.normalizer.std.min() > 0.1 and not torch.allclose(agent.normalizer.std, torch.ones(4))
    observations, actions = torch.randn(2, 6, 4) * 3, torch.rand(2, 6, 2)
    found = agent.judge(agent.seen(observations), actions).detach()
    ahead, world = agent.foresight, agent.foresight.dynamics
    assert found.shape == (2, 2, 6)
    for seed in range(2):
        for model in range(2):
            x = (torch.cat([observations[seed], actions[seed]], 1) - world.input_mean) / world.input_std
            for i, layer in enumerate(world.net.layers):
                x = x @ layer.weight[2 * seed + model] + layer.bias[2 * seed + model]
                x = torch.nn.functional.silu(x) if i < 2 else x
            told = x[:, :5] * world.target_std + world.target_mean
            states = agent.seen(observations[seed] + told[:, :4])
            values = ahead.value(states.expand(6, -1, -1))[3 * seed : 3 * seed + 3].mean(0)
            torch.testing.assert_close(found[seed, model], (told[:, 4] + 0.9 * values).detach(), rtol=1e-4, atol=1e-4)


def test_it_chooses_what_is_better():
    """A point on a line is pushed, and pays for its distance from 0: the foretold Q must know which push is better."""
    rng = np.random.default_rng(0)
    states = rng.uniform(-1, 1, (2000, 1)).astype(np.float32)
    actions = rng.uniform(-1, 1, (2000, 1)).astype(np.float32)
    cut = np.ones(2000, bool)  # each row is an episode of its own
    log = from_rows(states, actions, -np.abs(states[:, 0]), ~cut, cut, states + 0.3 * actions)
    settings = {
        "model_hidden": [32, 32], "model_epochs": 30, "critic_steps": 600, "batch_size": 64, "gamma": 0.8,
        "value_lr": 1e-2, "tau": 0.1, "rewards": "raw", "alpha": 0.1,
    }  # fmt: skip
    agent, phases = make_agent(log, **SMALL | settings)
    fit = phases[0]
    stepper = Stepper(fit, torch.device("cpu"))
    for epoch in range(30):
        fit.hook(epoch * fit.every)
        stepper.run(epoch * fit.every, fit.every)
    fit.finish()
    Stepper(phases[2], torch.device("cpu")).run(0, 600)
    here, pushes = torch.linspace(-0.9, 0.9, 40).view(1, -1, 1), torch.rand(2, 1, 40, 1) * 2 - 1
    left, right = (agent.judge(here, push).mean(1)[0] for push in pushes)
    nearer = [(here + 0.3 * push).abs()[0, :, 0] for push in pushes]
    clear = (nearer[0] - nearer[1]).abs() > 0.05
    agrees = ((left > right) == (nearer[0] < nearer[1]))[clear]
    assert clear.sum() > 20 and agrees.float().mean() > 0.9


@pytest.mark.parametrize("cut", [2, 5, 9, 14])
def test_a_cut_run_ends_like_a_whole_one(cut, tmp_path, monkeypatch):
    """Cut in the models' first and second pass, in the behaviour, in the values."""
    settings = FRONT | SMALL | {"behavior_steps": 6, "critic_steps": 7, "normalize": True, "model_epochs": 4}
    log = endless(lengths=(300, 200, 100))
    assert dice.returns_steps(dice.Config(backup="model")) == 0
    cut_and_resumed(log, tmp_path, monkeypatch, cut, settings)
    assert RunFolder(tmp_path / "cut").info()["findings"]["dynamics"]["epochs"]
    page = replaylab.report([tmp_path / "cut"], tmp_path / "page.html").read_text()
    assert "Models of one step" in page and "Member 1" in page and "not readable" not in page


def test_seeds_do_not_know_their_company():
    (together, phases), (alone, others) = (make_agent(endless(), seeds, **SMALL) for seeds in ((3, 0, 5), (5,)))
    for each in (phases, others):
        each[0].hook(0)
        train(each)
    for name, value in alone.state_dict().items():
        whole = together.state_dict()[name]
        part = whole if whole.shape == value.shape else whole[2 * len(value) :]
        torch.testing.assert_close(part, value, rtol=1e-4, atol=1e-6, msg=name)


def test_a_log_whose_episodes_end_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"2 episodes of this log end by themselves.*--backup data or values"):
        replaylab.train("diffusion-dice", make_episodes(), out=tmp_path / "r", **FRONT | SMALL)
    assert not RunFolder(tmp_path / "r").exists()
