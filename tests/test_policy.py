"""Policies loaded from run folders, and evaluation, with arguments that a stranger may pass."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import make_episodes

import replaylab
from replaylab.algos import Spaces, bc, dt
from replaylab.envs import Noise
from replaylab.errors import UsageError
from replaylab.evaluate import Policy, pick_device

TINY = {"steps": 20, "width": 16, "context": 4, "rtg_scale": 1.0, "target": 5.0, "lr": 0.01, "final_episodes": 0}


@pytest.fixture(scope="module")
def log():
    return make_episodes((20, 20))


@pytest.fixture(scope="module")
def run(log, tmp_path_factory):
    return replaylab.train("dt", log, out=tmp_path_factory.mktemp("p") / "r", preset="debug", device="cpu", **TINY)


def test_the_reward_of_the_last_episode_is_not_taken_off_the_next(run, log):
    rows = log.observations
    first = replaylab.load_policy(run).act(rows[4])
    policy = replaylab.load_policy(run)
    policy.act(rows[:2])
    policy.reset(np.array([True, False]))
    acted = policy.act(rows[4:6], rewards=[3.0, 1.0])[0]  # 3 ended the episode before
    np.testing.assert_allclose(acted, first, rtol=0, atol=1e-6)  # one row and two are not summed alike on every CPU
    assert policy.state.asked.tolist() == [[5.0, 4.0]]
    policy.act(rows[5:7], rewards=0.5)  # one number is that of all
    assert policy.state.asked.tolist() == [[4.5, 3.5]]


def test_a_policy_that_counts_rewards_asks_for_them(run, log, tmp_path):
    policy = replaylab.load_policy(run)
    policy.act(log.observations[0])
    with pytest.raises(UsageError, match="pass the rewards of its last actions, or reset it"):
        policy.act(log.observations[1])
    policy.reset()
    policy.act(log.observations[1])
    for name, value in (("mode", "delayed"), ("condition", "none")):  # these do not count
        policy = replaylab.load_policy(run)
        policy.agent.config = replace(policy.agent.config, **{name: value})
        policy.act(log.observations[0])
        assert not policy.state.waits


def test_a_policy_without_a_memory_asks_for_none(log):
    spaces = Spaces.of(log)
    policy = Policy(bc.Agent(bc.Config(hidden=[4]), spaces, [0], torch.device("cpu")), spaces, torch.device("cpu"))
    assert np.array_equal(policy.act(log.observations[0]), policy.act(log.observations[0]))


@pytest.mark.parametrize("rewards", [[1.0, 2.0], [1.0, np.nan, 2.0], float("nan"), "much", [None] * 3])
def test_rewards_that_are_none(run, log, rewards):
    policy = replaylab.load_policy(run)
    policy.act(log.observations[:3])
    with pytest.raises(UsageError, match="rewards must be numbers, one for each of the 3 last actions"):
        policy.act(log.observations[:3], rewards=rewards)
    with pytest.raises(UsageError, match="reset takes 3 booleans"):
        policy.reset([True])


@pytest.mark.parametrize(
    ("seen", "told"),
    [
        (np.array(["a"] * 4), "observations of numbers, not <U1"),
        (np.array([None] * 4), "observations of numbers, not object"),
        (np.full(4, 1e39), "NaN or infinity"),
        (np.zeros((2, 3, 4)), "observations of shape"),
    ],
)
def test_observations_that_are_none(run, seen, told):
    with pytest.raises(UsageError, match=told):
        replaylab.load_policy(run).act(seen)


def test_frames_are_bytes(tmp_path):
    """Frames divided by 255 would all be cut to 0."""
    rng = np.random.default_rng(0)
    ends = np.arange(12) % 6 == 5
    frames = rng.integers(0, 255, (12, 84, 84), dtype=np.uint8)
    log = replaylab.from_rows(frames, rng.integers(0, 3, 12), np.ones(12), ends, meta={"frame_stack": 4})
    settings = {"steps": 1, "batch_size": 2, "context": 2, "width": 8, "final_episodes": 0, "device": "cpu"}
    run = replaylab.train("dt", log, out=tmp_path / "r", preset="debug", **settings)
    stack = frames[:4]
    assert replaylab.load_policy(run).act(stack).shape == ()
    with pytest.raises(UsageError, match=r"frames of bytes \(uint8\), not float32"):
        replaylab.load_policy(run).act(stack.astype(np.float32) / 255)


def test_small_returns_are_asked_for_as_they_are(log, tmp_path):
    small = replace(log, rewards=(log.rewards * 1e-6).astype(np.float32))
    settings = {k: v for k, v in TINY.items() if k not in ("target", "rtg_scale")}
    run = replaylab.train("dt", small, out=tmp_path / "r", preset="debug", device="cpu", **settings)
    agent = replaylab.load_policy(run).agent
    assert agent.targets[0] == pytest.approx(small.returns.max(), rel=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_the_best_return_of_the_data_is_not_beyond_it(seed, capsys):
    log = make_episodes((20, 20), seed=seed)  # in single precision its best return is rounded, up or down
    spaces = replaylab.algos.Spaces.of(log)
    agent = dt.Agent(dt.Config(width=8, layers=1), spaces, [0], torch.device("cpu"))
    agent.phases(log)
    assert not agent.notes and agent.seen_return(agent.targets[0])


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"episodes": 1.5}, "episodes must be a whole number"),
        ({"seed": 1.5}, "seed must be a whole number"),
        ({"targets": "high"}, "a target must be a number"),
        ({"acting": {"alpha": [1]}}, "dt does not act by 'alpha'"),
        ({"acting": {"temperature": 1.0}}, "temperature changes nothing of what"),
        ({"acting": 5}, "acting must be names with values, not 5"),
        ({"acting": ["temperature"]}, "acting must be names with values, not"),
        ({"noise": Noise}, r"noise must be a replaylab\.envs\.Noise, such as"),
    ],
)
def test_what_evaluation_does_not_take(run, given, told, monkeypatch):
    monkeypatch.setattr(sys.modules["replaylab.evaluate"], "check_spaces", lambda *_: None)
    with pytest.raises(UsageError, match=told):
        replaylab.evaluate(run, env="CartPole-v1", device="cpu", **given)


def test_settings_of_acting_that_change_nothing_are_refused(run):
    with pytest.raises(UsageError, match="temperature changes nothing"):
        replaylab.load_policy(run, temperature=1.0)
    with pytest.raises(UsageError, match="a target must be a number"):
        replaylab.load_policy(run, target="high")


@pytest.mark.parametrize("name", ["meta", "mps", None])
def test_devices_that_nothing_runs_on(name):
    with pytest.raises(UsageError, match="use auto, cpu or cuda"):
        pick_device(name)


def test_a_gpu_that_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto").type == "cpu"
    with pytest.raises(UsageError, match="torch sees no GPU here"):
        pick_device("cuda")


def test_a_policy_takes_numpys_numbers_for_its_seed_and_one_target(run, log):
    rows = log.observations
    assert np.array_equal(
        replaylab.load_policy(run, seed=np.int64(0)).act(rows[0]), replaylab.load_policy(run).act(rows[0])
    )
    with pytest.raises(UsageError, match="a policy aims for one target"):
        replaylab.load_policy(run, target=[1.0, 2.0])
    with pytest.raises(UsageError, match="has no seed '0'; it has 0"):
        replaylab.load_policy(run, seed="0")
    with pytest.raises(UsageError, match=r"has no seed array\(\[0, 1\]\); it has 0"):
        replaylab.load_policy(run, seed=np.array([0, 1]))
    with pytest.raises(UsageError, match="the policy takes observations of shape"):
        replaylab.load_policy(run).act([[1.0, 2.0], [3.0]])
    with pytest.raises(UsageError, match="a run is named by the path of its folder, not NoneType"):
        replaylab.load_policy(None)
