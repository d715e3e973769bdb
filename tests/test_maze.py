"""Mazes: the environments do what they say, and the data cannot be solved without stitching."""

from __future__ import annotations

import json
import pickle
import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gymnasium_robotics")
import gymnasium

from replaylab import envs, load
from replaylab.collect.maze import collect_maze, drive, evaluation_pairs, make_trips
from replaylab.envs.antmaze import AntMazeVectorEnv, place
from replaylab.envs.maze import MAZES, Layout, MazeEnv, load_model
from replaylab.errors import UsageError

STYLES = ("play", "diverse")
RECORDED = json.loads((Path(__file__).parent / "antmaze_transitions.json").read_text())["rows"]  # D4RL's own


@pytest.fixture(scope="module")
def data():
    """Small collections, made once: (maze, style) -> Episodes."""
    return {(maze, style): make_trips(f"pointmaze-{maze}", 12_000, style=style) for maze in MAZES for style in STYLES}


# --- layouts


def test_paths_by_hand():
    layout = Layout("umaze")
    assert layout.path((1, 1), (3, 1)) == [(1, 1), (1, 2), (1, 3), (2, 3), (3, 3), (3, 2), (3, 1)]
    assert layout.longest_trip == 3 and len(layout.cells) == 7
    assert set(layout.far_pairs) == {
        (start, goal) if forth else (goal, start)
        for start, goal in [((1, 1), (3, 1)), ((1, 1), (3, 2)), ((1, 2), (3, 1))]
        for forth in (True, False)
    }
    assert Layout("medium").moves[(6, 6)][(1, 6)] == 9
    assert Layout("large").moves[(7, 9)][(7, 1)] == 18


@pytest.mark.parametrize("maze", MAZES)
def test_every_path_is_free_connected_and_shortest(maze):
    layout = Layout(maze)
    for target in layout.cells:
        for start in layout.cells:
            path = layout.path(start, target)
            assert path[0] == start and path[-1] == target and set(path) <= set(layout.cells)
            assert len(path) == layout.moves[target][start] + 1 == layout.moves[start][target] + 1
            assert all(abs(a[0] - b[0]) + abs(a[1] - b[1]) == 1 for a, b in pairwise(path))


@pytest.mark.parametrize("size", [1.0, 4.0])
def test_cells_and_coordinates_agree_with_gymnasium_robotics(size):
    from gymnasium_robotics.envs.maze.maze_v4 import Maze

    layout = Layout("large", size)
    theirs = Maze(layout.map, size, 0.5)
    for cell in layout.cells:
        np.testing.assert_allclose(layout.centre(cell), theirs.cell_rowcol_to_xy(np.array(cell)))
        assert layout.cell_at(layout.centre(cell) + 0.4 * size) == cell == layout.cell_at(layout.centre(cell))


# --- environments


