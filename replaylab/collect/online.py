"""Fast training of SAC in an environment, which keeps everything it saw.

Many environments are stepped in parallel on the CPU while the device updates; the replay is one packed table on the
device, and an update (draw, gather, three losses, one optimiser step) is one captured graph. Training is divided into
chapters of fixed length. A chapter begins with freshly seeded environments and ends with a checkpoint, so an
interrupted run resumes after its last complete chapter, with the same result as an uninterrupted one.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from replaylab import envs
from replaylab.algos import Spaces
from replaylab.algos.sac import SAC
from replaylab.algos.sac import Config as SACConfig
from replaylab.config import COUNT, FROM_0, knob
from replaylab.errors import DataError, UsageError
from replaylab.evaluate import rollout
from replaylab.fuse import fused
from replaylab.progress import Progress, duration
from replaylab.step import Graph
from replaylab.tensors import by_index, load_tensors, save_tensors, under
from replaylab.trainer import Interrupted


@dataclass
class Config(SACConfig):
    """SAC in an environment."""

    train_steps: int = knob(1_000_000, "environment steps (and updates) to train for", COUNT)
    environments: int = knob(16, "environments stepped side by side, per candidate", COUNT)
    candidates: int = knob(1, "policies trained side by side; the best one makes the data", COUNT)
    warm_up: int = knob(10_000, "steps with random actions before the first update", FROM_0)
    updates_per_step: float = knob(1.0, "updates for each environment step", FROM_0)
    chapter: int = knob(20_000, "environment steps between evaluations, snapshots and checkpoints", COUNT)
    eval_episodes: int = knob(10, "episodes of each evaluation", COUNT)
    compile: bool = knob(True, "torch.compile the update on CUDA: a third faster after some twenty seconds")
    stop_at: float | None = knob(None, "end training when a candidate's mean return reaches this")


class Replay:
    """Transitions of every candidate in one table on the device: [observation, action, reward, terminated, next]."""

    def __init__(self, members: int, capacity: int, observation: int, action: int, device: torch.device):
        self.sizes = [observation, action, 1, 1, observation]
        self.table = torch.zeros(members, capacity, sum(self.sizes), device=device)
        self.filled = torch.zeros((), device=device)  # rows, as a float: indices are drawn as rand * filled
        self.first = torch.arange(members, device=device)[:, None] * capacity
        self.cursor = 0

    def add(self, rows: Tensor) -> None:  # (members, count, width)
        count = rows.shape[1]
        self.table[:, self.cursor : self.cursor + count].copy_(rows, non_blocking=True)
        self.cursor += count
        self.filled.fill_(self.cursor)

    def sample(self, batch_size: int) -> dict[str, Tensor]:
        drawn = (torch.rand(len(self.table), batch_size, device=self.table.device) * self.filled).long()
        rows = self.table.flatten(0, 1)[drawn + self.first]
        observations, actions, rewards, terminated, following = rows.split(self.sizes, -1)
        return {
            "observations": observations,
            "actions": actions,
            "rewards": rewards[..., 0],
            "terminated": terminated[..., 0],
            "next_observations": following,
        }


class Online:
    """SAC candidates in one environment, with their histories under `folder`."""

    def __init__(self, env_id: str, config: Config, seed: int, device: torch.device, folder: Path):
        self.env_id, self.config, self.seed, self.device, self.folder = env_id, config, seed, device, folder
        if config.chapter % config.environments:
            raise UsageError(
                f"chapter must be a multiple of environments ({config.environments}), not {config.chapter:,}"
            )
        if config.train_steps % config.chapter:
            raise UsageError(
                f"train_steps must be a multiple of chapter ({config.chapter:,}), not {config.train_steps:,}"
            )
        self.env = envs.make_vec(env_id, config.candidates * config.environments)
        box = self.env.single_action_space
        if not hasattr(box, "low") or len(self.env.single_observation_space.shape) != 1 or len(box.shape) != 1:
            raise UsageError(f"{env_id}: collecting with SAC needs vector observations and continuous action vectors")
        if not np.isfinite([box.low, box.high]).all():
            raise UsageError(f"{env_id}: collecting with SAC needs actions between bounds, and some have none")
        shape = [int(n) for n in self.env.single_observation_space.shape]
        self.spaces = Spaces(shape, "float32", int(box.shape[0]), False, box.low.tolist(), box.high.tolist())
        torch.manual_seed(seed)
        seeds = [seed * 1000 + i for i in range(config.candidates)]
        self.sac = SAC(config, self.spaces, seeds, device)
        self.untrained = {k: v[:1].cpu().clone() for k, v in self.sac.actor.state_dict().items()}
        width = (config.candidates, config.train_steps, shape[0], self.spaces.action_dim)
        self.replay = Replay(*width, device)
        self.update = Graph(fused(self._update, config.compile and device.type == "cuda"), device)
        if device.type == "cuda":
            torch.set_float32_matmul_precision("high")
        self.curve: list[dict[str, Any]] = []  # per chapter: step, seconds, return of each candidate
        self.seconds = 0.0
        self.folder.mkdir(parents=True, exist_ok=True)

    @cached_property
    def untrained_return(self) -> float:
        sac = SAC(self.config, self.spaces, [0], torch.device("cpu"))
        sac.actor.load_state_dict(self.untrained)
        return float(rollout(sac.act, 1, self.env_id, self.config.eval_episodes)[0].mean())

    def _update(self) -> None:
        self.sac.update(self.replay.sample(self.config.batch_size))

    # --- training

    def train(self) -> None:
        """Train from the last complete chapter on disk to `train_steps`, or until `stop_at` is reached."""
        config = self.config
        self._restore()
        bar = Progress(f"sac {self.env_id}", config.train_steps, self.replay.cursor)
        try:
            self._train(bar)
        except KeyboardInterrupt:
            raise Interrupted("stopped: the same command goes on from the last whole chapter") from None
        bar.close()
        self.env.close()

    def _train(self, bar: Progress) -> None:
        config = self.config
        for chapter in range(len(self.curve), config.train_steps // config.chapter):
            if self._reached():
                break
            began = time.monotonic()
            rows = self._chapter(chapter, bar)
            self.seconds += time.monotonic() - began
            returns, _ = rollout(self.sac.act, config.candidates, self.env_id, config.eval_episodes, device=self.device)
            means = returns.mean(1).tolist()
            step = self.replay.cursor
            self.curve.append({"step": step, "seconds": round(self.seconds, 2), "returns": means})
            self._save(chapter, rows)
            bar.say(f"step {step}: return {', '.join(f'{m:.0f}' for m in means)} ({duration(self.seconds)})")

    def _reached(self) -> bool:
        stop = self.config.stop_at
        return stop is not None and bool(self.curve) and max(self.curve[-1]["returns"]) >= stop

    def _chapter(self, chapter: int, bar: Progress) -> dict[str, np.ndarray]:
        """Play and learn for one chapter. Returns what was seen, in columns of (environments, steps, ...), and in
        `finals` the last observation of each episode."""
        config, count = self.config, self.env.num_envs
        steps = config.chapter // config.environments
        rng = np.random.default_rng([self.seed, chapter])
        seeds = [int(s) for s in rng.integers(0, 2**31, count)]
        torch.manual_seed(int(rng.integers(0, 2**62)))
        observations = self.env.reset(seed=seeds)[0].astype(np.float32)
        box = self.env.single_action_space
        seen: dict[str, list] = {k: [] for k in ("observations", "actions", "rewards", "terminated", "truncated")}
        finals: list[np.ndarray] = []
        log_probs: list[np.ndarray] = []
        debt = 0.0
        for _ in range(steps):
            learning = self.replay.cursor >= config.warm_up
            if learning:
                actions, log_prob = self._act(observations)
                debt += config.updates_per_step * config.environments
                while debt >= 1:  # queued on the device while the environments step
                    self.update()
                    debt -= 1
            else:
                actions = rng.uniform(box.low, box.high, (count, *box.shape)).astype(np.float32)
                log_prob = np.full(count, -np.log(box.high - box.low).sum(), np.float32)
            following, rewards, terminated, truncated, _ = self.env.step(actions)
            following = following.astype(np.float32)
            self._remember(observations, actions, rewards, terminated, following)
            for name, value in zip(seen, (observations, actions, rewards, terminated, truncated), strict=True):
                seen[name].append(value)
            log_probs.append(log_prob)
            finals.append(following)
            done = terminated | truncated
            observations = following
            if done.any():
                fresh = self.env.reset(options={"reset_mask": done})[0].astype(np.float32)
                observations = np.where(done[:, None], fresh, following)
            bar.update(self.replay.cursor)
        rows = {name: np.stack(values, 1) for name, values in seen.items()}
        ends = rows["terminated"] | rows["truncated"]
        rows["cut"] = np.zeros_like(ends)  # the end of a chapter ends what is under way
        rows["cut"][:, -1] = ~ends[:, -1]
        rows["truncated"], ends = rows["truncated"] | rows["cut"], ends | rows["cut"]
        following_rows = np.stack(finals, 1)
        return rows | {"log_probs": np.stack(log_probs, 1), "finals": following_rows[ends]}

    @torch.no_grad()
    def _act(self, observations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        shape = (self.config.candidates, self.config.environments)
        batch = torch.as_tensor(observations).to(self.device, non_blocking=True).view(*shape, -1)
        actions, log_prob = self.sac.sample(batch)
        both = torch.cat([actions, log_prob[..., None]], -1).flatten(0, 1).cpu().numpy()  # one copy to the host
        return np.ascontiguousarray(both[:, :-1]), both[:, -1].copy()

    def _remember(
        self, observations: np.ndarray, actions: np.ndarray, rewards: np.ndarray, terminated: np.ndarray, following: Any
    ) -> None:
        columns = [observations, actions, rewards[:, None], terminated[:, None], following]
        rows = torch.from_numpy(np.concatenate(columns, 1, dtype=np.float32))
        if self.device.type == "cuda":
            rows = rows.pin_memory().to(self.device, non_blocking=True)
        self.replay.add(rows.view(self.config.candidates, self.config.environments, -1))

    # --- disk: one shard of rows and one snapshot of weights per chapter

    def _save(self, chapter: int, rows: dict[str, np.ndarray]) -> None:
        try:
            save_tensors(self.folder / f"rows-{chapter}", {k: torch.from_numpy(v) for k, v in rows.items()})
            actor = {k: v for k, v in self.sac.state_dict().items() if k.startswith("actor.")}
            save_tensors(self.folder / f"actor-{chapter}", actor)
            state = dict(self.sac.state_dict())
            for index, entries in self.sac.optimizers["all"].state_dict()["state"].items():
                state |= {f"optimizer.{index}.{key}": value for key, value in entries.items()}
            save_tensors(self.folder / "sac.part", state)
            os.replace(self.folder / "sac.part", self.folder / f"sac-{chapter}")
            (self.folder / "curve.part").write_text(json.dumps(self.curve))
            os.replace(self.folder / "curve.part", self.folder / "curve.json")
            (self.folder / f"sac-{chapter - 1}").unlink(missing_ok=True)
        except OSError as error:
            again = "make room, and the same command goes on from the chapter before"
            raise DataError(f"cannot save chapter {chapter} under {self.folder}: {error}; {again}") from error

    def _restore(self) -> None:
        path = self.folder / "curve.json"
        if not path.exists():
            return
        self.curve = json.loads(path.read_text())
        self.seconds, done = self.curve[-1]["seconds"], self.curve[-1]["step"]
        if done > self.config.train_steps:
            raise UsageError(
                f"{self.folder} has been trained for {done:,} steps already, more than the {self.config.train_steps:,} "
                f"of train_steps: ask for more, or pass --overwrite to start anew"
            )
        state = load_tensors(self.folder / f"sac-{len(self.curve) - 1}")
        self.sac.load_state_dict({k: v for k, v in state.items() if not k.startswith("optimizer.")})
        optimizer = self.sac.optimizers["all"]
        entries = by_index(under("optimizer.", state))
        optimizer.load_state_dict({"state": entries, "param_groups": optimizer.state_dict()["param_groups"]})
        for chapter in range(len(self.curve)):
            self._refill(self.history(chapter))

    def _refill(self, rows: dict[str, np.ndarray]) -> None:
        """Put the rows of a chapter back into the replay, in their original order."""
        ends = rows["terminated"] | rows["truncated"]
        following = np.concatenate([rows["observations"][:, 1:], rows["observations"][:, :1]], 1)
        following[ends] = rows["finals"]
        for t in range(rows["rewards"].shape[1]):
            now = {name: column[:, t] for name, column in rows.items() if name != "finals"}
            self._remember(now["observations"], now["actions"], now["rewards"], now["terminated"], following[:, t])

    def history(self, chapter: int) -> dict[str, np.ndarray]:
        return {k: v.numpy() for k, v in load_tensors(self.folder / f"rows-{chapter}").items()}

    def actor(self, chapter: int, candidate: int) -> dict[str, Tensor]:
        """One candidate's actor as it was at the end of a chapter."""
        found = under("actor.", load_tensors(self.folder / f"actor-{chapter}"))
        return {k: v[candidate : candidate + 1] for k, v in found.items()}

    def forget(self) -> None:
        shutil.rmtree(self.folder)
