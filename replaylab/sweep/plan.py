"""The sweep file: systems x datasets x settings, each a cell with all its seeds.

    name: locomotion
    systems:
      - bc                                          # a name, or a name with its own settings
      - {system: bc, name: bc10, settings: {top_fraction: 0.1}}
      - {system: dt, preset: gym, seeds: [0, 1, 2]}
    datasets:
      - data/hopper-medium                          # a path, or several that are joined
      - {name: hopper-medium-expert, path: [data/hopper-medium, data/hopper-expert], env: d4rl/hopper}
    environments: [atari/freeway]                   # for systems that make their own data
    seeds: [0, 1, 2, 3, 4]
    settings: {final_episodes: 100}                 # of every cell
    grid: {lr: [0.001, 0.0003]}                     # every combination; or `list:` of settings
    split_seeds: true                               # a cell for each seed; also per system
    per_device: 2                                   # processes that share a GPU
    budget: 60                                      # minutes; the rest is left for the next call

Everything is checked before anything runs, and a mistake is one line that names the place.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import ModuleType
from typing import Any

from replaylab.algos import system
from replaylab.config import COUNT, check, knob, read_yaml, resolve
from replaylab.data.formats.common import check_columns
from replaylab.data.read import FORMATS, SAMPLES, TOYS, detect
from replaylab.errors import MissingExtra, ReplaylabError, UsageError, nearest
from replaylab.published import dataset_name
from replaylab.trainer import Options

KEYS = (
    "name", "systems", "datasets", "environments", "seeds", "settings", "grid", "list", "budget", "split_seeds",
    "per_device",
)  # fmt: skip
SYSTEM_KEYS = (
    "system", "name", "preset", "settings", "grid", "list", "seeds", "split_seeds", "datasets", "environments",
)  # fmt: skip
DATASET_KEYS = ("name", "path", "env", "options")
# reading options that have another name on the command line
FLAGS = {
    "max_steps": "num-steps", "checkpoints": "num-buffers", "episodes_per_checkpoint": "trajectories-per-buffer",
}  # fmt: skip


@dataclass
class Reading:
    """How data is read: the options of `load`, except `columns`."""

    format: str | None = knob(None, "found by looking", FORMATS)
    max_episode_steps: int | None = knob(None, "an episode ends after so many", COUNT)
    split: str = knob("flags", "where unmarked episodes end", ("flags", "discontinuity"))
    checkpoints: int | None = knob(None, "of a DQN-replay log, the last so many", COUNT)
    max_steps: int | None = knob(None, "of a DQN-replay log", COUNT)
    episodes_per_checkpoint: int | None = knob(None, "of a DQN-replay log", COUNT)


@dataclass(frozen=True)
class Cell:
    """One training run: a system on a dataset under a setting, with its seeds side by side in one process."""

    name: str  # its folder
    label: str  # the system's name in the table
    system: str
    dataset: str  # its name in the table; for a system that makes its own data, the environment's
    setting: str  # distinguishes it from the system's other cells on this dataset
    data: list[str] | None
    env: str | None
    preset: str | None
    settings: dict[str, Any]
    seeds: list[int]
    options: dict[str, Any] = field(default_factory=dict)  # for reading the data

    def arguments(self) -> dict[str, Any]:
        """The arguments of `replaylab.train`, except the folder."""
        given = {"env": self.env} if self.env else {}
        return {
            "system_name": self.system, "data": self.data, "preset": self.preset, "data_options": self.options,
            "seeds": self.seeds, **given, **self.settings,
        }  # fmt: skip

    def command(self, out: str | Path) -> list[str]:
        """The same run as words on a command line, for its run.json."""
        words = ["replaylab", "train", self.system, *(["--data", *self.data] if self.data else [])]
        columns = check_columns(self.options.get("columns"))
        reading = self.options | {"columns": [f"{role}={','.join(names)}" for role, names in columns.items()] or None}
        given = {FLAGS.get(key, key): value for key, value in reading.items()}
        given |= {"env": self.env, "preset": self.preset} | self.settings | {"seeds": self.seeds}
        for key, value in given.items():
            option = key.replace("_", "-")
            if isinstance(value, bool):
                words.append(f"--{option}" if value else f"--no-{option}")
            elif value is not None:
                words += [f"--{option}", *(map(str, value) if isinstance(value, list) else [str(value)])]
        return [*words, "--out", str(out)]


@dataclass(frozen=True)
class Common:
    """What the file sets for all its systems, and each system may override."""

    settings: dict[str, Any] = field(default_factory=dict)
    variants: list[dict[str, Any]] = field(default_factory=lambda: [{}])  # from `grid` or `list`
    seeds: list[int] = field(default_factory=lambda: [0])
    split: bool = False  # a cell for each seed


@dataclass(frozen=True)
class Plan:
    name: str
    cells: list[Cell]
    budget: float | None = None  # minutes
    per_device: int = 1  # worker processes

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> Plan:
        values = json.loads(text)
        return Plan(**values | {"cells": [Cell(**cell) for cell in values["cells"]]})


def read_plan(path: str | Path, per_device: int | None = None) -> Plan:
    """Read and check a sweep file. `per_device` overrides the file's value."""
    if not isinstance(path, str | Path):
        raise UsageError(f"a sweep is named by the path of its file, not {type(path).__name__}")
    values = read_yaml(path)
    _known(str(path), values, KEYS)
    name = _name(str(path), values, Path(path).stem)
    if _slug(name) != name:
        raise UsageError(f"{path}: name '{name}' must be fit for a folder: letters, digits, '.', '_' and '-'")
    datasets = [_dataset(f"{path}: datasets[{i}]", d) for i, d in enumerate(_list(path, values, "datasets"))]
    _distinct(f"{path}: datasets", [d["name"] for d in datasets])
    common = _common(str(path), values, Common())
    envs = values.get("environments", [])
    rows: list[tuple[str, list[Cell]]] = []
    takers = 0  # systems that use the file's `environments`
    for i, entry in enumerate(_list(path, values, "systems")):
        found = _rows(f"{path}: systems[{i}]", entry, common, datasets, envs)
        takers += "environments" not in entry and any(cell.data is None for _, row in found for cell in row)
        rows += found
    if "environments" in values and not takers:
        raise UsageError(f"{path}: no system takes `environments`: they are for systems that make their own data")
    cells = [cell for _, row in rows for cell in row]
    if not cells:
        raise UsageError(f"{path}: no cells: it needs `systems`, and `datasets` or `environments` for them")
    names = [name for row, parts in rows for name in {row, *(cell.name for cell in parts)}]
    _distinct(f"{path}: cells (give systems or datasets a `name`)", names)
    budget = values.get("budget")
    per_device = values.get("per_device", 1) if per_device is None else per_device
    if budget is not None and not (_is_number(budget) and budget > 0):
        raise UsageError(f"{path}: budget must be minutes, not {budget!r}")
    if type(per_device) is not int or per_device < 1:
        raise UsageError(f"{path}: per_device must be a whole number of processes, not {per_device!r}")
    return Plan(name, cells, budget, per_device)


