"""Collecting Atari data: DQN learns to play, and everything it sees is written as DQN-replay logs.

Games are played in parallel. While they step, the device learns; a thread compresses and writes finished episodes.
Training is divided into chapters. A chapter begins with freshly seeded games and, except for the last, ends with a
checkpoint in `OUT.training`. Run again after an interruption, the same command resumes there, with the same result as
an uninterrupted run. Episodes cut off at the end of a chapter are logged as truncated.
"""

from __future__ import annotations

import io
import json
import os
import queue
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from replaylab.algos.dqn import DQN
from replaylab.algos.dqn import Config as DQNConfig
from replaylab.collect import recipe
from replaylab.config import COUNT, FROM_0, SHARE, Within, knob, resolve
from replaylab.data.formats import dqn_replay
from replaylab.data.formats.dqn_log import Log
from replaylab.envs import atari
from replaylab.errors import UsageError
from replaylab.evaluate import pick_device, rollout
from replaylab.progress import Progress, duration
from replaylab.tensors import load_tensors, save_tensors

RECENT = 100  # episodes whose mean return is reported


@dataclass
class Config(DQNConfig):
    """DQN in Atari games."""

    environments: int = knob(32, "games played side by side", COUNT)
    chapter: int = knob(500_000, "environment steps between checkpoints; the running episodes are cut off there", COUNT)
    files: int = knob(50, "checkpoint files the log is cut into, about", COUNT)
    gzip_level: int = knob(1, "of the log", Within(0, 9))
    sticky: float = knob(0.25, "probability that the game repeats the previous action; Dopamine's is 0.25", SHARE)
    eval_episodes: int = knob(30, "games the finished policy plays for its score; 0: none", FROM_0)
    points: int = knob(40, "points on the learning curve", COUNT)
    deterministic: bool = knob(True, "only convolutions that give the same result every time")


def collect_atari(
    game: str,
    steps: int,
    out: str | Path,
    *,
    seed: int = 0,
    device: str = "auto",
    progress: bool = True,
    overwrite: bool = False,
    **settings: Any,
) -> Path:
    """Train DQN on `game` for `steps` steps and log them all to `out/1/replay_logs`, with a recipe.json in `out`."""
    env_id = f"atari/{atari.game_name(game)}"
    (config,) = resolve([Config], [("settings", settings)])
    if min(steps, config.chapter) < config.environments:
        raise UsageError(f"steps and chapter must be at least environments ({config.environments})")
    out = Path(out)
    training = out.with_name(out.name + ".training")
    asked = {"env_id": env_id, "steps": steps, "seed": seed, "device": pick_device(device).type} | asdict(config)
    if overwrite or not _unfinished(out, training, asked):
        if out.exists() and not overwrite:
            raise UsageError(f"{out} exists: pass --overwrite or another --out")
        ours = (training / "asked.json").exists() or dqn_replay.sniff(out)  # started by this command, or a log
        if out.exists() and not ours and (not out.is_dir() or any(out.iterdir())):
            raise UsageError(f"{out} holds something other than DQN-replay logs and is not replaced")
        for folder in (out, training):
            shutil.rmtree(folder, ignore_errors=True)
    run = Collector(env_id, steps, config, seed, pick_device(device), out, training, progress)
    (training / "asked.json").write_text(json.dumps(asked))
    try:
        run.train()
    finally:
        run.close()
    shutil.rmtree(training)
    return out


def _unfinished(out: Path, training: Path, asked: dict[str, Any]) -> bool:
    """Whether there is an interrupted run with exactly these settings."""
    try:
        return out.exists() and json.loads((training / "asked.json").read_text()) == asked
    except (OSError, ValueError):
        return False


