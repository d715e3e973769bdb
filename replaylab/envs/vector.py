"""Vector environments that rest when an episode ends, so that evaluation pays only for the running ones.

`RestingVectorEnv` implements the rules: nothing resets automatically (`AutoresetMode.DISABLED`); a sub-environment
whose episode has ended is not stepped again until it is reset, and meanwhile repeats its last observation with reward 0
and unchanged flags. `reset(options={"reset_mask": mask})` resets only some. `PlainVectorEnv` applies these rules to
ordinary Gymnasium environments; faster implementations (see d4rl.py) define the same two methods.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, create_empty_array

from replaylab.errors import UsageError

Seeds = int | Sequence[int | None] | None
Step = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]


def spread(seed: Seeds, num_envs: int) -> list[int | None]:
    """One seed per sub-environment: an int n becomes n, n + 1, ..., as in Gymnasium's own vector environments."""
    if seed is None:
        return [None] * num_envs
    if isinstance(seed, int | np.integer):
        return [int(seed) + i for i in range(num_envs)]
    if len(seed) != num_envs:
        raise ValueError(f"{len(seed)} seeds for {num_envs} environments")
    return [None if s is None else int(s) for s in seed]


def which(options: dict[str, Any] | None, num_envs: int) -> np.ndarray:
    """Indices of the sub-environments to reset: those in options['reset_mask'], by default all."""
    mask = np.asarray((options or {}).get("reset_mask", np.ones(num_envs, bool)))
    if mask.shape != (num_envs,) or mask.dtype != bool:
        raise ValueError(f"reset_mask must be {num_envs} booleans, got shape {mask.shape} and dtype {mask.dtype}")
    return np.flatnonzero(mask)


class RestingVectorEnv(VectorEnv):
    """The rules above. A subclass defines `_reset(ids, seeds, options)`, which returns observations and infos, and
    `_step(ids, actions)`, which returns a Gymnasium step; both with exactly one row for each of `ids`."""

    metadata = {"autoreset_mode": AutoresetMode.DISABLED}  # noqa: RUF012  as in every Gymnasium environment

    def __init__(self, num_envs: int, observation_space: gymnasium.Space, action_space: gymnasium.Space) -> None:
        if num_envs < 1:
            raise UsageError(f"a vector environment needs at least one environment, got {num_envs}")
        self.num_envs = num_envs
        self.single_observation_space, self.single_action_space = observation_space, action_space
        self.observation_space = batch_space(observation_space, num_envs)
        self.action_space = batch_space(action_space, num_envs)
        self._observations: Any = create_empty_array(observation_space, num_envs)
        self._terminated = np.zeros(num_envs, bool)
        self._truncated = np.zeros(num_envs, bool)
        self._started = np.zeros(num_envs, bool)

    def reset(self, *, seed: Seeds = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        ids = which(options, self.num_envs)
        seeds = spread(seed, self.num_envs)
        rest = {key: value for key, value in (options or {}).items() if key != "reset_mask"}
        infos: dict[str, Any] = {}
        if len(ids):
            self._observations[ids], infos = self._reset(ids, [seeds[i] for i in ids], rest)
        self._terminated[ids] = self._truncated[ids] = False
        self._started[ids] = True
        return self._observations.copy(), infos

    def step(self, actions: np.ndarray) -> Step:
        if not self._started.all():
            raise gymnasium.error.ResetNeeded("reset() comes before the first step()")
        actions = np.asarray(actions)
        if len(actions) != self.num_envs:
            raise ValueError(f"{len(actions)} actions for {self.num_envs} environments")
        ids = np.flatnonzero(~(self._terminated | self._truncated))
        rewards = np.zeros(self.num_envs)
        infos: dict[str, Any] = {}
        if len(ids):
            new = self._step(ids, actions[ids])
            self._observations[ids], rewards[ids], self._terminated[ids], self._truncated[ids], infos = new
        return self._observations.copy(), rewards, self._terminated.copy(), self._truncated.copy(), infos

    def _reset(self, ids: np.ndarray, seeds: list[int | None], options: dict) -> tuple[np.ndarray, dict[str, Any]]:
        raise NotImplementedError

    def _step(self, ids: np.ndarray, actions: np.ndarray) -> Step:
        raise NotImplementedError


class PlainVectorEnv(RestingVectorEnv):
    """Ordinary environments stepped one after another, for any Box observation and any Box or Discrete action."""

    def __init__(self, env_fns: Sequence[Callable[[], gymnasium.Env]]) -> None:
        self.envs = [flat_goal(make()) for make in env_fns]
        if not self.envs:
            raise UsageError("a vector environment needs at least one environment, got 0")
        observation_space, action_space = self.envs[0].observation_space, self.envs[0].action_space
        if not isinstance(observation_space, Box) or not isinstance(action_space, Box | Discrete):
            raise UsageError(
                "only Box observations with Box or Discrete actions can be stepped side by side, "
                f"got {observation_space} with {action_space}"
            )
        super().__init__(len(self.envs), observation_space, action_space)
        self.render_mode = self.envs[0].render_mode

    def _reset(self, ids: np.ndarray, seeds: list[int | None], options: dict) -> tuple[np.ndarray, dict[str, Any]]:
        infos: dict[str, Any] = {}
        observations = np.empty_like(self._observations[ids])
        for row, (i, seed) in enumerate(zip(ids, seeds, strict=True)):
            observations[row], info = self.envs[i].reset(seed=seed, options=options or None)
            infos = self._add_info(infos, info, i)
        return observations, infos

    def _step(self, ids: np.ndarray, actions: np.ndarray) -> Step:
        infos: dict[str, Any] = {}
        observations = np.empty_like(self._observations[ids])
        rewards, terminated, truncated = np.zeros(len(ids)), np.zeros(len(ids), bool), np.zeros(len(ids), bool)
        for row, i in enumerate(ids):
            new = self.envs[i].step(actions[row])
            observations[row], rewards[row], terminated[row], truncated[row], info = new
            infos = self._add_info(infos, info, i)
        return observations, rewards, terminated, truncated, infos

    def render(self) -> tuple[Any, ...]:
        return tuple(env.render() for env in self.envs)

    def close_extras(self, **kwargs: Any) -> None:
        for env in self.envs:
            env.close()


def flat_goal(env: gymnasium.Env) -> gymnasium.Env:
    """Flatten dict observations, as in mazes, to one vector for policies: `observation` followed by `desired_goal`."""
    space = env.observation_space
    if not isinstance(space, Dict):
        return env
    if not {"observation", "desired_goal"} <= space.keys():
        raise UsageError(f"cannot flatten an observation with the parts {', '.join(space.keys())}")
    parts: list[Any] = [space["observation"], space["desired_goal"]]
    flat = Box(
        np.concatenate([part.low for part in parts]),
        np.concatenate([part.high for part in parts]),
        dtype=np.result_type(*[part.dtype for part in parts]),
    )
    return gymnasium.wrappers.TransformObservation(
        env, lambda seen: np.concatenate([seen["observation"], seen["desired_goal"]]).astype(flat.dtype), flat
    )
