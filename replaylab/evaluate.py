"""Evaluation: episodes played in parallel in vector environments, and policies loaded from run folders.

Episode i starts from environment seed `seed + i`, the same for every policy, so comparisons are paired. Every episode
is played to its end (or to MAX_STEPS) and counted once, so that short episodes are not over-represented.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from replaylab import scores, stats
from replaylab.algos import Spaces, system
from replaylab.config import check, resolve
from replaylab.errors import DataError, UsageError, nearest
from replaylab.progress import Progress
from replaylab.run import REWRITE, RunFolder

if TYPE_CHECKING:
    from replaylab.envs.noise import Noise

BOX_SLACK = 1e-5  # tolerance at the bounds of actions, for rounding
SEED = 1000  # environment seed of the first evaluation episode
MAX_ENVS = 512  # environments that are stepped together
MAX_STEPS = 100_000  # of an episode, for environments that never end

Act = Callable[[Tensor, Any], tuple[Tensor, Any]]


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"unknown device '{name}': use auto, cpu or cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"device '{name}' is not supported: use auto, cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("device cuda was asked for, but torch sees no GPU here")
    return device


def rollout(
    act: Act,
    members: int,
    env_id: str,
    episodes: int,
    *,
    seed: int = SEED,
    noise: Noise | None = None,
    device: torch.device | str = "cpu",
    begin: Callable[[int], Any] | None = None,
    variants: int = 1,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns and lengths, (members, episodes). `act` takes observations (members, batch, ...) and its own state.

    A policy with a memory passes `begin(batch)`, which makes the first state; a state that has `receive` gets the
    rewards. With `variants` (such as targets) every episode is played once for each, all in one batch, the episodes
    of the first variant first; the result is (members * variants, episodes).
    """
    from replaylab import envs

    if not isinstance(episodes, int | np.integer) or episodes < 1:
        raise UsageError(f"episodes must be a whole number of at least 1, not {episodes!r}")
    episodes = int(episodes)
    rows = members * variants
    wave = max(1, min(episodes, MAX_ENVS // rows))
    parts, bar = [], Progress("evaluation", rows * episodes, unit="episodes")
    for first in range(0, episodes, wave):
        count = min(wave, episodes - first)
        env = envs.make_vec(env_id, rows * count, noise=noise)
        state = begin(variants * count) if begin else None
        try:
            parts.append(_play(act, env, members, [seed + first + i for i in range(count)], device, state, bar))
        finally:
            env.close()
    bar.erase()
    returns, lengths = (np.concatenate(p, axis=1) for p in zip(*parts, strict=True))
    return returns, lengths


def _play(
    act: Act, env: Any, members: int, seeds: Sequence[int], device: torch.device | str, state: Any, bar: Progress
) -> tuple:
    shape = (env.num_envs // len(seeds), len(seeds))
    observations, _ = env.reset(seed=list(seeds) * shape[0])
    box = getattr(env.single_action_space, "low", None)
    returns, lengths = np.zeros(env.num_envs), np.zeros(env.num_envs, np.int64)
    running, before = np.ones(env.num_envs, bool), bar.done
    for _ in range(MAX_STEPS):
        batch = torch.as_tensor(observations, device=device)
        batch = batch if batch.dtype == torch.uint8 else batch.float()
        actions, state = act(batch.reshape(members, -1, *batch.shape[1:]), state)
        chosen = actions.flatten(0, 1).cpu().numpy()
        if not np.isfinite(chosen).all():
            raise DataError("the policy answers with NaN or infinity")
        if box is not None:
            chosen = np.clip(chosen, env.single_action_space.low, env.single_action_space.high)
        observations, rewards, terminated, truncated, _ = env.step(chosen)
        if hasattr(state, "receive"):
            state.receive(torch.as_tensor(rewards, dtype=torch.float32, device=device).view(members, -1))
        if not np.isfinite(rewards).all():
            raise DataError("the environment gives rewards of NaN or infinity")
        returns += rewards * running
        lengths += running
        running &= ~(terminated | truncated)
        bar.update(before + int((~running).sum()), step=int(lengths.max()))
        if not running.any():
            break
    return returns.reshape(shape), lengths.reshape(shape)


class Policy:
    """A trained policy for one seed of a run: observations in, actions out, as numpy arrays."""

    def __init__(
        self, agent: Any, spaces: Spaces, device: torch.device, target: float | None = None, step: int | None = None
    ):
        self.agent, self.spaces, self.device, self.target = agent, spaces, device, target
        self.step = step  # of training, at which it was saved
        self.state: Any = None
        self.batch = 0  # observations in the last call

    def reset(self, which: np.ndarray | None = None) -> None:
        """Forget the past: a new episode starts in all environments of the batch, or in those that `which` marks."""
        if which is None:
            self.state = None
        elif hasattr(self.state, "reset"):
            marks = np.asarray(which)
            if marks.shape != (self.batch,) or marks.dtype != bool:
                raise UsageError(f"reset takes {self.batch} booleans, one for each observation of the last call")
            self.state.reset(torch.as_tensor(marks, device=self.device)[None])

    @torch.no_grad()
    def act(self, observations: np.ndarray, rewards: np.ndarray | float | None = None) -> np.ndarray:
        """Actions for one observation, or for a batch of them. A return-conditioned policy also needs the `rewards` of
        the previous actions; those of environments that begin anew do not count."""
        shape = tuple(self.spaces.seen)
        try:
            observations = np.asarray(observations)
        except (ValueError, TypeError, RuntimeError):  # lists of unequal length, tensors on a GPU
            observations = np.zeros(())
        if observations.shape[-len(shape) :] != shape or observations.ndim > len(shape) + 1:
            raise UsageError(f"the policy takes observations of shape {shape} or (batch, {', '.join(map(str, shape))})")
        numbers = self._numbers(observations)
        colours = len(getattr(self.agent, "palette", ()))
        if colours and ((observations < 0) | (observations >= colours)).any():
            raise UsageError(f"the policy takes frames whose pixels are indices of colours, 0 to {colours - 1}")
        batch = torch.as_tensor(numbers.reshape(1, -1, *shape), device=self.device)
        if not batch.shape[1] and self.state is None:
            return np.zeros(0, np.int64) if self.spaces.discrete else np.zeros((0, self.spaces.action_dim), np.float32)
        if self.state is None and hasattr(self.agent, "begin"):
            self.state = self.agent.begin(batch.shape[1], [] if self.target is None else [self.target])
        elif rewards is not None and hasattr(self.state, "receive"):
            self.state.receive(self._rewards(rewards))
        elif rewards is None and batch.shape[1] == self.batch and getattr(self.state, "waits", False):
            raise UsageError("the policy counts down to its target: pass the rewards of its last actions, or reset it")
        actions, self.state = self.agent.act(batch, self.state)
        self.batch = batch.shape[1]
        chosen = actions[0].cpu().numpy()
        return chosen[0] if observations.ndim == len(shape) else chosen

    def _numbers(self, observations: np.ndarray) -> np.ndarray:
        """As float32, or bytes."""
        if observations.dtype == np.uint8:
            return observations
        if len(self.spaces.seen) > 1 and observations.dtype.kind == "f":
            raise UsageError(f"the policy takes frames of bytes (uint8), not {observations.dtype}")
        if observations.dtype.kind not in "fiub":
            raise UsageError(f"the policy takes observations of numbers, not {observations.dtype}")
        with np.errstate(over="ignore"):
            numbers = observations.astype(np.float32)
        if not np.isfinite(numbers).all():
            raise UsageError("the observations hold NaN or infinity: a policy's answer to them would mean nothing")
        return numbers

    def _rewards(self, rewards: Any) -> Tensor:  # (1, batch)
        try:
            given = np.asarray(rewards, np.float32).reshape(1, -1)
        except (TypeError, ValueError):
            given = np.full((1, 1), np.nan)
        if given.size not in (1, self.batch) or not np.isfinite(given).all():
            raise UsageError(f"rewards must be numbers, one for each of the {self.batch} last actions")
        return torch.as_tensor(given, dtype=torch.float32, device=self.device)


def load_agent(run: RunFolder, device: torch.device, seed: int | None = None) -> tuple[Any, Spaces, list[int]]:
    """The trained agent of a run, with all its seeds or only the given one."""
    module, config = system(run.system()), run.config()
    own = {k: v for k, v in config.items() if k in module.Config.__dataclass_fields__}
    (settings,) = resolve([module.Config], [("config.yaml", own)])
    trained = run.seeds()
    try:
        spaces = Spaces(**run.info()["spaces"])
    except (KeyError, TypeError) as error:
        raise DataError(f"{run.path / 'run.json'} does not tell the run's spaces: {REWRITE}") from error
    if seed is not None and (np.ndim(seed) or seed not in trained):
        raise UsageError(f"{run.path} has no seed {seed!r}; it has {', '.join(map(str, trained))}")
    seeds = trained if seed is None else [trained[trained.index(seed)]]  # a NumPy number is no seed to torch
    agent = module.Agent(settings, spaces, seeds, device)
    weights = run.weights()
    if seed is not None:
        weights = _one_seed(weights, agent.state_dict(), trained.index(seed))
    try:
        agent.load_state_dict(weights)
    except RuntimeError as error:
        raise DataError(f"the weights in {run.path} do not fit its config.yaml: was that edited?") from error
    return agent.eval(), spaces, seeds


def _one_seed(weights: dict[str, Tensor], wanted: dict[str, Tensor], index: int) -> dict[str, Tensor]:
    """Cut one seed out of tensors that stack all seeds; tensors that the seeds share have the wanted shape already."""

    def cut(name: str) -> Tensor:
        size = wanted[name].shape
        return weights[name] if weights[name].shape == size else weights[name][index * size[0] : (index + 1) * size[0]]

    return {name: cut(name) for name in wanted}


def load_policy(
    run: str | Path, seed: int | None = None, device: str = "cpu", *, target: float | None = None, **acting: Any
) -> Policy:
    """The policy of a run folder; without `seed`, that of the run's first seed. `target`: the return to aim for.
    `acting`: other values for settings of how the policy acts, such as candidates=4, if its system has any."""
    folder = RunFolder(run).require()
    where = pick_device(device)
    agent, spaces, _ = load_agent(folder, where, folder.seeds()[0] if seed is None else seed)
    (values,) = _combinations(folder, agent, {name: [value] for name, value in acting.items()})
    if values:
        agent.config = replace(agent.config, **values)
    if target is not None and np.ndim(target):
        raise UsageError("a policy aims for one target: load one policy for each")
    if target is not None:
        (target,) = _check_targets(agent, [target])
    return Policy(agent, spaces, where, target, folder.step)


@torch.no_grad()
def evaluate_agent(
    agent: Any,
    seeds: Sequence[int],
    env_id: str,
    episodes: int,
    *,
    seed: int = SEED,
    noise: Noise | None = None,
    device: torch.device | str = "cpu",
    settings: dict[str, Any] | None = None,
    targets: Sequence[float] = (),
) -> list[dict[str, Any]]:
    """One record per seed (and target): the return, raw and normalised, and the length of every episode."""
    from replaylab import envs

    env_id = envs.canonical(env_id)  # hopper is d4rl/hopper: reports must not take them for two
    targets = list(targets or getattr(agent, "targets", []))
    begin = (lambda batch: agent.begin(batch, targets)) if hasattr(agent, "begin") else None
    variants = max(1, len(targets))
    began = time.monotonic()
    where = torch.device(device)
    with torch.random.fork_rng(devices=[where] if where.type == "cuda" else []):  # keeps training's random state
        torch.manual_seed(seed)
        returns, lengths = rollout(
            agent.act, len(seeds), env_id, episodes,
            seed=seed, noise=noise, device=device, begin=begin, variants=variants,
        )  # fmt: skip
    seconds = time.monotonic() - began
    known = scores.reference(env_id) is not None
    return [
        {
            "seed": s,
            "env": env_id,
            "episodes": int(episodes),
            "returns": returns[i].tolist(),
            "lengths": lengths[i].tolist(),
            "normalized": scores.normalize(env_id, returns[i]).tolist() if known else None,
            "settings": (settings or {}) | ({"target": targets[i % variants]} if targets else {}),
            "seconds": round(seconds, 3),
        }
        for i, s in enumerate(s for s in seeds for _ in range(variants))
    ]


def check_spaces(env_id: str, spaces: Spaces) -> None:
    from replaylab import envs

    env = envs.make_vec(env_id, 1)
    try:
        sees, acts = tuple(env.single_observation_space.shape), env.single_action_space
        if sees != tuple(spaces.seen):
            raise UsageError(f"{env_id} shows {sees}, the data has observations of {tuple(spaces.seen)}")
        discrete = hasattr(acts, "n")
        if not discrete and len(acts.shape) != 1:
            raise UsageError(
                f"{env_id} takes actions of shape {acts.shape}, policies answer vectors: flatten its actions"
            )
        if discrete and acts.start != 0:
            raise UsageError(f"{env_id} numbers its actions from {acts.start}, policies from 0: wrap it")
        offered = int(acts.n if discrete else acts.shape[0])
        fits = spaces.action_dim <= offered if discrete else spaces.action_dim == offered  # a log may lack some actions
        if discrete != spaces.discrete or not fits:
            kind = "discrete actions" if discrete else "continuous numbers an action"
            theirs = f"{spaces.action_dim} {'discrete' if spaces.discrete else 'continuous'}"
            raise UsageError(f"{env_id} takes {offered} {kind}, which do not fit the data's {theirs}")
        if spaces.action_low and spaces.action_high:
            beyond = (spaces.action_low < acts.low - BOX_SLACK) | (spaces.action_high > acts.high + BOX_SLACK)
            if beyond.any():
                print(
                    f"note: some of the data's actions are outside what {env_id} takes: it clips them", file=sys.stderr
                )
    finally:
        env.close()


def _check_targets(agent: Any, targets: Any) -> list[float]:
    if not hasattr(agent, "begin") or not agent.targets:
        raise UsageError("this run's policy takes no target return: leave the target out")
    try:
        wanted = [float(t) for t in np.ravel(targets)]
    except (TypeError, ValueError):
        wanted = [math.nan]
    if not all(map(math.isfinite, wanted)):
        raise UsageError("a target must be a number")
    if outside := [f"{t:g}" for t in wanted if not agent.seen_return(t)]:
        low, high = agent.returns_range.tolist()
        print(f"note: target {', '.join(outside)} is outside the data's returns, {low:g} to {high:g}", file=sys.stderr)
    return wanted


def evaluate(
    run: str | Path,
    env: str | None = None,
    *,
    episodes: int = 100,
    seed: int = SEED,
    noise: Noise | None = None,
    device: str = "auto",
    targets: Sequence[float] = (),
    acting: dict[str, Sequence[Any]] | None = None,
    told: Callable[[list[dict[str, Any]]], None] | None = None,
) -> list[dict[str, Any]]:
    """Evaluate every seed of a run folder; the records are returned and added to its eval.jsonl.

    targets: returns that a Decision Transformer aims for, one record each.
    acting: settings of how the policy acts, with several values each; every combination is played.
    told: a function that is called with the records of each combination as soon as it is played.
    """
    folder = RunFolder(run).require()
    where = pick_device(device)
    agent, spaces, seeds = load_agent(folder, where)
    if not isinstance(seed, int | np.integer) or not 0 <= seed < 2**31:
        raise UsageError(f"seed must be a whole number from 0 to {2**31 - 1}, not {seed!r}")
    seed = int(seed)
    module = system(folder.system())
    env_id = module.environment(env) if env and hasattr(module, "environment") else env or folder.config().get("env")
    if env_id is None:
        raise UsageError(f"{run} was trained without an environment: name one with --env")
    check_spaces(env_id, spaces)
    own = folder.config().get("env")
    if getattr(module, "ONLINE", False) and env_id != own:
        print(f"note: {run} was trained in {own} and is played in {env_id}", file=sys.stderr)
    targets = _check_targets(agent, targets) if np.size(targets) else []
    settings: dict[str, Any] = {} if seed == SEED else {"seed": seed}
    if noise is not None:
        from replaylab import envs

        if not isinstance(noise, envs.Noise):
            raise UsageError(f"noise must be a replaylab.envs.Noise, such as Noise(action_scale=0.1), not {noise!r}")
        settings["noise"] = {k: v for k, v in vars(noise).items() if v != getattr(type(noise), k, None)}
    records: list[dict[str, Any]] = []
    for values in _combinations(folder, agent, acting or {}):
        agent.config = replace(agent.config, **values)
        found = evaluate_agent(
            agent, seeds, env_id, episodes,
            seed=seed, noise=noise, device=where, settings=settings | values, targets=targets,
        )  # fmt: skip
        found = [{"step": folder.step, **record} for record in found]
        folder.append("eval.jsonl", found)
        records += found
        if told:
            told(found)
    return records


def _combinations(run: RunFolder, agent: Any, acting: dict[str, Any]) -> list[dict[str, Any]]:
    """Every combination of the values of these settings of acting; a value that is no list stands alone."""
    if not isinstance(acting, dict):
        raise UsageError(f"acting must be names with values, not {acting!r}")
    name = run.system()
    known = getattr(system(name), "ACTING", ())
    if unknown := [key for key in acting if key not in known]:
        raise UsageError(f"{name} does not act by '{unknown[0]}'{nearest(unknown[0], known)}")
    if idle := [key for key in acting if key in getattr(agent, "idle", ())]:
        raise UsageError(f"{idle[0]} changes nothing of what {run.path} does: leave it out")
    lists = {key: given if isinstance(given, (list, tuple, range)) else [given] for key, given in acting.items()}
    if empty := [key for key, given in lists.items() if not given]:
        raise UsageError(f"{empty[0]} needs at least one value")
    checked = {key: [check(type(agent.config), key, value) for value in given] for key, given in lists.items()}
    return [dict(zip(checked, values, strict=True)) for values in itertools.product(*checked.values())]


def summary(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean, standard error, IQM and its bootstrap interval over the seeds of one evaluation."""
    kind = "normalized" if records[0]["normalized"] is not None else "returns"
    return {
        "env": records[0]["env"],
        "score": "normalised" if kind == "normalized" else "return",
        **stats.summarize_scores([record[kind] for record in records]),
        "return": float(np.mean([record["returns"] for record in records])),
        "length": float(np.mean([record["lengths"] for record in records])),
    }