# --- one system's cells


def _rows(
    where: str, entry: Any, common: Common, datasets: list[dict[str, Any]], envs: Any
) -> list[tuple[str, list[Cell]]]:
    """(name, cells) for each dataset and setting of a system; several cells if each seed has its own."""
    entry = {"system": entry} if isinstance(entry, str) else entry
    if not isinstance(entry, dict) or not isinstance(entry.get("system"), str):
        raise UsageError(f"{where}: expected a system's name, or `system: NAME` with settings")
    _known(where, entry, SYSTEM_KEYS)
    name = entry["system"]
    with _at(where):
        module = system(name)
    preset = entry.get("preset")
    if preset is not None and (not isinstance(preset, str) or preset not in module.PRESETS):
        raise UsageError(f"{where}: unknown preset '{preset}'{nearest(str(preset), module.PRESETS)}")
    common = _common(where, entry, common)
    label = _slug(_name(where, entry, name))
    named = ["-".join(f"{key}{_text(value)}" for key, value in variant.items()) for variant in common.variants]
    _distinct(f"{where}: `grid` or `list`", named)
    found = []
    pairs = zip(named, common.variants, strict=True)
    for place, (setting, variant) in itertools.product(_places(where, entry, datasets, envs, module), pairs):
        settings = common.settings | variant
        read = place.get("options", {})
        _check(where, module, preset, settings)
        row = "-".join(_slug(word) for word in (label, place["name"], setting) if word)
        online = getattr(module, "ONLINE", False)  # trains one seed per run
        apart = common.split or (online and len(common.seeds) > 1)
        about = (label, name, place["name"], setting, place.get("path"), place.get("env"), preset, settings)
        parts = [(f"{row}-seed{seed}", [seed]) for seed in common.seeds] if apart else [(row, common.seeds)]
        found.append((row, [Cell(folder, *about, part, read) for folder, part in parts]))
    return found


