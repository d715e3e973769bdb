"""Mazes where stitching matters: `pointmaze-{umaze,medium,large}` and `antmaze-...`, on Gymnasium-Robotics' models.

The reward is 1 on the step that comes within 0.5 of the goal and ends the episode, else 0: the return is success.
`mode="play"` starts from one hand-picked cell with one fixed goal far away, and therefore does not observe the goal.
`mode="diverse"` (ids that end in `-diverse`) draws both at every reset, far apart, and appends the goal to the
observation.

First the layouts and the paths in them, then the model, then the environment.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import os
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box
from gymnasium.utils import EzPickle

from replaylab.envs.d4rl import MujocoEnv, mujoco, simulation
from replaylab.errors import UsageError, nearest, require

with contextlib.redirect_stderr(io.StringIO()):  # it prints a notice about the hands, which are not used here
    robotics: Any = require("gymnasium_robotics", "playing in a maze")
maps: Any = importlib.import_module("gymnasium_robotics.envs.maze.maps")
walls: Any = importlib.import_module("gymnasium_robotics.envs.maze.maze_v4")

Cell = tuple[int, int]  # row and column of the map

RADIUS = 0.5  # distance at which the goal is reached: D4RL's (Gymnasium-Robotics has 0.45)
SPREAD = 0.25  # starts, and goals that are not fixed, are drawn up to this share of a cell from its centre
MODES = ("play", "diverse")

# name -> (map in Gymnasium-Robotics, start and goal of `play`). The goals are D4RL's; the starts are chosen for a
# winding way: from D4RL's corner, a point that is pushed to the right and down slides along the walls to the goal.
MAZES: dict[str, tuple[str, Cell, Cell]] = {
    "umaze": ("U_MAZE", (1, 1), (3, 1)),
    "medium": ("MEDIUM_MAZE", (1, 6), (6, 6)),
    "large": ("LARGE_MAZE", (7, 1), (7, 9)),
}


@dataclass(frozen=True)
class Robot:
    xml: Path
    cell: float  # width of a maze cell
    wall: float  # height of the walls, in cells
    frame_skip: int
    fps: int
    top_speed: float | None = None  # a ball that is pushed all the time would accelerate without limit


_ANT = Path(gymnasium.__file__).parent / "envs/mujoco/assets/ant.xml"
ROBOTS = {
    "point": Robot(Path(robotics.__file__).parent / "envs/assets/point/point.xml", 1.0, 0.4, 1, 100, top_speed=5.0),
    "ant": Robot(_ANT, 4.0, 0.5, 5, 20),
    "d4rl-ant": Robot(_ANT, 4.0, 0.5, 5, 10),  # see antmaze.py
}


# --- layouts ----------------------------------------------------------------------------------------------------


class Layout:
    """One maze: its free cells, their positions, and the numbers of moves between them."""

    def __init__(self, maze: str, size: float = 1.0) -> None:
        if maze not in MAZES:
            raise UsageError(f"unknown maze '{maze}'{nearest(maze, MAZES)}")
        name, self.start, self.goal = MAZES[maze]
        self.map, self.size = getattr(maps, name), size
        self.cells = [(r, c) for r, row in enumerate(self.map) for c, block in enumerate(row) if block != 1]
        self.moves = {cell: self._moves_to(cell) for cell in self.cells}  # moves[target][cell]

    @property
    def longest_trip(self) -> int:
        """The most moves of a trip in our data: half of what `play` needs, so that trips must be stitched together."""
        return self.moves[self.goal][self.start] // 2

    @functools.cached_property
    def far_pairs(self) -> list[tuple[Cell, Cell]]:
        """(start, goal) pairs of `diverse`: too far apart for one trip, even if it ends next to the goal's cell."""
        least = self.longest_trip + 2
        return [(start, goal) for goal in self.cells for start in self.cells if self.moves[goal][start] >= least]

    def centre(self, cell: Cell) -> np.ndarray:
        """Centre of a cell: x to the right, y upwards, origin in the middle of the map, as in Gymnasium-Robotics."""
        rows, columns = len(self.map), len(self.map[0])
        return self.size * np.array([cell[1] + 0.5 - columns / 2, rows / 2 - cell[0] - 0.5])

    def cell_at(self, xy: np.ndarray) -> Cell:
        rows, columns = len(self.map), len(self.map[0])
        return int(np.floor(rows / 2 - xy[1] / self.size)), int(np.floor(xy[0] / self.size + columns / 2))

    def path(self, start: Cell, target: Cell) -> list[Cell]:
        """A shortest path, both ends included."""
        path, left = [start], self.moves[target]
        while path[-1] != target:
            path.append(min(self._beside(path[-1]), key=left.__getitem__))
        return path

    def _beside(self, cell: Cell) -> list[Cell]:
        row, column = cell
        around = [(row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)]
        return [(r, c) for r, c in around if self.map[r][c] != 1]  # the outermost cells are walls

    def _moves_to(self, target: Cell) -> dict[Cell, int]:
        """The number of moves from every cell to the target, by breadth-first search."""
        moves, queue = {target: 0}, deque([target])
        while queue:
            cell = queue.popleft()
            for beside in self._beside(cell):
                if beside not in moves:
                    moves[beside] = moves[cell] + 1
                    queue.append(beside)
        return moves


