"""Collecting DQN-replay logs: every step is there, a killed run goes on, a full disk, bad requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ale_py")

from replaylab.collect import atari as collector
from replaylab.collect.atari import collect_atari
from replaylab.data.formats import dqn_log, dqn_replay
from replaylab.envs import atari
from replaylab.errors import DataError, UsageError

QUICK: dict[str, Any] = {
    "environments": 2, "batch_size": 4, "replay_ratio": 0.5, "warm_up": 20, "epsilon_steps": 50, "chapter": 100,
    "files": 3, "eval_episodes": 0, "points": 4, "progress": False, "device": "cpu",
}  # fmt: skip


def test_collected_logs_hold_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames, actions and rewards, against copies made when they happened."""
    happened = []

    class Watched:  # the engine that the collector steps, with a witness
        def __init__(self, engine: Any):
            self.engine, self.single_action_space = engine, engine.single_action_space

        def reset(self, **options: Any) -> Any:
            self.seen = self.engine.reset(**options)[0].copy()
            return self.seen.copy(), {}

        def send(self, actions: np.ndarray) -> None:
            self.actions = actions.copy()
            self.engine.send(actions)

        def recv(self) -> Any:
            result = self.engine.recv()
            for frame, action, reward in zip(self.seen, self.actions, result[1], strict=True):
                happened.append((frame.tobytes(), int(action), float(np.clip(reward, -1, 1))))
            self.seen = result[0].copy()
            return result

        def close(self, **kwargs: Any) -> None:
            pass

    real = atari.engine
    monkeypatch.setattr(atari, "engine", lambda *args, **options: Watched(real(*args, **options)))
    out = collect_atari("breakout", 240, tmp_path / "Breakout", **QUICK)
    episodes = dqn_replay.read(out)
    assert len(episodes) == 240 and episodes.env_id == "atari/breakout" and episodes.num_actions == 4
    columns = (episodes.observations, episodes.actions, episodes.rewards)
    logged = [(frame.tobytes(), int(action), float(reward)) for frame, action, reward in zip(*columns, strict=True)]
    assert sorted(logged) == sorted(happened)
    assert episodes.truncated.sum() >= 6  # two games, cut at the end of three chapters
    recipe = json.loads((out / "recipe.json").read_text())
    assert recipe["seed"] == 0 and recipe["settings"]["batch_size"] == 4 and recipe["curve"][-1]["step"] == 240
    assert recipe["versions"]["ale_py"] and (out / "policy.safetensors").exists()
    assert not (tmp_path / "Breakout.training").exists()
    with pytest.raises(UsageError, match="exists"):
        collect_atari("breakout", 240, out, **QUICK)


def test_a_killed_run_ends_like_one_that_was_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def files(out: Path) -> dict[str, bytes]:
        found = {f.name: f.read_bytes() for f in (out / "1" / "replay_logs").glob("*.gz")}
        return found | {"policy": (out / "policy.safetensors").read_bytes()}

    whole = collect_atari("pong", 240, tmp_path / "whole", **QUICK)
    chapters = []
    real = collector.Collector._play

    def play(self: Any) -> None:
        chapters.append(self.chapter)
        real(self)
        if len(chapters) == 2:
            self.recorder.cut()
            self.writer.finish()
            raise KeyboardInterrupt

    monkeypatch.setattr(collector.Collector, "_play", play)
    with pytest.raises(KeyboardInterrupt):
        collect_atari("pong", 240, tmp_path / "killed", **QUICK)
    assert len(dqn_replay.read(tmp_path / "killed")) == 200  # what was written can be read
    (tmp_path / "killed" / "1" / "replay_logs" / "$store$_action_ckpt.9.gz").write_bytes(b"of the lost chapter")
    killed = collect_atari("pong", 240, tmp_path / "killed", **QUICK)
    assert chapters == [0, 1, 1, 2]
    assert files(killed) == files(whole)
    curves = [json.loads((out / "recipe.json").read_text())["curve"] for out in (whole, killed)]
    for point in curves[0] + curves[1]:
        del point["seconds"]
    assert curves[0] == curves[1]


def test_other_settings_do_not_continue_a_killed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def play(self: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(collector.Collector, "_play", play)
        with pytest.raises(KeyboardInterrupt):
            collect_atari("pong", 240, tmp_path / "Pong", **QUICK)
    with pytest.raises(UsageError, match="exists"):
        collect_atari("pong", 240, tmp_path / "Pong", seed=1, **QUICK)
    assert json.loads((tmp_path / "Pong" / "recipe.json").read_text())["asked"]["steps"] == 240  # before any log
    collect_atari("pong", 120, tmp_path / "Pong", seed=1, overwrite=True, **QUICK)
    assert len(dqn_replay.read(tmp_path / "Pong")) == 120


def test_collector_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = dqn_log.save_gzip
    written = []

    def full(file: Path, *args: Any) -> None:
        written.append(file)
        if len(written) > 9:  # in the middle of the second checkpoint
            raise OSError(28, "No space left on device")
        real(file, *args)

    monkeypatch.setattr(dqn_log, "save_gzip", full)
    with pytest.raises(DataError, match="No space left"):
        collect_atari("pong", 240, tmp_path / "Pong", **QUICK)
    assert len(dqn_replay.read(tmp_path / "Pong")) == 100  # the first chapter


def test_bad_requests(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="did you mean 'pong'"):
        collect_atari("pongg", 100, tmp_path / "x", **QUICK)
    with pytest.raises(UsageError, match="batch_sise"):
        collect_atari("pong", 100, tmp_path / "x", **QUICK, batch_sise=3)
    with pytest.raises(UsageError, match="must be at least environments"):
        collect_atari("pong", 1, tmp_path / "x", **QUICK)
    with pytest.raises(UsageError, match="at least 1"):
        collect_atari("pong", 100, tmp_path / "x", **QUICK | {"files": 0})
    assert not list(tmp_path.iterdir())
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match="not replaced"):
        collect_atari("pong", 100, tmp_path, overwrite=True, **QUICK)
