"""Atari games with the preprocessing of Dopamine, with which the DQN-replay data was made.

An action lasts four emulator frames; with sticky actions the emulator repeats the previous action with probability
0.25 in each of them. The last two frames are converted to grey, their pixelwise maximum is taken and resized to 84 x 84
by area. Actions are those the game uses. An episode begins without idle moves and ends at game over or after 27,000
actions. ale-py's C++ engine does all of this, in this order; this file adds our vector semantics.

An id is `atari/` and the game's name in any spelling: atari/space_invaders, atari/SpaceInvaders, atari/spaceinvaders.
Options may follow after commas: `atari/pong,sticky=0,noops=30,resize=bilinear` is the setup of the original Decision
Transformer.
"""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import gymnasium
import numpy as np
import torch
from torch.nn import functional as F

from replaylab.envs.vector import RestingVectorEnv, Step
from replaylab.errors import UsageError, nearest, require

FRAME_SKIP = 4
MAX_STEPS = 27_000  # actions per episode, 108,000 emulator frames
SCREEN, SIZE = (210, 160), (84, 84)
RESIZES = ("area", "bilinear")


# ale-py ends the process when it loads one of these for a single player
TWO_PLAYERS = {"combat", "joust", "maze_craze", "warlords"}


@cache
def games() -> dict[str, str]:
    """Every game for one player that comes with ale-py: name without underscores -> name."""
    require("ale_py", "Atari")
    from ale_py import roms

    return {name.replace("_", ""): name for name in roms.get_all_rom_ids() if name not in TWO_PLAYERS}


def game_name(env_id: str) -> str:
    """'atari/SpaceInvaders' -> 'space_invaders'."""
    plain = env_id.lower().removeprefix("atari/").replace("_", "").replace("-", "")
    if plain not in games():
        raise UsageError(f"unknown Atari game '{env_id}'{nearest(plain, games().values(), always=True)}")
    return games()[plain]


def parse(env_id: str) -> tuple[str, dict[str, Any]]:
    """'atari/Pong,sticky=0,noops=30' -> ('atari/pong', {'sticky': 0.0, 'noop_max': 30})."""
    name, *settings = env_id.split(",")
    options: dict[str, Any] = {}
    for setting in settings:
        key, _, value = setting.partition("=")
        if key == "sticky" and re.fullmatch(r"0(\.\d+)?|1(\.0+)?", value):
            options["sticky"] = float(value)
        elif key == "noops" and value.isdecimal():
            options["noop_max"] = int(value)
        elif key == "resize" and value in RESIZES:
            options["resize"] = value
        else:
            known = f"sticky=0 to 1, noops=0, 1, 2, ... and resize={' or '.join(RESIZES)}"
            raise UsageError(f"'{setting}' in '{env_id}': a game's options are {known}")
    return f"atari/{game_name(name)}", options


def engine(
    env_id: str,
    num_envs: int,
    *,
    autoreset: str = "NextStep",
    threads: int = 0,
    sticky: float = 0.25,
    noop_max: int = 0,
    reward_clipping: bool = False,
    episodic_life: bool = False,
    stack: int = 4,
    max_steps: int = MAX_STEPS,
    **others: Any,
) -> Any:
    """ale-py's own vector environment, which resets automatically. Observations (num_envs, stack, 84, 84), newest last.

    noop_max: up to this many idle frames at the start. episodic_life: losing a life ends the episode, and a reset then
    starts a new game. The defaults are Dopamine's; the original Decision Transformer evaluates with `sticky=0,
    noop_max=30` and a bilinear resize, which this engine does not have (see `BilinearVectorEnv`).
    """
    require("ale_py", "Atari")
    from ale_py.vector_env import AtariVectorEnv

    settings = {"frameskip": FRAME_SKIP} | others
    return AtariVectorEnv(
        game_name(env_id),
        num_envs,
        num_threads=threads,
        autoreset_mode=autoreset,
        repeat_action_probability=sticky,
        noop_max=noop_max,
        use_fire_reset=False,
        reward_clipping=reward_clipping,
        episodic_life=episodic_life,
        stack_num=stack,
        max_num_frames_per_episode=max_steps * FRAME_SKIP,
        **settings,
    )