@pytest.mark.parametrize(
    ("env_id", "theirs"), [("pointmaze-large", "PointMaze_Large-v3"), ("antmaze-umaze", "AntMaze_UMaze-v4")]
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_states_equal_gymnasium_robotics_to_the_bit(env_id, theirs, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where theirs leaves a file behind
    ours, other = envs.make(env_id).unwrapped, gymnasium.make(theirs, continuing_task=False).unwrapped
    ours.reset(seed=0)
    other.reset(seed=0)
    inner = other.point_env if env_id.startswith("point") else other.ant_env
    inner.set_state(ours.data.qpos, ours.data.qvel)
    rng = np.random.default_rng(0)
    for action in rng.uniform(-1.2, 1.2, (60, *ours.action_space.shape)).repeat(5, 0):  # long pushes, into walls
        observation = ours.step(action)[0]
        other.step(np.clip(action, -1, 1))
        np.testing.assert_array_equal(observation, np.concatenate([inner.data.qpos, inner.data.qvel]))
    assert other.spec.max_episode_steps == ours.spec.max_episode_steps


@pytest.mark.parametrize("maze", MAZES)
def test_play_has_one_start_and_one_goal(maze):
    env = envs.make(f"pointmaze-{maze}")
    layout = env.unwrapped.layout
    assert env.observation_space.shape == (4,)
    starts = [env.reset(seed=seed)[0] for seed in range(20)]
    assert {layout.cell_at(start[:2]) for start in starts} == {layout.start}
    assert np.ptp([s[0] for s in starts]) > 0.2 and not np.any([s[2:] for s in starts])
    np.testing.assert_array_equal(env.unwrapped.goal, layout.centre(layout.goal))


@pytest.mark.parametrize("maze", MAZES)
def test_diverse_draws_pairs_that_no_trip_covers_and_shows_the_goal(maze):
    env = envs.make(f"pointmaze-{maze}-diverse")
    layout = env.unwrapped.layout
    assert env.observation_space.shape == (6,)
    pairs = set()
    for seed in range(40):
        observation, _ = env.reset(seed=seed)
        np.testing.assert_array_equal(observation[4:], env.unwrapped.goal)
        pairs.add((layout.cell_at(observation[:2]), layout.cell_at(observation[4:])))
    assert pairs <= set(layout.far_pairs) and len(pairs) >= 5
    assert min(layout.moves[goal][start] for start, goal in pairs) >= layout.longest_trip + 2
    again = envs.make(f"pointmaze-{maze}", mode="diverse").reset(seed=39)[0]
    np.testing.assert_array_equal(observation, again)


def test_coming_within_half_a_metre_of_the_goal_earns_one_and_terminates():
    env = envs.make("pointmaze-umaze")
    env.reset(seed=0)
    inner = env.unwrapped
    for away, there in ((0.55, False), (0.45, True)):
        inner.set_state(inner.goal + np.array([away, 0.0]), np.zeros(2))
        _, reward, terminated, truncated, info = env.step(np.zeros(2))
        assert (reward, terminated, truncated, info["success"]) == (float(there), there, False, there)


def test_the_time_limit_truncates_and_is_worth_nothing():
    env = envs.make("pointmaze-umaze")
    env.reset(seed=0)
    steps = [env.step(np.zeros(2)) for _ in range(300)]
    assert not any(s[2] for s in steps) and [s[3] for s in steps] == [False] * 299 + [True]
    assert sum(s[1] for s in steps) == 0


def test_vector_form_rests_at_the_goal_and_repeats():
    vector = envs.make_vec("pointmaze-umaze", 3)
    first, _ = vector.reset(seed=[7, 7, 8])
    np.testing.assert_array_equal(first[0], first[1])
    assert (first[0] != first[2]).any()
    inner = vector.envs[1].unwrapped
    inner.set_state(inner.goal + np.array([0.2, 0.0]), np.zeros(2))
    assert vector.step(np.zeros((3, 2)))[2].tolist() == [False, True, False]
    assert vector.step(np.zeros((3, 2)))[1].tolist() == [0, 0, 0]  # paid once


def test_ant_sees_where_it_is():
    env = envs.make("antmaze-medium-diverse")
    observation, _ = env.reset(seed=0)
    assert observation.shape == (31,) and env.action_space.shape == (8,)
    np.testing.assert_array_equal(observation[:2], env.unwrapped.data.qpos[:2])
    assert envs.make("antmaze-medium").observation_space.shape == (29,)


def test_environments_share_a_model_and_leave_no_files(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    load_model.cache_clear()
    one, two = MazeEnv("point", "umaze"), MazeEnv("point", "umaze")
    assert one.model is two.model and one.data is not two.data
    assert not list(tmp_path.iterdir())
    copy = pickle.loads(pickle.dumps(MazeEnv("point", "umaze", mode="diverse")))
    assert copy.mode == "diverse"


def test_wrong_names_are_answered():
    with pytest.raises(UsageError, match="unknown maze mode 'random'"):
        envs.make("pointmaze-umaze", mode="random")
    with pytest.raises(UsageError, match="unknown environment 'pointmaze-larg'; did you mean 'pointmaze-large'"):
        envs.make("pointmaze-larg")
    with pytest.raises(UsageError, match=r"not goal=\(0, 0\)"):
        envs.make("pointmaze-umaze").reset(options={"goal": (0, 0)})


# --- D4RL's AntMaze


def one_step_errors(env):
    env.reset(seed=0)
    errors = []
    for row in RECORDED:
        state = np.array(row["observation"])
        env.unwrapped.set_state(state[:15], state[15:])
        observation = env.unwrapped.step(np.array(row["action"], np.float32))[0]
        errors.append(np.abs(observation - row["next_observation"]).max())
    return np.array(errors)


def test_an_ant_moves_as_in_d4rl():
    assert one_step_errors(envs.make("d4rl/antmaze-umaze")).max() < 1e-5
    assert one_step_errors(envs.make("antmaze-umaze")).min() > 1e-2  # Gymnasium-Robotics' ant is another one
    assert envs.canonical("antmaze-umaze") == "antmaze-umaze"


def test_the_walls_are_where_d4rl_has_them():
    """The last four rows touch one; another maze has walls elsewhere."""
    other = one_step_errors(envs.make("d4rl/antmaze-large"))
    assert other[:2].max() < 1e-5 and other[2:].max() > 1e-3


@pytest.mark.parametrize("name", ["umaze-v0", "umaze-diverse-v2", "medium-play-v2", "large-diverse-v2"])
def test_start_goal_and_limit_are_d4rls(name):
    env, maze = envs.make(f"antmaze-{name}"), name.split("-")[0]
    assert env.spec.id == f"d4rl/antmaze-{maze}" and env.observation_space.shape == (29,)
    assert env.spec.max_episode_steps == (700 if maze == "umaze" else 1000)
    goals = []
    for seed in range(30):
        first, _ = env.reset(seed=seed)
        assert np.abs(first[:2]).max() <= 0.1
        goals.append(env.unwrapped.goal)
    away = np.array(goals) - {"umaze": (0, 8), "medium": (20, 20), "large": (32, 24)}[maze]
    assert away.min() >= 0 and away.max() <= 1.5 and away.std() > 0.1  # drawn at every reset
    np.testing.assert_array_equal(place(env.unwrapped.layout.goal), np.array(goals[0]) - away[0])


def test_many_ants_are_one_ant_to_the_bit():
    many, one = envs.make_vec("d4rl/antmaze-umaze", 3), envs.make("d4rl/antmaze-umaze")
    observations, first = many.reset(seed=5)[0], one.reset(seed=6)[0]
    np.testing.assert_array_equal(observations[1], first)
    for action in np.random.default_rng(0).uniform(-1.2, 1.2, (30, 8)):
        observations = many.step(np.tile(action, (3, 1)))[0]
        np.testing.assert_array_equal(observations[1], one.step(action)[0])
    goals = many.goals if isinstance(many, AntMazeVectorEnv) else [e.unwrapped.goal for e in many.envs]
    np.testing.assert_array_equal(goals[1], one.unwrapped.goal)
    assert pickle.loads(pickle.dumps(one.unwrapped)).maze == "umaze"


def test_an_ant_at_the_goal_is_paid_once_and_the_limit_ends_the_rest():
    pytest.importorskip("mujoco.batch")
    many = envs.make_vec("d4rl/antmaze-umaze", 2)
    many.reset(seed=0)
    many.qpos[1, :2] = many.goals[1] + [0.3, 0.0]
    steps = [many.step(np.zeros((2, 8))) for _ in range(700)]
    assert steps[0][1].tolist() == [0, 1] and steps[0][2].tolist() == [False, True]
    assert sum(s[1].sum() for s in steps) == 1
    assert [bool(s[3][0]) for s in steps] == [False] * 699 + [True]


# --- data


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("maze", MAZES)
def test_no_trajectory_makes_an_evaluation_trip(data, maze, style):
    episodes, layout = data[maze, style], Layout(maze)
    starts = [layout.cell_at(o[:2]) for o in episodes.observations[episodes.offsets[:-1]]]
    goals = [layout.goal] * len(starts)
    if style == "diverse":
        goals = [layout.cell_at(o[4:]) for o in episodes.observations[episodes.offsets[:-1]]]
    reached = [(s, g) for s, g, end in zip(starts, goals, episodes.terminated[episodes.last_rows], strict=True) if end]
    asked = min(layout.moves[goal][start] for start, goal in evaluation_pairs(layout, style))
    assert 0 < len(reached) < 0.5 * episodes.num_episodes
    assert max(layout.moves[g][s] for s, g in reached) < asked
    if style == "play":  # a start near evaluation's never gets to the goal: at least two trips have to be joined
        assert max(layout.moves[g][s] for s, g in reached) <= layout.longest_trip == asked // 2


@pytest.mark.parametrize("maze", MAZES)
def test_all_trajectories_together_make_the_evaluation_trip(data, maze):
    layout = Layout(maze)
    moves = set()
    for episode in data[maze, "play"]:
        moves |= set(pairwise(layout.cell_at(o[:2]) for o in episode["observations"]))
    seen = {layout.start}
    while more := {after for before, after in moves if before in seen} - seen:
        seen |= more
    assert layout.goal in seen


@pytest.mark.parametrize("style", STYLES)
def test_rewards_and_ends_say_what_happened(data, style):
    episodes = data["medium", style]
    goal = Layout("medium").centre((6, 6)) if style == "play" else episodes.next_observations()[:, 4:]
    there = np.hypot(*(episodes.next_observations()[:, :2] - goal).T) <= 0.5 + 1e-6
    np.testing.assert_array_equal(episodes.terminated, there)
    np.testing.assert_array_equal(episodes.rewards, there)
    assert np.abs(episodes.actions).max() <= 1 and episodes.final_known.all()
    assert (episodes.terminated & episodes.truncated).sum() == 0
    assert episodes.lengths.max() < 300  # trips arrive, no one is stuck until the time limit
    if style == "diverse":  # the goal stands still within an episode
        assert (episodes.observations[:, 4:] == episodes.next_observations()[:, 4:]).all()


def test_the_data_are_transitions_of_the_environment(data):
    """Replay a trip from its first observation: the logged actions lead to the logged observations."""
    episodes = data["umaze", "play"]
    env = envs.make("pointmaze-umaze")
    env.reset(seed=0)
    for trip in list(episodes)[:5]:
        first = trip["observations"][0].astype(np.float64)
        env.unwrapped.set_state(first[:2], first[2:])
        seen = [env.unwrapped.step(action)[0] for action in trip["actions"]]
        np.testing.assert_allclose(trip["observations"][1:], seen, atol=2e-3)  # starts are stored as float32


@pytest.mark.parametrize("maze", MAZES)
def test_the_driver_itself_solves_the_maze_in_time(maze):
    env, layout, rng = envs.make(f"pointmaze-{maze}"), Layout(maze), np.random.default_rng(0)
    assert all(drive(env, layout, layout.start, layout.goal, 0.5, rng)["terminated"][-1] for _ in range(3))


def test_collect_writes_a_dataset_with_its_recipe(tmp_path, capsys):
    out = collect_maze("pointmaze-umaze", 1500, tmp_path / "set", seed=4, style="diverse", noise=0.2)
    episodes = load(out)
    assert "reach the goal" in capsys.readouterr().err
    assert 1500 <= len(episodes) < 1800 and episodes.env_id == "pointmaze-umaze-diverse"
    recipe = episodes.meta["recipe"]
    assert recipe["seed"] == 4 and recipe["settings"]["noise"] == 0.2 and recipe["settings"]["style"] == "diverse"
    assert recipe["versions"]["gymnasium_robotics"] and recipe["longest_trip_moves"] == 3
    share = episodes.terminated[episodes.last_rows].mean()
    assert recipe["success_share"] == pytest.approx(share, abs=1e-4)
    with pytest.raises(UsageError, match="exists: pass --overwrite"):
        collect_maze("pointmaze-umaze", 10, out)
    collect_maze("pointmaze-umaze", 10, out, overwrite=True, progress=False)
    assert load(out).env_id == "pointmaze-umaze"


def test_a_seed_decides_everything():
    one, same, other = (make_trips("pointmaze-medium", 1000, seed=s) for s in (1, 1, 2))
    for name in ("observations", "actions", "rewards", "offsets", "final_observations"):
        np.testing.assert_array_equal(getattr(one, name), getattr(same, name))
    assert not np.array_equal(one.observations[:100], other.observations[:100])


@pytest.mark.parametrize(
    ("env_id", "settings", "message"),
    [
        ("antmaze-umaze", {}, "no driver for 'antmaze-umaze'"),
        ("pointmaze-huge", {}, "no driver for 'pointmaze-huge'"),
        ("pointmaze-umaze", {"style": "plays"}, "unknown maze style 'plays'; did you mean 'play'"),
        ("pointmaze-umaze-diverse", {"style": "play"}, "which is the style diverse"),
        ("pointmaze-umaze", {"noise": float("nan")}, "noise a number"),
        ("pointmaze-umaze", {"steps": 0}, "steps must be at least 1"),
    ],
)
def test_wrong_orders_are_refused(env_id, settings, message):
    with pytest.raises(UsageError, match=message):
        make_trips(env_id, **{"steps": 100} | settings)
