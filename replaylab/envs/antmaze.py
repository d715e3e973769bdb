"""D4RL's AntMaze: `d4rl/antmaze-{umaze,medium,large}`, for policies trained on D4RL's own files.

The maps are from Gymnasium-Robotics, the robot is Gymnasium's ant changed to D4RL's, and the physics is corrected as in
d4rl.py, so that the transitions are D4RL's. The reward is 1 on the step that comes within 0.5 of the goal and ends the
episode, else 0; the reward usually trained on, 0 at the goal and -1 elsewhere, is in data/rewards.py. The goal is drawn
at every reset, as in D4RL's -v2, and is not observed. Policies of play and diverse data are evaluated in the same maze.
"""

from __future__ import annotations

import functools
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.utils import EzPickle

from replaylab.envs.d4rl import BatchVectorEnv, advance, load_model, rk4_is_classical
from replaylab.envs.maze import RADIUS, ROBOTS, Cell, Layout, MazeEnv

SPREAD = 1.0, 0.5  # offset of a goal from the centre of its cell, along each axis: the sum of two draws from 0 to these
NOISE = 0.1  # on the initial state
CELL, START = ROBOTS["d4rl-ant"].cell, (1, 1)


def place(cell: Cell) -> np.ndarray:
    """Centre (x, y) of a cell (row, column): x grows with the column, y with the row, the start is the origin."""
    return CELL * np.array([cell[1] - START[1], cell[0] - START[0]])


@functools.cache
def load_maze(robot: str, maze: str) -> Any:
    return load_ant(Layout(maze).map)


def load_ant(blocks: Sequence[Sequence[Any]]) -> Any:
    """Model of D4RL's ant and the walls: a fifth as strong as Gymnasium's ant, twice the time step, softer ground."""
    kind = ROBOTS["d4rl-ant"]
    root = ElementTree.parse(kind.xml).getroot()
    option, ground, world = (root.find(path) for path in ("option", "default/geom", "worldbody"))
    assert option is not None and ground is not None and world is not None
    option.set("timestep", "0.02")
    ground.attrib |= {"solref": "0.02 1", "solimp": "0.8 0.8 0.01"}
    for motor in root.iter("motor"):
        motor.set("gear", "30")
    half, height = CELL / 2, CELL * kind.wall / 2
    wall = {"type": "box", "size": f"{half} {half} {height}", "conaffinity": "1", "rgba": "0.7 0.5 0.3 1"}
    for row, line in enumerate(blocks):
        for column, block in enumerate(line):
            if block == 1:
                x, y = place((row, column))
                ElementTree.SubElement(world, "geom", wall | {"pos": f"{x} {y} {height}"})
    ElementTree.SubElement(world, "site", name="target", size=str(half / 4), pos=f"0 0 {height}", rgba="1 0 0 0.7")
    return load_model(ElementTree.tostring(root, "unicode"), density=5.0)


def begin(env: MazeEnv, rng: np.random.Generator, start: Cell, goal: Cell) -> tuple[np.ndarray, ...]:
    """(goal, qpos, qvel): a goal and an initial state, drawn as in D4RL."""
    target = place(goal) + rng.uniform(0, SPREAD[0], 2) + rng.uniform(0, SPREAD[1], 2)
    qpos = env.init_qpos + rng.uniform(-NOISE, NOISE, env.init_qpos.shape)
    qpos[:2] += place(start)
    return target, qpos, env.init_qvel + NOISE * rng.standard_normal(env.init_qvel.shape)


class D4RLAntMazeEnv(MazeEnv):
    """Observation: the 15 positions, x and y first, and the 14 velocities."""

    load: Any = staticmethod(load_maze)

    def __init__(self, maze: str, **kwargs: Any) -> None:
        super().__init__("d4rl-ant", maze, **kwargs)
        EzPickle.__init__(self, maze, **kwargs)
        self.own_rk4 = not rk4_is_classical()

    def _step_mujoco_simulation(self, ctrl: np.ndarray, n_frames: int) -> None:
        advance(self, ctrl, n_frames)

    def reset_model(self) -> np.ndarray:
        cells = self._asked.get("start", START), self._asked.get("goal", self.layout.goal)
        self.goal, *state = begin(self, self.np_random, *cells)
        self._mark_goal()
        self.set_state(*state)
        return self._observe()


class AntMazeVectorEnv(BatchVectorEnv):
    def __init__(self, maze: str, num_envs: int, **kwargs: Any) -> None:
        super().__init__(D4RLAntMazeEnv(maze), num_envs, **kwargs)
        self.goals = np.zeros((num_envs, 2))

    def _begin(self, i: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        self.goals[i], qpos, qvel = begin(self.single, rng, START, self.single.layout.goal)
        return qpos, qvel

    def _observe(self, ids: np.ndarray) -> np.ndarray:
        return np.concatenate([self.qpos[ids], self.qvel[ids]], 1)

    def _outcome(self, ids: np.ndarray, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        self._move(ids, np.clip(actions, -1.0, 1.0))
        success = np.hypot(*(self.qpos[ids, :2] - self.goals[ids]).T) <= RADIUS
        return success.astype(np.float64), success
