"""Collecting benchmark data: `collect` chooses the collector for an environment and stores the recipe with the data."""

from __future__ import annotations

import difflib
import json
import platform
import shutil
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

import replaylab
from replaylab.config import resolve
from replaylab.data.damage import check_seed
from replaylab.data.episodes import Episodes
from replaylab.data.read import load
from replaylab.data.write import check_target, save
from replaylab.errors import DataError, UsageError
from replaylab.run import command_line

SHORT = {"swimmer": "Swimmer-v5", "pendulum": "Pendulum-v1"}
LEVELS = ("random", "medium", "medium-replay", "full-replay", "expert", "medium-expert", "mixed")

BITS = 12  # of mantissa that compact data keeps, of float32's 23


def collect(
    env: str,
    out: str | Path,
    *,
    level: str | None = None,
    steps: int | None = None,
    seed: int = 0,
    device: str = "auto",
    overwrite: bool = False,
    format: str | None = None,
    compact: bool = False,
    **settings: Any,
) -> Path:
    """Collect a dataset of `env` into `out` (`level="all"`: one folder per level) and return `out`.

    Run again after an interruption, the same command resumes after the last complete chapter of training.
    """
    out = Path(out)
    if steps is not None and steps < 1:
        raise UsageError(f"steps must be at least 1, not {steps}")
    check_seed(seed)
    if env.startswith("atari/"):
        if format not in (None, "dqn-replay") or compact:
            raise UsageError(f"{env}: Atari data is written as DQN-replay logs: leave --to and --compact out")
        from replaylab.collect.atari import collect_atari

        if level not in (None, "replay"):
            raise UsageError(f"{env}: unknown level '{level}'; Atari data has one, 'replay'")
        return collect_atari(env, steps or 1_000_000, out, seed=seed, device=device, overwrite=overwrite, **settings)
    if env.startswith("pointmaze") or "antmaze" in env:
        if level is not None:
            raise UsageError(f"{env}: mazes have no levels; choose --style play or diverse")
        settings |= {"seed": seed, "overwrite": overwrite, "format": format, "compact": compact}
        if env.startswith("pointmaze"):
            from replaylab.collect.maze import collect_maze

            return collect_maze(env, steps or 300_000, out, **settings)
        from replaylab.collect.antmaze import collect_antmaze

        return collect_antmaze(env, steps or 300_000, out, device=device, **settings)
    level = level or "medium"
    if level != "all" and level not in LEVELS:
        close = difflib.get_close_matches(level, LEVELS, n=1)
        hint = f"did you mean '{close[0]}'? " if close else ""
        raise UsageError(f"unknown level '{level}'; {hint}known: {', '.join(LEVELS)}, and all: all but the last")
    return _collect_levels(env, out, level, steps or 1_000_000, seed, device, overwrite, format, compact, settings)


def _collect_levels(
    env: str,
    out: Path,
    level: str,
    steps: int,
    seed: int,
    device: str,
    overwrite: bool,
    format: str | None,
    compact: bool,
    settings: dict[str, Any],
) -> Path:
    from replaylab.collect.levels import make_level
    from replaylab.collect.online import Config, Online
    from replaylab.envs import canonical
    from replaylab.evaluate import pick_device

    env = SHORT.get(env.lower(), canonical(env))
    (config,) = resolve([Config], [("settings", settings)])
    names = LEVELS[:-1] if level == "all" else (level,)
    targets = {name: out / name if level == "all" else out for name in names}
    training = out.with_name(out.name + ".training")
    asked = {"env": env, "seed": seed} | vars(config)

    def asked_of(name: str) -> dict[str, Any]:
        return {"env": env, "level": name, "steps": steps, "compact": compact}

    resumed = going_on(training, asked, overwrite)
    for name, path in list(targets.items()):
        if path.exists() and resumed and level == "all":  # written before the interruption, perhaps in part
            about = load(path).meta
            older = about["recipe"]["settings"]["train_steps"] != config.train_steps and name != "random"
            if not older and "cut_short" not in about and about["recipe"].get("asked") == asked_of(name):
                targets.pop(name)
        elif path.exists() and not overwrite:
            raise UsageError(f"{path} exists: pass --overwrite or another --out")
        check_target(path, format, overwrite=True)  # fail before the training, not after it
    online = Online(env, config, seed, pick_device(device), training)
    (training / "asked.json").write_text(json.dumps(asked))
    if names != ("random",):
        online.train()
    missed: DataError | None = None
    for name, path in targets.items():
        try:
            episodes = make_level(online, name, steps, seed)
        except DataError as error:  # no policy was good enough for this level; other levels may not need it
            missed = error
            continue
        made = recipe(config, seed) | {"asked": asked_of(name)} | episodes.meta.get("recipe", {})
        episodes = replace(episodes, meta=episodes.meta | {"recipe": made})
        again = overwrite or path.exists()
        save_what_fits(rounded(episodes) if compact else episodes, path, overwrite=again, format=format)
        score = f"return {episodes.returns.mean():.0f} +- {episodes.returns.std():.0f}"
        print(f"wrote {path}: {len(episodes)} steps, {episodes.num_episodes} episodes, {score}", file=sys.stderr)
        for note in episodes.meta["notes"]:
            print(f"note: {note}", file=sys.stderr)
    if missed:
        raise missed
    online.forget()
    return out


