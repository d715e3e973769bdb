"""HDF5, as d4rl, hdf5 and minari use it: hard links to plain arrays inside one file, sizes checked before reading.

HDF5 can point outside its file (external links, external storage, virtual datasets); all of that is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from replaylab.data.formats.common import check_size
from replaylab.errors import DataError, require

MAX_DEPTH = 12
MAX_DATASETS = 1_000_000


def is_hdf5(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(8) == b"\x89HDF\r\n\x1a\n"


@contextmanager
def open_file(path: Path) -> Iterator[Any]:
    h5py = require("h5py", "reading HDF5")
    if not is_hdf5(path):
        raise DataError(f"{path.name} is not an HDF5 file")
    with h5py.File(path, "r") as file:
        cache = file.id.get_mdc_config()  # by default HDF5 keeps 32 MB of directory in memory, more than some data
        cache.set_initial_size, cache.initial_size, cache.min_size, cache.max_size = True, *[1 << 18] * 3
        file.id.set_mdc_config(cache)
        yield file


def child(group: Any, path: str) -> Any:
    """The group or array at a path, None where there is none. Whatever lies outside this file is refused."""
    h5py = require("h5py", "reading HDF5")
    for name in path.split("/"):
        if not group.id.links.exists(name.encode()):
            return None
        if group.id.links.get_info(name.encode()).type != h5py.h5l.TYPE_HARD:
            raise DataError(f"{path} is a link to somewhere else, which is not followed")
        group = group[name]
    if isinstance(group, h5py.Dataset):
        if group.shape is None:
            raise DataError(f"{path} is not an array")
        if group.is_virtual or group.external:
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


def read_all(path: Path, notes: list[str]) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """All arrays of numbers and all strings of a file, by path."""
    arrays, strings = {}, {}
    with open_file(path) as file:
        found = datasets(file)
        check_size("the file", sum(map(nbytes, found.values())), path.stat().st_size)
        for name, dataset in found.items():
            if (string := text(dataset)) is not None:
                strings[name] = string
            elif dataset.dtype.kind in "fiub":
                arrays[name] = np.asarray(dataset[()])
            else:
                notes.append(f"{name} holds {dataset.dtype}, not numbers, and is left out")
    return arrays, strings


def write_array(group: Any, name: str, array: np.ndarray, compress: bool = True) -> None:
    """Small pieces at a time, so that memory-mapped columns need not fit into memory."""
    array = np.asanyarray(array)
    packed = {"compression": "gzip", "compression_opts": 1, "shuffle": True} if compress and array.size > 64 else {}
    dataset = group.create_dataset(name, array.shape, array.dtype, **packed)
    if array.ndim == 0:
        dataset[()] = array
        return
    step = max(1, (1 << 24) // max(1, array[:1].nbytes))
    for start in range(0, len(array), step):
        dataset[start : start + step] = array[start : start + step]