def _common(where: str, entry: Mapping[str, Any], base: Common) -> Common:
    settings = base.settings | _mapping(where, entry, "settings")
    variants = _variants(where, entry) or base.variants
    split = entry.get("split_seeds", base.split)
    if not isinstance(split, bool):
        raise UsageError(f"{where}: split_seeds must be true or false, not {split!r}")
    if any("seeds" in given for given in (settings, *variants)):
        raise UsageError(f"{where}: seeds are no setting: give `seeds` beside `settings`")
    with _at(where):
        seeds = check(Options, "seeds", entry.get("seeds", base.seeds))
    if not seeds or len(set(seeds)) != len(seeds):
        raise UsageError(f"{where}: seeds must be distinct, and at least one")
    return Common(settings, variants, seeds, split)


def _places(
    where: str, entry: dict[str, Any], datasets: list[dict[str, Any]], envs: Any, module: ModuleType
) -> list[dict[str, Any]]:
    """What the system is trained on: the datasets it names, else all of them; for a system that makes its own data, the
    environments it names, else the file's `envs`."""
    if getattr(module, "ONLINE", False):
        if "datasets" in entry:
            raise UsageError(f"{where}: {entry['system']} makes its own data: give it `environments`, not `datasets`")
        envs = entry.get("environments", envs)
        if not isinstance(envs, list) or not envs:
            raise UsageError(f"{where}: {entry['system']} makes its own data: list `environments` for it")
        for env in envs:
            with _at(where):
                _environment(str(env), module)
        return [{"name": str(env).split("/")[-1], "env": str(env)} for env in envs]
    if "environments" in entry:
        raise UsageError(f"{where}: {entry['system']} learns from logs: give `env` to a dataset instead")
    wanted = _list(where, entry, "datasets") if "datasets" in entry else [d["name"] for d in datasets]
    known = {d["name"]: d for d in datasets}
    for name in wanted:
        if not isinstance(name, str) or name not in known:
            raise UsageError(f"{where}: unknown dataset '{name}'{nearest(str(name), known)}")
    if not wanted:
        raise UsageError(f"{where}: {entry['system']} learns from logs: list `datasets`")
    return [known[name] for name in wanted]


def _check(where: str, module: ModuleType, preset: str | None, settings: dict[str, Any]) -> None:
    with _at(where):
        options, _ = resolve(
            [Options, module.Config],
            [(f"preset {preset}", module.PRESETS[preset] if preset else {}), ("settings", settings)],
        )
        _environment(options.env, module)
        if not options.device.startswith(("auto", "cpu", "cuda")):  # whether it is there, its machine must say
            raise UsageError(f"unknown device '{options.device}': use auto, cpu or cuda")


def _environment(env: str | None, module: ModuleType | None = None) -> None:
    """Check that the name exists, if possible without a simulator. What is not installed here is left to the cell."""
    with contextlib.suppress(MissingExtra):
        if env is None:
            return
        if module is not None and hasattr(module, "environment"):
            module.environment(env)
            return
        from replaylab import envs

        if env.startswith(("atari/", "atari-rgb/")):
            importlib.import_module(envs.FAMILIES[env.partition("/")[0]]).parse(env)
        elif ":" not in env and envs.canonical(env) not in envs.gymnasium.registry:  # MODULE:ID registers itself
            envs.make(env).close()  # names the nearest in an error, or completes an id without version


