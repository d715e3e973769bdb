"""The run folder: what training writes, and all that `eval`, `report` and `resume` read.

config.yaml     every setting, resolved
run.json        command, machine, versions, data summary, status, time
metrics.jsonl   one line per seed at each logging step
eval.jsonl      one line per seed at each evaluation, with every episode's return
checkpoints/    step-N/: weights.safetensors, training.safetensors, state.json
media/          pictures and videos, for systems that make any
density_model/  a copy of the folder that was given as --density-model
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import replaylab
from replaylab.config import read_yaml, write_whole
from replaylab.data.formats.common import read_json
from replaylab.errors import DataError, UsageError, nearest
from replaylab.tensors import load_tensors, save_tensors

KEEP = 2  # checkpoints: the last one, and the one before in case the last is unreadable
ANEW = "restore it from a copy, or train anew with --overwrite"
REWRITE = "delete it and train on with --resume, which writes it anew"


class RunFolder:
    def __init__(self, path: str | Path):
        if not isinstance(path, str | Path):
            raise UsageError(f"a run is named by the path of its folder, not {type(path).__name__}")
        self.path = Path(path)
        self.step = 0  # of the weights that were read last

    def exists(self) -> bool:
        return (self.path / "config.yaml").exists()

    def require(self) -> RunFolder:
        if not self.exists():
            others = [str(p.parent) for p in self.path.parent.glob("*/config.yaml")]
            hint = nearest(str(self.path), others) if others else ""
            what = "is not a run folder: it has no config.yaml" if self.path.exists() else "does not exist"
            raise UsageError(f"{self.path} {what}{hint}")
        return self

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Let only one process train in the folder. The lock is released when the process ends, even if killed."""
        new = not self.path.exists()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise UsageError(f"cannot make the run folder {self.path}: a file is in the way") from error
        except OSError as error:
            raise UsageError(f"cannot make the run folder {self.path}: {error.strerror}") from error
        with open(self.path / ".lock", "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise UsageError(f"another process is training in {self.path}") from error
            try:
                yield
            finally:
                if new and not any(p.name != ".lock" for p in self.path.iterdir()):
                    shutil.rmtree(self.path)  # a run that is refused leaves nothing behind

    def left(self) -> bool:
        """Whether the process that trained here has ended. False also for a copy without the lock file: unknown."""
        try:
            with open(self.path / ".lock") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def clear(self) -> None:
        for entry in self.path.iterdir():
            if entry.name != ".lock":
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    # --- small files

    def config(self) -> dict[str, Any]:
        try:
            return read_yaml(self.path / "config.yaml")
        except UsageError as error:
            raise DataError(f"{error}: the file is damaged; {ANEW}") from error

    def system(self) -> str:
        name = self.require().config().get("system")
        if not isinstance(name, str):
            raise DataError(f"{self.path / 'config.yaml'} names no system: the file is damaged; {ANEW}")
        return name

    def seeds(self) -> list[int]:
        seeds = self.config().get("seeds")
        if not isinstance(seeds, list) or not seeds:
            raise DataError(f"{self.path / 'config.yaml'} names no seeds: the file is damaged; {ANEW}")
        return seeds

    def info(self) -> dict[str, Any]:
        try:
            return read_json(self.path / "run.json")
        except DataError as error:
            raise DataError(f"{self.path}/{error}: {REWRITE}") from error
        except OSError as error:
            what = f"{self.path / 'run.json'} cannot be read ({error.strerror})"
            raise DataError(f"{what}: train on with --resume, which writes it anew") from error

    def write_info(self, **values: Any) -> None:
        path = self.path / "run.json"
        info = self.info() if path.exists() else {}
        write_whole(path, json.dumps(info | values, indent=1))

    def write_media(self, name: str, content: bytes) -> None:
        (self.path / "media").mkdir(exist_ok=True)
        (self.path / "media" / Path(name).name).write_bytes(content)

    def copy(self, source: str, name: str) -> None:
        """Keep a copy of another folder. It gets its name only when it is complete."""
        part = self.path / f"{name}.part"
        shutil.copytree(source, part, dirs_exist_ok=True)
        os.rename(part, self.path / name)

    def append(self, name: str, lines: list[dict[str, Any]]) -> None:
        append_lines(self.path / name, lines)

    def lines(self, name: str) -> list[dict[str, Any]]:
        return read_lines(self.path / name)

    def rewind(self, step: int) -> None:
        """Drop what was logged after `step`: the resumed run logs it again."""
        for name in ("metrics.jsonl", "eval.jsonl"):
            if (self.path / name).exists():
                kept = [line for line in self.lines(name) if isinstance(at := line.get("step"), int) and at <= step]
                write_whole(self.path / name, "".join(json.dumps(line) + "\n" for line in kept))

    # --- checkpoints

    def checkpoints(self) -> list[Path]:
        """The complete checkpoints, oldest first. `save` gives a checkpoint its final name only when it is complete."""
        folder = self.path / "checkpoints"
        found = [p for p in folder.glob("step-*") if re.fullmatch(r"step-[0-9]+", p.name)] if folder.exists() else []
        return sorted(found, key=lambda p: int(p.name.removeprefix("step-")))

    def save(self, step: int, weights: dict[str, Tensor], training: dict[str, Tensor], state: dict[str, Any]) -> None:
        target = self.path / "checkpoints" / f"step-{step}"
        part = target.with_name(target.name + ".part")
        for left in target.parent.glob("step-*.part"):  # from a process that was killed while saving
            shutil.rmtree(left, ignore_errors=True)
        try:
            part.mkdir(parents=True)
            save_tensors(part / "weights.safetensors", weights)
            save_tensors(part / "training.safetensors", training)
            (part / "state.json").write_text(json.dumps(state))
            for file in part.iterdir():
                with open(file, "rb") as handle:
                    os.fsync(handle.fileno())
            shutil.rmtree(target, ignore_errors=True)
            os.rename(part, target)
        except OSError as error:
            shutil.rmtree(part, ignore_errors=True)
            kept = "the last good checkpoint is kept" if self.checkpoints() else "no checkpoint was made before"
            raise DataError(f"cannot save {target}: {error}; {kept}") from error
        for old in self.checkpoints()[:-KEEP]:
            shutil.rmtree(old)

    def load(self) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]] | None:
        """The newest readable checkpoint: (weights, training, state). None if there is no checkpoint at all."""
        damaged = []
        for path in reversed(self.checkpoints()):
            try:
                state = read_json(path / "state.json")
                if "step" not in state:
                    raise DataError("state.json tells no step")
                found = load_tensors(path / "weights.safetensors"), load_tensors(path / "training.safetensors"), state
            except (DataError, OSError) as error:
                damaged.append(f"{path.name} is not readable ({error})")
                continue
            if damaged:
                print(f"note: going on from {path.name}, as {damaged[0]}", file=sys.stderr)
            return found
        if damaged:
            raise DataError(f"no checkpoint of {self.path} is left: {damaged[0]}; --overwrite starts anew")
        return None

    def places(self, seeds: Sequence[int], alone: bool = False) -> list[int]:
        """The index of each seed in this run. `alone`: if the run has only one seed, use it for every seed."""
        trained = self.seeds()
        if alone and len(trained) == 1:
            return [0] * len(seeds)
        if missing := [seed for seed in seeds if seed not in trained]:
            raise UsageError(f"{self.path} has no seed {missing[0]}; it has {', '.join(map(str, trained))}")
        return [trained.index(seed) for seed in seeds]

    def weights(self) -> dict[str, Tensor]:
        """Those of the newest readable checkpoint; sets `step`."""
        newest = self.checkpoints()[::-1]
        for path in newest:
            with contextlib.suppress(DataError):
                found = load_tensors(path / "weights.safetensors")
                self.step = int(path.name.removeprefix("step-"))
                if path != newest[0]:
                    print(f"note: these are the weights of {path.name}: {newest[0]} is not readable", file=sys.stderr)
                return found
        raise DataError(f"{self.path} has no readable checkpoint")

    def state(self) -> dict[str, Any]:
        """How far training was in the checkpoint that `weights` has read."""
        path = self.path / "checkpoints" / f"step-{self.step}" / "state.json"
        try:
            return json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise DataError(f"{path} is not readable: {error}") from error


