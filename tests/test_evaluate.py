from __future__ import annotations

import contextlib

import gymnasium
import numpy as np
import pytest
import torch

import replaylab
from replaylab import evaluate
from replaylab.algos import SYSTEMS, Spaces, system
from replaylab.errors import DataError, UsageError
from replaylab.evaluate import Policy, check_spaces, rollout
from replaylab.progress import Progress
from replaylab.run import RunFolder


class Countdown(gymnasium.Env):
    """Ends after as many steps as its first observation says; the reward is 1 a step, so return = length = start."""

    observation_space = gymnasium.spaces.Box(-100, 100, (2,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(1, 40))
        self.start = self.left
        return np.array([self.left, self.start], np.float32), {}

    def step(self, action):
        self.left -= 1
        return np.array([self.left, self.start], np.float32), 1.0, self.left == 0, False, {}


if "Countdown-v0" not in gymnasium.registry:
    gymnasium.register("Countdown-v0", entry_point=Countdown)


def act(observations, state):
    return torch.zeros(*observations.shape[:2], 1), state


def test_every_episode_is_counted_once_however_long():
    expected = []
    for i in range(30):
        env = gymnasium.make("Countdown-v0")
        expected.append(env.reset(seed=1000 + i)[0][1])
    returns, lengths = rollout(act, 2, "Countdown-v0", 30)
    np.testing.assert_array_equal(returns, [expected, expected])
    np.testing.assert_array_equal(lengths, returns)


def test_waves_do_not_change_the_result(monkeypatch):
    whole = rollout(act, 2, "Countdown-v0", 30)[0]
    monkeypatch.setattr(evaluate_module(), "MAX_ENVS", 14)
    np.testing.assert_array_equal(whole, rollout(act, 2, "Countdown-v0", 30)[0])


def test_progress_counts_the_episodes_of_all_waves(monkeypatch):
    seen = []

    def update(bar, done, step):
        bar.done = done
        seen.append((done, step))

    monkeypatch.setattr(evaluate_module(), "MAX_ENVS", 14)
    monkeypatch.setattr(Progress, "update", update)
    _, lengths = rollout(act, 2, "Countdown-v0", 30)
    done, steps = zip(*seen, strict=True)
    assert list(done) == sorted(done) and done[-1] == 60 and max(steps) == lengths.max()


def evaluate_module():
    import sys

    return sys.modules["replaylab.evaluate"]


def test_members_get_their_own_observations():
    def follow(observations, state):
        assert observations.shape[:2] == (3, 4)
        assert torch.equal(observations[0, :, 1], observations[1, :, 1])  # paired seeds
        return torch.zeros(3, 4, 1), state

    assert rollout(follow, 3, "Countdown-v0", 4)[0].shape == (3, 4)


def test_a_policy_that_answers_with_nan_is_one_line():
    with pytest.raises(DataError, match="answers with NaN"):
        rollout(lambda seen, state: (torch.full((1, 2, 1), torch.nan), state), 1, "Countdown-v0", 2)


def test_side_by_side_equals_one_after_another():
    """Ten hopper episodes in one batch are the same ten episodes played alone."""

    def policy(observations, state):
        return 0.3 * torch.sin(30 * observations[..., 5:8]), state

    together, lengths = rollout(policy, 1, "d4rl/hopper", 10)
    alone = [rollout(policy, 1, "d4rl/hopper", 1, seed=1000 + i)[0][0, 0] for i in range(10)]
    np.testing.assert_allclose(together[0], alone, rtol=1e-6)
    assert lengths.min() < lengths.max()


def test_evaluating_a_run(tmp_path):
    rng = np.random.default_rng(0)
    log = replaylab.from_rows(
        rng.standard_normal((200, 2)), rng.uniform(-1, 1, (200, 1)), np.ones(200), np.arange(200) % 20 == 19
    )
    run = replaylab.train("bc", log, out=tmp_path / "r", preset="debug", env="Countdown-v0", seeds=[0, 7], device="cpu")
    first = RunFolder(run).lines("eval.jsonl")
    assert {line["seed"] for line in first} == {0, 7} and first[-1]["step"] == 500
    assert len(first[-1]["returns"]) == 4 and first[-1]["normalized"] is None
    records = replaylab.evaluate(run, episodes=5, device="cpu")
    assert records[0]["returns"] == records[1]["returns"] and len(records[0]["returns"]) == 5
    found = evaluate_module().summary(records)
    assert found["mean"] == pytest.approx(np.mean(records[0]["returns"])) and found["score"] == "return"
    with pytest.raises(UsageError, match="seed must be a whole number from 0"):
        replaylab.evaluate(run, seed=-1, device="cpu")
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("hidden: [64", "hidden: [65"))
    with pytest.raises(DataError, match=r"do not fit its config\.yaml"):
        replaylab.evaluate(run, device="cpu")
    config.write_text("")
    with pytest.raises(DataError, match="names no system"):
        replaylab.evaluate(run, device="cpu")


@pytest.mark.parametrize("name", SYSTEMS)
def test_no_observations_get_no_actions(name):
    vectors, frames = Spaces([3], "float32", 2, False, [-1, -1], [1, 1]), Spaces([4, 105, 80], "uint8", 6, True)
    module, spaces = system(name), frames if name == "mbarc" else vectors
    small = {k: v for k, v in module.PRESETS["debug"].items() if k in module.Config.__dataclass_fields__}
    agent = module.Agent(module.Config(**small), spaces, [0], torch.device("cpu"))
    policy, shape = Policy(agent, spaces, torch.device("cpu")), spaces.observation_shape
    for rows in (0, 2):
        actions = policy.act(np.zeros((rows, *shape), spaces.observation_dtype))
        assert actions.shape == ((rows,) if spaces.discrete else (rows, 2))
        assert actions.dtype == (np.int64 if spaces.discrete else np.float32)


