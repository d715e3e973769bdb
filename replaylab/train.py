"""`replaylab train`: resolves the settings, reads the data, checks the run folder, then runs the loop (trainer.py)."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from replaylab.algos import Spaces, system
from replaylab.config import read_yaml, resolve
from replaylab.data.ends import check_meta
from replaylab.data.episodes import Episodes
from replaylab.data.inspect import summarize
from replaylab.data.read import as_paths, load
from replaylab.data.sample import refuse_nonfinite
from replaylab.errors import DataError, ReplaylabError, UsageError, nearest
from replaylab.evaluate import check_spaces, pick_device
from replaylab.memory import memory
from replaylab.run import REWRITE, RunFolder
from replaylab.trainer import Options, Trainer

# settings that --resume may change: how the run is executed, how long it is, and rates, since they may have diverged
MEANS = {"device", "compile", "track", "checkpoint_minutes", "preset"}
LENGTHS = {"steps", "behavior_steps", "critic_steps"}
RATES = {"behavior_lr", "value_lr", "guide_lr", "min_lr"}
LARGE = ("batch_size", "rollout_batch", "hidden")  # what takes the memory; mbarc knows its own more closely


def train(
    system_name: str,
    data: Episodes | str | Path | Sequence[str | Path] | None = None,
    *,
    out: str | Path | None = None,
    preset: str | None = None,
    config: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    data_options: dict[str, Any] | None = None,
    logs: Episodes | None = None,
    **settings: Any,
) -> Path:
    """Train a system on logged data; returns the run folder.

    `settings` are fields of `Options` and of the system's `Config`. They win over the YAML file `config`, which wins
    over `preset`, which wins over the defaults. The file may name `data` and `preset` too: a run's config.yaml is such
    a file. A system that collects its own data (mbarc) takes `env` and no data. `logs`: the contents of the paths in
    `data`, if they have been read already.
    """
    module = system(system_name)
    given, named = _file(config, system_name)
    if not isinstance(data_options or {}, dict):
        raise UsageError(f"data_options must be names with values, not {data_options!r}")
    if data is None:
        data, data_options = named["data"] or None, data_options or named["data_options"]
    preset = named["preset"] if preset is None else preset
    if preset is not None and (not isinstance(preset, str) or preset not in module.PRESETS):
        raise UsageError(f"{system_name}: unknown preset '{preset}'{nearest(str(preset), module.PRESETS)}")
    layers = [
        (f"preset {preset}", module.PRESETS[preset] if preset else {}),
        (str(config), given),
        ("settings", settings),
    ]
    options, algorithm = resolve([Options, module.Config], layers)
    if not options.seeds or len(set(options.seeds)) != len(options.seeds):
        raise UsageError("seeds must be distinct, and at least one")
    paths: list[str] = []
    source: Episodes | str
    if getattr(module, "ONLINE", False):
        source = options.env = _environment(system_name, module, data, options.env)
        spaces = module.spaces(source)
    else:
        source, paths = _logs(system_name, data, data_options, logs)
        refuse_nonfinite(source)
        spaces = Spaces.of(source)
        if options.env:  # the user's choice wins over what the data names
            check_spaces(options.env, spaces)
            source = replace(source, meta=source.meta | {"env_id": options.env})
        elif source.env_id:
            options.env = _usable(source.env_id, spaces)
        if preset is None and hasattr(module, "usual_preset"):
            preset = module.usual_preset(source)
            if preset is not None:
                print(f"note: --preset {preset}, since none was named", file=sys.stderr)
                layers[0] = (f"preset {preset}", module.PRESETS[preset])
                options, algorithm = resolve([Options, module.Config], [*layers, ("data", {"env": options.env})])
    smaller = getattr(module, "SMALLER", {}).get(preset)
    if smaller and pick_device(options.device).type == "cpu":
        print(f"note: this is made for a GPU; on a CPU try --preset {smaller}", file=sys.stderr)
    if not resume and hasattr(module, "needs"):
        for path in module.needs(algorithm):
            RunFolder(path).require()
    values = {"system": system_name, "data": paths, "data_options": data_options or {}, "preset": preset}
    values |= asdict(options) | asdict(algorithm)
    folder = RunFolder(out or Path("runs") / f"{system_name}-{_name(source, paths)}")
    large = [name.replace("_", "-") for name in LARGE if hasattr(algorithm, name)]
    copies = {name: path for name in getattr(module, "COPIES", ()) if (path := getattr(algorithm, name)) is not None}
    with folder.lock(), memory("this training", *large):
        was = _check_folder(folder, values, resume, overwrite)
        about = None if isinstance(source, str) else summarize(source)
        if about is not None and isinstance(was, dict):
            _check_data(folder, was, about)
        for path in copies.values():
            if overwrite and Path(path).resolve().is_relative_to(folder.path.resolve()):
                raise UsageError(f"{path} is in the folder that --overwrite would clear: choose another --out")
        own = {name: str(folder.path / name) for name in copies if resume and (folder.path / name).exists()}
        algorithm = replace(algorithm, **own)
        with Trainer(folder, module, options, algorithm, source, about, spaces, values, resume) as trainer:
            for name in copies.keys() - own.keys():
                folder.copy(copies[name], name)
            trainer.run()
    return folder.path


def _file(config: str | Path | None, system_name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings in a YAML file, and what else it may name."""
    if not isinstance(config, str | Path | None):
        raise UsageError("config is the path of a YAML file; in Python settings are arguments: train(..., steps=1000)")
    given = read_yaml(config) if config else {}
    if given.pop("system", system_name) != system_name:
        raise UsageError(f"{config} is not of {system_name}: it names another system")
    named = {key: given.pop(key, None) for key in ("data", "preset", "data_options")}
    data, how = named["data"], named["data_options"]
    if data is not None and not all(isinstance(p, str) for p in (data if isinstance(data, list) else [data])):
        raise UsageError(f"{config}: data must be a path, or a list of paths, not {data!r}")
    if not isinstance(how or {}, dict):
        raise UsageError(f"{config}: data_options must be names with values, not {how!r}")
    return given, named