def going_on(training: Path, asked: dict[str, Any], overwrite: bool) -> bool:
    """Whether `training` holds an unfinished run of this command; one of another command is an error."""
    if overwrite:
        shutil.rmtree(training, ignore_errors=True)
    path = training / "asked.json"
    free = ("train_steps", "stop_at")  # a longer training may continue the run
    if path.exists():
        earlier = json.loads(path.read_text())
        changed = [k for k in asked if k not in free and earlier.get(k) != asked[k]]
        if changed:
            raise UsageError(
                f"{training} belongs to a command with another {changed[0]}: pass --overwrite to start anew"
            )
    return path.exists()


def rounded(episodes: Episodes) -> Episodes:
    """Smaller data, to ship: floats rounded to BITS bits of mantissa, which compress well, and no extra columns."""

    def shorten(column: np.ndarray) -> np.ndarray:
        whole = column.astype(np.float32).view(np.uint32)
        drop = 23 - BITS
        return ((whole + np.uint32(1 << (drop - 1))) >> drop << drop).view(np.float32)

    names = ("observations", "actions", "rewards", "final_observations")
    shorter: dict[str, Any] = {name: shorten(getattr(episodes, name)) for name in names}
    return replace(episodes, **shorter, extras={}, meta=episodes.meta | {"rounded_to_bits": BITS})


def recipe(config: Any, seed: int) -> dict[str, Any]:
    """What it takes to reproduce the data."""
    versions = {"replaylab": replaylab.__version__, "torch": torch.__version__, "numpy": np.__version__}
    for name in ("gymnasium", "mujoco", "ale_py", "gymnasium_robotics"):
        if name in sys.modules:
            versions[name] = getattr(sys.modules[name], "__version__", "?")
    return {
        "command": command_line(),
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": seed,
        "settings": vars(config),
        "versions": versions | {"python": platform.python_version()},
    }


def save_what_fits(episodes: Episodes, path: Path, *, overwrite: bool, format: str | None = None) -> Path:
    """Save. If the disk is full, save as many whole episodes as fit and raise a DataError that says so."""
    try:
        return save(episodes, path, format=format, overwrite=overwrite)
    except DataError as error:
        folder = next(f for f in path.absolute().parents if f.exists())
        share = 0.98 * shutil.disk_usage(folder).free / episodes.nbytes
        if share > 2:  # space was not the problem
            raise
        problem = error
    while (keep := int(np.searchsorted(episodes.offsets, min(share, 1) * len(episodes), "right")) - 1) > 0:
        kept = f"kept the first {keep} of {episodes.num_episodes} episodes"
        part = episodes.select(range(keep))
        part = replace(part, meta=part.meta | {"cut_short": f"the disk was full; {kept}"})
        try:
            save(part, path, format=format, overwrite=overwrite)
        except DataError:
            share = 0.9 * min(share, 1)
            continue
        raise DataError(f"{path}: the disk is full; {kept}. For all, make room, remove it and run the command again")
    raise problem
