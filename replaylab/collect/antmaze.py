"""AntMaze data, collected as in D4RL: an ant trained to walk to goals follows a planner's waypoints through a maze.

First SAC trains the ant on an open floor (envs/antgoal.py). Then, in D4RL's own mazes, the planner of the point mazes
(maze.py) gives it the next waypoint as its goal. The reward is 1 at the environment's goal, which ends the episode,
else 0. In both styles, play and diverse, that is the goal of evaluation, drawn around its cell in every episode; the
styles differ in the trips.

The walker's weights are stored with the data, so that it can be used in another maze without training it again.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from replaylab import envs
from replaylab.collect import going_on
from replaylab.collect.levels import layers_of
from replaylab.collect.maze import parse, plan, write
from replaylab.collect.online import Config as OnlineConfig
from replaylab.collect.online import Online
from replaylab.config import COUNT, FROM_0, RATE, knob, resolve
from replaylab.data.read import load
from replaylab.data.write import check_target
from replaylab.envs.antgoal import observe
from replaylab.envs.antmaze import START, place
from replaylab.envs.maze import MODES, RADIUS, Cell, Layout
from replaylab.errors import DataError, UsageError
from replaylab.evaluate import pick_device

PASSED = 0.75  # distance at which a waypoint counts as passed; for the last one it is the environment's radius
JITTER = 0.5  # waypoints are up to this far off the centre of their cell, which is 4 wide; the ant needs 1 on each side
GOALS, ENOUGH = 50, 0.5  # a walker is tested on this many goals on the open floor, and has to reach this share
WEIGHTS = "walker/"  # prefix of the weights' names in the data


@dataclass
class Config(OnlineConfig):
    """SAC for the ant, and the trips."""

    # small and quick: an ant that reaches every goal takes about ten minutes on one core
    train_steps: int = knob(300_000, "environment steps to train for", COUNT)
    updates_per_step: float = knob(0.25, "updates for each environment step", FROM_0)
    hidden: list[int] = knob([128, 128], "widths of the hidden layers of actor and critics", COUNT)
    batch_size: int = knob(128, "rows a batch", COUNT)
    actor_lr: float = knob(6e-4, "Adam's learning rate of the actor", RATE)
    critic_lr: float = knob(6e-4, "Adam's learning rate of the critics", RATE)
    alpha_lr: float = knob(6e-4, "Adam's learning rate of the temperature", RATE)
    warm_up: int = knob(4_000, "steps with random actions before the first update", FROM_0)
    style: str | None = knob(None, "hand-picked (play) or random (diverse) starts and targets of trips", MODES)
    noise: float = knob(0.2, "deviation of the noise on the walker's actions", FROM_0)
    walker: str | None = knob(None, "an antmaze dataset from here, whose walker is used: nothing is trained")


def collect_antmaze(
    env_id: str,
    steps: int,
    out: str | Path,
    *,
    seed: int = 0,
    device: str = "auto",
    overwrite: bool = False,
    format: str | None = None,
    compact: bool = False,
    **settings: Any,
) -> Path:
    """Train the walker, or take the one in `walker`, and write at least `steps` rows in whole episodes to `out`."""
    out = Path(out)
    (config,) = resolve([Config], [("settings", settings)])
    maze, style = _parse(env_id, config.style)
    unused = sorted(settings.keys() - {"walker", "style", "noise"})
    if config.walker and unused:
        raise UsageError(f"a walker that is there is not trained: leave out {unused[0]}, or walker")
    if out.exists() and not overwrite:
        raise UsageError(f"{out} exists: pass --overwrite or another --out")
    check_target(out, format, overwrite)
    online = None
    if config.walker:
        weights, facts = load_walker(config.walker)
    else:
        online = train(config, seed, device, out.with_name(out.name + ".training"), overwrite)
        weights, facts = best(online)
    driver = Ant(weights)
    facts["goals_reached"] = goals_reached(driver, config.noise, seed)
    if facts["goals_reached"] < ENOUGH:
        what = f"the ant reaches {facts['goals_reached']:.0%} of its goals on an open floor, under {ENOUGH:.0%}"
        raise DataError(f"{what}: nothing was written. Train longer (--train-steps) or more --candidates")
    episodes = plan(f"d4rl/antmaze-{maze}", maze, style, driver, steps, config.noise, seed, progress=True)
    arrived = float((episodes.lengths < envs.OURS[f"d4rl/antmaze-{maze}"][2]).mean())
    layout = Layout(maze)
    told = {"trips_that_arrive": round(arrived, 4), "evaluation_moves": layout.moves[layout.goal][START]}
    meta = episodes.meta | {"recipe": episodes.meta["recipe"] | told | {"walker": facts}}
    attachments = {WEIGHTS + name: value for name, value in weights.items()}
    write(replace(episodes, meta=meta, attachments=attachments), out, overwrite, format, compact, progress=True)
    print(f"the ant reached {facts['goals_reached']:.0%} of its goals on an open floor; {arrived:.0%} of the trips "
          "arrived where they were heading", file=sys.stderr)  # fmt: skip
    if online:
        online.forget()
    return out


def _parse(env_id: str, style: str | None) -> tuple[str, str]:
    """(maze, style) of an id: ours (antmaze-umaze), the environment's (d4rl/...) or D4RL's (antmaze-large-play-v2)."""
    name = re.sub(r"^d4rl/|-v[012]$", "", env_id)
    if name.endswith("-play") and style == "diverse":
        raise UsageError(f"{env_id} asks for the style play, not diverse")
    return parse(name.removesuffix("-play"), style, robot="ant")


# --- the walker


def train(config: Config, seed: int, device: str, folder: Path, overwrite: bool) -> Online:
    """Train with SAC on the open floor; an interrupted run of the same command is resumed."""
    asked = {"env": "antgoal", "seed": seed} | vars(config)
    for name in ("style", "noise", "walker"):  # may differ when a run is resumed
        asked.pop(name)
    going_on(folder, asked, overwrite)
    online = Online("antgoal", config, seed, pick_device(device), folder)
    (folder / "asked.json").write_text(json.dumps(asked))
    online.train()
    return online


def best(online: Online) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The weights of the candidate with the best last return, and the facts of its training."""
    candidate = int(np.argmax(online.curve[-1]["returns"]))
    return layers_of(online.actor(len(online.curve) - 1, candidate)), {
        "candidate": candidate,
        "curve": [[entry["step"], round(entry["returns"][candidate], 1)] for entry in online.curve],
        "training_seconds": online.seconds,
        "seed": online.seed,
        "settings": vars(online.config),
    }