def append_lines(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    with open(path, "a+b") as file:
        if file.seek(0, os.SEEK_END) and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
            file.write(b"\n")  # a kill cut the last line short
        file.write("".join(json.dumps(line) + "\n" for line in lines).encode())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All lines of a JSONL file, except those that are damaged, as by a kill that cut one short."""
    found = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError, RecursionError):
            found.append(json.loads(line))
    return [line for line in found if isinstance(line, dict)]


def command_line() -> str:
    """The command that this process was started with, as a user would type it."""
    name = Path(sys.argv[0]).name
    if name == "distributed.py":  # each of its processes was started by torchrun
        processes = os.environ.get("LOCAL_WORLD_SIZE", "1")
        return shlex.join(["torchrun", "--nproc-per-node", processes, "-m", "replaylab.distributed", *sys.argv[1:]])
    return shlex.join([name.replace("__main__.py", "replaylab"), *sys.argv[1:]])


def machine(device: torch.device) -> dict[str, Any]:
    """Hardware and versions: what a reader needs to judge timings."""
    versions = {}
    for name in ("gymnasium", "mujoco", "ale_py"):
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name.replace("_", "-"))
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration), open("/proc/cpuinfo") as file:
        cpu = next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gib": round(memory, 1),
        "replaylab": replaylab.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        **versions,
    }