def _logs(
    system_name: str, data: Any, data_options: dict[str, Any] | None, logs: Episodes | None
) -> tuple[Episodes, list[str]]:
    if data is None:
        raise UsageError(f"{system_name} learns from logs: name them with --data")
    if isinstance(data, Episodes):
        check_meta(data.meta, data.actions)  # which `replace` may have set since
        return data, [str(data.meta.get("source") or "arrays")]
    paths = [str(path) for path in as_paths(data)]
    return load(paths, **(data_options or {})) if logs is None else logs, paths


def _environment(system_name: str, module: Any, data: Any, env: str | None) -> str:
    if data is not None:
        raise UsageError(f"{system_name} makes its own data: leave --data out")
    if env is None:
        raise UsageError(f"{system_name} plays while it learns: name an environment with --env")
    return module.environment(env) if hasattr(module, "environment") else env


def _usable(env_id: str, spaces: Spaces) -> str | None:
    """The environment that the data names, or None, with a note, if it is not available: nobody asked for it."""
    try:
        check_spaces(env_id, spaces)
    except ReplaylabError as error:
        print(f"note: nothing will be evaluated: {error}", file=sys.stderr)
        return None
    return env_id


def _name(source: Episodes | str, paths: Sequence[str]) -> str:
    """A short name for the data, for the run folder: its dataset id, else the name of its file."""
    if isinstance(source, str):
        return source.split("/")[-1]
    if len(paths) > 1:
        return "mix"
    return str(source.meta.get("dataset_id") or Path(paths[0]).stem).replace("/", "-")


def _check_folder(folder: RunFolder, values: dict[str, Any], resume: bool, overwrite: bool) -> Any:
    """Refuse a folder that must stay as it is. What a run to go on with tells of its data."""
    if resume and overwrite:
        raise UsageError("--resume goes on with what --overwrite would throw away: pass one of them")
    if folder.exists() and resume:
        folder.system()  # or it is damaged
        stored, info = folder.config(), folder.info() if (folder.path / "run.json").exists() else {}
        changed = {k for k in values if k in stored and stored[k] != values[k]} - MEANS
        allowed = LENGTHS if info.get("status") == "finished" and not changed & LENGTHS else LENGTHS | RATES
        if refused := [k for k in values if k in changed - allowed]:
            raise UsageError(
                f"cannot resume {folder.path} with other settings: "
                + ", ".join(f"{k} was {stored[k]!r}, now {values[k]!r}" for k in refused)
            )
        return info.get("data")
    if folder.exists() and not overwrite:
        raise UsageError(f"{folder.path} holds a run already: pass --resume, --overwrite or another --out")
    if not folder.exists() and any(p.name != ".lock" for p in folder.path.iterdir()):
        raise UsageError(f"{folder.path} exists and is not a run folder: choose another --out")
    return None


def _check_data(folder: RunFolder, was: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse other data than a run was begun with, by the summaries of both."""
    try:
        counts = [tuple(int(about[key]) for key in ("steps", "episodes")) for about in (was, now)]
        means = [float(about["return"]["mean"]) for about in (was, now)]
        others = [part for part in ("return", "observation", "action") if not _alike(was[part], now[part])]
        others += ["terminated"] if was["terminated"] != now["terminated"] else []
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{folder.path / 'run.json'} does not tell the run's data: {REWRITE}") from error
    if counts[0] != counts[1] or "return" in others:
        text = "{:,} rows in {:,} episodes with a mean return of {:g}"
        then, today = (text.format(*count, mean) for count, mean in zip(counts, means, strict=True))
        raise UsageError(f"cannot resume {folder.path} with other data: it had {then}, now {today}")
    if others:
        raise UsageError(f"cannot resume {folder.path} with other data: as many rows, but another {others[0]} column")


def _alike(then: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether two summaries are of the same numbers, of all columns and of each."""
    theirs, ours = ([about, *about.get("columns", [])] for about in (then, now))
    return len(theirs) == len(ours) and all(map(_near, theirs, ours))


def _near(then: dict[str, Any], now: dict[str, Any]) -> bool:
    changed = [key for key in ("mean", "std", "min", "max") if then[key] != now[key]]
    little = 1e-5 * max(abs(now["min"] or 0), abs(now["max"] or 0))  # sums differ a little between machines
    return all(math.isclose(then[key], now[key], abs_tol=little) for key in changed)


def settings_of(module: Any) -> set[str]:
    return {f.name for cls in (Options, module.Config) for f in fields(cls)}
