"""Maze data that must be stitched: a planner and a noisy PD controller drive the point between cells, as in D4RL.

Every episode is one trip of at most a third of the moves that evaluation asks for, so that no trajectory makes an
evaluation trip: the way to the goal has to be joined from pieces. Rewards do not know where a trip was heading:
  play     trips between hand-picked cells; the goal of every row is the one fixed goal of evaluation
  diverse  trips between random cells; the goal of an episode is drawn anew, and is part of its observations
A trip that comes to its episode's goal earns 1 and terminates. One that arrives where it was heading is truncated.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import numpy as np

from replaylab import envs
from replaylab.data.episodes import Episodes
from replaylab.data.write import save
from replaylab.envs.maze import MODES, RADIUS, SPREAD, Cell, Layout
from replaylab.errors import DataError, UsageError, nearest
from replaylab.progress import Progress

PULL, BRAKE = 10.0, 1.0  # gains of the PD controller on position and velocity
PASSED = 0.25  # a waypoint this near is passed
STOPPED = 0.5  # a trip ends at its last waypoint when it is slower than this, so that other trips can follow on it
JITTER = 0.2  # waypoints lie this far off the middle of their cell, so that trips use the width of a corridor

# where the trips of `play` start and end: the start and the goal of evaluation, dead ends and junctions between
STOPS: dict[str, list[Cell]] = {
    "umaze": [(1, 1), (1, 3), (3, 1), (3, 3)],
    "medium": [(1, 1), (1, 6), (2, 4), (3, 2), (4, 1), (4, 4), (4, 6), (5, 4), (6, 1), (6, 3), (6, 6)],
    "large": [(1, 1), (1, 4), (1, 6), (1, 10), (3, 1), (3, 6), (3, 10), (5, 1), (5, 4), (5, 6), (5, 8), (5, 10)]
    + [(7, 1), (7, 4), (7, 6), (7, 9)],
}


def collect_maze(
    env_id: str,
    steps: int,
    out: str | Path | None,
    *,
    seed: int = 0,
    style: str | None = None,
    noise: float = 0.5,
    progress: bool = True,
    overwrite: bool = False,
) -> Episodes:
    """At least `steps` rows in whole episodes, written to `out` unless that is None.

    `env_id` is `pointmaze-{umaze,medium,large}`; `style` is play, or diverse, which `...-diverse` implies.
    `noise` is the standard deviation of what is added to every action before it is clipped to [-1, 1].
    """
    maze, style = _parse(env_id, style)
    if steps < 1 or not noise >= 0:
        raise UsageError(f"steps must be at least 1 and noise at least 0, not {steps} and {noise}")
    if out is not None and Path(out).exists() and not overwrite:
        raise UsageError(f"{out} exists: choose another place, or pass overwrite (--overwrite)")
    env_id = f"pointmaze-{maze}" + ("-diverse" if style == "diverse" else "")
    env, layout, rng = envs.make(env_id), Layout(maze), np.random.default_rng(seed)
    pairs = trips(layout, maze, style)
    parts: list[dict[str, np.ndarray]] = []
    rows, bar = 0, Progress(f"collect {env_id}", steps) if progress else None
    while rows < steps:
        parts.append(drive(env, layout, *pairs[rng.integers(len(pairs))], noise, rng))
        rows += len(parts[-1]["rewards"])
        if bar:
            bar.update(min(rows, steps), success=float(np.mean([p["terminated"][-1] for p in parts])))
    if bar:
        bar.close()
    env.close()
    recipe = {"command": "data collect", "env": env_id, "steps": steps, "seed": seed, "style": style, "noise": noise}
    episodes = _join(parts, _meta(env, env_id, layout, recipe, parts))
    if out is not None:
        try:
            save(episodes, out, overwrite=overwrite)
        except OSError as error:
            raise DataError(f"{out} could not be written: {error.strerror or error}; nothing was kept") from error
    return episodes


def _parse(env_id: str, style: str | None) -> tuple[str, str]:
    """The maze's name and the style of 'pointmaze-medium-diverse' and the like."""
    known = [f"pointmaze-{maze}" for maze in STOPS]
    plain = env_id.removesuffix("-diverse")
    if plain not in known:
        raise UsageError(f"no driver for '{env_id}'{nearest(plain, known)}")
    implied = "play" if plain == env_id else "diverse"
    style = style or implied
    if style not in MODES:
        raise UsageError(f"unknown maze style '{style}'{nearest(style, MODES)}")
    if implied == "diverse" and style != implied:
        raise UsageError(f"{env_id} asks for random goals, which is the style diverse, not {style}")
    return plain.removeprefix("pointmaze-"), style