# --- the environment --------------------------------------------------------------------------------------------


@functools.cache
def load_model(robot: str, maze: str) -> Any:
    """Model of robot and walls. All environments that do not render share it: its textures alone take 11 MB."""
    kind = ROBOTS[robot]
    _, path = walls.Maze.make_maze(str(kind.xml), Layout(maze).map, kind.cell, kind.wall)
    try:
        return mujoco.MjModel.from_xml_path(path)
    finally:
        os.remove(path)  # Gymnasium-Robotics does not


class MazeEnv(MujocoEnv, EzPickle):
    """Observation: positions and velocities of all joints, x and y first (point: 4, ant: 29); `diverse`: goal x, y."""

    metadata = {"render_modes": ["human", "rgb_array", "depth_array", "rgbd_tuple"]}  # noqa: RUF012
    load: Any = staticmethod(load_model)

    def __init__(self, robot: str, maze: str, mode: str = "play", **kwargs: Any) -> None:
        EzPickle.__init__(self, robot, maze, mode, **kwargs)
        if mode not in MODES:
            raise UsageError(f"unknown maze mode '{mode}'{nearest(mode, MODES)}")
        self.robot, self.maze, self.mode = robot, maze, mode
        self.kind = ROBOTS[robot]
        self.layout = Layout(maze, self.kind.cell)
        self.goal = self.layout.centre(self.layout.goal)
        self.metadata = {**self.metadata, "render_fps": self.kind.fps}
        self._pictured = kwargs.get("render_mode") is not None
        camera = {"distance": 1.5 * self.kind.cell * len(self.layout.map)}
        super().__init__(str(self.kind.xml), self.kind.frame_skip, None, default_camera_config=camera, **kwargs)
        self.observation_space = Box(-np.inf, np.inf, self._observe().shape, np.float64)

    def _initialize_simulation(self) -> tuple[Any, Any]:
        if self._pictured:  # its own model, since the image size and the goal's marker are written into it
            return simulation(self, self.load.__wrapped__(self.robot, self.maze))
        model = self.load(self.robot, self.maze)
        return model, mujoco.MjData(model)

    def _observe(self) -> np.ndarray:
        goal = [self.goal] if self.mode == "diverse" else []
        return np.concatenate([self.data.qpos, self.data.qvel, *goal])

    def step(self, action: np.ndarray) -> tuple[np.ndarray, Any, bool, bool, dict[str, Any]]:
        top = self.kind.top_speed
        if top is not None:
            self.set_state(self.data.qpos, self.data.qvel.clip(-top, top))
        self.do_simulation(np.clip(action, -1.0, 1.0), self.frame_skip)
        success = bool(np.hypot(*(self.data.qpos[:2] - self.goal)) <= RADIUS)
        if self.render_mode == "human":
            self.render()
        return self._observe(), float(success), success, False, {"success": success}

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """`options` may name the cells: {"start": (row, column), "goal": (row, column)}."""
        self._asked = options or {}
        for name, cell in self._asked.items():
            if name not in ("start", "goal") or tuple(cell) not in self.layout.moves:
                raise UsageError(f"reset options are a free cell (row, column) as 'start' or 'goal', not {name}={cell}")
        observation, _ = super().reset(seed=seed)
        return observation, {"success": False}

    def reset_model(self) -> np.ndarray:
        start, goal = self.layout.start, self.layout.goal
        if self.mode == "diverse":
            start, goal = self.layout.far_pairs[self.np_random.integers(len(self.layout.far_pairs))]
        start, goal = self._asked.get("start", start), self._asked.get("goal", goal)
        reach = SPREAD * self.kind.cell
        self.goal = self.layout.centre(goal)
        if self.mode == "diverse":
            self.goal += self.np_random.uniform(-reach, reach, 2)
        self._mark_goal()
        qpos = self.init_qpos.copy()
        qpos[:2] = self.layout.centre(start) + self.np_random.uniform(-reach, reach, 2)
        self.set_state(qpos, self.init_qvel)
        return self._observe()

    def _mark_goal(self) -> None:
        if self._pictured:
            self.model.site("target").pos[:2] = self.goal
