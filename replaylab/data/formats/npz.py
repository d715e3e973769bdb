"""NumPy's .npz: flat arrays under the usual names, or everything that Episodes hold when we wrote it.

Never unpickles. The headers of all members are read and checked against their sizes before an array is made.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from replaylab.data.episodes import Episodes
from replaylab.data.formats.common import (
    COLUMNS,
    EPISODE_COLUMNS,
    Options,
    assemble,
    check_size,
    first_bytes,
    read_index,
    storage_names,
    write_index,
)
from replaylab.errors import DataError

INDEX = "replaylab"  # the member that marks a file of ours


def sniff(path: Path) -> bool:
    return first_bytes(path, 4) in (b"PK\x03\x04", b"PK\x05\x06")


def read(path: Path, options: Options) -> Episodes:
    arrays, unread = read_arrays(path)
    if INDEX not in arrays or options.columns:
        return assemble(arrays, options, {}, unread)
    index = read_index(arrays[INDEX])
    columns: dict[str, Any] = {name: take(arrays, name) for name in (*COLUMNS, *EPISODE_COLUMNS)}
    episodes = Episodes(**columns, **beside(arrays, index))
    return episodes.split(options.max_episode_steps, options.split)


def write(episodes: Episodes, path: Path) -> None:
    extras = storage_names(episodes.extras, "extras")
    attachments = storage_names(episodes.attachments, "attachments")
    arrays = {name: getattr(episodes, name) for name in (*COLUMNS, *EPISODE_COLUMNS)}
    arrays |= {where: episodes.extras[name] for name, where in extras.items()}
    arrays |= {where: episodes.attachments[name] for name, where in attachments.items()}
    write_arrays(path, arrays | {INDEX: write_index(episodes, extras, attachments)})


def take(arrays: Mapping[str, np.ndarray], name: Any) -> np.ndarray:
    if name not in arrays:
        raise DataError(f"{name} is missing")
    return arrays[name]


def beside(arrays: Mapping[str, np.ndarray], index: Mapping[str, Any]) -> dict[str, Any]:
    """What our files hold beside the columns, by their index."""
    named = {kind: {n: take(arrays, at) for n, at in index[kind].items()} for kind in ("extras", "attachments")}
    return {**named, "meta": index["meta"]}


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.asarray(array), allow_pickle=False)


def read_arrays(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The arrays of the archive; and what holds Python objects."""
    with zipfile.ZipFile(path) as archive:
        members = [m for m in archive.infolist() if not m.is_dir()]
        dtypes = {m.filename: _check_header(archive, m) for m in members}
        check_size("the archive", sum(m.file_size for m in members), path.stat().st_size)
        arrays, unread = {}, {}
        for member in members:
            name = member.filename.removesuffix(".npy")
            if name in arrays or name in unread:
                raise DataError(f"{name} is there twice")
            if dtypes[member.filename].hasobject:
                unread[name] = "Python objects (reading them could run code)"
                continue
            with archive.open(member) as file:
                arrays[name] = np.lib.format.read_array(file, allow_pickle=False)
    return arrays, unread


def _check_header(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.dtype:
    """The dtype a member declares, after its declared shape has been found to fill the member exactly."""
    name = member.filename
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise DataError(f"{name} is compressed in a way NumPy does not write")
    with archive.open(member) as file:
        shape, dtype = read_header(name, file)
        start = file.tell()
    declared = start + math.prod(shape) * dtype.itemsize
    if not dtype.hasobject and declared != member.file_size:
        raise DataError(f"{name} declares {declared} bytes ({dtype} of shape {shape}) but holds {member.file_size}")
    return dtype


def read_header(name: str, file: Any) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and dtype that a .npy declares, leaving the file at its first value."""
    try:
        version = np.lib.format.read_magic(file)
        header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        shape, _, dtype = header(file)
    except Exception as error:  # the header is parsed as Python literals, which can fail in a dozen ways
        raise DataError(f"{name} is not a NumPy array: its header cannot be read") from error
    if len(shape) > 32 or any(type(n) is not int or n < 0 for n in shape):
        raise DataError(f"{name} declares the shape {shape}")
    return shape, dtype