class AtariVectorEnv(RestingVectorEnv):
    """Games in parallel that rest when over.

    Each is a separate engine with one thread, and only the running ones are stepped, all at the same time. So one slow
    game costs only itself, and an episode depends only on its seed and its actions.
    """

    def __init__(self, env_id: str, num_envs: int, **options: Any) -> None:
        name, found = parse(env_id)
        found.pop("resize", None)
        self.engines = [engine(name, 1, threads=1, **found | options) for _ in range(max(num_envs, 1))]
        first = self.engines[0]
        super().__init__(num_envs, first.single_observation_space, first.single_action_space)
        self.num_actions = int(first.single_action_space.n)

    def _reset(self, ids: np.ndarray, seeds: list[int | None], options: dict) -> tuple[np.ndarray, dict[str, Any]]:
        def one(i: int, seed: int | None) -> np.ndarray:
            # with a seed the engine reloads the game, about 90 ms: hence the threads
            known = None if seed is None else np.array([seed % 2**31])
            return self.engines[i].reset(seed=known)[0][0]

        with ThreadPoolExecutor(min(len(ids), os.cpu_count() or 1)) as pool:
            return np.stack(list(pool.map(one, ids, seeds))), {}

    def _step(self, ids: np.ndarray, actions: np.ndarray) -> Step:
        if ((actions < 0) | (actions >= self.num_actions)).any():  # the engine would hang
            raise ValueError(f"actions must be 0..{self.num_actions - 1}, got {actions}")
        for i, action in zip(ids, actions, strict=True):
            self.engines[i].send(np.array([action], np.int64))
        results = [self.engines[i].recv()[:4] for i in ids]
        observations, rewards, terminated, truncated = (np.concatenate(column) for column in zip(*results, strict=True))
        return observations, rewards, terminated, truncated, {}

    def close_extras(self, **kwargs: Any) -> None:
        self.engines.clear()


class BilinearVectorEnv(AtariVectorEnv):
    """The same, but each of the last two frames is shrunk bilinearly before their maximum is taken. For this the engine
    returns every frame in full size, which halves its speed."""

    def __init__(self, env_id: str, num_envs: int, *, stack: int = 4, **options: Any) -> None:
        whole = {"frameskip": 1, "maxpool": False, "img_height": SCREEN[0], "img_width": SCREEN[1]}
        super().__init__(env_id, num_envs, stack=1, **options | whole)
        self.seen = np.zeros((num_envs, stack, *SIZE), np.uint8)
        space = gymnasium.spaces.Box(0, 255, self.seen.shape[1:], np.uint8)
        RestingVectorEnv.__init__(self, num_envs, space, self.single_action_space)

    def _reset(self, ids: np.ndarray, seeds: list[int | None], options: dict) -> tuple[np.ndarray, dict[str, Any]]:
        frames, infos = super()._reset(ids, seeds, options)
        self.seen[ids] = 0
        self.seen[ids, -1] = shrunk(frames)
        return self.seen[ids], infos

    def _step(self, ids: np.ndarray, actions: np.ndarray) -> Step:
        last = np.zeros((len(ids), 2, *SCREEN), np.uint8)
        rewards, terminated, truncated = np.zeros(len(ids)), np.zeros(len(ids), bool), np.zeros(len(ids), bool)
        for _ in range(FRAME_SKIP):
            on = np.flatnonzero(~(terminated | truncated))
            if len(on):
                frames, gained, terminated[on], truncated[on], _ = super()._step(ids[on], actions[on])
                last[on] = np.stack([last[on, 1], frames[:, 0]], 1)
                rewards[on] += gained
        self.seen[ids] = np.concatenate([self.seen[ids, 1:], shrunk(last)[:, None]], 1)
        return self.seen[ids], rewards, terminated, truncated, {}


def shrunk(frames: np.ndarray) -> np.ndarray:
    """(games, frames, height, width) -> (games, 84, 84): the maximum over the frames, each shrunk bilinearly."""
    small = F.interpolate(torch.from_numpy(frames).float(), SIZE, mode="bilinear")
    return small.round().amax(1).byte().numpy()


class AtariEnv(gymnasium.Env):
    """One game as a plain Gymnasium environment."""

    def __init__(self, vector: RestingVectorEnv) -> None:
        self.vector = vector
        self.observation_space = self.vector.single_observation_space
        self.action_space = self.vector.single_action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        observations, infos = self.vector.reset(seed=None if seed is None else [seed])
        return observations[0], infos

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        observations, rewards, terminated, truncated, infos = self.vector.step(np.array([action]))
        return observations[0], float(rewards[0]), bool(terminated[0]), bool(truncated[0]), infos

    def close(self) -> None:
        self.vector.close()


def make(env_id: str, **options: Any) -> AtariEnv:
    return AtariEnv(make_vec(env_id, 1, **options))


def make_vec(env_id: str, num_envs: int, **options: Any) -> AtariVectorEnv:
    resize = (parse(env_id)[1] | options).get("resize", "area")
    kind = BilinearVectorEnv if resize == "bilinear" else AtariVectorEnv
    return kind(env_id, num_envs, **{k: v for k, v in options.items() if k != "resize"})
