"""When an imagined episode ends: functions (observations, actions, next_observations) -> done, of shape (...,).

Nothing in a log says which states end an episode, only that some did. So the function is named by the user or by the
environment, it is stated in the run, and what it says about the logged rows is compared with what the log says.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from replaylab.errors import DataError, UsageError, nearest

Termination = Callable[[Tensor, Tensor, Tensor], Tensor]
TOO_FAR = 100.0  # no state of a healthy body is beyond


def never(observations: Tensor, actions: Tensor, following: Tensor) -> Tensor:
    return torch.zeros_like(following[..., 0], dtype=torch.bool)


def hopper(observations: Tensor, actions: Tensor, following: Tensor) -> Tensor:
    height, angle = following[..., 0], following[..., 1]
    healthy = (height > 0.7) & (angle.abs() < 0.2) & (following[..., 1:].abs() < TOO_FAR).all(-1)
    return ~(healthy & following.isfinite().all(-1))


def walker2d(observations: Tensor, actions: Tensor, following: Tensor) -> Tensor:
    height, angle = following[..., 0], following[..., 1]
    healthy = (height > 0.8) & (height < 2.0) & (angle.abs() < 1.0) & (following.abs() < TOO_FAR).all(-1)
    return ~healthy


def halfcheetah(observations: Tensor, actions: Tensor, following: Tensor) -> Tensor:
    return ~(following.abs() < TOO_FAR).all(-1)


def ant(observations: Tensor, actions: Tensor, following: Tensor) -> Tensor:
    height = following[..., 0]
    return ~((height >= 0.2) & (height <= 1.0) & following.isfinite().all(-1))


KNOWN: dict[str, Termination] = {
    "none": never,
    "hopper": hopper,
    "halfcheetah": halfcheetah,
    "walker2d": walker2d,
    "ant": ant,
    "pendulum": never,
    "abiomed": never,  # the heart pump: six steps, then the log's own limit
}
OTHER_NAMES = {
    "antangle": "ant", "offlinehoppervelocity": "hopper", "heartpump": "abiomed", "invertedpendulum": None,
    "inverteddoublependulum": None,
}  # fmt: skip


def family(env_id: str | None) -> str | None:
    """The known environment that an id such as `d4rl/hopper`, `Hopper-v5` or `mujoco/hopper/medium-v0` is of."""
    for word in re.split(r"[-_/. ]+", re.sub("heart[-_ ]pump", "heartpump", (env_id or "").lower())):
        word = re.sub(r"v\d+$", "", word) if word not in KNOWN else word
        found = OTHER_NAMES.get(word, word)
        if found in KNOWN and found != "none":
            return found
    return None


def same_family(what: str, theirs: str | None, ours: str | None) -> None:
    """Refuse what was trained on the data of another known environment: the columns of some robots are as many."""
    before, now = family(theirs), family(ours)
    if before and now and before != now:
        raise DataError(f"{what} was trained on data of {before}, this is of {now}")


def find(name: str) -> Termination:
    """A known function, or the user's: `module:function` or `path/to/file.py:function`."""
    if name in KNOWN:
        return KNOWN[name]
    place, colon, function = name.rpartition(":")
    if not colon:
        raise UsageError(f"unknown termination '{name}'{nearest(name, KNOWN)}; your own is FILE.py:FUNCTION")
    try:
        module = _from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        found = getattr(module, function)
    except (Exception, SystemExit) as error:  # whatever the user's file does
        raise UsageError(f"termination {name} cannot be imported: {_line(error)}") from error
    if not callable(found):
        raise UsageError(f"termination {name} is not a function")
    return _guarded(name, found)


def _from_file(path: Path) -> object:
    spec = importlib.util.spec_from_file_location(f"termination_{path.stem}", path)
    if spec is None or spec.loader is None or not path.exists():
        raise FileNotFoundError(f"there is no file {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


WANTS = "it takes tensors (observations, actions, next_observations) of (rows, dims) and returns a boolean for each row"


def _guarded(name: str, function: Termination) -> Termination:
    """A user's function sees (rows, dims), whatever stands before. What goes wrong in it is one line."""

    def call(observations: Tensor, actions: Tensor, following: Tensor) -> Tensor:
        flat = [x.reshape(-1, x.shape[-1]).clone() for x in (observations, actions, following)]  # it may write in them
        try:
            done = function(*flat)
        except (Exception, SystemExit) as error:
            raise UsageError(f"termination {name} failed: {_line(error)}; {WANTS}") from error
        if not isinstance(done, Tensor) or done.dtype != torch.bool or done.shape != flat[2].shape[:1]:
            given = f"{done.dtype} of shape {tuple(done.shape)}" if isinstance(done, Tensor) else type(done).__name__
            raise UsageError(f"termination {name} returned {given}; {WANTS}")
        return done.view(following.shape[:-1])

    return call


def absolute(name: str) -> str:
    """The user's `file.py:function` with its whole path, for whoever reads the run in another folder."""
    place, colon, function = name.rpartition(":")
    return f"{Path(place).resolve()}:{function}" if colon and place.endswith(".py") else name


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
