"""AntMaze data: the floor pays what it says, the planner leads the ant, an ant that cannot walk writes nothing."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("gymnasium_robotics")
import torch

from replaylab import envs, load
from replaylab.cli import main
from replaylab.collect import antmaze, collect
from replaylab.collect.antmaze import Ant, best, collect_antmaze, goals_reached, train
from replaylab.collect.maze import drive, plan, trips
from replaylab.collect.online import Online
from replaylab.envs.antgoal import AntGoalVectorEnv, judge, observe
from replaylab.envs.antmaze import place
from replaylab.envs.maze import MAZES, Layout
from replaylab.errors import DataError, UsageError

TINY = {"train_steps": 160, "environments": 2, "warm_up": 80, "chapter": 80, "eval_episodes": 1, "hidden": [16]}
HALF = np.sqrt(0.5)


def standing(x=0.0, y=0.0, turn=(1.0, 0.0, 0.0, 0.0)):
    return np.array([x, y, 0.75, *turn, *np.arange(8) / 10])


def weights(seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"fc0/weight": (16, 29), "fc0/bias": 16, "last_fc/weight": (8, 16), "last_fc/bias": 8}
    return {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}


# --- the open floor


def test_the_ant_sees_its_maze_self_without_x_and_y_and_the_way_to_the_goal():
    env = envs.make("d4rl/antmaze-umaze").unwrapped
    env.reset(seed=0)
    env.set_state(standing(1, 2), np.arange(14.0))
    seen = observe(env.data.qpos, env.data.qvel, np.array([3.0, 1.0]))
    np.testing.assert_allclose(seen, [*env._observe()[2:], 2, -1])
    assert seen.shape == envs.make("antgoal").observation_space.shape == (29,)


def test_a_goal_to_the_left_is_seen_to_the_left_and_not_too_far():
    north = standing(1, 2, turn=(HALF, 0, 0, HALF))  # a quarter turn to the left: it faces along y
    velocity = np.array([0.0, 2.0, 0.5, *range(11)])
    for goal, way in (((1, 4), (2, 0)), ((-1, 2), (0, 2)), ((1, 32), (3, 0)), ((31, 2), (0, -3)), ((1, 2), (0, 0))):
        seen = observe(north, velocity, np.array(goal, float))
        np.testing.assert_allclose(seen[27:], way, atol=1e-12)
    np.testing.assert_allclose(seen[1:5], [1, 0, 0, 0], atol=1e-12)
    np.testing.assert_allclose(seen[13:16], [2, 0, 0.5], atol=1e-12)  # it runs ahead


def turned(qpos, qvel, goal, angle):
    """The same ant and goal in a world that is turned about the z axis."""
    flat = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    (w, x, y, z), c, s = qpos[3:7], np.cos(angle / 2), np.sin(angle / 2)
    turn = [c * w - s * z, c * x - s * y, c * y + s * x, c * z + s * w]
    qpos = np.concatenate([flat @ qpos[:2], qpos[2:3], turn, qpos[7:]])
    return qpos, np.concatenate([flat @ qvel[:2], qvel[2:]]), flat @ goal


@pytest.mark.parametrize("angle", [0.7, 3.1, 6.2])
def test_turning_the_world_changes_nothing(angle):
    env, rng = envs.make("antgoal").unwrapped, np.random.default_rng(0)
    env.reset(seed=1)
    state = env.data.qpos.copy(), rng.normal(size=14), np.array([3.0, -2.0])
    state[0][3:7] /= np.linalg.norm(state[0][3:7])
    found = []
    for qpos, qvel, goal in (state, turned(*state, angle)):
        env.set_state(qpos, qvel)
        env.goal = goal
        found.append([env._observe(), *env.step(np.linspace(-1, 1, 8))[:2]])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_rewards_by_hand():
    action = np.full(8, 0.5)  # squares add up to 2
    goal = np.array([3.0, 4.0])
    ahead = judge(np.zeros(2), standing(0.3, 0.4), goal, action, dt=0.1)  # from 5 m to 4.5 m in a tenth of a second
    assert ahead[0] == pytest.approx(5 + 0.2 - 0.04) and not ahead[1] and not ahead[2]
    assert judge(np.zeros(2), standing(-0.3, -0.4), goal, 0 * action, 0.1)[0] == pytest.approx(-5 + 0.2)
    assert [bool(judge(goal, standing(3 + away, 4), goal, action, 0.1)[2]) for away in (0.49, 0.51)] == [True, False]
    cases = {(1, 0, 0, 0): False, (HALF, 0, 0, HALF): False, (HALF, HALF, 0, 0): True, (0, 0, 1, 0): True}
    for turn, fallen in cases.items():  # upright, turned, on its side, on its back
        assert bool(judge(goal, standing(turn=turn), goal, action, 0.1)[1]) == fallen


def test_a_goal_that_is_reached_is_followed_by_another():
    env = envs.make("antgoal")
    env.reset(seed=0)
    inner = env.unwrapped
    old = inner.goal
    assert 2 <= np.hypot(*(old - inner.data.qpos[:2])) <= 6
    inner.set_state(np.concatenate([old + np.array([0.3, 0]), inner.data.qpos[2:]]), inner.data.qvel)
    before = inner.data.qpos[:2].copy()
    seen, reward, terminated, truncated, info = env.step(np.full(8, 3.0))  # clipped to 1, which costs 8 x 0.02
    progress = np.hypot(*(old - before)) - np.hypot(*(old - inner.data.qpos[:2]))
    assert reward == pytest.approx(progress / 0.1 + 0.2 - 0.16) and info["success"]
    assert not (terminated or truncated) and 2 <= np.hypot(*(inner.goal - inner.data.qpos[:2])) <= 6
    np.testing.assert_array_equal(seen, observe(inner.data.qpos, inner.data.qvel, inner.goal))
    assert not env.step(np.zeros(8))[4]["success"]


def test_many_ants_on_the_floor_are_one_ant_to_the_bit():
    pytest.importorskip("mujoco.batch")
    many, one = envs.make_vec("antgoal", 3), envs.make("antgoal")
    assert isinstance(many, AntGoalVectorEnv)
    first = many.reset(seed=5)[0], one.reset(seed=6)[0]
    np.testing.assert_array_equal(first[0][1], first[1])
    rng = np.random.default_rng(0)
    for t in range(300):
        if t in (10, 20):  # beside the goal: the next one is the same for both
            many.goals[1] = one.unwrapped.goal = one.unwrapped.data.qpos[:2] + 0.1
        action = rng.uniform(-1.2, 1.2, 8)
        steps = many.step(np.tile(action, (3, 1))), one.step(action)
        for column in range(4):
            np.testing.assert_array_equal(steps[0][column][1], steps[1][column])
    np.testing.assert_array_equal(many.goals[1], one.unwrapped.goal)
    assert steps[1][3] and not steps[1][2]  # the limit


# --- the planner


class Gliding:
    """A maze without physics: the first two numbers of the action are a shift in metres."""

    mode = "play"

    def __init__(self, goal):
        self.goal, self.unwrapped = np.array(goal, float), self

    def reset(self, seed, options):
        self.state = standing(*place(options["start"]))
        return self._seen(), {}

    def step(self, action):
        self.state[:2] += 0.2 * action[:2]
        success = np.hypot(*(self.state[:2] - self.goal)) <= 0.5
        return self._seen(), float(success), success, False, {}

    def _seen(self):
        return np.concatenate([self.state, np.zeros(14)])


class Follows(Ant):
    """Goes where it is told, and remembers where that was."""

    def __init__(self):
        self.told, self.left = [], []  # waypoints, and how far away they were when the next one came

    def act(self, seen):
        return np.concatenate([seen[27:] / 3, np.zeros(6)])

    def steer(self, observation, waypoint):
        if not self.told or waypoint is not self.told[-1]:
            self.left += [np.hypot(*(observation[:2] - old)) for old in self.told[-1:]]
            self.told.append(waypoint)
        return super().steer(observation, waypoint)


def test_the_planner_gives_the_next_waypoint_and_at_last_the_goal():
    layout, driver, rng = Layout("umaze"), Follows(), np.random.default_rng(0)
    goal = place(layout.goal) + np.array([1.2, 1.3])  # D4RL draws it off the middle of its cell
    trip = drive(Gliding(goal), layout, (1, 1), layout.goal, 0.0, rng, driver)
    cells = [(1, 2), (1, 3), (2, 3), (3, 3), (3, 2)]
    assert len(driver.told) == 6
    for waypoint, cell in zip(driver.told, cells, strict=False):
        assert 0 < np.abs(waypoint - place(cell)).max() <= 0.5
    np.testing.assert_array_equal(driver.told[-1], goal)
    assert trip["terminated"][-1] and trip["rewards"].sum() == trip["rewards"][-1] == 1
    assert len(driver.left) == 5 and min(driver.left) > 0.65 and max(driver.left) <= 0.75
    elsewhere = drive(Gliding(goal), layout, (1, 1), (1, 3), 0.0, rng, driver)
    assert elsewhere["truncated"][-1] and not elsewhere["rewards"].any()
    assert np.hypot(*(elsewhere["observations"][-1, :2] - driver.told[-1])) <= 0.5


@pytest.mark.parametrize("style", ["play", "diverse"])
@pytest.mark.parametrize("maze", MAZES)
def test_trips_of_the_ant_are_short_and_start_away_from_the_goal(maze, style):
    layout = Layout(maze)
    pairs = trips(layout, maze, style, "play")
    longest, asked = {"umaze": (3, 6), "medium": (4, 10), "large": (9, 14)}[maze]  # no trip is one of evaluation's
    assert max(layout.moves[target][start] for start, target in pairs) <= longest < asked
    assert layout.moves[layout.goal][(1, 1)] == asked
    assert layout.goal in {target for _, target in pairs} and layout.goal not in {start for start, _ in pairs}


def test_a_seed_decides_every_trip():
    one, same, other = (
        plan("d4rl/antmaze-umaze", "umaze", "diverse", Ant(weights()), 100, 0.2, seed, False) for seed in (1, 1, 2)
    )
    for name in ("observations", "actions", "rewards", "offsets", "final_observations"):
        np.testing.assert_array_equal(getattr(one, name), getattr(same, name))
    assert not np.array_equal(one.observations[:100], other.observations[:100])


# --- the walker and the command


def test_the_weights_in_the_data_act_as_sac_does(tmp_path, capsys):
    config = antmaze.Config(**TINY | {"candidates": 2})
    online = train(config, 0, "cpu", tmp_path / "t", overwrite=False)
    online.curve[-1]["returns"] = [1.0, 2.0]
    found, facts = best(online)
    assert facts["candidate"] == 1 and [step for step, _ in facts["curve"]] == [80, 160]
    seen = np.random.default_rng(0).normal(size=29)
    expected = online.sac.mode(torch.tensor(seen, dtype=torch.float32).expand(2, 1, 29))[1, 0].detach().numpy()
    np.testing.assert_allclose(Ant(found).act(seen), expected, atol=1e-5)


def test_goals_are_counted(monkeypatch):
    actions = []

    class Floor:
        """Every third goal is reached, every third ends in a fall, the rest run out of time."""

        def reset(self, seed):
            self.seed, self.steps = seed, 0
            return np.zeros(29), {}

        def step(self, action):
            self.steps += 1
            actions.append(action)
            late = self.steps == 5
            return np.zeros(29), 0.0, late and self.seed % 3 == 1, late and self.seed % 3 == 2, {
                "success": late and self.seed % 3 == 0
            }  # fmt: skip

        def close(self):
            pass

    monkeypatch.setattr(antmaze, "GOALS", 6)
    monkeypatch.setattr(antmaze.envs, "make", lambda name: Floor())
    assert goals_reached(Ant(weights()), 0.2, seed=3) == pytest.approx(2 / 6)
    assert np.std(actions, 0).mean() == pytest.approx(0.2, abs=0.03)  # the floor looks the same: it is the noise


def test_the_command_writes_a_maze_and_leads_the_same_ant_through_another(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(antmaze, "GOALS", 1)
    monkeypatch.setattr(antmaze, "ENOUGH", 0.0)
    options = [word for k, v in TINY.items() for word in (f"--{k.replace('_', '-')}", str(v).strip("[]"))]
    out = tmp_path / "u"
    order = ["data", "collect", "antmaze-umaze", "--steps", "800", "--device", "cpu", "--out", str(out), *options]
    assert main(order) == 0
    assert "of the trips arrived" in capsys.readouterr().err and not (tmp_path / "u.training").exists()
    log = load(out)
    assert log.env_id == "d4rl/antmaze-umaze" and log.meta["level"] == "play" and len(log) >= 800
    assert log.observations.shape[1:] == (29,) and log.actions.shape[1:] == (8,) and log.lengths.max() <= 700
    recipe = log.meta["recipe"]
    assert recipe["settings"]["noise"] == 0.2 and recipe["evaluation_moves"] == 6 and json.dumps(recipe)
    assert [step for step, _ in recipe["walker"]["curve"]] == [80, 160] and recipe["walker"]["settings"][
        "warm_up"
    ] == 80
    assert recipe["trips_that_arrive"] == (log.lengths < 700).mean()
    env = envs.make("d4rl/antmaze-umaze")
    env.reset(seed=0)
    first = log.observations[0].astype(np.float64)
    env.unwrapped.set_state(first[:15], first[15:])
    seen = [env.unwrapped.step(action)[0] for action in log.actions[:10]]
    np.testing.assert_allclose(log.observations[1:11], seen, atol=2e-3)  # starts are stored as float32

    monkeypatch.setattr(Online, "__init__", lambda *args: pytest.fail("trained again"))
    collect("antmaze-medium-diverse-v2", tmp_path / "m", steps=10, walker=str(out))
    other = load(tmp_path / "m")
    assert other.env_id == "d4rl/antmaze-medium" and other.meta["level"] == "diverse"
    assert other.meta["recipe"]["walker"]["curve"] == recipe["walker"]["curve"]
    assert log.attachments.keys() == other.attachments.keys() and "walker/last_fc/bias" in log.attachments
    np.testing.assert_array_equal(log.attachments["walker/fc0/weight"], other.attachments["walker/fc0/weight"])


def test_an_ant_that_does_not_walk_writes_nothing_and_may_train_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(antmaze, "GOALS", 2)
    monkeypatch.setattr(antmaze, "plan", lambda *args, **kwargs: pytest.fail("driven"))
    for train_steps, noise, chapters in ((160, 0.2, 2), (240, 0.1, 3)):
        with pytest.raises(
            DataError, match=r"reaches 0% of its goals .* Train longer \(--train-steps\) or more --cand"
        ):
            changed = {"train_steps": train_steps, "noise": noise}
            collect("antmaze-umaze", tmp_path / "u", steps=10, device="cpu", **TINY | changed)
        assert len(json.loads((tmp_path / "u.training" / "curve.json").read_text())) == chapters
    with pytest.raises(UsageError, match="with another warm_up: pass --overwrite"):
        collect("antmaze-umaze", tmp_path / "u", steps=10, device="cpu", **TINY | {"warm_up": 70})
    assert not (tmp_path / "u").exists()


@pytest.mark.parametrize(
    ("env_id", "settings", "message"),
    [
        ("antmaze-huge", {}, "no driver for 'antmaze-huge'"),
        ("d4rl/antmaze-umaz", {}, "no driver for 'antmaze-umaz'; did you mean 'antmaze-umaze'"),
        ("antmaze-umaze", {"level": "medium"}, "mazes have no levels"),
        ("antmaze-umaze", {"style": "plays"}, "style: unknown value 'plays'"),
        ("antmaze-large-diverse-v2", {"style": "play"}, "the style diverse, not play"),
        ("antmaze-large-play-v2", {"style": "diverse"}, "the style play, not diverse"),
        ("antmaze-umaze", {"noise": float("nan")}, "noise must be at least 0"),
        ("antmaze-umaze", {"walker": "x", "train_steps": 5}, "leave out train_steps"),
        ("antmaze-umaze", {"walker": "sample"}, "sample holds no walker"),
        ("antmaze-umaze", {"format": "table"}, "cannot be written"),
    ],
)
def test_wrong_orders_are_refused_before_the_training(tmp_path, monkeypatch, env_id, settings, message):
    monkeypatch.setattr(Online, "__init__", lambda *args: pytest.fail("trained"))
    with pytest.raises((UsageError, DataError), match=message):
        collect(env_id, tmp_path / "x", **settings)
    assert not any(tmp_path.iterdir())


def test_existing_data_is_kept(tmp_path):
    (tmp_path / "x").mkdir()
    with pytest.raises(UsageError, match="exists: pass --overwrite"):
        collect_antmaze("antmaze-umaze", 10, tmp_path / "x")
