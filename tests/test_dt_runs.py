"""Whole runs of the decision transformer: what is asked for is what is done, evaluation, resumption."""

from __future__ import annotations

import json
import time

import gymnasium
import numpy as np
import pytest
import torch
from conftest import make_episodes
from tiny_dt import TINY

import replaylab
from replaylab.algos import dt
from replaylab.cli import main
from replaylab.data.episodes import from_rows
from replaylab.errors import UsageError
from replaylab.run import RunFolder


class Levers(gymnasium.Env):
    """Ten steps; the reward is the action's sign. Nothing in the observation says which one pays."""

    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 10
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.left -= 1
        return np.zeros(1, np.float32), float(np.sign(action[0])), self.left == 0, False, {}


if "DTLevers-v0" not in gymnasium.registry:
    gymnasium.register("DTLevers-v0", Levers)


@pytest.fixture(scope="module")
def levers():
    """Half of the episodes always pull +0.8 and return 10, half -0.8 and return -10."""
    sign = np.repeat(np.tile([1.0, -1.0], 10), 10)
    ends = np.arange(200) % 10 == 9
    meta = {"env_id": "DTLevers-v0", "action_low": [-1.0], "action_high": [1.0]}
    return from_rows(np.zeros((200, 1)), 0.8 * sign[:, None], sign, ends, meta=meta)


@pytest.fixture(scope="module")
def levers_run(levers, tmp_path_factory):
    out = tmp_path_factory.mktemp("dt") / "levers"
    settings = {"steps": 150, "eval_every": -1, "final_episodes": 2, "seeds": [0, 1], "device": "cpu"}
    return replaylab.train("dt", levers, out=out, preset="debug", **settings)


def test_what_is_asked_for_is_what_is_done(levers_run):
    """The first action has nothing but the asked return to go by."""
    for target, sign in ((10.0, 1), (-10.0, -1)):
        policy = replaylab.load_policy(levers_run, seed=1, target=target)
        assert sign * policy.act(np.zeros(1)) > 0.4
    last = RunFolder(levers_run).lines("eval.jsonl")[-1]
    assert last["settings"] == {"target": 10.0} and last["returns"] == [10.0, 10.0]


def test_rewards_are_taken_off_in_evaluation(levers_run, monkeypatch):
    contexts = []

    def begin(agent, batch, targets):
        contexts.append(dt.Context(agent, batch, torch.full((batch,), targets[0])))
        return contexts[-1]

    monkeypatch.setattr(dt.Agent, "begin", begin)
    replaylab.evaluate(levers_run, episodes=2, targets=[10.0], device="cpu")  # of which 10 are received
    torch.testing.assert_close(contexts[0].asked, torch.zeros(2, 2), rtol=0, atol=1e-5)


def test_all_targets_in_one_evaluation(levers_run, capsys):
    records = replaylab.evaluate(levers_run, episodes=3, targets=[10.0, -10.0], device="cpu")
    assert [(r["seed"], r["settings"]["target"], r["returns"]) for r in records] == [
        (0, 10.0, [10.0] * 3), (0, -10.0, [-10.0] * 3), (1, 10.0, [10.0] * 3), (1, -10.0, [-10.0] * 3),
    ]  # fmt: skip
    capsys.readouterr()
    assert main(["eval", str(levers_run), "--target", "10", "-10", "30", "--episodes", "2", "--device", "cpu"]) == 0
    out, errors = capsys.readouterr()
    assert "(target 10): DTLevers-v0 return 10.0" in out and "(target -10): DTLevers-v0 return -10.0" in out
    assert "target 30 is outside the data's returns, -10 to 10" in errors
    with pytest.raises(UsageError, match="a target must be a number"):
        replaylab.evaluate(levers_run, episodes=1, targets=[10.0, float("nan")], device="cpu")
    assert main(["eval", str(levers_run), "--target", "10", "-10", "--episodes", "2", "--json", "--device", "cpu"]) == 0
    assert [row["settings"]["target"] for row in json.loads(capsys.readouterr().out)] == [10, -10]


def test_a_policy_keeps_its_own_context(levers_run):
    policy = replaylab.load_policy(levers_run)
    rng = np.random.default_rng(0)
    observations = rng.standard_normal((7, 2, 1)).astype(np.float32)
    rewards = rng.standard_normal((7, 2))
    played = [policy.act(o, None if t == 0 else rewards[t - 1]) for t, o in enumerate(observations)]
    assert not np.allclose(policy.act(observations[0], rewards[-1]), played[0])
    policy.reset()
    np.testing.assert_allclose(policy.act(observations[0]), played[0], rtol=1e-4)
    with pytest.raises(UsageError, match="1 observations, but 2 before: reset first"):
        policy.act(observations[0, 0])
    again = policy.act(observations[1], rewards[0])
    np.testing.assert_allclose(again, played[1], rtol=1e-4)
    policy.reset(np.array([True, False]))  # the first environment begins anew, the second goes on
    mixed = policy.act(np.stack([observations[0, 0], observations[2, 1]]), np.array([0.0, rewards[1, 1]]))
    np.testing.assert_allclose(mixed, [played[0][0], played[2][1]], rtol=1e-4)


def test_the_debug_preset_is_quick(tmp_path):
    pytest.importorskip("mujoco")
    began = time.monotonic()
    run = replaylab.train("dt", "sample", out=tmp_path / "r", preset="debug", device="cpu")
    assert time.monotonic() - began < 60 and RunFolder(run).lines("eval.jsonl")[-1]["settings"] == {"target": 3600.0}
    losses = [line["loss"] for line in RunFolder(run).lines("metrics.jsonl")]
    assert np.mean(losses[-10:]) < 0.8 * np.mean(losses[:10])


def test_without_returns_there_is_no_target(levers, tmp_path):
    settings = {"steps": 5, "condition": "none", "final_episodes": 1, "device": "cpu"}
    run = replaylab.train("dt", levers, out=tmp_path / "r", preset="debug", **settings)
    assert RunFolder(run).lines("eval.jsonl")[-1]["settings"] == {}
    with pytest.raises(UsageError, match="takes no target return"):
        replaylab.evaluate(run, episodes=1, targets=[1.0])


@pytest.mark.parametrize("discrete", [False, True])
def test_half_and_resume_is_the_whole(discrete, tmp_path):
    """Dropout included."""
    log = make_episodes(lengths=(20, 15), discrete=discrete)
    same_for_all = TINY | {"seeds": [0, 1], "device": "cpu", "steps": 30}
    replaylab.train("dt", log, out=tmp_path / "whole", **same_for_all)
    replaylab.train("dt", log, out=tmp_path / "half", **same_for_all | {"steps": 13})
    replaylab.train("dt", log, out=tmp_path / "half", resume=True, **same_for_all)
    for a, b in zip(*(RunFolder(tmp_path / name).load()[:2] for name in ("whole", "half")), strict=True):
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
