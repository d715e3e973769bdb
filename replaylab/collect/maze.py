"""Maze data that needs stitching: as in D4RL, a planner and a noisy PD controller drive the point between cells.

Every episode is one trip of at most half the moves that evaluation needs, so no trajectory covers an evaluation trip:
the way to the goal has to be stitched together. Rewards depend on the episode's goal, not on the trip's target:
  play     trips between hand-picked cells; the goal is always the fixed goal of evaluation
  diverse  trips between random cells; the goal is drawn for every episode and is part of its observations
A trip that reaches the goal earns 1 and terminates. One that reaches its target is truncated.

The ant uses the same planner with its own driver (antmaze.py).
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from replaylab import envs
from replaylab.collect import recipe, rounded, save_what_fits
from replaylab.data.episodes import Episodes
from replaylab.data.write import check_target
from replaylab.envs.maze import MODES, RADIUS, SPREAD, Cell, Layout
from replaylab.errors import UsageError, nearest
from replaylab.progress import Progress

PULL, BRAKE = 10.0, 1.0  # gains of the PD controller on position and velocity
PASSED = 0.25  # distance at which a waypoint counts as passed
STOPPED = 0.5  # a trip ends at its last waypoint once it is slower than this, so that others can continue from there
JITTER = 0.2  # waypoints are up to this far off the centre of their cell, so that trips use the width of a corridor

# row -> columns of the cells where the trips of `play` start and end: dead ends, turns and junctions
STOPS: dict[str, dict[int, list[int]]] = {
    "umaze": {1: [1, 3], 3: [1, 3]},
    "medium": {1: [1, 6], 2: [4], 3: [2], 4: [1, 4, 6], 5: [4], 6: [1, 3, 6]},
    "large": {1: [1, 4, 6, 10], 3: [1, 6, 10], 5: [1, 4, 6, 8, 10], 7: [1, 4, 6, 9]},
}


def collect_maze(
    env_id: str,
    steps: int,
    out: str | Path,
    *,
    seed: int = 0,
    style: str | None = None,
    noise: float = 0.5,
    progress: bool = True,
    overwrite: bool = False,
    format: str | None = None,
    compact: bool = False,
) -> Path:
    """Write at least `steps` rows of trips, in whole episodes, to `out`; see `make_trips` for the settings."""
    out = Path(out)
    if out.exists() and not overwrite:
        raise UsageError(f"{out} exists: pass --overwrite or another --out")
    check_target(out, format, overwrite)
    episodes = make_trips(env_id, steps, seed=seed, style=style, noise=noise, progress=progress)
    return write(episodes, out, overwrite, format, compact, progress)


def write(episodes: Episodes, out: Path, overwrite: bool, format: str | None, compact: bool, progress: bool) -> Path:
    save_what_fits(rounded(episodes) if compact else episodes, out, overwrite=overwrite, format=format)
    if progress:
        share = f"{episodes.meta['recipe']['success_share']:.1%} reach the goal"
        print(f"wrote {out}: {len(episodes)} steps, {episodes.num_episodes} episodes, {share}", file=sys.stderr)
    return out


def make_trips(
    env_id: str, steps: int, *, seed: int = 0, style: str | None = None, noise: float = 0.5, progress: bool = False
) -> Episodes:
    """Trips in `pointmaze-{umaze,medium,large}`, at least `steps` rows.

    style: play or diverse; an id that ends in `-diverse` implies diverse.
    noise: standard deviation of the noise added to every action before it is clipped to [-1, 1]; 0.5 in D4RL.
    """
    maze, style = parse(env_id, style)
    env_id = f"pointmaze-{maze}" + ("-diverse" if style == "diverse" else "")
    return plan(env_id, maze, style, Point(), steps, noise, seed, progress)


def plan(
    env_id: str, maze: str, style: str, driver: Any, steps: int, noise: float, seed: int, progress: bool
) -> Episodes:
    """At least `steps` rows of trips of any robot, steered by its driver (see `Point`)."""
    if steps < 1 or not 0 <= noise < np.inf:
        raise UsageError(f"steps must be at least 1 and noise a number from 0 up, not {steps} and {noise}")
    env, layout, rng = envs.make(env_id), Layout(maze), np.random.default_rng(seed)
    pairs = trips(layout, maze, style, env.unwrapped.mode)
    parts: list[dict[str, np.ndarray]] = []
    rows = reached = 0
    bar = Progress(f"collect {env_id}", steps) if progress else None
    while rows < steps:
        parts.append(drive(env, layout, *pairs[rng.integers(len(pairs))], noise, rng, driver))
        rows += len(parts[-1]["rewards"])
        reached += int(parts[-1]["terminated"][-1])
        if bar:
            bar.update(min(rows, steps), success=reached / len(parts))
    if bar:
        bar.close()
    env.close()
    settings = {"env": env_id, "steps": steps, "style": style, "noise": noise} | driver.settings
    return _join(parts, _meta(env, layout, style, settings, seed, reached, len(parts)))


def evaluation_pairs(layout: Layout, style: str) -> list[tuple[Cell, Cell]]:
    return [(layout.start, layout.goal)] if style == "play" else layout.far_pairs


def parse(env_id: str, style: str | None, robot: str = "point") -> tuple[str, str]:
    """(maze, style) of an id such as 'pointmaze-medium-diverse'."""
    known = [f"{robot}maze-{maze}" for maze in STOPS]
    plain = env_id.removesuffix("-diverse")
    if plain not in known:
        raise UsageError(f"no driver for '{env_id}'{nearest(plain, known, always=True)}")
    implied = "play" if plain == env_id else "diverse"
    style = style or implied
    if style not in MODES:
        raise UsageError(f"unknown maze style '{style}'{nearest(style, MODES)}")
    if implied == "diverse" and style != implied:
        raise UsageError(f"{env_id} asks for random goals, which is the style diverse, not {style}")
    return plain.removeprefix(f"{robot}maze-"), style


def trips(layout: Layout, maze: str, style: str, mode: str) -> list[tuple[Cell, Cell]]:
    """(start, target) of every allowed trip. If the goal is fixed (the environment's `mode` is play), none starts
    there: it would be over at once."""
    ends = layout.cells
    if style == "play":
        ends = [(row, column) for row, columns in STOPS[maze].items() for column in columns]
    return [
        (start, target)
        for start in ends
        for target in ends
        if 1 <= layout.moves[target][start] <= layout.longest_trip and not (mode == "play" and start == layout.goal)
    ]


class Point:
    """A PD controller. A driver plans a route, steers towards a waypoint, and checks whether the robot is there."""

    settings = {"pull": PULL, "brake": BRAKE, "passed": PASSED, "stopped": STOPPED, "jitter": JITTER, "spread": SPREAD}  # noqa: RUF012

    def route(self, env: Any, layout: Layout, path: list[Cell], rng: np.random.Generator) -> list[np.ndarray]:
        return [layout.centre(cell) + rng.uniform(-JITTER, JITTER, 2) for cell in path]

    def steer(self, observation: np.ndarray, waypoint: np.ndarray) -> np.ndarray:
        return PULL * (waypoint - observation[:2]) - BRAKE * observation[2:4]

    def there(self, observation: np.ndarray, waypoint: np.ndarray, last: bool) -> bool:
        slow = not last or np.hypot(*observation[2:4]) <= STOPPED
        return bool(slow and np.hypot(*(waypoint - observation[:2])) <= PASSED)


def drive(
    env: Any,
    layout: Layout,
    start: Cell,
    target: Cell,
    noise: float,
    rng: np.random.Generator,
    driver: Any = Point(),  # noqa: B008  it has no state
) -> dict[str, np.ndarray]:
    """One trip as columns; `observations` has one row more than the others."""
    others = [cell for cell in layout.cells if cell != start]
    goal = layout.goal if env.unwrapped.mode == "play" else others[rng.integers(len(others))]
    observation, _ = env.reset(seed=int(rng.integers(2**31)), options={"start": start, "goal": goal})
    route = driver.route(env.unwrapped, layout, layout.path(start, target)[1:], rng)
    observations, actions, terminated, truncated = [observation], [], False, False
    while not (terminated or truncated):
        wanted = driver.steer(observation, route[0])
        action = np.clip(wanted + noise * rng.standard_normal(wanted.shape), -1.0, 1.0).astype(np.float32)
        observation, reward, terminated, truncated, _ = env.step(action)
        observations.append(observation)
        actions.append(action)
        if driver.there(observation, route[0], len(route) == 1):
            truncated = truncated or len(route) == 1
            route = route[1:] or route
    last = np.arange(len(actions)) == len(actions) - 1
    return {
        "observations": np.array(observations, np.float32),
        "actions": np.array(actions),
        "rewards": np.float32(reward) * last,  # only the step that terminates can earn anything
        "terminated": last & terminated,
        "truncated": last & (truncated and not terminated),
    }


def _join(parts: list[dict[str, np.ndarray]], meta: dict[str, Any]) -> Episodes:
    def column(name: str) -> np.ndarray:
        return np.concatenate([part[name] for part in parts])

    return Episodes(
        observations=np.concatenate([part["observations"][:-1] for part in parts]),
        actions=column("actions"),
        rewards=column("rewards"),
        terminated=column("terminated"),
        truncated=column("truncated"),
        offsets=np.cumsum([0] + [len(part["rewards"]) for part in parts]),
        final_observations=np.array([part["observations"][-1] for part in parts]),
        final_known=np.ones(len(parts), bool),
        meta=meta,
    )


def _meta(
    env: Any, layout: Layout, style: str, settings: dict[str, Any], seed: int, reached: int, episodes: int
) -> dict[str, Any]:
    settings["radius"] = RADIUS
    facts = {
        "longest_trip_moves": layout.longest_trip,
        "evaluation_moves": min(layout.moves[goal][start] for start, goal in evaluation_pairs(layout, style)),
        "episodes_that_reach_the_goal": reached,
        "success_share": round(reached / episodes, 4),
    }
    return {
        "env_id": settings["env"],
        "level": style,
        "source": f"replaylab collect, a planner in {settings['env']}",
        "licence": "CC0-1.0",
        "action_low": env.action_space.low.tolist(),
        "action_high": env.action_space.high.tolist(),
        "recipe": recipe(SimpleNamespace(**settings), seed) | facts,
        "notes": [],
    }