def load_walker(path: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    data = load(path)
    weights = {k.removeprefix(WEIGHTS): v for k, v in data.attachments.items() if k.startswith(WEIGHTS)}
    if not weights:
        raise DataError(f"{path} holds no walker: name a dataset made by `replaylab data collect antmaze-...`")
    return weights, dict(data.meta["recipe"]["walker"])


class Ant:
    """The driver (see maze.py): the trained policy, without its own noise, with the waypoint as its goal."""

    settings = {"passed": PASSED, "jitter": JITTER}  # noqa: RUF012

    def __init__(self, weights: dict[str, np.ndarray]) -> None:
        names = [f"fc{i}" for i in range(sum(name.startswith("fc") for name in weights) // 2)]
        self.hidden = [(weights[f"{name}/weight"], weights[f"{name}/bias"]) for name in names]
        self.last = weights["last_fc/weight"], weights["last_fc/bias"]

    def act(self, seen: np.ndarray) -> np.ndarray:
        """The action, in [-1, 1], for an observation of antgoal."""
        x = seen.astype(np.float32)
        for weight, bias in self.hidden:
            x = np.maximum(weight @ x + bias, 0)
        return np.tanh(self.last[0] @ x + self.last[1])

    def steer(self, observation: np.ndarray, waypoint: np.ndarray) -> np.ndarray:
        return self.act(observe(observation[:15], observation[15:], waypoint))

    def route(self, env: Any, layout: Layout, path: list[Cell], rng: np.random.Generator) -> list[np.ndarray]:
        """One waypoint per cell. If the last cell is the goal's, it is the goal itself, which is off the centre."""
        route = [place(cell) + rng.uniform(-JITTER, JITTER, 2) for cell in path]
        return [*route[:-1], env.goal] if path[-1] == layout.goal else route

    def there(self, observation: np.ndarray, waypoint: np.ndarray, last: bool) -> bool:
        return bool(np.hypot(*(waypoint - observation[:2])) <= (RADIUS if last else PASSED))


def goals_reached(walker: Ant, noise: float, seed: int) -> float:
    """The share of goals on the open floor that are reached in time and without falling, each from a fresh start."""
    env, rng, reached = envs.make("antgoal"), np.random.default_rng(seed), 0
    for i in range(GOALS):
        observation, _ = env.reset(seed=seed + i)
        over, info = False, {"success": False}
        while not (over or info["success"]):
            action = walker.act(observation) + noise * rng.standard_normal(8)
            observation, _, terminated, truncated, info = env.step(action)  # step clips the action
            over = terminated or truncated
        reached += info["success"]
    env.close()
    return reached / GOALS
