"""Our own store: a folder of .npy files and one meta.json. Columns stay on the disk, memory-mapped, until used.

observations.npy actions.npy rewards.npy terminated.npy truncated.npy      one entry a row
offsets.npy final_observations.npy final_known.npy                         one entry an episode
extra_000.npy ... attachment_000.npy ...                                   their names are in meta.json
meta.json    {"schema": 1, "arrays": {name: {file, dtype, shape, bytes, sha256}}, "extras", "attachments", "meta"}
"""

from __future__ import annotations

import hashlib
import io
import math
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from replaylab.data.episodes import Episodes
from replaylab.data.formats.common import (
    COLUMNS,
    EPISODE_COLUMNS,
    SCHEMA,
    Options,
    check_index,
    dump_json,
    read_json,
)
from replaylab.data.formats.npz import beside, read_header, take
from replaylab.errors import DataError

META = "meta.json"
PIECE = 2**24  # bytes written at a time


def sniff(path: Path) -> bool:
    return (path / META).is_file()


def read(path: Path, options: Options) -> Episodes:
    if options.columns:
        raise DataError("a native store has its own column names: --columns does not apply")
    index = _read_meta(path)
    arrays = {name: _read_array(path, name, entry) for name, entry in index["arrays"].items()}
    columns: dict[str, Any] = {name: take(arrays, name) for name in (*COLUMNS, *EPISODE_COLUMNS)}
    for name in ("terminated", "truncated", *EPISODE_COLUMNS):  # small, and looked at all the time
        columns[name] = np.array(columns[name])
    episodes = Episodes(**columns, **beside(arrays, index))
    return episodes.split(options.max_episode_steps, options.split)


def write(episodes: Episodes, path: Path, observations: Sequence[np.ndarray] = ()) -> None:
    """`observations`: piece by piece, where they are too large to be one array."""
    path.mkdir()
    extras = {name: f"extra_{i:03}" for i, name in enumerate(episodes.extras)}
    attachments = {name: f"attachment_{i:03}" for i, name in enumerate(episodes.attachments)}
    arrays = {name: getattr(episodes, name) for name in (*COLUMNS, *EPISODE_COLUMNS)}
    arrays |= {where: episodes.extras[name] for name, where in extras.items()}
    arrays |= {where: episodes.attachments[name] for name, where in attachments.items()}
    parts = {name: [array] for name, array in arrays.items()}
    if observations:
        parts["observations"] = list(observations)
    index = {
        "schema": SCHEMA,
        "steps": len(episodes),
        "episodes": episodes.num_episodes,
        "meta": episodes.meta,
        "arrays": {name: _write_array(path, name, pieces) for name, pieces in parts.items()},
        "extras": extras,
        "attachments": attachments,
    }
    (path / META).write_text(dump_json(index, indent=1))


def verify(path: Path) -> None:
    """Read every byte and compare its checksum with meta.json; DataError names the first file that differs."""
    path = Path(path)
    for name, entry in _read_meta(path)["arrays"].items():
        if _sha256(_file(path, name, entry)) != entry.get("sha256"):
            raise DataError(f"{path}: {name} does not match its checksum; the store is damaged or was edited")


def _read_meta(path: Path) -> dict[str, Any]:
    index = check_index(read_json(path / META))
    if not isinstance(index.get("arrays"), dict):
        raise DataError(f"{META} has no 'arrays'")
    return index


def _file(path: Path, name: str, entry: Any) -> Path:
    """The file of an array. Only a plain name in this very folder will do, whatever meta.json says."""
    file = entry.get("file") if isinstance(entry, dict) else None
    if not isinstance(file, str) or not re.fullmatch(r"\w+\.npy", file, re.ASCII):
        raise DataError(f"{META}: {name} names the file {file!r}, which is no file of this store")
    if not (path / file).is_file():
        raise DataError(f"{file} is missing")
    return path / file


def _read_array(path: Path, name: str, entry: Any) -> np.ndarray:
    file = _file(path, name, entry)
    with file.open("rb") as stream:
        shape, dtype = read_header(file.name, stream)
        start = stream.tell()
    if list(shape) != entry.get("shape") or dtype.str != entry.get("dtype") or dtype.hasobject:
        raise DataError(
            f"{file.name} holds {dtype.str} {list(shape)}, {META} says {entry.get('dtype')} {entry.get('shape')}"
        )
    size = math.prod(shape) * dtype.itemsize
    if file.stat().st_size != start + size:
        raise DataError(f"{file.name} has {file.stat().st_size} bytes, its header promises {start + size}")
    if size == 0 or not shape:  # cannot be mapped, or is not worth it
        return np.load(file, allow_pickle=False)
    return np.load(file, mmap_mode="r", allow_pickle=False)


def _write_array(path: Path, name: str, parts: list[np.ndarray]) -> dict[str, Any]:
    """One array, given in parts along its first axis. Its checksum is taken by a thread, while it is written."""
    file, dtype = path / f"{name}.npy", parts[0].dtype
    shape = (sum(map(len, parts)), *parts[0].shape[1:]) if parts[0].ndim else ()
    header, digest = io.BytesIO(), hashlib.sha256()
    np.lib.format.write_array_header_1_0(header, {"descr": dtype.str, "fortran_order": False, "shape": shape})
    with file.open("wb") as stream, ThreadPoolExecutor(1) as pool:
        for data in chain([header.getvalue()], _pieces(parts)):
            hashing = pool.submit(digest.update, data)
            stream.write(data)
            hashing.result()
    return {
        "file": file.name,
        "dtype": dtype.str,
        "shape": list(shape),
        "bytes": file.stat().st_size,
        "sha256": digest.hexdigest(),
    }


def _pieces(parts: list[np.ndarray]) -> Iterator[Any]:
    for part in map(np.atleast_1d, parts):
        step = max(1, PIECE * len(part) // max(1, part.nbytes))
        for start in range(0, len(part), step):
            yield np.ascontiguousarray(part[start : start + step]).data


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
