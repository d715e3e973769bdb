"""Assessing a policy from logs alone: a chain whose values are known, support that is known, files that are broken."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import make_episodes

from replaylab import offpolicy
from replaylab.algos import Spaces
from replaylab.data.episodes import from_rows
from replaylab.errors import DataError, UsageError
from replaylab.offpolicy import Budget, assess, assess_agent
from replaylab.offpolicy.fitted import Folds, Log, fitted_q, some_episodes
from replaylab.offpolicy.support import Neighbours, support

CPU = torch.device("cpu")
GAMMA, CELLS = 0.9, 5  # cells 0 to 4; reaching cell 4 pays 1 and ends the episode
SMALL = Budget(100_000, 500, (32, 32), 500, batch=64, lr=3e-3)
TINY = Budget(10_000, 20, (8, 8), 50, batch=16)


def chain(episodes=150, discrete=False, seed=0, right=0.6):
    """A walk on a line: right with probability 0.6, else left (and not beyond cell 0). Cut after 40 steps."""
    rng = np.random.default_rng(seed)
    rows: list[tuple] = []
    for _ in range(episodes):
        cell = int(rng.integers(CELLS - 1))
        for step in range(40):
            go = rng.random() < right
            after = cell + 1 if go else max(cell - 1, 0)
            ended = after == CELLS - 1
            action = int(go) if discrete else [(1 if go else -1) * rng.uniform(0.5, 1)]
            rows.append((np.eye(CELLS)[cell], action, float(ended), ended, step == 39, np.eye(CELLS)[after]))
            if ended:
                break
            cell = after
    columns = [np.array(c) for c in zip(*rows, strict=True)]
    kinds = [np.float32, np.int64 if discrete else np.float32, np.float32, bool, bool, np.float32]
    return from_rows(*(c.astype(k) for c, k in zip(columns, kinds, strict=True)))


def true_values(right):
    """V = r + gamma P V, solved."""
    moves = np.zeros((CELLS, CELLS))
    for cell in range(CELLS - 1):
        moves[cell, cell + 1] += right
        moves[cell, max(cell - 1, 0)] += 1 - right
    pays = moves[:, -1].copy()
    moves[:, -1] = 0
    return np.linalg.solve(np.eye(CELLS) - GAMMA * moves, pays)


class Constant(torch.nn.Module):
    """One action a seed, whatever it sees."""

    def __init__(self, *actions, gamma=GAMMA):
        super().__init__()
        self.actions, self.config = actions, SimpleNamespace(gamma=gamma)

    def act(self, observations, state=None):
        first = torch.as_tensor(self.actions).view(len(self.actions), 1, -1)
        actions = first.expand(-1, observations.shape[1], -1)
        return (actions[..., 0] if actions.dtype == torch.int64 else actions), state


class Habit(Constant):
    """What `habits` does, without its noise."""

    def act(self, observations, state=None):
        return 0.5 * torch.tanh(observations), state


# --- fitted-Q evaluation


def test_known_answers_of_the_solver():
    alone = true_values(1.0)
    np.testing.assert_allclose(alone[:4], [GAMMA**3, GAMMA**2, GAMMA, 1])
    assert (true_values(0.0) == 0).all()


@pytest.mark.parametrize("discrete", [False, True])
def test_fitted_q_finds_the_true_values(discrete):
    """On-policy (the data's own actions) and off-policy (always right, always left): values in [0, 1], within 0.04."""
    log = chain(discrete=discrete)
    agent = Constant(1, 0) if discrete else Constant(0.75, -0.75)
    found = assess_agent(agent, Spaces.of(log), [0, 1], log, budget=SMALL)
    first = log.observations[log.offsets[:-1]].argmax(1)
    fqe = found["fqe"]
    assert abs(fqe["behaviour"]["mean"] - true_values(0.6)[first].mean()) < 0.04
    right, left = fqe["policies"]
    assert abs(right["mean"] - true_values(1.0)[first].mean()) < 0.04
    assert abs(left["mean"]) < 0.04
    assert (right["verdict"], left["verdict"]) == ("better", "worse")
    assert fqe["calibration"]["good"] and right["settled"] and fqe["behaviour"]["settled"]
    assert abs(fqe["data"]["logged"] - true_values(0.6)[first].mean()) < 0.05
    assert right["low"] < right["mean"] < right["high"] and len(right["members"]) == 4
    assert len(right["curve"]) == 10 and right["curve"][-1] == pytest.approx(right["mean"], abs=1e-5)
    json.dumps(found, allow_nan=False)


def test_what_a_cut_episode_would_have_earned_counts():
    """One reward a step for ever, logged in pieces of ten: the value is 1 / (1 - gamma) = 10, the logged part 6.5."""
    rows = 300
    rng = np.random.default_rng(0)
    ends = np.arange(rows) % 10 == 9
    observations = rng.standard_normal((rows + 1, 2)).astype(np.float32)
    actions = rng.uniform(-1, 1, (rows, 1)).astype(np.float32)
    log = from_rows(observations[:-1], actions, np.ones(rows, np.float32), ends & False, ends, observations[1:])
    found = assess_agent(Constant(0.3), Spaces.of(log), [0], log, budget=SMALL)
    data = found["fqe"]["data"]
    assert abs(data["logged"] - (1 - GAMMA**10) / (1 - GAMMA)) < 1e-3
    assert abs(data["mean"] - 10) < 0.3 and abs(found["fqe"]["policies"][0]["mean"] - 10) < 0.3
    assert data["cut"] == 1 and abs(data["cut_weight"] - GAMMA**10) < 1e-9
    assert any("cut off" in line for line in found["limits"])


def test_what_follows_a_cut_is_the_behaviours_not_its_clones():
    """r = -a^2 and actions of -1 and 1 at random: the behaviour has -1 a step, a clone, which answers 0, nothing."""
    rows = 400
    rng = np.random.default_rng(0)
    ends = np.arange(rows) % 5 == 4
    observations = rng.standard_normal((rows + 1, 2)).astype(np.float32)
    actions = rng.choice([-1.0, 1.0], (rows, 1)).astype(np.float32)
    rewards = -(actions[:, 0] ** 2)
    log = from_rows(observations[:-1], actions, rewards, ends & False, ends, observations[1:])
    found = assess_agent(Constant(0.3), Spaces.of(log), [0], log, budget=SMALL)
    assert abs(found["fqe"]["data"]["mean"] + 10) < 0.7


def test_an_estimate_beyond_all_that_was_fitted_is_not_settled():
    """r = a in episodes of one row, actions up to 1: nothing was paid that a line through them promises at 3."""
    rng = np.random.default_rng(0)
    observations, actions = (rng.uniform(-1, 1, (1000, 1)).astype(np.float32) for _ in range(2))
    log = from_rows(observations, actions, actions[:, 0], np.ones(1000, bool))
    rows = Log(log, Spaces.of(log), CPU, 4)
    tables = {a: torch.full((1, len(rows.states), 1), a) for a in (0.5, 3.0)}
    near, far = fitted_q(rows, tables, GAMMA, SMALL)["policies"]
    assert abs(near["mean"] - 0.5) < 0.05 and near["settled"]
    assert far["mean"] > 1.5 and not far["settled"]


def test_discounted_returns_by_hand():
    log = make_episodes((3, 1, 2))
    r = log.rewards.astype(float)
    expected = [r[0] + 0.5 * r[1] + 0.25 * r[2], r[1] + 0.5 * r[2], r[2], r[3], r[4] + 0.5 * r[5], r[5]]
    np.testing.assert_allclose(log.returns_to_go(0.5), expected)


def test_nobody_judges_what_it_was_fitted_on():
    log = Log(make_episodes([4] * 9), Spaces.of(make_episodes([4] * 9)), CPU, 3)
    drawn = Folds(log, 64).draw(0, 20)  # (steps, folds, batch)
    for fold in range(3):
        seen = set(log.episodes.episode_ids[drawn[:, fold]].ravel())
        assert seen == set(np.flatnonzero(log.fold != fold))
    assert set(log.fold) == {0, 1, 2}


def test_next_states_and_actions_belong_to_the_row():
    episodes = make_episodes((5, 3, 8, 4))
    log = Log(episodes, Spaces.of(episodes), CPU, 2)
    table = log.states[None, :, :2]  # a policy that answers with what it sees
    rows = torch.arange(20)[None].expand(2, -1)
    batch = Folds(log, 4, [table]).gather(rows)
    following = torch.as_tensor(episodes.next_observations())
    torch.testing.assert_close(batch["next_observations"][1], following)
    torch.testing.assert_close(batch["next_vectors"][0, 1], following[:, :2])
    torch.testing.assert_close(batch["observations"][0], torch.as_tensor(episodes.observations))


def test_rows_without_a_successor_are_left_out():
    episodes = make_episodes((5, 3, 8, 4))  # terminated, truncated, terminated, truncated
    known = np.array([False, False, True, True])
    log = Log(dataclasses.replace(episodes, final_known=known), Spaces.of(episodes), CPU, 2)
    assert sorted(set(range(20)) - set(log.usable.tolist())) == [7]  # nothing follows a terminated row anyway


# --- support


def habits(episodes=40, seed=0):
    """Actions around a function of the state."""
    rng = np.random.default_rng(seed)
    rows = 25 * episodes
    observations = rng.standard_normal((rows, 2)).astype(np.float32)
    actions = (0.5 * np.tanh(observations) + 0.1 * rng.standard_normal((rows, 2))).clip(-1, 1).astype(np.float32)
    ends = np.arange(rows) % 25 == 24
    return from_rows(observations, actions, rng.standard_normal(rows).astype(np.float32), ends)


def table_of(log, actions):
    table = torch.zeros(1, len(log.states), actions.shape[1])
    table[0, log.place] = actions
    return table


def test_support_of_known_policies():
    log, fresh = habits(), habits(seed=1)
    spaces = Spaces.of(log)
    train, held = Log(log, spaces, CPU, 1), Log(fresh, spaces, CPU, 1)
    noise = torch.as_tensor(np.random.default_rng(5).standard_normal(held.actions.shape), dtype=torch.float32)
    again = 0.5 * torch.tanh(held.states[held.place]) + 0.1 * noise  # the same habits, drawn once more
    tables = {0: held.actions, 1: held.actions + 3, 2: again, 3: torch.tensor([[1.0, 0.0]]).expand(1000, 2)}
    for base in (train, held):
        found = support(held, base, {k: table_of(held, v) for k, v in tables.items()}, spaces, 900, 10, None)
        logged, shifted, drawn, edge = found["policies"]
        assert logged["beyond_95"] == pytest.approx(0.05, abs=0.002)
        assert logged["beyond_99"] == pytest.approx(0.01, abs=0.002)
        assert shifted["beyond_95"] > 0.99 and shifted["beyond_99"] > 0.99
        assert drawn["beyond_95"] == pytest.approx(0.05, abs=0.025)
        assert edge["at_edge"] == 1 and found["data"]["at_edge"] < 0.02
        assert sum(found["actions"][0]["data"]) == pytest.approx(1, abs=1e-3) and len(found["actions"]) == 2
    assert found["states"] is None
    states = support(held, train, {0: table_of(held, held.actions)}, spaces, 900, 10, held.states[None] + 9)["states"]
    assert states["held_out_beyond"] == pytest.approx(0.05, abs=0.03) and states["imagined_beyond"] == [1.0]
    log.observations[:25] = 9  # an imagined state is of no episode, and thus near the rows of the first, too
    train = Log(log, spaces, CPU, 1)
    found = support(train, train, {0: table_of(train, train.actions)}, spaces, 900, 10, torch.full((1, 5, 2), 9.0))
    assert found["states"]["imagined_beyond"] == [0.0]


def test_support_is_that_of_the_log_an_estimate_is_made_from():
    """A policy that does what its training log did has none where people have changed what they do since."""
    before = habits()
    since = dataclasses.replace(habits(seed=1), actions=-before.actions.clip(0.3, 0.9))
    spaces, policy = Spaces.of(before), before.actions.clip(0.3, 0.9)
    train, held = Log(before, spaces, CPU, 1), Log(since, spaces, CPU, 1)
    found = support(held, train, {0: table_of(held, torch.as_tensor(policy))}, spaces, 900, 10, None)
    assert found["policies"][0]["beyond_99"] == 1 and found["data"]["beyond_99"] < 0.02


def test_neighbours_are_the_nearest_of_other_episodes():
    log = habits(4)
    log.observations[:] = log.observations * 7 + 3  # the scale of a column must not matter
    spaces = Spaces.of(log)
    device_log = Log(log, spaces, CPU, 1)
    rows = torch.arange(0, 100, 7)
    owners = torch.as_tensor(log.episode_ids)[rows]
    distance, near = Neighbours(device_log, 3).find(device_log.states[device_log.place[rows]], owners)
    _, std = device_log.standard(device_log.states)
    for i, row in enumerate(rows.tolist()):
        apart = np.linalg.norm((log.observations - log.observations[row]) / std.numpy(), axis=1)
        apart[log.episode_ids == log.episode_ids[row]] = np.inf
        assert set(near[i].tolist()) == set(np.argsort(apart)[:3])
        assert float(distance[i]) == pytest.approx(np.sort(apart)[:3].mean(), rel=1e-3)


def test_the_rows_of_a_small_log_have_only_those_of_other_episodes_as_neighbours():
    log = habits(2)
    few = log.select([0]).split(max_episode_steps=22)
    small, one = Log(few, Spaces.of(log), CPU, 1), Log(log.select([0]), Spaces.of(log), CPU, 1)
    assert few.lengths.tolist() == [22, 3]
    owners = torch.as_tensor(few.episode_ids)
    distance, near = Neighbours(small, 10).find(small.states[small.place], owners)
    assert distance.isfinite().all() and (owners[near] != owners[:, None]).all()
    tables, spaces = {0: table_of(small, small.actions)}, Spaces.of(log)
    found = support(small, small, tables, spaces, 25, 10, small.states[None])
    assert found["k"] == 3 and found["data"]["median"] > 0  # an action was compared with itself
    assert np.isfinite(found["states"]["threshold"])
    assert support(small, one, tables, spaces, 25, 10, small.states[None])["states"] is None  # nothing is usual there


def test_discrete_support_is_whether_it_was_ever_done():
    log = chain(discrete=True, right=0.999)
    found = assess_agent(Constant(1, 0), Spaces.of(log), [0, 1], log, budget=TINY)["support"]
    right, left = found["policies"]
    assert right["beyond_95"] < 0.02 and left["beyond_95"] > 0.9
    assert found["actions"][0]["edges"] == [-0.5, 0.5, 1.5] and found["actions"][0]["policies"][1] == [1.0, 0.0]


def test_a_constant_column_is_no_column():
    log = habits(10)
    wide = dataclasses.replace(
        log,
        observations=np.c_[log.observations, np.full(len(log), 0.9, np.float32)],
        final_observations=np.c_[log.final_observations, np.full(10, 0.9, np.float32)],
    )
    budget = dataclasses.replace(TINY, steps=30)
    one, two = (
        assess_agent(Constant([0.1, 0.2], gamma=0.5), Spaces.of(x), [0], x, budget=budget)["support"]
        for x in (log, wide)
    )
    assert one["policies"][0]["median"] == pytest.approx(two["policies"][0]["median"], rel=1e-4)


# --- what is said


def test_limits_follow_from_the_numbers():
    log = habits()
    said = " ".join(assess_agent(Constant([0.99, -0.99]), Spaces.of(log), [0], log, budget=TINY)["limits"])
    assert "No overlap" in said and "rare harm" in said and "7.5%" in said  # 3 of 40 episodes
    own = " ".join(assess_agent(Habit(0.0), Spaces.of(log), [0], log, train=log, budget=TINY)["limits"])
    assert "trained on" in own and "No overlap" not in own
    assert "those that the policy was trained on" not in said


def test_a_verdict_needs_a_difference_beyond_every_doubt():
    fqe = {"calibration": {"error": -0.3, "good": True}, "behaviour": {"settled": True}}

    def said(low, spread, settled=True, beyond=0.5):
        policy = {"gain": {"low": low, "high": low + 1, "spread": spread}, "settled": settled}
        return offpolicy.verdict(policy, {"beyond_99": beyond}, fqe)

    assert said(2.4, 1.0) == "better" and said(-3.4, 1.0) == "worse"
    assert said(2.2, 1.0) == said(-3.2, 1.0) == "unclear"  # two spreads and the check's miss are 2.3
    assert said(2.4, 1.0, settled=False) == said(2.4, 1.0, beyond=0.51) == "unclear"


def test_a_world_model_is_asked():
    log = habits(6)

    class Dreamer(Constant):
        def predicted_return(self, observations, horizon):
            assert observations.shape == (6, 2)
            return torch.tensor([1.0 * horizon]), torch.tensor([0.3 * horizon])

        def imagined_states(self, observations, horizon):
            return observations[None] + 50

    found = assess_agent(Dreamer([0.1, 0.1]), Spaces.of(log), [4], log, budget=TINY)
    assert [row["horizon"] for row in found["predicted"]] == [5, 20]
    assert found["predicted"][0]["policies"] == [{"seed": 4, "mean": 5.0, "disagreement": pytest.approx(1.5)}]
    expected = np.mean([log.rewards[s : s + 5].sum() for s in log.offsets[:-1]])
    assert found["predicted"][0]["data"] == pytest.approx(expected, rel=1e-5)
    assert found["support"]["states"]["imagined_beyond"] == [1.0]
    assert any("disagree" in line for line in found["limits"])


def test_what_cannot_be_assessed_is_said():
    log = habits(6)
    agent = Constant([0.1, 0.1])
    agent.begin = lambda *_: None
    found = assess_agent(agent, Spaces.of(log), [0], log, budget=TINY)
    assert found["fqe"] is None and "memory" in found["limits"][0] and len(offpolicy.summary(found)) == 4
    with pytest.raises(UsageError, match="observations of"):
        assess_agent(Constant([0.1]), Spaces.of(make_episodes()), [0], log, budget=TINY)
    with pytest.raises(UsageError, match="takes 2 actions"):
        assess_agent(Constant([0.1]), Spaces.of(log), [0], make_episodes(observation=2, action=1), budget=TINY)
    with pytest.raises(UsageError, match="gamma"):
        assess_agent(Constant([0.1, 0.1], gamma=1.0), Spaces.of(log), [0], log, budget=TINY)
    broken = habits(6)
    broken.rewards[3] = np.nan
    with pytest.raises(DataError, match="rewards holds NaN"):
        assess_agent(Constant([0.1, 0.1]), Spaces.of(log), [0], broken, budget=TINY)


def test_whole_amounts_are_amounts_to_a_policy_of_amounts():
    """In a log of their own they look like choices."""
    log = habits(6)
    doses = dataclasses.replace(log, actions=np.round(4 * np.abs(log.actions[:, :1])))
    whole, spaces = dataclasses.replace(doses, actions=doses.actions[:, 0].astype(np.int64)), Spaces.of(doses)
    assert whole.discrete and not spaces.discrete
    found = assess_agent(Constant([0.1]), spaces, [0], whole, train=doses, budget=TINY)
    assert found["fqe"] and found["support"] and found["seen"] == 1
    for data, policy, told in (
        (doses, Spaces.of(whole), "makes choices, the data's actions are real numbers: write choices as 1, not 1.0"),
        (whole, Spaces([2], "float32", 2, True), f"knows 2 choices, the data has {whole.action_dim}"),
        (whole, Spaces.of(log), "takes 2 actions, the data has 1"),
    ):
        with pytest.raises(UsageError, match=told):
            assess_agent(Constant([0.1]), policy, [0], data, budget=TINY)


def test_who_learns_by_playing_is_played(tmp_path):
    (tmp_path / "config.yaml").write_text('system: "mbarc"\n')
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(UsageError, match="mbarc learns by playing: `replaylab eval"):
        assess(tmp_path)


def test_episodes_that_were_trained_on_are_found_out():
    log = habits(10)
    assert offpolicy.seen(log, log) == 1 and offpolicy.seen(habits(10, seed=1), log) == 0
    assert offpolicy.seen(log.select([0, 1, 2, 3]), log.select([2, 9, 3])) == 0.5


def test_a_part_of_a_large_log():
    log = habits(40)
    part = some_episodes(log, 260)
    assert 200 <= len(part) <= 260 and part.num_episodes == 10 and (part.lengths == 25).all()
    assert some_episodes(log, 5000) is log
