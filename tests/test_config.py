from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import pytest
import yaml

from replaylab.algos import SYSTEMS, system
from replaylab.config import (
    COUNT,
    RATE,
    SHARE,
    Settings,
    Within,
    add_arguments,
    knob,
    read_yaml,
    resolve,
    write_whole,
    write_yaml,
)  # fmt: skip
from replaylab.errors import UsageError, nearest
from replaylab.trainer import Options


@dataclass
class Example:
    """Example."""

    rate: float = knob(0.1, "a rate")
    sizes: list[int] = knob([1, 2], "some sizes")
    kind: str = knob("a", "a kind", ("a", "b"))
    limit: int | None = knob(None, "a limit")
    flag: bool = knob(True, "a flag")


def one(**layer):
    return resolve([Example], [("test", layer)])[0]


def test_later_layers_win():
    (found,) = resolve(
        [Example], [("preset", {"rate": 1, "kind": "b"}), ("yaml", {"rate": 2.0}), ("cli", {"limit": 3})]
    )
    assert (found.rate, found.kind, found.limit, found.sizes) == (2.0, "b", 3, [1, 2])


def test_an_unknown_key_names_the_nearest():
    with pytest.raises(UsageError, match="unknown key 'rat'; did you mean 'rate'"):
        one(rat=1)
    assert nearest("x", []) == ""  # and where nothing is known, nothing is listed


@pytest.mark.parametrize(
    "layer",
    [{"rate": "x"}, {"rate": True}, {"sizes": 3}, {"sizes": ["a"]}, {"kind": "c"}, {"flag": 1}, {"limit": 1.5}],
)
def test_values_must_fit(layer):
    with pytest.raises(UsageError, match=next(iter(layer))):
        one(**layer)


def test_numbers_of_numpy_and_ranges_are_numbers_and_lists():
    found = one(rate=np.float32(0.5), limit=np.int64(3), sizes=np.arange(1, 3), flag=np.bool_(False))
    assert (found.rate, found.limit, found.sizes) == (0.5, 3, [1, 2]) == (0.5, 3, one(sizes=range(1, 3)).sizes)
    assert [type(x) for x in (found.rate, found.limit, found.flag)] == [float, int, bool]


def test_command_line_gives_only_what_was_asked():
    parser = argparse.ArgumentParser()
    add_arguments(parser, Example)
    given = vars(parser.parse_args(["--sizes", "4", "5", "--no-flag"]))
    assert given == {"sizes": [4, 5], "flag": False}


def test_yaml_round_trip_without_a_yaml_library(tmp_path, monkeypatch):
    values = {"a": [1, 2], "b": None, "c": "x: y # z", "d": {"k": 1.5}, "e": True}
    write_yaml(tmp_path / "c.yaml", values)
    assert yaml.safe_load((tmp_path / "c.yaml").read_text()) == values
    monkeypatch.setattr("replaylab.config.require", lambda *a: pytest.fail("needed a library"))
    assert read_yaml(tmp_path / "c.yaml") == values


def test_ordinary_yaml_is_read(tmp_path):
    (tmp_path / "c.yaml").write_text("# comment\nlr: 1e-3\nhidden:\n  - 64\n  - 64\n")
    assert read_yaml(tmp_path / "c.yaml") == {"lr": 0.001, "hidden": [64, 64]}
    (tmp_path / "bad.yaml").write_text("a: [1\nb")
    with pytest.raises(UsageError, match="not valid YAML"):
        read_yaml(tmp_path / "bad.yaml")
    for text in ("steps: 1\nlr: 2\nsteps: 3\n", "settings: {lr: 1,\n lr: 2}\nsteps: 3\n"):  # the last would win
        (tmp_path / "twice.yaml").write_text(text)
        with pytest.raises(
            UsageError, match=r"twice.yaml is not valid YAML: '(steps|lr)' is there twice in .*line [23]"
        ):
            read_yaml(tmp_path / "twice.yaml")


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_key_is_read(name):
    """A setting that no code reads is a lie in the help text."""
    module = system(name)
    classes = [module.Agent, *module.Config.__mro__[:-1]]  # one may stand on another's
    own = {module.__name__} | {cls.__module__ for cls in classes}
    parts = {getattr(value, "__module__", None) or "" for m in own for value in vars(sys.modules[m]).values()}
    files = [sys.modules[m].__file__ for m in own | parts if m.startswith("replaylab.")]
    source = "".join(Path(file).read_text() for file in files)
    for knob_ in fields(module.Config):
        assert f"config.{knob_.name}" in source, f"{name}: nothing reads {knob_.name}"
    train = "".join(Path(f"replaylab/{name}.py").read_text() for name in ("train", "trainer"))
    for knob_ in fields(Options):
        assert f"options.{knob_.name}" in train, f"nothing reads {knob_.name}"


@pytest.mark.parametrize("name", SYSTEMS)
def test_presets_are_valid(name):
    module = system(name)
    assert "debug" in module.PRESETS
    for preset, layer in {"the defaults": {}, **module.PRESETS}.items():
        resolve([Options, module.Config], [(preset, layer)])


def test_seeds_whose_derived_numbers_fit_into_64_bits():
    assert Options(seeds=[10**12]).seeds == [10**12]
    with pytest.raises(UsageError, match=r"seeds must be from 0 to 1e\+12, not 4611686018427387904"):
        Options(seeds=[2**62])


@dataclass
class Limited(Settings):
    """Limited."""

    count: int = knob(1, "a count", COUNT)
    rate: float | None = knob(None, "a rate", RATE)
    share: float = knob(0.0, "a share", SHARE)
    part: float = knob(1.0, "a part", Within(0, 1, above=True))
    widths: list[int] = knob([8], "widths", COUNT)
    free: float = knob(-1.0, "any number")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"count": 0}, "count must be at least 1, not 0"),
        ({"rate": 0.0}, "rate must be above 0, not 0.0"),
        ({"rate": float("nan")}, "rate must be above 0, not nan"),
        ({"share": 1.1}, "share must be from 0 to 1, not 1.1"),
        ({"part": 0.0}, "part must be above 0 and at most 1, not 0.0"),
        ({"widths": [8, 0]}, "widths must be at least 1, not 0"),
        ({"free": float("inf")}, "free must be a number, not inf"),
    ],
)
def test_numbers_stay_within_their_limits(given, told):
    for make in (lambda: Limited(**given), lambda: resolve([Limited], [("test", given)])):
        with pytest.raises(UsageError) as error:
            make()
        assert str(error.value) == told


def test_two_processes_may_write_a_file_at_once(tmp_path, monkeypatch):
    replace, pids = os.replace, iter([1, 2])

    def meanwhile(part, path):
        monkeypatch.setattr(os, "replace", replace)
        write_whole(path, "of the second")
        replace(part, path)

    monkeypatch.setattr(os, "getpid", lambda: next(pids))
    monkeypatch.setattr(os, "replace", meanwhile)
    write_whole(tmp_path / "file", "of the first")
    assert [p.name for p in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "of the first"
