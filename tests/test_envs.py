"""Environments: D4RL's physics against recorded transitions, the resting vector forms, noise, names, Reacher2d."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from functools import partial
from pathlib import Path

import numpy as np
import pytest

gymnasium = pytest.importorskip("gymnasium")
pytest.importorskip("mujoco")

from replaylab import envs  # noqa: E402
from replaylab.envs import Noise, PlainVectorEnv, d4rl, reacher2d  # noqa: E402
from replaylab.errors import MissingExtra, UsageError  # noqa: E402

RECORDED = json.loads((Path(__file__).parent / "d4rl_transitions.json").read_text())  # says where they are from
ROBOTS = ["hopper", "halfcheetah", "walker2d", "ant"]
# D4RL stored float32 states, which halfcheetah's stiff legs amplify; the other two are recorded in full
TOLERANCE = {"hopper": 2e-5, "halfcheetah": 1e-4, "walker2d": 1e-8, "ant": 1e-8}
CLIP = {"hopper": 10.0, "halfcheetah": np.inf, "walker2d": 10.0, "ant": np.inf}
has_batch = pytest.mark.skipif(importlib.util.find_spec("mujoco.batch") is None, reason="mujoco older than 3.17")


def one_step_errors(env, name):
    """Largest error of the state after one step, of root x and of the reward, and the observation's: (rows, 4)."""
    env.reset(seed=0)
    simulator, errors = env.unwrapped, []
    for row in RECORDED[f"{name}_rows"]:
        simulator.set_state(np.array(row["qpos"]), np.array(row["qvel"]))
        action = np.array(row["action"], np.float32 if "row" in row else np.float64)  # D4RL's own are float32
        observation, reward, *_ = simulator.step(action)
        qpos, qvel = simulator.data.qpos, np.clip(simulator.data.qvel, -CLIP[name], CLIP[name])
        position = np.abs(qpos - row["next_qpos"])
        velocity = np.abs(qvel - np.clip(row["next_qvel"], -CLIP[name], CLIP[name]))
        seen = np.abs(observation[: len(row["next_observation"])] - row["next_observation"])
        state = max(position.max(), velocity.max())
        errors.append([state, position[0], abs(reward - row["reward"]), seen.max()])
    return np.array(errors)


# --- physics ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROBOTS)
def test_one_step_matches_d4rl(name):
    state, x, reward, observation = one_step_errors(envs.make(name), name).max(axis=0)
    assert state < TOLERANCE[name] and observation < TOLERANCE[name]
    assert x < 1e-8
    assert reward < 8e-7


