"""The errors a user can cause. The command line prints each as one line and exits with `exit_code`."""

from __future__ import annotations

import difflib
import importlib
import os
from collections.abc import Iterable
from types import ModuleType


class ReplaylabError(Exception):
    """Something went wrong that one sentence can explain; no traceback is needed."""

    exit_code = 1


class DataError(ReplaylabError):
    """A file or a set of arrays is not what it should be. The message names the file and the field."""


class UsageError(ReplaylabError):
    """An option, a key or a name that does not exist, or a value that does not fit it."""

    exit_code = 2


class MissingExtra(ReplaylabError):
    """An optional package is needed for what was asked."""


def nearest(name: str, known: Iterable[str], always: bool = False) -> str:
    """'; did you mean X?' where something is close, otherwise (or always) the list of what is known."""
    known = sorted(known)
    if not known:
        return ""
    listed = f"known: {', '.join(known)}"
    if not (close := difflib.get_close_matches(name, known, n=1)):
        return f"; {listed}"
    return f"; did you mean '{close[0]}'?" + (f" {listed}" if always else "")


# import name -> (name to pip install, extra of replaylab that brings it)
_EXTRAS = {
    "h5py": ("h5py", "data"),
    "yaml": ("pyyaml", "data"),
    "pyarrow": ("pyarrow", "data"),
    "gymnasium": ("gymnasium", "mujoco"),
    "mujoco": ("mujoco", "mujoco"),
    "ale_py": ("ale-py", "atari"),
    "gymnasium_robotics": ("gymnasium-robotics", "maze"),
    "tensorboard": ("tensorboard", "track"),
    "wandb": ("wandb", "track"),
    "stable_baselines3": ("stable-baselines3", "peers"),
    "d3rlpy": ("d3rlpy", "d3rlpy"),
    "ray": ("ray", "cluster"),
    "PIL": ("pillow", "atari"),
    "onnxscript": ("onnxscript", "onnx"),
    "onnxruntime": ("onnxruntime", "onnx"),
}
_OTHERWISE = {"gymnasium": ", for Atari 'replaylab[atari]', for mazes 'replaylab[maze]'"}  # where several bring it


def require(module: str, purpose: str) -> ModuleType:
    """Import an optional package, or say which `pip install` brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.split(".")[0]
        package, extra = _EXTRAS[name]
        advice = f"pip install 'replaylab[{extra}]'{_OTHERWISE.get(name, '')}"
        raise MissingExtra(f"{purpose} needs {package}: {advice}") from error
    except Exception as error:  # MuJoCo, where a graphics driver is asked for that is not there
        asked = os.environ.get("MUJOCO_GL") if module == "mujoco" else None
        hint = f"; without MUJOCO_GL={asked} in the environment it may" if asked else ""
        raise UsageError(f"{purpose} needs {module}, which does not load here ({error}){hint}") from error