class Collector:
    def __init__(
        self,
        env_id: str,
        steps: int,
        config: Config,
        seed: int,
        device: torch.device,
        out: Path,
        training: Path,
        progress: bool,
    ):
        self.env_id, self.config, self.seed, self.device = env_id, config, seed, device
        self.out, self.training = out, training
        self.games = config.environments
        self.total = -(-steps // self.games)  # steps of each game
        self.per_chapter = config.chapter // self.games
        training.mkdir(parents=True, exist_ok=True)
        config.replay_size = min(config.replay_size, self.total * self.games)
        config.lr_steps = steps if config.lr_steps is None else config.lr_steps
        self.env = atari.engine(env_id, self.games, autoreset="SameStep", stack=1, sticky=config.sticky)
        self.agent = DQN(config, self.games, int(self.env.single_action_space.n), seed, device)
        if device.type == "cuda":
            torch.set_float32_matmul_precision("high")
            torch.backends.cudnn.deterministic = config.deterministic
        self.chapter, self.files, self.seconds = 0, 0, 0.0
        self.returns: deque[float] = deque(maxlen=RECENT)
        self.episodes = 0
        self.curve: list[dict[str, float | None]] = []
        self._restore()
        rows = max(1, steps // config.files)
        self.writer = Writer(Log(out / "1" / "replay_logs", rows, config.gzip_level, self.files))
        self.recorder = Recorder(self.games, self.writer)
        done, output = self.chapter * self.per_chapter * self.games, sys.stderr if progress else io.StringIO()
        self.bar = Progress(f"dqn {env_id}", self.total * self.games, done, file=output)

    def close(self) -> None:
        self.writer.stop()
        self.env.close()

    # --- training

    def train(self) -> None:
        self._write_recipe([])  # so that even an unfinished folder names its game
        while self.chapter * self.per_chapter < self.total:
            self._play()
            self.recorder.cut()
            self.writer.finish()
            self.chapter, self.files = self.chapter + 1, self.writer.log.number
            if self.chapter * self.per_chapter < self.total:
                self._save()
        self.bar.close()
        self._write_recipe([])  # in case the evaluation fails
        self._write_recipe(self._evaluate())

    def _play(self) -> None:
        """One chapter."""
        began, config, agent = time.monotonic() - self.seconds, self.config, self.agent
        rng = np.random.default_rng([self.seed, self.chapter])
        torch.manual_seed(int(rng.integers(2**62)))
        observations, _ = self.env.reset(seed=rng.integers(2**31, size=self.games))
        frames = observations[:, 0]
        rewards, over, cut = np.zeros(self.games), np.zeros(self.games, bool), np.ones(self.games, bool)
        first, owed = self.chapter * self.per_chapter, 0.0
        last = min(first + self.per_chapter, self.total)
        every = max(1, self.total // config.points)
        for step in range(first, last):
            agent.give(frames, rewards, over, cut)
            agent.observe()
            actions = agent.chosen.cpu().numpy().copy()  # waits for the device; copied, since the recorder keeps it
            self.env.send(actions)
            if step * self.games >= config.warm_up and step > config.n_step:
                owed += config.replay_ratio * self.games / config.batch_size
            while owed >= 1:  # queued on the device while the games step
                agent.learn()
                owed -= 1
            observations, rewards, over, cut, _ = self.env.recv()
            for score in self.recorder.add(frames, actions, rewards, over, cut):
                self.returns.append(score)
                self.episodes += 1
            frames = observations[:, 0]
            if (step + 1) % every == 0 or step + 1 == last:
                self.seconds = time.monotonic() - began
                self._point((step + 1) * self.games)
            self.bar.update((step + 1) * self.games)
        self.seconds = time.monotonic() - began

    def _point(self, step: int) -> None:
        """Add a point to the learning curve and print it."""
        means, score = self.agent.read(), _mean(self.returns)
        numbers: dict[str, float | None] = {
            "step": step,
            "seconds": round(self.seconds, 2),
            "episodes": self.episodes,
            "return": score,
        }
        self.curve.append({**numbers, **means})
        played = (
            f"return {score:.1f} over the last {len(self.returns)} of {self.episodes} episodes, "
            if self.returns
            else ""
        )
        rest = f"loss {means['loss']:.4f}, value {means['value']:.2f}, {duration(self.seconds)}"
        self.bar.say(f"step {step}: {played}{rest}")

    def _evaluate(self) -> list[float]:
        """Returns of the finished policy."""
        if self.config.eval_episodes < 1:
            return []
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(self.seed)
            returns, _ = rollout(self.agent.act, 1, self.env_id, self.config.eval_episodes, device=self.device)
        self.bar.say(f"the policy scores {returns.mean():.1f} +- {returns.std():.1f} in {returns.size} games")
        return returns[0].tolist()

    # --- disk

    def _write_recipe(self, scores: list[float]) -> None:
        about = {"env_id": self.env_id, "num_actions": self.agent.num_actions, "sticky": self.config.sticky}
        asked = {"env": self.env_id, "level": "replay", "steps": self.total * self.games}
        made = recipe(self.config, self.seed) | {"asked": asked}
        made |= {"seconds": round(self.seconds, 1), "device": str(self.device)}
        result = {"scores": {"policy": scores, "mean": _mean(scores)}, "curve": self.curve}
        save_tensors(self.out / "policy.safetensors", dict(self.agent.online.state_dict()))
        (self.out / "recipe.json").write_text(json.dumps(about | made | result, indent=1))

    def _save(self) -> None:
        """A checkpoint of everything the next chapter depends on."""
        notes = {name: getattr(self, name) for name in ("chapter", "files", "seconds", "episodes", "curve")}
        notes["returns"] = list(self.returns)
        part, path = self.training / "state.part", self.training / f"state-{self.chapter}"
        try:
            save_tensors(part, self.agent.state())
            os.replace(part, path)
            (self.training / "notes.part").write_text(json.dumps(notes))
            os.replace(self.training / "notes.part", self.training / "notes.json")
        except OSError as error:
            part.unlink(missing_ok=True)
            self.bar.say(f"no checkpoint of chapter {self.chapter}: {error}; a killed run will not go on from here")
            return
        (self.training / f"state-{self.chapter - 1}").unlink(missing_ok=True)

    def _restore(self) -> None:
        notes: dict[str, Any] = {}
        if (self.training / "notes.json").exists():
            notes = json.loads((self.training / "notes.json").read_text())
            self.agent.load_state(load_tensors(self.training / f"state-{notes['chapter']}"))
            self.returns.extend(notes.pop("returns"))
        for name, value in notes.items():
            setattr(self, name, value)
        for file in (self.out / "1" / "replay_logs").glob("*.gz"):  # written after the checkpoint
            if int(file.name.split(".")[-2]) >= self.files:
                file.unlink()


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return float(np.mean(found)) if found else None


class Recorder:
    """Collects the steps of all games and passes each finished episode to the writer."""

    def __init__(self, games: int, writer: Writer):
        self.writer, self.seen = writer, 0
        self.starts = np.zeros(games, np.int64)  # step at which each game's current episode began
        # (frames, actions, rewards) of all games in each step since the oldest running episode began
        self.steps: deque[tuple[np.ndarray, np.ndarray, np.ndarray]] = deque()
        self.running = np.zeros(games)  # returns of the running episodes

    def add(self, frames: np.ndarray, actions: np.ndarray, rewards: np.ndarray, over: Any, cut: Any) -> list[float]:
        """Add one step of every game; the result is the returns of the episodes that ended."""
        self.steps.append((frames, actions, rewards))
        self.seen += 1
        self.running += rewards
        ended = np.flatnonzero(over | cut).tolist()
        returns = self.running[ended].tolist()
        for game in ended:
            self._pass_on(game, truncated=not over[game])
        return returns

    def cut(self) -> None:
        """End every running episode as truncated."""
        for game in np.flatnonzero(self.starts < self.seen).tolist():
            self._pass_on(game, truncated=True)

    def _pass_on(self, game: int, truncated: bool) -> None:
        oldest = self.seen - len(self.steps)
        rows = list(islice(self.steps, int(self.starts[game]) - oldest, None))
        frames, actions, rewards = (np.stack([row[i][game] for row in rows]) for i in range(3))
        self.writer.put(frames, actions, rewards, truncated)
        self.starts[game], self.running[game] = self.seen, 0.0
        for _ in range(self.starts.min() - oldest):
            self.steps.popleft()


class Writer:
    """Writes the log in a separate thread, so that compression does not hold up the games."""

    def __init__(self, log: Log):
        self.log = log
        self.queue: queue.Queue[Any] = queue.Queue(maxsize=64)  # episodes; if full, the games wait for the disk
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while (item := self.queue.get()) is not None:
            try:
                if self.error is None:
                    item()
            except Exception as error:
                self.error = error
            self.queue.task_done()

    def put(self, *episode: Any) -> None:
        self._check()
        self.queue.put(lambda: self.log.add(*episode))

    def finish(self) -> None:
        """Close the log and wait until everything is on disk."""
        self.queue.put(self.log.close)
        self.queue.join()
        self._check()

    def stop(self) -> None:
        self.queue.put(None)
        self.thread.join()

    def _check(self) -> None:
        if self.error is not None:
            raise self.error