def trips(layout: Layout, maze: str, style: str) -> list[tuple[Cell, Cell]]:
    """(start, target) of every trip that may be driven. None starts at the fixed goal: it would be over at once."""
    ends = STOPS[maze] if style == "play" else layout.cells
    return [
        (start, target)
        for start in ends
        for target in ends
        if 1 <= layout.moves[target][start] <= layout.longest_trip and not (style == "play" and start == layout.goal)
    ]


def drive(
    env: Any, layout: Layout, start: Cell, target: Cell, noise: float, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """One trip in columns; `observations` has a row more than the others."""
    others = [cell for cell in layout.cells if cell != start]
    goal = layout.goal if env.unwrapped.mode == "play" else others[rng.integers(len(others))]
    observation, _ = env.reset(seed=int(rng.integers(2**31)), options={"start": start, "goal": goal})
    route = [layout.centre(cell) + rng.uniform(-JITTER, JITTER, 2) for cell in layout.path(start, target)[1:]]
    observations, actions, terminated, truncated = [observation], [], False, False
    while not (terminated or truncated):
        wanted = PULL * (route[0] - observation[:2]) - BRAKE * observation[2:4]
        action = np.clip(wanted + noise * rng.standard_normal(2), -1.0, 1.0).astype(np.float32)
        observation, reward, terminated, truncated, _ = env.step(action)
        observations.append(observation)
        actions.append(action)
        if np.hypot(*(route[0] - observation[:2])) <= PASSED:
            if len(route) > 1:
                route.pop(0)
            elif np.hypot(*observation[2:4]) <= STOPPED:
                truncated = True
    last = np.arange(len(actions)) == len(actions) - 1
    return {
        "observations": np.array(observations, np.float32),
        "actions": np.array(actions),
        "rewards": np.float32(reward) * last,  # only the step that terminates can earn anything
        "terminated": last & terminated,
        "truncated": last & (truncated and not terminated),
    }


def _join(parts: list[dict[str, np.ndarray]], meta: dict[str, Any]) -> Episodes:
    columns = {name: np.concatenate([p[name] for p in parts]) for name in parts[0] if name != "observations"}
    return Episodes(
        **columns,
        observations=np.concatenate([p["observations"][:-1] for p in parts]),
        offsets=np.cumsum([0] + [len(p["rewards"]) for p in parts]),
        final_observations=np.array([p["observations"][-1] for p in parts]),
        final_known=np.ones(len(parts), bool),
        meta=meta,
    )


def _meta(
    env: Any, env_id: str, layout: Layout, recipe: dict[str, Any], parts: list[dict[str, np.ndarray]]
) -> dict[str, Any]:
    names = ("replaylab", "numpy", "gymnasium", "gymnasium-robotics", "mujoco")
    planner = {"pull": PULL, "brake": BRAKE, "passed": PASSED, "stopped": STOPPED, "jitter": JITTER, "spread": SPREAD, "radius": RADIUS}
    reached = int(sum(p["terminated"][-1] for p in parts))
    recipe |= {
        "planner": planner,
        "longest_trip_moves": layout.longest_trip,
        "evaluation_moves": layout.moves[layout.goal][layout.start] if recipe["style"] == "play" else None,
        "episodes_that_reach_the_goal": reached,
        "success_share": round(reached / len(parts), 4),
        "versions": {name: _version(name) for name in names},
    }
    return {
        "env_id": env_id,
        "level": recipe["style"],
        "source": f"replaylab collect, a planner in {env_id}",
        "licence": "CC0-1.0",
        "action_low": env.action_space.low.tolist(),
        "action_high": env.action_space.high.tolist(),
        "recipe": recipe,
        "notes": [],
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return None
