"""The four D4RL robots (hopper, halfcheetah, walker2d, ant) with the physics D4RL's data came from.

D4RL was recorded with MuJoCo 2.0. Newer engines move the same robots differently, by 1e-2 and more in a single step.
Three corrections to Gymnasium's models and integrator restore the old transitions, with every mujoco from 3.5 on:
1. a capsule's inertia is again that of a cylinder (changed in 2.1.2);
2. two contact margins count as their maximum, not their sum (changed in 3.5);
3. free joints are integrated by the classical Runge-Kutta scheme (changed in 4.0; only ant has one).
`docs/environments.md` has the errors with and without them.

First the robots (pure numpy, for one state or a batch of them), then the corrections, then the two environments.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box
from gymnasium.utils import EzPickle, seeding

from replaylab.envs.vector import PlainVectorEnv, RestingVectorEnv, Step
from replaylab.errors import require

mujoco: Any = require("mujoco", "playing in a D4RL environment")
from gymnasium.envs.mujoco import MujocoEnv  # noqa: E402  needs mujoco, whose absence is reported above

Array = np.ndarray
EPISODE_LIMIT = 1000


# --- the robots -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Robot:
    """What distinguishes the tasks. qpos is (..., nq), qvel (..., nv), an action (..., nu)."""

    xml: str  # a file among Gymnasium's assets
    frame_skip: int
    fps: int
    hidden: int  # leading coordinates (x, or x and y) that the observation leaves out
    control_cost: float
    alive_bonus: float
    reset_noise: float
    healthy: Callable[[Array, Array], Array]
    gaussian_velocity: bool = False  # reset noise of velocities: normal, or uniform as for positions
    velocity_clip: float | None = None  # in observations only
    padding: int = 0  # ant's 84 contact forces, which MuJoCo 2.0 left at zero
    torso_speed: bool = False  # measure speed by the torso's xpos, which lags behind qpos
    density: float = 1000.0
    total_mass: float | None = None

    def observe(self, qpos: Array, qvel: Array) -> Array:
        parts = [qpos[..., self.hidden :], qvel]
        if self.velocity_clip is not None:
            parts[1] = qvel.clip(-self.velocity_clip, self.velocity_clip)
        if self.padding:
            parts.append(np.zeros((*qpos.shape[:-1], self.padding)))
        return np.concatenate(parts, axis=-1)

    def reward(self, speed: Array, action: Array) -> Array:
        effort = np.square(action).sum(axis=-1).astype(np.float64)  # summed in the action's precision, as D4RL did
        return speed + self.alive_bonus - self.control_cost * effort

    def start(self, qpos: Array, qvel: Array, rng: np.random.Generator) -> tuple[Array, Array]:
        """A random initial state around the given one."""
        noise = self.reset_noise
        qpos = qpos + rng.uniform(-noise, noise, qpos.shape)
        if self.gaussian_velocity:
            return qpos, qvel + noise * rng.standard_normal(qvel.shape)
        return qpos, qvel + rng.uniform(-noise, noise, qvel.shape)


def _hopper_healthy(qpos: Array, qvel: Array) -> Array:
    state = np.concatenate([qpos, qvel], axis=-1)
    bounded = np.isfinite(state).all(-1) & (np.abs(state[..., 2:]) < 100).all(-1)
    return bounded & (qpos[..., 1] > 0.7) & (np.abs(qpos[..., 2]) < 0.2)


def _walker_healthy(qpos: Array, qvel: Array) -> Array:
    height, angle = qpos[..., 1], qpos[..., 2]
    return (height > 0.8) & (height < 2.0) & (np.abs(angle) < 1.0)


def _ant_healthy(qpos: Array, qvel: Array) -> Array:
    height = qpos[..., 2]
    return np.isfinite(qpos).all(-1) & np.isfinite(qvel).all(-1) & (height >= 0.2) & (height <= 1.0)


def _always_healthy(qpos: Array, qvel: Array) -> Array:
    return np.ones(qpos.shape[:-1], bool)


ROBOTS = {
    "hopper": Robot(
        xml="hopper.xml", frame_skip=4, fps=125, hidden=1, control_cost=1e-3, alive_bonus=1.0, reset_noise=5e-3,
        healthy=_hopper_healthy, velocity_clip=10.0,
    ),
    "halfcheetah": Robot(
        xml="half_cheetah.xml", frame_skip=5, fps=20, hidden=1, control_cost=0.1, alive_bonus=0.0, reset_noise=0.1,
        healthy=_always_healthy, gaussian_velocity=True, total_mass=14.0,
    ),
    "walker2d": Robot(
        xml="walker2d.xml", frame_skip=4, fps=125, hidden=1, control_cost=1e-3, alive_bonus=1.0, reset_noise=5e-3,
        healthy=_walker_healthy, velocity_clip=10.0,
    ),
    "ant": Robot(
        xml="ant.xml", frame_skip=5, fps=20, hidden=2, control_cost=0.5, alive_bonus=1.0, reset_noise=0.1,
        healthy=_ant_healthy, gaussian_velocity=True, padding=84, torso_speed=True, density=5.0,
    ),
}  # fmt: skip


# --- the corrections --------------------------------------------------------------------------------------------


def load_model(xml: str, density: float, total_mass: float | None = None) -> Any:
    """Compile a model of capsules and spheres so that it behaves as in MuJoCo 2.0 (except for free joints: see rk4).

    The inertias are set in the XML, not in the compiled model: the compiler derives bounding boxes and shortcuts from
    them, and if those are stale, contacts go missing.
    """
    root = ElementTree.fromstring(xml)
    compiler = root.find("compiler")
    assert compiler is not None
    # mujoco 4.0 prints a warning about this attribute and writes a log file, so the scaling is done here
    compiler.attrib.pop("settotalmass", None)
    shapes = mujoco.MjModel.from_xml_string(ElementTree.tostring(root, "unicode"))
    solids = [body_inertia(shapes, body, density) for body in range(1, shapes.nbody)]
    scale = total_mass / sum(mass for mass, _, _ in solids) if total_mass else 1.0

    compiler.set("inertiafromgeom", "false")
    bodies = [body for top in root.iter("worldbody") for body in top.iter("body")]  # in the order of their ids
    for body, (mass, centre, tensor) in zip(bodies, solids, strict=True):
        six = scale * tensor[[0, 1, 2, 0, 0, 1], [0, 1, 2, 1, 2, 2]]
        inertial = {"pos": _numbers(centre), "mass": _numbers([scale * mass]), "fullinertia": _numbers(six)}
        body.insert(0, ElementTree.Element("inertial", inertial))
    model = mujoco.MjModel.from_xml_string(ElementTree.tostring(root, "unicode"))

    if margins_add():
        if np.ptp(model.geom_margin):
            raise ValueError("halving the margins restores their maximum only where all are equal")
        model.geom_margin[:] *= 0.5
    return model


def _numbers(values: Iterable[float]) -> str:
    return " ".join(repr(float(value)) for value in values)


def body_inertia(model: Any, body: int, density: float) -> tuple[float, Array, Array]:
    """Mass, centre and inertia tensor (3, 3) of a body, as MuJoCo computed them before 2.1.2."""
    geoms = np.flatnonzero(model.geom_bodyid == body)
    solids = [_solid(model, int(geom), density) for geom in geoms]
    masses = [mass for mass, _ in solids]
    centre = np.average(model.geom_pos[geoms], axis=0, weights=masses)
    tensor = np.zeros((3, 3))
    for (mass, own), position in zip(solids, model.geom_pos[geoms], strict=True):
        d = position - centre
        tensor += own + mass * (d @ d * np.eye(3) - np.outer(d, d))  # parallel axis theorem
    return sum(masses), centre, tensor


def _solid(model: Any, geom: int, density: float) -> tuple[float, Array]:
    """Mass of a capsule or sphere, and its inertia tensor about its own centre along the body's axes.

    Before 2.1.2, a capsule of radius r and half-length h was a solid cylinder of radius r and half-length h + r/2.
    """
    radius, half = model.geom_size[geom, :2]
    if model.geom_type[geom] == mujoco.mjtGeom.mjGEOM_SPHERE:
        mass = density * 4 / 3 * np.pi * radius**3
        return mass, 0.4 * mass * radius**2 * np.eye(3)
    if model.geom_type[geom] != mujoco.mjtGeom.mjGEOM_CAPSULE:
        raise ValueError("only capsules and spheres are known here")
    half += radius / 2
    mass = density * np.pi * radius**2 * 2 * half
    across = mass * (3 * radius**2 + 4 * half**2) / 12
    rotation = np.zeros((3, 3))
    mujoco.mju_quat2Mat(rotation.ravel(), model.geom_quat[geom])  # ravel is a view here
    return mass, rotation @ np.diag([across, across, mass * radius**2 / 2]) @ rotation.T


@functools.cache
def margins_add() -> bool:
    """Whether this engine sums the margins of two geoms: tested on two spheres 1.5 margins apart."""
    model = mujoco.MjModel.from_xml_string("""<mujoco><worldbody><geom size=".1" margin=".01"/>
        <body pos="0 0 .215"><freejoint/><geom size=".1" margin=".01"/></body></worldbody></mujoco>""")
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    return data.ncon > 0


@functools.cache
def rk4_is_classical() -> bool:
    """Whether mj_step rotates a free body as the classical scheme does: tested on a tumbling box."""
    model = mujoco.MjModel.from_xml_string("""<mujoco><option integrator="RK4" timestep=".01"/>
        <worldbody><body><freejoint/><geom type="box" size=".1 .2 .3"/></body></worldbody></mujoco>""")
    old, new = mujoco.MjData(model), mujoco.MjData(model)
    old.qvel[3:] = new.qvel[3:] = 4.0, 5.0, 6.0
    step_rk4(model, old)
    mujoco.mj_step(model, new)
    return bool(np.abs(old.qpos - new.qpos).max() < 1e-10)


def rk4(model: Any, qpos: Array, qvel: Array, accelerate: Callable[[Array, Array], Array]) -> tuple[Array, Array]:
    """qpos and qvel after one classical Runge-Kutta step, of one state or a batch; `accelerate(qpos, qvel)` -> qacc."""
    h = model.opt.timestep

    def move(velocity: Array) -> Array:
        moved = qpos.copy()
        for row, v in zip(np.atleast_2d(moved), np.atleast_2d(velocity), strict=True):
            mujoco.mj_integratePos(model, row, v, h)  # in place; handles quaternions
        return moved

    v, a = qvel, accelerate(qpos, qvel)
    v_sum, a_sum = v, a
    for reach, weight in ((0.5, 2), (0.5, 2), (1.0, 1)):
        place, v = move(reach * v), qvel + reach * h * a
        a = accelerate(place, v)
        v_sum, a_sum = v_sum + weight * v, a_sum + weight * a
    return move(v_sum / 6), qvel + h * a_sum / 6


def step_rk4(model: Any, data: Any) -> None:
    def accelerate(qpos: Array, qvel: Array) -> Array:
        data.qpos[:], data.qvel[:] = qpos, qvel
        mujoco.mj_forward(model, data)
        data.qacc_warmstart[:] = data.qacc  # as mj_step does: the solver then needs fewer iterations
        return data.qacc.copy()

    data.qpos[:], data.qvel[:] = rk4(model, data.qpos.copy(), data.qvel.copy(), accelerate)


def advance(env: Any, ctrl: Array, n_frames: int) -> None:
    """Simulate `n_frames` physics steps of one environment, with our integrator if `env.own_rk4`."""
    env.data.ctrl[:] = ctrl
    if env.own_rk4:
        for _ in range(n_frames):
            step_rk4(env.model, env.data)
    else:
        mujoco.mj_step(env.model, env.data, nstep=n_frames)


# --- the environments -------------------------------------------------------------------------------------------


def simulation(env: Any, model: Any) -> tuple[Any, Any]:
    """A model that can be rendered in the size that the environment was asked for, and its state."""
    model.vis.global_.offwidth = max(model.vis.global_.offwidth, env.width)
    model.vis.global_.offheight = max(model.vis.global_.offheight, env.height)
    return model, mujoco.MjData(model)


class D4RLEnv(MujocoEnv, EzPickle):
    """One robot. Made by `gymnasium.make("d4rl/hopper")` and the like, which adds the limit of 1000 steps."""

    metadata = {"render_modes": ["human", "rgb_array", "depth_array", "rgbd_tuple"]}  # noqa: RUF012

    def __init__(self, robot: str, **kwargs: Any) -> None:
        EzPickle.__init__(self, robot, **kwargs)
        self.robot = ROBOTS[robot]
        self.metadata = {**self.metadata, "render_fps": self.robot.fps}
        super().__init__(self.robot.xml, self.robot.frame_skip, None, default_camera_config={"distance": 4.0}, **kwargs)
        has_free_joint = (self.model.jnt_type == mujoco.mjtJoint.mjJNT_FREE).any()
        self.own_rk4 = bool(has_free_joint) and not rk4_is_classical()
        size = self.robot.observe(self.init_qpos, self.init_qvel).size
        self.observation_space = Box(-np.inf, np.inf, (size,), np.float64)

    def _initialize_simulation(self) -> tuple[Any, Any]:
        with open(self.fullpath, encoding="utf-8") as file:
            return simulation(self, load_model(file.read(), self.robot.density, self.robot.total_mass))

    def _step_mujoco_simulation(self, ctrl: Array, n_frames: int) -> None:
        advance(self, ctrl, n_frames)

    def _x(self) -> Any:
        return self.data.xpos[1, 0] if self.robot.torso_speed else self.data.qpos[0]

    def step(self, action: Array) -> tuple[Array, Any, bool, bool, dict[str, Any]]:
        before = self._x()
        self.do_simulation(action, self.frame_skip)
        speed = (self._x() - before) / self.dt
        qpos, qvel = self.data.qpos, self.data.qvel
        reward = self.robot.reward(speed, action)
        terminated = not self.robot.healthy(qpos, qvel)
        if self.render_mode == "human":
            self.render()
        return self.robot.observe(qpos, qvel), reward, terminated, False, {"x_position": self._x(), "x_velocity": speed}

    def reset_model(self) -> Array:
        self.set_state(*self.robot.start(self.init_qpos, self.init_qvel, self.np_random))
        return self.robot.observe(self.data.qpos, self.data.qvel)


class BatchVectorEnv(RestingVectorEnv):
    """Many copies of one environment, stepped by `mujoco.batch` on several threads, bit-identical to the original.
    A subclass defines `_begin` (an initial state), `_observe` and `_outcome` (the result of a step)."""

    def __init__(
        self, single: Any, num_envs: int, *, nthread: int | None = None, max_episode_steps: int = EPISODE_LIMIT
    ) -> None:
        from mujoco.batch import Batch  # mujoco 3.17 and newer

        super().__init__(num_envs, single.observation_space, single.action_space)
        self.single, self.model, self.max_episode_steps = single, single.model, max_episode_steps
        self._batch = Batch(single.model, num_envs, min(nthread or os.cpu_count() or 1, num_envs))
        bind = self._batch.bind  # live arrays, one row per sub-environment
        self.qpos, self.qvel, self.ctrl, self.xpos = bind("qpos"), bind("qvel"), bind("ctrl"), bind("xpos")
        self._qacc, self._warmstart = bind("qacc"), bind("qacc_warmstart")
        self._rngs: list[np.random.Generator | None] = [None] * num_envs
        self._steps = np.zeros(num_envs, int)

    def _begin(self, i: int, rng: np.random.Generator) -> tuple[Array, Array]:
        raise NotImplementedError

    def _observe(self, ids: Array) -> Array:
        raise NotImplementedError

    def _outcome(self, ids: Array, actions: Array) -> tuple[Array, Array]:
        """Simulate one step; returns rewards and terminated."""
        raise NotImplementedError

    def _reset(self, ids: Array, seeds: list[int | None], options: dict) -> tuple[Array, dict[str, Any]]:
        self._batch.reset(ids, stage=mujoco.mjtStage.mjSTAGE_NONE)
        for i, seed in zip(ids, seeds, strict=True):
            rng = self._rngs[i]
            if rng is None or seed is not None:
                rng = self._rngs[i] = seeding.np_random(seed)[0]
            self.qpos[i], self.qvel[i] = self._begin(i, rng)
        self._batch.forward(ids)
        self._steps[ids] = 0
        return self._observe(ids), {}

    def _step(self, ids: Array, actions: Array) -> Step:
        rewards, terminated = self._outcome(ids, actions)
        self._steps[ids] += 1
        return self._observe(ids), rewards, terminated, self._steps[ids] >= self.max_episode_steps, {}

    def _move(self, ids: Array, actions: Array) -> None:
        self.ctrl[ids] = actions
        if self.single.own_rk4:
            for _ in range(self.single.frame_skip):
                self._rk4(ids)
        else:
            self._batch.step(ids, nstep=self.single.frame_skip)

    def _rk4(self, ids: Array) -> None:
        def accelerate(qpos: Array, qvel: Array) -> Array:
            self.qpos[ids], self.qvel[ids] = qpos, qvel
            self._batch.forward(ids)
            acceleration = self._warmstart[ids] = self._qacc[ids]
            return acceleration

        self.qpos[ids], self.qvel[ids] = rk4(self.model, self.qpos[ids], self.qvel[ids], accelerate)


class RobotVectorEnv(BatchVectorEnv):
    def _begin(self, i: int, rng: np.random.Generator) -> tuple[Array, Array]:
        return self.single.robot.start(self.single.init_qpos, self.single.init_qvel, rng)

    def _observe(self, ids: Array) -> Array:
        return self.single.robot.observe(self.qpos[ids], self.qvel[ids])

    def _outcome(self, ids: Array, actions: Array) -> tuple[Array, Array]:
        robot = self.single.robot
        x = self.xpos[:, 1, 0] if robot.torso_speed else self.qpos[:, 0]
        before = x[ids]
        self._move(ids, actions)
        speed = (x[ids] - before) / self.single.dt
        return robot.reward(speed, actions), ~robot.healthy(self.qpos[ids], self.qvel[ids])


def make_vec(env_id: str, num_envs: int, *, nthread: int | None = None, **kwargs: Any) -> RestingVectorEnv:
    """`num_envs` robots on `nthread` threads (default: all cores), but one by one to render or without Batch."""
    if importlib.util.find_spec("mujoco.batch") is None or "render_mode" in kwargs:
        return PlainVectorEnv([lambda: gymnasium.make(env_id, disable_env_checker=True, **kwargs)] * num_envs)
    name = env_id.removeprefix("d4rl/")
    if name in ROBOTS:
        return RobotVectorEnv(D4RLEnv(name), num_envs, nthread=nthread, **kwargs)
    from replaylab.envs.antmaze import AntMazeVectorEnv  # needs Gymnasium-Robotics

    kwargs = {"max_episode_steps": gymnasium.spec(env_id).max_episode_steps} | kwargs
    return AntMazeVectorEnv(name.removeprefix("antmaze-"), num_envs, nthread=nthread, **kwargs)