@pytest.mark.parametrize(
    "name, plain",
    [("hopper", "Hopper-v5"), ("halfcheetah", "HalfCheetah-v5"), ("walker2d", "Walker2d-v5"), ("ant", "Ant-v5")],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_plain_gymnasium_does_not(name, plain, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # mujoco 4.0 writes a log file about HalfCheetah
    env = gymnasium.make(plain)
    assert np.median(one_step_errors(env, name)[:, 0]) > 1e-3


@pytest.mark.parametrize("name", ["hopper", "ant"])
def test_margins_matter(name, monkeypatch):
    if not d4rl.margins_add():
        pytest.skip("this engine takes the larger margin, as MuJoCo 2.0 did")
    monkeypatch.setattr(d4rl, "margins_add", lambda: False)
    assert one_step_errors(envs.make(name), name)[:, 0].max() > 1e-3


def test_the_integrator_matters(monkeypatch):
    if d4rl.rk4_is_classical():
        pytest.skip("this engine integrates free joints as MuJoCo 2.0 did")
    monkeypatch.setattr(d4rl, "rk4_is_classical", lambda: True)
    assert one_step_errors(envs.make("ant"), "ant")[:, 0].max() > 1e-6


def test_ant_speed_is_the_lagging_torso():
    """Over a run both ends of the difference lag, which one step after set_state cannot show."""
    run, env = RECORDED["ant_replay_run"], envs.make("ant")
    env.reset(seed=0)
    env.unwrapped.set_state(np.array(run["qpos"]), np.array(run["qvel"]))
    rewards = [env.unwrapped.step(np.array(action))[1] for action in run["actions"]]
    np.testing.assert_allclose(rewards, run["rewards"], atol=1e-8)
    np.testing.assert_allclose(env.unwrapped.data.qpos, run["last_qpos"], atol=1e-8)


def test_capsule_inertia_by_hand():
    """Hopper's torso: r = 0.05, h = 0.2, so a cylinder of half-length 0.225; halfcheetah is scaled to 14 kg."""
    model = envs.make("hopper").unwrapped.model
    mass = 1000 * np.pi * 0.05**2 * 0.45
    along, across = mass * 0.05**2 / 2, mass * (3 * 0.05**2 + 4 * 0.225**2) / 12
    assert model.body_mass[1] == pytest.approx(mass)
    assert sorted(model.body_inertia[1]) == pytest.approx([along, across, across])
    assert envs.make("halfcheetah").unwrapped.model.body_mass.sum() == pytest.approx(14.0)


@pytest.mark.skipif("REPLAYLAB_D4RL_DIR" not in os.environ, reason="REPLAYLAB_D4RL_DIR names no folder of D4RL files")
@pytest.mark.parametrize("name", ROBOTS)
def test_whole_files(name):
    """States come from the observations, as the infos of -v1 files belong to other rows; root x is then 0."""
    h5py = pytest.importorskip("h5py")
    env, tolerance = envs.make(name).unwrapped, max(TOLERANCE[name], 2e-5)
    paths = sorted(Path(os.environ["REPLAYLAB_D4RL_DIR"]).glob(f"{name}_*.hdf5"))
    if not paths:
        pytest.skip(f"no {name} files there")
    for path in paths:
        with h5py.File(path) as file:
            observations, actions, rewards = (file[key][:] for key in ("observations", "actions", "rewards"))
            ended = file["terminals"][:].astype(bool) | file["timeouts"][:].astype(bool)
        hidden, size = env.robot.hidden, env.model.nq - env.robot.hidden
        rows = np.flatnonzero(~ended[:-1] & (np.abs(observations[:-1, size:]) < CLIP[name]).all(1))
        errors = []
        for i in rows[:: max(1, len(rows) // 2000)]:
            seen = observations[i].astype(np.float64)
            env.set_state(np.concatenate([np.zeros(hidden), seen[:size]]), seen[size : size + env.model.nv])
            after, reward, *_ = env.step(actions[i])
            lag = 0.0 if name == "ant" else abs(reward - float(np.ravel(rewards)[i]))  # ant's needs the step before
            errors.append([np.abs(after - observations[i + 1]).max(), lag])
        state, reward = np.array(errors).T
        print(f"{path.name}: {len(state)} rows, state {state.max():.1e}, reward {reward.max():.1e}")
        assert (state < tolerance).mean() > 0.999 and reward.max() < 2e-6, path.name


# --- the tasks --------------------------------------------------------------------------------------------------


def test_spaces_and_observations():
    for name, size, actions in zip(ROBOTS, [11, 17, 17, 111], [3, 6, 6, 8], strict=True):
        env = envs.make(name)
        observation, _ = env.reset(seed=0)
        assert observation.shape == env.observation_space.shape == (size,) and observation.dtype == np.float64
        assert env.action_space.shape == (actions,) and (env.action_space.high == 1).all()
    assert not observation[27:].any() and observation[:27].all()  # ant's contact forces were never filled in
    hopper = d4rl.ROBOTS["hopper"].observe(np.arange(6.0), np.array([-30.0, 5, 30, 0, 0, 0]))
    np.testing.assert_array_equal(hopper, [1, 2, 3, 4, 5, -10, 5, 10, 0, 0, 0])


@pytest.mark.parametrize(
    "name, place, inside, outside",
    [
        ("hopper", 1, [0.701, 5.0], [0.7, 0.1]),
        ("hopper", 2, [-0.199, 0.199], [-0.2, 0.2]),
        ("hopper", 4, [-99.0, 99.0], [-100.0, 100.0, np.nan]),
        ("walker2d", 1, [0.801, 1.999], [0.8, 2.0]),
        ("walker2d", 2, [-0.999, 0.999], [-1.0, 1.0]),
        ("ant", 2, [0.2, 1.0], [0.199, 1.001, np.inf]),
        ("halfcheetah", 1, [-9.0, 9.0], []),
    ],
)
def test_where_episodes_end(name, place, inside, outside):
    robot, qpos = d4rl.ROBOTS[name], np.zeros((len(inside) + len(outside), 15))
    qpos[:, 2 if name == "ant" else 1] = 1.0 if name == "ant" else 1.25
    qpos[:, place] = inside + outside
    healthy = robot.healthy(qpos, np.zeros((len(qpos), 14)))  # (rows,)
    assert healthy.tolist() == [True] * len(inside) + [False] * len(outside)


def test_reset_distributions():
    for name, noise, normal in zip(ROBOTS, [5e-3, 0.1, 5e-3, 0.1], [False, True, False, True], strict=True):
        robot, rng = d4rl.ROBOTS[name], np.random.default_rng(0)
        qpos, qvel = robot.start(np.zeros(20_000), np.zeros(20_000), rng)
        assert np.abs(qpos).max() <= noise and qpos.std() == pytest.approx(noise / 3**0.5, rel=0.02)
        assert qvel.std() == pytest.approx(noise if normal else noise / 3**0.5, rel=0.02)
        assert (np.abs(qvel).max() > noise) == normal


def test_loading_is_silent(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    envs.make("halfcheetah")
    assert capfd.readouterr() == ("", "") and not list(tmp_path.iterdir())


# --- vector forms -----------------------------------------------------------------------------------------------


@has_batch
@pytest.mark.parametrize("name", ROBOTS)
def test_batch_equals_single(name):
    many, rng = envs.make_vec(name, 3, nthread=2), np.random.default_rng(0)
    assert isinstance(many, d4rl.BatchVectorEnv)
    singles = [envs.make(name) for _ in range(3)]
    first = many.reset(seed=7)[0]
    np.testing.assert_array_equal(first, [env.reset(seed=7 + i)[0] for i, env in enumerate(singles)])
    for _ in range(60):
        actions = rng.uniform(-1, 1, many.action_space.shape).astype(np.float32)
        observations, rewards, terminated, truncated, _ = many.step(actions)
        for i, env in enumerate(singles):
            observation, reward, *flags, _ = env.step(actions[i])
            np.testing.assert_array_equal(observations[i], observation)
            assert (rewards[i], terminated[i], truncated[i]) == (reward, *flags)
            if flags[0]:  # both go on with the generators they have
                again = many.reset(options={"reset_mask": np.arange(3) == i})[0]
                np.testing.assert_array_equal(again[i], env.reset()[0])


def resting_forms():
    return {
        "batch": lambda: envs.make_vec("hopper", 3),
        "plain": lambda: PlainVectorEnv([lambda: gymnasium.make("d4rl/hopper")] * 3),
        "noisy": lambda: envs.make_vec("hopper", 3, noise=Noise(0.1, 0.5, 0.1, 0.5)),
    }


@pytest.mark.parametrize("form", resting_forms())
def test_finished_environments_stand_still(form):
    env = resting_forms()[form]()
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(np.zeros((3, 3)))
    env.reset(seed=0)
    actions = np.array([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [-1.0, 1.0, -1.0]])
    before, ended = None, np.zeros(3, bool)
    for _ in range(200):
        observations, rewards, terminated, truncated, _ = env.step(actions)
        if before is not None:
            np.testing.assert_array_equal(observations[ended], before[ended])
        assert not rewards[ended].any() and rewards[~ended].all() and terminated[ended].all() and not truncated.any()
        before, ended = observations, terminated
        if ended.sum() == 2:
            break
    assert ended.sum() == 2
    mask = np.flatnonzero(ended)[0] == np.arange(3)
    after, _ = env.reset(seed=[5, 5, 5], options={"reset_mask": mask})
    np.testing.assert_array_equal(after[~mask], before[~mask])
    _, rewards, terminated, _, _ = env.step(actions)
    np.testing.assert_array_equal(rewards != 0, mask | ~ended)
    np.testing.assert_array_equal(terminated, ended & ~mask)


@pytest.mark.parametrize("form", resting_forms())
def test_seeds(form):
    env, other = resting_forms()[form](), resting_forms()[form]()
    first = env.reset(seed=3)[0]
    np.testing.assert_array_equal(first, other.reset(seed=[3, 4, 5])[0])
    np.testing.assert_array_equal(env.reset()[0], other.reset()[0])
    assert (env.reset(seed=4)[0][0] == first[1]).all()
    assert not np.array_equal(env.reset()[0], first)
    for wrong in ({"seed": [1, 2]}, {"options": {"reset_mask": np.ones(2, bool)}}):
        with pytest.raises(ValueError):
            env.reset(**wrong)


def test_episodes_are_cut_at_1000_steps():
    many, one = envs.make_vec("halfcheetah", 1), envs.make("halfcheetah")
    many.reset(seed=0), one.reset(seed=0)
    for _ in range(999):
        assert not many.step(np.zeros((1, 6)))[3][0] and not one.step(np.zeros(6))[3]
    _, _, terminated, truncated, _ = many.step(np.zeros((1, 6)))
    assert truncated[0] and not terminated[0] and one.step(np.zeros(6))[3]


def test_without_batch_plain_environments_serve(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    env = envs.make_vec("hopper", 2)
    assert isinstance(env, PlainVectorEnv)
    monkeypatch.undo()
    np.testing.assert_array_equal(env.reset(seed=1)[0], envs.make_vec("hopper", 2).reset(seed=1)[0])


class Maze(gymnasium.Env):
    """A stand-in with a maze's kind of observation."""

    observation_space = gymnasium.spaces.Dict(
        {key: gymnasium.spaces.Box(-5.0, 5.0, (size,)) for key, size in (("observation", 3), ("desired_goal", 2))}
    )
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return {"observation": np.arange(3.0), "desired_goal": np.array([4.0, 5.0])}, {}


def test_plain_vector_with_any_environment():
    env = envs.make_vec("CartPole-v1", 2)
    env.reset(seed=0)
    for _ in range(30):
        _, rewards, terminated, _, _ = env.step(np.array([1, 0]))
    assert terminated.all() and not rewards.any()
    maze = PlainVectorEnv([Maze])
    assert maze.single_observation_space.shape == (5,)
    np.testing.assert_array_equal(maze.reset()[0], [[0, 1, 2, 4, 5]])
    with pytest.raises(UsageError, match="Box"):
        envs.make_vec("FrozenLake-v1", 1)


# --- noise ------------------------------------------------------------------------------------------------------


def test_noise_statistics_and_clipping():
    noise, rng = Noise(action_scale=0.2, action_rate=0.25, transition_scale=3.0, loc=0.5), np.random.default_rng(0)
    wide = gymnasium.spaces.Box(-9.0, 9.0, (2,))
    draws = noise.on_actions(np.zeros((20_000, 2), np.float32), wide, [rng] * 20_000)
    hit = draws.any(axis=1)
    assert hit.mean() == pytest.approx(0.25, abs=0.01)
    assert draws[hit].mean() == pytest.approx(0.5, abs=0.01) and draws[hit].std() == pytest.approx(0.2, abs=0.01)
    narrow = gymnasium.spaces.Box(-1.0, 1.0, (2,))
    seen = noise.on_observations(np.zeros((500, 2), np.float32), narrow, [rng] * 500)
    assert seen.dtype == np.float32 and seen.min() == -1 and seen.max() == 1 and (np.abs(seen) < 1).any()
    pixels = gymnasium.spaces.Box(0, 255, (4,), np.uint8)
    assert noise.on_observations(np.full((1, 4), 254, np.uint8), pixels, [rng]).dtype == np.uint8


def test_noise_is_the_same_alone_and_side_by_side():
    noise = Noise(action_scale=0.3, action_rate=0.5, transition_scale=0.1, transition_rate=0.5)
    many, one, clean = envs.make_vec("hopper", 2, noise=noise), envs.make("hopper", noise=noise), envs.make("hopper")
    first, start = many.reset(seed=8)[0], clean.reset(seed=9)[0]
    np.testing.assert_array_equal(first[1], one.reset(seed=9)[0])
    actions = np.full((2, 3), 0.9, np.float32)
    noisy = False
    for _ in range(10):
        seen, rewards, *_ = many.step(actions)
        alone, reward, *_ = one.step(actions[1])
        np.testing.assert_array_equal(seen[1], alone)
        assert rewards[1] == reward
        noisy |= bool(np.abs(clean.step(actions[1])[0] - alone).max() > 0.02)
    assert noisy and (actions == np.float32(0.9)).all() and start.shape == alone.shape


def test_noise_that_makes_no_sense():
    for wrong in ({"action_scale": -1.0}, {"transition_rate": 1.5}, {"action_rate": float("nan")}):
        with pytest.raises(UsageError):
            Noise(**wrong)
    for wrong in ("a", None, [0.1], np.ones(2), float("nan")):
        with pytest.raises(UsageError, match="action_scale of noise must be a number, not"):
            Noise(wrong)
        with pytest.raises(UsageError, match="loc of noise must be a number, not"):
            Noise(0.1, loc=wrong)
    assert Noise(np.float32(0.5), loc=np.int64(1)) == Noise(0.5, loc=1)
    assert json.dumps(vars(Noise(np.float32(0.5), loc=np.int64(1))))  # an evaluation is written with its noise
    with pytest.raises(UsageError, match="action noise"):
        envs.make("CartPole-v1", noise=Noise(action_scale=0.1))
    for make in (envs.make, partial(envs.make_vec, num_envs=2)):
        with pytest.raises(UsageError, match="shows names of colours"):
            make("atari-rgb/pong", noise=Noise(transition_scale=0.1))


# --- names ------------------------------------------------------------------------------------------------------


def test_unknown_names():
    with pytest.raises(UsageError, match="'d4rl/hopper'"):
        envs.make("d4rl/hoper")
    with pytest.raises(UsageError, match="Hopper-v5"):
        envs.make_vec("Hoper-v5", 2)
    with pytest.raises(UsageError, match=r"known: .*d4rl/ant, .*reacher2d"):
        envs.make("zzzzzzzz")
    with pytest.raises(UsageError, match="d4rl/walker2d"):
        envs.make_vec("d4rl/walker", 2)


def test_registering_is_cheap():
    code = (
        "import sys, gymnasium, replaylab.envs; assert 'd4rl/ant' in gymnasium.registry and 'mujoco' not in sys.modules"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )


def test_missing_mujoco_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mujoco", None)
    monkeypatch.delitem(sys.modules, "replaylab.envs.d4rl")
    for make in (lambda: envs.make("hopper"), lambda: envs.make_vec("hopper", 2)):
        with pytest.raises(MissingExtra, match=r"pip install 'replaylab\[mujoco\]'"):
            make()


def test_missing_gymnasium_names_what_each_environment_needs(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    monkeypatch.delitem(sys.modules, "replaylab.envs")
    with pytest.raises(MissingExtra, match="needs gymnasium: pip install") as error:
        importlib.import_module("replaylab.envs")
    told = re.findall(r"replaylab\[(\w+)\]", str(error.value))
    assert told == ["mujoco", "atari", "maze"]
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    assert all("gymnasium" in " ".join(project["optional-dependencies"][extra]) for extra in told)


def test_mujoco_without_the_driver_it_is_asked_for(monkeypatch, tmp_path):
    (tmp_path / "mujoco.py").write_text("None.eglQueryString")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("MUJOCO_GL", "egl")
    monkeypatch.delitem(sys.modules, "mujoco")
    monkeypatch.delitem(sys.modules, "replaylab.envs.d4rl")
    with pytest.raises(UsageError, match=r"mujoco, which does not load here .*eglQueryString.*; without MUJOCO_GL=egl"):
        envs.make("hopper")


# --- reacher2d --------------------------------------------------------------------------------------------------


def test_reacher2d_by_hand():
    env = envs.make("reacher2d")
    arm = env.unwrapped
    for seed in range(20):
        env.reset(seed=seed)
        assert np.abs(arm.data.qpos).max() <= 2 and not arm.data.qvel.any() and 0.5 <= np.linalg.norm(arm.goal) <= 1
        np.testing.assert_allclose(arm.data.site("goal").xpos[:2], arm.goal)  # what a viewer sees
    a, b = np.array([0.3, -0.5]), 0.785  # the upper arm starts at 0.785 rad, the forearm undoes it
    tip = 0.6 * np.array([np.cos(a[0] + b), np.sin(a[0] + b)]) + 0.45 * np.array([np.cos(a.sum()), np.sin(a.sum())])
    arm.goal = tip + np.array([0.04, -0.05])  # L1 distance 0.09: inside
    arm.set_state(a, np.zeros(2))
    expected = np.concatenate([np.sin(a), np.cos(a), [0, 0], tip, arm.goal, [-0.04, 0.05]])
    np.testing.assert_allclose(arm._observe(), expected, atol=1e-12)
    still, reward, *_ = env.step(np.zeros(2))
    assert reward == 1.0
    np.testing.assert_allclose(still, expected, atol=1e-9)
    arm.goal = tip + np.array([0.06, -0.05])  # 0.11: outside
    assert env.step(np.zeros(2))[1] == 0.0


def test_reacher2d_moves_and_never_terminates():
    env = envs.make("reacher2d")
    env.reset(seed=0)
    arm = env.unwrapped
    arm.set_state(np.zeros(2), np.zeros(2))
    for step in range(100):
        observation, _, terminated, truncated, _ = env.step(np.array([9.0, 0.0]))  # counts as 1
        tip = 0.6 * np.exp(1j * (arm.data.qpos[0] + 0.785)) + 0.45 * np.exp(1j * arm.data.qpos.sum())
        np.testing.assert_allclose(observation[6:8], [tip.real, tip.imag], atol=1e-12)  # the tip does not lag
        assert not terminated and truncated == (step == 99)
    assert observation[4] / arm.dt == pytest.approx(1.0, abs=0.05)  # torque 1 against damping 1
    assert arm.dt == pytest.approx(0.15) and reacher2d.Reacher2dEnv.metadata["render_fps"] == 7