def _variants(where: str, entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    grid, given = _mapping(where, entry, "grid"), entry.get("list", [])
    if grid and given:
        raise UsageError(f"{where}: give `grid` or `list`, not both")
    if not isinstance(given, list) or not all(isinstance(v, dict) for v in given):
        raise UsageError(f"{where}: `list` must hold settings, such as [{{lr: 0.001}}, {{lr: 0.0003}}]")
    for key, row in grid.items():
        if not isinstance(row, list) or not row:
            raise UsageError(f"{where}: grid: {key} must be a list of values, not {row!r}")
    return given or [dict(zip(grid, row, strict=True)) for row in itertools.product(*grid.values()) if grid]


def _dataset(where: str, entry: Any) -> dict[str, Any]:
    entry = {"path": entry} if isinstance(entry, (str, list)) else entry
    if not isinstance(entry, dict) or not entry.get("path"):
        raise UsageError(f"{where}: expected a path, or `path: PATH` with a name and an env")
    _known(where, entry, DATASET_KEYS)
    if isinstance(entry["path"], list) and not all(isinstance(p, str) for p in entry["path"]):
        raise UsageError(f"{where}: a path is a word, or a list of words to be joined")
    paths = [str(p) for p in (entry["path"] if isinstance(entry["path"], list) else [entry["path"]])]
    options = _mapping(where, entry, "options")
    _known(f"{where}: options", options, [*(f.name for f in fields(Reading)), "columns"])
    columns = _mapping(where, options, "columns")
    for path in paths:
        known = Path(path) if Path(path).exists() else SAMPLES.get(path, Path(path))
        if not ("format" in options if known.exists() else path in TOYS):
            relative = not known.exists() and not known.is_absolute()
            with _at(f"{where}: {path}", f" (looked for from {Path.cwd()}, where this is run)" if relative else ""):
                detect(known)
    with _at(where):
        check_columns(columns)
        resolve([Reading], [("options", {k: v for k, v in options.items() if k != "columns"})])
        _environment(check(Options, "env", entry.get("env")))
    name = _name(where, entry, "+".join(map(dataset_name, paths)))
    return entry | {"name": name, "path": paths, "options": options | ({"columns": columns} if columns else {})}


# --- small helpers


@contextlib.contextmanager
def _at(where: str, more: str = "") -> Iterator[None]:
    """Say in errors which place of the file they are about."""
    try:
        yield
    except ReplaylabError as error:
        raise UsageError(f"{where}: {error}{more}") from error


def _known(where: str, values: Mapping[str, Any], keys: Sequence[str]) -> None:
    for key in values:
        if key not in keys:
            raise UsageError(f"{where}: unknown key '{key}'{nearest(str(key), keys)}")


def _name(where: str, values: Mapping[str, Any], usual: str) -> str:
    found = values.get("name", usual)
    if not isinstance(found, str) or not found:  # YAML reads off, no, on and yes as true or false
        raise UsageError(f"{where}: a name must be text, in quotes where YAML takes it for something else: {found!r}")
    if not _slug(found):
        raise UsageError(f"{where}: the name '{found}' has no letter or digit, which its folder needs")
    return found


def _list(path: str | Path, values: Mapping[str, Any], key: str) -> list[Any]:
    found = values.get(key, [])
    if not isinstance(found, list):
        raise UsageError(f"{path}: `{key}` must be a list")
    return found


def _mapping(where: str, values: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = values.get(key) or {}
    if not isinstance(found, dict):
        raise UsageError(f"{where}: `{key}` must hold `name: value`")
    return {str(k).replace("-", "_"): v for k, v in found.items()}


def _distinct(where: str, names: Sequence[str]) -> None:
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise UsageError(f"{where}: '{twice[0]}' is there twice")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "x".join(map(_text, value))
    return f"{value:g}" if _is_number(value) else str(value).lower() if isinstance(value, bool) else str(value)


def _slug(text: str) -> str:
    return re.sub(r"[^\w.+-]+", "-", text).strip("-.")
