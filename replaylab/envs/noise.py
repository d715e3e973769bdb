"""Gaussian noise on actions, on observations ("transitions") or on both, to test how robust a policy is.

At each step, with probability `rate`, N(loc, scale^2) is added to every component and the sum is clipped to the
space's bounds. Reset observations are disturbed too. Each sub-environment has its own generator, seeded with its reset
seed, so an evaluation with given seeds always has the same noise, however many environments run in parallel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box
from gymnasium.vector import VectorEnv, VectorWrapper
from gymnasium.vector.utils import create_empty_array

from replaylab.envs.vector import Seeds, Step, spread, which
from replaylab.errors import UsageError

Generators = Sequence[np.random.Generator]
_STREAM = 0x6E6F6973  # makes the noise independent of the environment's own draws with the same seed


@dataclass(frozen=True)
class Noise:
    """A scale of 0 turns that noise off entirely, `loc` included."""

    action_scale: float = 0.0
    action_rate: float = 1.0
    transition_scale: float = 0.0
    transition_rate: float = 1.0
    loc: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, Real) or not math.isfinite(value):
                raise UsageError(f"{name} of noise must be a number, not {value!r}")
            object.__setattr__(self, name, float(value))  # JSON, which keeps it, has no NumPy numbers
        for name in ("action", "transition"):
            scale, rate = getattr(self, f"{name}_scale"), getattr(self, f"{name}_rate")
            if scale < 0:
                raise UsageError(f"the scale of {name} noise must be at least 0, not {scale}")
            if not 0 <= rate <= 1:
                raise UsageError(f"the rate of {name} noise is a probability, not {rate}")

    def check(self, observation_space: gymnasium.Space, action_space: gymnasium.Space) -> None:
        for name, scale, space in (
            ("action", self.action_scale, action_space),
            ("transition", self.transition_scale, observation_space),
        ):
            if scale and not isinstance(space, Box):
                raise UsageError(f"{name} noise needs real numbers to disturb, not {space}")

    def on_actions(self, actions: np.ndarray, space: gymnasium.Space, rngs: Generators) -> np.ndarray:
        return _disturb(actions, space, self.action_rate, self.loc, self.action_scale, rngs)

    def on_observations(self, observations: np.ndarray, space: gymnasium.Space, rngs: Generators) -> np.ndarray:
        return _disturb(observations, space, self.transition_rate, self.loc, self.transition_scale, rngs)


def _disturb(
    rows: np.ndarray, space: gymnasium.Space, rate: float, loc: float, scale: float, rngs: Generators
) -> np.ndarray:
    """Rows, (n, ...), with noise from one generator per row."""
    if not scale:
        return rows
    assert isinstance(space, Box)
    struck, normal = np.empty(len(rows), bool), np.empty(rows.shape)
    for i, rng in enumerate(rngs):
        # both are always drawn, so that runs with other rates and scales use the same random numbers
        struck[i] = rng.random() < rate
        rng.standard_normal(out=normal[i])
    noisy = np.clip(rows + loc + scale * normal, space.low, space.high)
    if np.issubdtype(space.dtype, np.integer):
        noisy = np.rint(noisy)
    return np.where(struck.reshape(-1, *[1] * (rows.ndim - 1)), noisy, rows).astype(space.dtype)


def _generator(seed: int | None) -> np.random.Generator:
    return np.random.default_rng(None if seed is None else [_STREAM, seed])


class NoisyEnv(gymnasium.Wrapper):
    """One environment with noise."""

    def __init__(self, env: gymnasium.Env, noise: Noise) -> None:
        super().__init__(env)
        noise.check(env.observation_space, env.action_space)
        self.noise, self._rng = noise, _generator(None)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self._rng = _generator(seed)
        observation, info = self.env.reset(seed=seed, options=options)
        return self._see(observation), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        (action,) = self.noise.on_actions(np.asarray(action)[None], self.action_space, [self._rng])
        observation, reward, terminated, truncated, info = self.env.step(action)
        return self._see(observation), reward, terminated, truncated, info

    def _see(self, observation: Any) -> Any:
        return self.noise.on_observations(np.asarray(observation)[None], self.observation_space, [self._rng])[0]


class NoisyVectorEnv(VectorWrapper):
    """A resting vector environment with noise: row i gets the same noise as `NoisyEnv` with the same seed."""

    def __init__(self, env: VectorEnv, noise: Noise) -> None:
        super().__init__(env)
        noise.check(env.single_observation_space, env.single_action_space)
        self.noise = noise
        self._rngs = [_generator(None) for _ in range(env.num_envs)]
        self._done = np.zeros(env.num_envs, bool)
        self._seen: Any = create_empty_array(env.single_observation_space, env.num_envs)

    def reset(self, *, seed: Seeds = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        ids = which(options, self.num_envs)
        seeds = spread(seed, self.num_envs)
        for i in ids:
            if seeds[i] is not None:
                self._rngs[i] = _generator(seeds[i])
        inner: Any = self.env  # takes a list of seeds, which VectorEnv's annotation lacks
        observations, infos = inner.reset(seed=seeds, options=options)
        self._done[ids] = False
        return self._see(ids, observations), infos

    def step(self, actions: np.ndarray) -> Step:
        running = np.flatnonzero(~self._done)
        actions = np.array(actions)  # leaves the caller's array unchanged
        rngs = [self._rngs[i] for i in running]
        actions[running] = self.noise.on_actions(actions[running], self.single_action_space, rngs)
        observations, rewards, terminated, truncated, infos = self.env.step(actions)
        self._done = terminated | truncated
        return self._see(running, observations), rewards, terminated, truncated, infos

    def _see(self, ids: np.ndarray, observations: np.ndarray) -> np.ndarray:
        """Add noise to the new rows; a resting environment repeats its last noisy observation."""
        rngs = [self._rngs[i] for i in ids]
        self._seen[ids] = self.noise.on_observations(observations[ids], self.single_observation_space, rngs)
        return self._seen.copy()
