"""HDF5, as d4rl, hdf5 and minari use it: hard links to plain arrays inside one file, sizes checked before reading.

HDF5 can point outside its file (external links, external storage, virtual datasets); all of that is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from replaylab.data.formats.common import check_size, first_bytes
from replaylab.errors import DataError, require

MAX_DEPTH = 12
MAX_DATASETS = 1_000_000


def is_hdf5(path: Path) -> bool:
    return first_bytes(path, 8) == b"\x89HDF\r\n\x1a\n"


@cache
def _h5py() -> ModuleType:
    return require("h5py", "HDF5")


@contextmanager
def open_file(path: Path) -> Iterator[Any]:
    h5py = _h5py()
    if not is_hdf5(path):
        raise DataError(f"{path.name} is not an HDF5 file")
    with h5py.File(path, "r") as file:
        cache = file.id.get_mdc_config()  # by default HDF5 keeps 32 MB of directory in memory, more than some data
        cache.set_initial_size, cache.initial_size, cache.min_size, cache.max_size = True, *[1 << 18] * 3
        file.id.set_mdc_config(cache)
        yield file


def child(group: Any, path: str) -> Any:
    """The group or array at a path, None where there is none. Whatever lies outside this file is refused."""
    h5py = _h5py()
    for name in path.split("/"):
        if not group.id.links.exists(name.encode()):
            return None
        if group.id.links.get_info(name.encode()).type != h5py.h5l.TYPE_HARD:
            raise DataError(f"{path} is a link to somewhere else, which is not followed")
        group = group[name]
    if isinstance(group, h5py.Dataset):
        if group.shape is None:
            raise DataError(f"{path} is not an array")
        stored = group.id.get_create_plist()
        if stored.get_layout() == h5py.h5d.VIRTUAL or stored.get_external_count():
            raise DataError(f"{path} is stored in another file, which is not read")
    elif not isinstance(group, h5py.Group):
        raise DataError(f"{path} is neither a group nor an array")
    return group


def datasets(group: Any, depth: int = 0) -> dict[str, Any]:
    """{"infos/qpos": dataset, ...}: every dataset below a group."""
    found: dict[str, Any] = {}
    if depth > MAX_DEPTH:
        raise DataError(f"groups are nested deeper than {MAX_DEPTH}")
    for name in group:
        node = child(group, name)
        if hasattr(node, "keys"):
            found |= {f"{name}/{below}": dataset for below, dataset in datasets(node, depth + 1).items()}
        else:
            found[name] = node
        if len(found) > MAX_DATASETS:
            raise DataError(f"more than {MAX_DATASETS} datasets")
    return found


def nbytes(dataset: Any) -> int:
    return math.prod(dataset.shape) * dataset.dtype.itemsize


def text(dataset: Any) -> str | None:
    """The string a scalar dataset holds, if it holds one."""
    if dataset.shape != () or dataset.dtype.kind not in "SO":
        return None
    value = dataset[()]
    return value.decode(errors="replace") if isinstance(value, bytes) else None


def read_all(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str], dict[str, str]]:
    """All arrays of numbers and all strings of a file, by path; and what the other arrays hold."""
    arrays, strings, unread = {}, {}, {}
    with open_file(path) as file:
        found = datasets(file)
        check_size("the file", sum(map(nbytes, found.values())), path.stat().st_size)
        for name, dataset in found.items():
            if (string := text(dataset)) is not None:
                strings[name] = string
            elif dataset.dtype.kind in "fiub":
                arrays[name] = np.asarray(dataset[()])
            else:
                unread[name] = _contents(dataset.dtype)
    return arrays, strings, unread


def _contents(dtype: np.dtype) -> str:
    """What an array of something else than numbers holds, in words."""
    if _h5py().check_string_dtype(dtype):
        return "text"
    return "lists of varying length" if _h5py().check_vlen_dtype(dtype) else str(dtype)


# --- writing


class _Shield:
    """The file under an HDF5 file. It swallows a failed write and remembers it.

    HDF5 does not survive one: when the disk is full, closing its file crashes the process. So it never hears of it.
    """

    def __init__(self, path: Path) -> None:
        self.file = path.open("w+b", buffering=0)
        self.error: OSError | None = None
        self.seek, self.tell, self.read, self.readinto = (
            getattr(self.file, name) for name in ("seek", "tell", "read", "readinto")
        )

    def write(self, data: Any) -> int:
        view, done = memoryview(data).cast("B"), 0
        try:
            while done < len(view):
                done += self.file.write(view[done:])
        except OSError as error:
            self.error = self.error or error
        return len(view)

    def truncate(self, size: int) -> int:
        try:
            return self.file.truncate(size)
        except OSError as error:
            self.error = self.error or error
            return size

    def flush(self) -> None:
        """Nothing is buffered."""


class Writer:
    """An HDF5 file being written; a failed write is raised between arrays, where HDF5 is not in the way."""

    def __init__(self, path: Path) -> None:
        self.shield = _Shield(path)
        self.file = _h5py().File(self.shield, "w", track_order=True)

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: Any) -> None:
        self.file.close()
        self.shield.file.close()
        self.check()

    def check(self) -> None:
        if self.shield.error:
            raise self.shield.error

    def put(self, name: str, array: np.ndarray, compress: bool = True, rows: Callable | None = None) -> None:
        """Write an array, or what `rows(slice)` gives in its shape, in pieces: it need not fit into memory."""
        array = np.asanyarray(array)
        packed = {"compression": "gzip", "compression_opts": 1, "shuffle": True} if compress and array.size > 64 else {}
        dataset = self.file.create_dataset(name, array.shape, array.dtype, **packed)
        step = max(1, (1 << 24) // max(1, array[:1].nbytes)) if array.ndim else 1
        for start in range(0, len(array) if array.ndim else 1, step):
            part = slice(start, start + step) if array.ndim else ()
            dataset[part] = rows(part) if rows else array[part]
            self.check()
