"""Settings: dataclass <-> YAML <-> command line.

A system's `Config` is a dataclass whose fields are made with `knob`; that one line gives the default, the YAML key,
the command-line option and its help text. Precedence: default < preset < YAML file < command line. An unknown
key is an error that names the nearest known one.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import types
import typing
from collections.abc import Iterable, Sequence
from dataclasses import Field, dataclass, field, fields
from numbers import Real
from pathlib import Path
from typing import Any

from replaylab.errors import UsageError, nearest, require


@dataclass(frozen=True)
class Within:
    """The range of numbers that a setting accepts; `above` excludes `low` itself."""

    low: float
    high: float = math.inf
    above: bool = False

    def __contains__(self, number: float) -> bool:
        return math.isfinite(number) and self.low <= number <= self.high and not (self.above and number == self.low)

    def __str__(self) -> str:
        if self.low == -math.inf:
            return "a number"
        low = f"{'above' if self.above else 'at least'} {self.low:g}"
        if self.high == math.inf:
            return low
        return f"{low} and at most {self.high:g}" if self.above else f"from {self.low:g} to {self.high:g}"


ANY, FROM_0, COUNT, RATE, SHARE = Within(-math.inf), Within(0), Within(1), Within(0, above=True), Within(0, 1)


def knob(default: Any, help: str, admits: Iterable[str] | Within = ANY) -> Any:
    """A dataclass field for one setting. `admits`: the words to choose from, or a range of numbers."""
    choices, within = (None, admits) if isinstance(admits, Within) else (tuple(admits), ANY)
    metadata = {"help": help, "choices": choices, "within": within}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class Settings:
    """Base class of settings: checks that all numbers are within their limits, wherever they come from."""

    def __post_init__(self) -> None:
        for knob in fields(self):
            value = getattr(self, knob.name)
            if value == [] and knob.metadata["within"] is COUNT:
                raise UsageError(f"{knob.name} needs at least one number")
            for item in value if isinstance(value, list) else [value]:
                _limit(knob, item)


def _limit(knob: Field, item: Any) -> None:
    if isinstance(item, (int, float)) and item not in knob.metadata["within"]:
        raise UsageError(f"{knob.name} must be {knob.metadata['within']}, not {item}")


def changed(config: Settings, names: Iterable[str], layers: Iterable[dict[str, Any]]) -> list[str]:
    """Those of the names whose values are neither the defaults nor those of a layer, such as a preset: somebody gave
    them."""
    usual = [vars(type(config)()), *layers]
    return [name for name in names if getattr(config, name) not in [layer[name] for layer in usual if name in layer]]


def without_effect(
    config: Settings, layers: Iterable[dict[str, Any]], rules: Iterable[tuple[bool, str, Sequence[str]]]
) -> list[str]:
    """Notes on settings that somebody gave and that do nothing; a rule: whether it holds, beside what, which names."""
    layers = list(layers)
    idle = [(name, why) for holds, why, names in rules if holds for name in changed(config, names, layers)]
    return [f"{name} has no effect {why}" for name, why in idle]


def default_of(knob: Field) -> Any:
    return knob.default_factory() if callable(knob.default_factory) else knob.default


def _value_type(annotation: Any) -> tuple[type, bool, bool]:
    """(element type, is a list, may be None) of an annotation such as `list[int]` or `float | None`."""
    optional = False
    if isinstance(annotation, types.UnionType):
        optional = type(None) in annotation.__args__
        annotation = next(a for a in annotation.__args__ if a is not type(None))
    if typing.get_origin(annotation) is list:
        return typing.get_args(annotation)[0], True, optional
    return annotation, False, optional


def check(cls: type, key: str, value: Any) -> Any:
    """The value converted to the field's type, or a UsageError that says what would fit."""
    knob = next(f for f in fields(cls) if f.name == key)
    kind, is_list, optional = _value_type(typing.get_type_hints(cls)[key])
    if value is None and optional:
        return None
    value = value.tolist() if hasattr(value, "tolist") else value  # NumPy's

    def one(item: Any) -> Any:
        item = typed(item)
        _limit(knob, item)
        return item

    def typed(item: Any) -> Any:
        number = isinstance(item, Real) and not isinstance(item, bool)  # also NumPy's numbers
        if kind is float and number:
            return float(item)
        if kind is int and number and float(item).is_integer():
            return int(item)
        if type(item) is not kind:
            raise UsageError(f"{key} must be {'a list of ' if is_list else ''}{kind.__name__}, not {item!r}")
        if knob.metadata["choices"] and item not in knob.metadata["choices"]:
            raise UsageError(f"{key}: unknown value '{item}'{nearest(str(item), knob.metadata['choices'])}")
        return item

    if not is_list:
        return one(value)
    if not isinstance(value, (list, tuple, range)):
        raise UsageError(f"{key} must be a list of {kind.__name__}, not {value!r}")
    return [one(item) for item in value]


