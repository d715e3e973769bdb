"""Environments by name: `make("d4rl/hopper")` for one, `make_vec("d4rl/hopper", 64)` for many in parallel.

Importing this package registers our environments with Gymnasium; MuJoCo itself is imported when one is made.
Any other Gymnasium id works as well. A family with its own vector environment is one line in FAMILIES and one module.
"""

from __future__ import annotations

import difflib
import importlib
import re
from typing import Any

from replaylab.errors import MissingExtra, UsageError, require

gymnasium: Any = require("gymnasium", "replaylab.envs")
from replaylab.envs.noise import Noise, NoisyEnv, NoisyVectorEnv  # noqa: E402  these need gymnasium
from replaylab.envs.vector import PlainVectorEnv, flat_goal  # noqa: E402

__all__ = ["Noise", "NoisyEnv", "NoisyVectorEnv", "PlainVectorEnv", "canonical", "make", "make_vec"]

# id -> (entry point, its arguments, episode limit)
OURS: dict[str, tuple[str, dict[str, Any], int]] = {
    "d4rl/hopper": ("replaylab.envs.d4rl:D4RLEnv", {"robot": "hopper"}, 1000),
    "d4rl/halfcheetah": ("replaylab.envs.d4rl:D4RLEnv", {"robot": "halfcheetah"}, 1000),
    "d4rl/walker2d": ("replaylab.envs.d4rl:D4RLEnv", {"robot": "walker2d"}, 1000),
    "d4rl/ant": ("replaylab.envs.d4rl:D4RLEnv", {"robot": "ant"}, 1000),
    "reacher2d": ("replaylab.envs.reacher2d:Reacher2dEnv", {}, 100),
}
OURS |= {  # as in D4RL's files
    f"d4rl/antmaze-{maze}": ("replaylab.envs.antmaze:D4RLAntMazeEnv", {"maze": maze}, limit)
    for maze, limit in {"umaze": 700, "medium": 1000, "large": 1000}.items()
}
OURS |= {  # as in Gymnasium-Robotics: pointmaze-umaze, pointmaze-umaze-diverse, ..., antmaze-large-diverse
    f"{robot}maze-{maze}{ending}": ("replaylab.envs.maze:MazeEnv", {"robot": robot, "maze": maze, "mode": mode}, limit)
    for robot, limits in {"point": (300, 600, 800), "ant": (700, 1000, 1000)}.items()
    for maze, limit in zip(("umaze", "medium", "large"), limits, strict=True)
    for mode, ending in (("play", ""), ("diverse", "-diverse"))
}
OURS["antgoal"] = ("replaylab.envs.antgoal:AntGoalEnv", {}, 300)  # where the ant of our own maze data learns to walk
for _id, (_entry, _kwargs, _limit) in OURS.items():
    if _id not in gymnasium.registry:  # a reload must not warn
        gymnasium.register(_id, entry_point=_entry, kwargs=_kwargs, max_episode_steps=_limit)

# part of an id before the '/' -> module with `make_vec(env_id, num_envs, **kwargs)`
FAMILIES = {"d4rl": "replaylab.envs.d4rl", "atari": "replaylab.envs.atari", "atari-rgb": "replaylab.envs.atari_rgb"}
FAMILIES |= {"antgoal": "replaylab.envs.antgoal"}


def make(env_id: str, *, noise: Noise | None = None, **kwargs: Any) -> Any:
    """One environment. A goal that is separate from the observation, as in mazes, is appended to it."""
    _check_noise(env_id, noise)
    env = flat_goal(_make(canonical(env_id), **kwargs))
    return NoisyEnv(env, noise) if noise else env


def make_vec(env_id: str, num_envs: int, *, noise: Noise | None = None, **kwargs: Any) -> Any:
    """`num_envs` environments that rest when done (see vector.py), in the fastest implementation available."""
    _check_noise(env_id, noise)
    env_id = canonical(env_id)
    family = FAMILIES.get(env_id.partition("/")[0])
    if family and (env_id in gymnasium.registry or env_id.startswith(("atari/", "atari-rgb/"))):
        env = importlib.import_module(family).make_vec(env_id, num_envs, **kwargs)
    else:
        env = PlainVectorEnv([lambda: _make(env_id, **kwargs)] * num_envs)
    return NoisyVectorEnv(env, noise) if noise else env


def _check_noise(env_id: str, noise: Noise | None) -> None:
    if noise and noise.transition_scale and env_id.startswith("atari-rgb/"):
        raise UsageError(f"transition noise needs numbers to disturb; {env_id} shows names of colours, as indices")


def canonical(env_id: str) -> str:
    """The full id: 'hopper' -> 'd4rl/hopper', D4RL's 'antmaze-medium-play-v2' -> 'd4rl/antmaze-medium'."""
    if not isinstance(env_id, str):
        raise UsageError(f"an environment is named by its id: gymnasium.register yours, not {type(env_id).__name__}")
    maze = re.fullmatch(r"(antmaze-(umaze|medium|large))(-play|-diverse)?-v[012]", env_id)
    if maze:
        return f"d4rl/{maze[1]}"
    return f"d4rl/{env_id}" if env_id not in OURS and f"d4rl/{env_id}" in OURS else env_id


def _make(env_id: str, **kwargs: Any) -> Any:
    if env_id.startswith(("atari/", "atari-rgb/")):
        return importlib.import_module(FAMILIES[env_id.partition("/")[0]]).make(env_id, **kwargs)
    try:
        return gymnasium.make(env_id, disable_env_checker=True, **kwargs)
    except (gymnasium.error.UnregisteredEnv, gymnasium.error.DeprecatedEnv) as error:
        close = difflib.get_close_matches(env_id, [*OURS, *gymnasium.registry], n=1)
        hint = f"did you mean '{close[0]}'? " if close else ""
        known = f"{', '.join(OURS)}, atari/GAME, atari-rgb/GAME and every Gymnasium id"
        raise UsageError(f"unknown environment '{env_id}'; {hint}known: {known}") from error
    except gymnasium.error.DependencyNotInstalled as error:
        raise MissingExtra(f"{env_id}: {error}") from error
    except (gymnasium.error.Error, ModuleNotFoundError) as error:  # a malformed id, or module:id without that module
        raise UsageError(f"cannot make the environment '{env_id}': {error}") from error
