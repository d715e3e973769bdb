"""`antgoal`: D4RL's ant on an open floor, where it learns to walk to a goal some metres away.

The observation is that of the ant in a maze without x and y (27 numbers), and the vector to the goal (2), both rotated
into the ant's frame, in which it faces along x: what it learns in one direction holds in all. The reward is the speed
towards the goal and a bonus per step, minus a small cost of effort. When a goal is reached, the next one is drawn;
falling over ends the episode. A planner leads the trained ant through a maze, see collect/antmaze.py.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import gymnasium
import numpy as np
from gymnasium.utils import EzPickle

from replaylab.envs.antmaze import START, D4RLAntMazeEnv, begin, load_ant
from replaylab.envs.d4rl import BatchVectorEnv
from replaylab.envs.maze import RADIUS
from replaylab.envs.vector import PlainVectorEnv, RestingVectorEnv

DISTANCE = 2.0, 6.0  # metres to a new goal, from and to; waypoints of a maze are about 4 apart
SIGHT = 3.0  # a goal farther away is observed at this distance
ALIVE, EFFORT = 0.2, 0.02  # bonus per step, and cost per squared action
UPRIGHT = 0.2  # the ant has fallen (on its side or back) if the cosine of its torso's tilt is below this


def observe(qpos: np.ndarray, qvel: np.ndarray, goal: np.ndarray) -> np.ndarray:
    """(..., 29): height, tilt, 8 joints; velocity forward, left and up, 3 angular, 8 joints; goal ahead and left."""
    w, x, y, z = np.moveaxis(qpos[..., 3:7], -1, 0)
    yaw = np.arctan2(2 * (w * z + x * y), w * w + x * x - y * y - z * z)
    c, s = np.cos(yaw / 2), np.sin(yaw / 2)
    tilt = np.stack([c * w + s * z, c * x + s * y, c * y - s * x, c * z - s * w], -1)  # the rotation without its yaw
    tilt *= np.where(tilt[..., :1] < 0, -1, 1)  # q and -q are the same rotation
    way = goal - qpos[..., :2]
    way = way * np.minimum(1, SIGHT / np.maximum(np.linalg.norm(way, axis=-1, keepdims=True), 1e-9))
    parts = [qpos[..., 2:3], tilt, qpos[..., 7:], _turned(qvel[..., :2], yaw), qvel[..., 2:], _turned(way, yaw)]
    return np.concatenate(parts, -1)


def _turned(vector: np.ndarray, yaw: np.ndarray) -> np.ndarray:
    x, y, c, s = vector[..., 0], vector[..., 1], np.cos(yaw), np.sin(yaw)
    return np.stack([c * x + s * y, c * y - s * x], -1)


def new_goal(rng: np.random.Generator, at: np.ndarray) -> np.ndarray:
    angle = rng.uniform(0, 2 * np.pi)
    return at + rng.uniform(*DISTANCE) * np.array([np.cos(angle), np.sin(angle)])


def judge(before: np.ndarray, qpos: np.ndarray, goal: np.ndarray, action: np.ndarray, dt: float) -> tuple[Any, ...]:
    """(reward, fallen, reached) of a step that began at `before`, (x, y)."""
    was, now = (np.linalg.norm(goal - at, axis=-1) for at in (before, qpos[..., :2]))
    up = 1 - 2 * np.square(qpos[..., 4:6]).sum(-1)
    reward = (was - now) / dt + ALIVE - EFFORT * np.square(action).sum(-1)
    return reward, ~(up >= UPRIGHT), now <= RADIUS


@functools.cache
def load_floor(robot: str, maze: str) -> Any:
    return load_ant([])


class AntGoalEnv(D4RLAntMazeEnv):
    """The maze environment without the maze. `info["success"]`: this step reached its goal."""

    load: Any = staticmethod(load_floor)

    def __init__(self, **kwargs: Any) -> None:
        super().__init__("umaze", **kwargs)
        EzPickle.__init__(self, **kwargs)

    def _observe(self) -> np.ndarray:
        return observe(self.data.qpos, self.data.qvel, self.goal)

    def reset_model(self) -> np.ndarray:
        _, *state = begin(self, self.np_random, START, START)
        self.set_state(*state)
        self._aim()
        return self._observe()

    def _aim(self) -> None:
        self.goal = new_goal(self.np_random, self.data.qpos[:2])
        self._mark_goal()

    def step(self, action: np.ndarray) -> tuple[np.ndarray, Any, bool, bool, dict[str, Any]]:
        action, before = np.clip(action, -1.0, 1.0), self.data.qpos[:2].copy()
        self.do_simulation(action, self.frame_skip)
        reward, fallen, reached = judge(before, self.data.qpos, self.goal, action, self.dt)
        if reached:
            self._aim()
        if self.render_mode == "human":
            self.render()
        return self._observe(), float(reward), bool(fallen), False, {"success": bool(reached)}


class AntGoalVectorEnv(BatchVectorEnv):
    def __init__(self, num_envs: int, **kwargs: Any) -> None:
        super().__init__(AntGoalEnv(), num_envs, **kwargs)
        self.goals = np.zeros((num_envs, 2))

    def _begin(self, i: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        _, qpos, qvel = begin(self.single, rng, START, START)
        self.goals[i] = new_goal(rng, qpos[:2])
        return qpos, qvel

    def _observe(self, ids: np.ndarray) -> np.ndarray:
        return observe(self.qpos[ids], self.qvel[ids], self.goals[ids])

    def _outcome(self, ids: np.ndarray, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        actions, before = np.clip(actions, -1.0, 1.0), self.qpos[ids, :2]
        self._move(ids, actions)
        rewards, fallen, reached = judge(before, self.qpos[ids], self.goals[ids], actions, self.single.dt)
        for i in ids[reached]:
            self.goals[i] = new_goal(self._rngs[i], self.qpos[i, :2])
        return rewards, fallen


def make_vec(env_id: str, num_envs: int, *, nthread: int | None = None, **kwargs: Any) -> RestingVectorEnv:
    """As in d4rl.py: on `nthread` threads, but one by one to render or without mujoco's Batch."""
    if importlib.util.find_spec("mujoco.batch") is None or "render_mode" in kwargs:
        return PlainVectorEnv([lambda: gymnasium.make(env_id, disable_env_checker=True, **kwargs)] * num_envs)
    kwargs = {"max_episode_steps": gymnasium.spec(env_id).max_episode_steps} | kwargs
    return AntGoalVectorEnv(num_envs, nthread=nthread, **kwargs)