def resolve(classes: Iterable[type], layers: Iterable[tuple[str, dict[str, Any]]]) -> list[Any]:
    """One instance of each class, filled from `layers` of (source, {key: value}); later layers win."""
    classes = list(classes)
    owner = {f.name: cls for cls in classes for f in fields(cls)}
    values: dict[str, Any] = {}
    for source, layer in layers:
        for key, value in layer.items():
            name = key.replace("-", "_")
            if name not in owner:
                raise UsageError(f"{source}: unknown key '{key}'{nearest(name, owner)}")
            values[name] = check(owner[name], name, value)
    return [cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values}) for cls in classes]


def add_arguments(parser: argparse.ArgumentParser, cls: type) -> None:
    """Add an option for every field of `cls`. Options that are not given stay out of the parsed namespace."""
    group = parser.add_argument_group(cls.__doc__.splitlines()[0].rstrip(".").lower() if cls.__doc__ else cls.__name__)
    hints = typing.get_type_hints(cls)
    for knob in fields(cls):
        kind, is_list, _ = _value_type(hints[knob.name])
        default = default_of(knob)
        shown = " ".join(map(str, default)) if is_list and default else default
        text = knob.metadata["help"] + ("" if default is None or default == [] else f" (default: {shown})")
        options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": text.replace("%", "%%"), "dest": knob.name}
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options |= {"type": kind, "choices": knob.metadata["choices"], "metavar": kind.__name__.upper()}
            if knob.metadata["choices"]:
                options["metavar"] = "|".join(knob.metadata["choices"])
            if is_list:
                options["nargs"] = "*"
        group.add_argument("--" + knob.name.replace("_", "-"), **options)


def add_acting_arguments(
    parser: argparse.ArgumentParser, cls: type, names: Iterable[str], title: str, several: bool
) -> None:
    """Add an option for each named field, which takes one value or `several`."""
    group, hints = parser.add_argument_group(title), typing.get_type_hints(cls)
    for knob in fields(cls):
        if knob.name in names and "--" + knob.name.replace("_", "-") not in parser._option_string_actions:
            kind = _value_type(hints[knob.name])[0]
            read = _boolean if kind is bool else kind
            choices = knob.metadata["choices"]
            group.add_argument(
                "--" + knob.name.replace("_", "-"), dest=knob.name, nargs="+" if several else None, type=read,
                choices=choices,
                metavar="|".join(choices) if choices else kind.__name__.upper(), default=argparse.SUPPRESS,
                help=knob.metadata["help"].replace("%", "%%"),
            )  # fmt: skip


def _boolean(word: str) -> bool:
    if word not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"expected true or false, not '{word}'")
    return word == "true"


# --- YAML

_POWER_OF_TEN = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")  # YAML 1.1 reads 1e-3 as a string
_OWN_LINE = re.compile(r"^([A-Za-z_]\w*): (.+)$")


def write_yaml(path: Path, values: dict[str, Any]) -> None:
    """Write one `key: JSON` line per setting: valid YAML that `read_yaml` reads back without a YAML library."""
    write_whole(path, "".join(f"{key}: {json.dumps(value)}\n" for key, value in values.items()))


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace a file atomically: if writing fails, as on a full disk, the old one stays. Several processes may do so
    at once: each writes a part of its own, and the last one to finish wins."""
    part = path.with_name(f"{path.name}.{platform.node()}-{os.getpid()}.part")  # hosts may share a folder
    try:
        part.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def read_yaml(path: str | Path) -> dict[str, Any]:
    path = Path(path)
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    found = {}
    for line in text.splitlines():
        match = _OWN_LINE.match(line)
        try:
            key, value = match[1], json.loads(match[2])  # type: ignore[index]
        except (TypeError, ValueError, RecursionError):  # not written by `write_yaml`
            return _parse_yaml(path, text)
        if key in found:
            return _parse_yaml(path, text)  # which refuses that
        found[key] = value
    return found


def _parse_yaml(path: Path, text: str) -> dict[str, Any]:
    yaml = require("yaml", "reading a YAML file")

    class Loader(yaml.SafeLoader):  # type: ignore[name-defined]
        """Refuses a key that stands twice, of which YAML's own would drop the first."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [key.value for key, _ in node.value if isinstance(key.value, str)]
            for key, _ in reversed(node.value):
                if keys.count(key.value) > 1:
                    raise yaml.MarkedYAMLError(problem=f"'{key.value}' is there twice", problem_mark=key.start_mark)
            return super().construct_mapping(node, deep)

    try:
        values = Loader(text).get_single_data()
    except (yaml.YAMLError, RecursionError) as error:
        raise UsageError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(k, str) for k in values):
        raise UsageError(f"{path} must hold `key: value` lines")
    return _numbers(values)


def _numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _numbers(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_numbers(entry) for entry in value]
    return float(value) if isinstance(value, str) and _POWER_OF_TEN.fullmatch(value) else value