def test_an_environment_has_one_name_in_the_records():
    class Still:
        def act(self, observations, state):
            return torch.zeros(*observations.shape[:2], 3), state

    (record,) = evaluate_module().evaluate_agent(Still(), [0], "hopper", 1)
    assert record["env"] == "d4rl/hopper" and record["normalized"]


def test_evaluation_leaves_the_random_numbers_of_training_alone(tmp_path):
    class Sampler:
        def act(self, observations, state):
            return torch.randn(*observations.shape[:2], 1), state

    torch.manual_seed(3)
    a = torch.randn(4)
    torch.manual_seed(3)
    evaluate_module().evaluate_agent(Sampler(), [0], "Countdown-v0", 3)
    assert torch.equal(a, torch.randn(4))
    assert callable(evaluate)


@pytest.mark.parametrize(
    ("env", "spaces", "words"),
    [
        (
            "d4rl/hopper",
            Spaces([11], "float32", 2, False),
            "takes 3 continuous numbers an action.*the data's 2 continuous",
        ),
        ("d4rl/hopper", Spaces([11], "float32", 4, False), "the data's 4 continuous"),
        ("d4rl/hopper", Spaces([11], "float32", 3, True), "the data's 3 discrete"),
        ("CartPole-v1", Spaces([4], "float32", 3, True), "takes 2 discrete actions.*the data's 3 discrete"),
        ("CartPole-v1", Spaces([4], "float32", 2, False), "the data's 2 continuous"),
        ("CartPole-v1", Spaces([5], "float32", 2, True), "the data has observations of"),
        ("CartPole-v1", Spaces([4], "float32", 1, True), None),  # a log need not show every action
        ("d4rl/hopper", Spaces([11], "float32", 3, False), None),
    ],
)
def test_what_the_data_does_fits_the_environment(env, spaces, words):
    with pytest.raises(UsageError, match=words) if words else contextlib.nullcontext():
        check_spaces(env, spaces)


@pytest.mark.parametrize(("reach", "told"), [(1.0, False), (5.0, True)])
def test_actions_beyond_the_environments_box_are_noted(capsys, reach, told):
    check_spaces("d4rl/hopper", Spaces([11], "float32", 3, False, [-1.0] * 3, [1.0, 1.0, reach]))
    assert ("outside what d4rl/hopper takes" in capsys.readouterr().err) == told


class Odd(Countdown):
    """Countdown with another action space, or with rewards that are no numbers."""

    def __init__(self, actions=None, reward=1.0):
        self.action_space, self.reward = actions or Countdown.action_space, reward

    def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, self.reward, *rest


@pytest.mark.parametrize(
    ("actions", "told"),
    [
        (gymnasium.spaces.Box(-1, 1, ()), r"takes actions of shape \(\), policies answer vectors"),
        (gymnasium.spaces.Box(-1, 1, (1, 1)), r"takes actions of shape \(1, 1\), policies answer vectors"),
        (gymnasium.spaces.Discrete(3, start=1), "numbers its actions from 1, policies from 0"),
    ],
)
def test_action_spaces_that_no_policy_fits(monkeypatch, actions, told):
    spec = gymnasium.envs.registration.EnvSpec("Odd-v0", entry_point=Odd, kwargs={"actions": actions})
    monkeypatch.setitem(gymnasium.registry, "Odd-v0", spec)
    discrete = hasattr(actions, "n")
    with pytest.raises(UsageError, match=told):
        check_spaces("Odd-v0", Spaces([2], "float32", 3 if discrete else 1, discrete))


def test_a_reward_of_nan_is_said():
    if "NaN-v0" not in gymnasium.registry:
        gymnasium.register("NaN-v0", entry_point=Odd, kwargs={"reward": float("nan")})
    with pytest.raises(DataError, match="the environment gives rewards of NaN or infinity"):
        rollout(act, 1, "NaN-v0", 1)


@pytest.mark.parametrize("name", ["a b c", "", "no_such_module:Env-v0"])
def test_a_malformed_name_of_an_environment_is_one_line(name):
    with pytest.raises(UsageError, match=f"cannot make the environment '{name}'"):
        rollout(act, 1, name, 1)


def test_an_environment_is_named_by_its_id_and_episodes_are_counted():
    with pytest.raises(
        UsageError, match=r"an environment is named by its id: gymnasium\.register yours, not Countdown"
    ):
        rollout(act, 1, Countdown(), 1)
    assert rollout(act, 1, "Countdown-v0", np.int64(2))[0].shape == (1, 2)
    with pytest.raises(UsageError, match=r"episodes must be a whole number of at least 1, not 2\.0"):
        rollout(act, 1, "Countdown-v0", 2.0)


def test_actions_are_clipped_to_the_environments_box(monkeypatch):
    step, taken = Countdown.step, []
    monkeypatch.setattr(Countdown, "step", lambda self, action: (taken.append(action.tolist()), step(self, action))[1])
    rollout(lambda seen, state: (torch.tensor([[[-9.0], [0.5], [9.0]]]), state), 1, "Countdown-v0", 3)
    assert taken[:3] == [[-1.0], [0.5], [1.0]]
