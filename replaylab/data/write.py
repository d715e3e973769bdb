"""`save`: Episodes -> a file or folder, whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from replaylab.data.episodes import Episodes
from replaylab.data.formats import FORMATS, SUFFIXES
from replaylab.data.read import one_line
from replaylab.errors import DataError, ReplaylabError, UsageError, nearest

PARTS = (".npy", ".npz", ".json", ".gz", ".hdf5")  # files that a dataset in a folder consists of
WRITABLE = [name for name, module in FORMATS.items() if hasattr(module, "write")]


def save(episodes: Episodes, path: str | Path, *, format: str | None = None, overwrite: bool = False) -> Path:
    """Write `episodes` as native, minari or dqn-replay (folders), d4rl (.hdf5) or npz; the suffix decides where it can.

    The data is written beside its target and renamed at the end, so a failure leaves nothing behind.
    """
    if not isinstance(episodes, Episodes) or not isinstance(path, str | Path):
        raise UsageError("save takes Episodes and a path; arrays become Episodes with replaylab.from_rows")
    path = Path(path)
    name = check_target(path, format, overwrite)
    made = _make_folders(path.parent)
    try:
        with tempfile.TemporaryDirectory(prefix=".replaylab-", dir=path.parent, ignore_cleanup_errors=True) as aside:
            part = Path(aside) / path.name
            FORMATS[name].write(episodes, part)
            _swap(part, path, Path(aside) / "old")
    except BaseException as error:
        for folder in made:
            with contextlib.suppress(OSError):
                folder.rmdir()
        if isinstance(error, ReplaylabError) or not isinstance(error, Exception):
            raise
        raise DataError(f"{path}: could not be written: {one_line(error)}") from error
    return path


def check_target(path: Path, format: str | None, overwrite: bool) -> str:
    """The format that would be written to `path`; an error where nothing may be."""
    suffix = "" if path.suffix[1:].isdigit() else path.suffix.lower()  # hopper-ood-1.4 is a name
    name = format or SUFFIXES.get(suffix)
    if name not in WRITABLE:
        what = f"format '{name}' cannot be written" if name else f"'{path.name}' does not tell the format"
        raise UsageError(f"{path}: {what}{nearest(str(name), WRITABLE)}")
    if os.path.lexists(path) and not overwrite:
        raise DataError(f"{path}: exists already; pass --overwrite to replace it")
    if path.is_dir() and not any(FORMATS[name].sniff(path) for name in ("native", "minari", "dqn-replay")):
        raise DataError(f"{path}: this folder is no dataset and is not replaced")
    for file in path.rglob("*"):
        if file.is_file() and file.suffix not in PARTS and not file.name.startswith("."):
            lies = f"{file.relative_to(path)} is no part of a dataset"
            raise DataError(f"{path}: {lies}, and the whole folder would be replaced: move it away first")
    return name


def _swap(part: Path, path: Path, old: Path) -> None:
    """Put `part` in the place of `path`. A folder cannot be replaced in one step, so the old one steps aside first."""
    if not path.exists() or not (path.is_dir() or part.is_dir()):
        os.replace(part, path)
        return
    os.replace(path, old)
    try:
        os.replace(part, path)
    except OSError:
        os.replace(old, path)
        raise


def _make_folders(folder: Path) -> list[Path]:
    """Create missing parents; return those that were made, innermost first."""
    missing = [f for f in (folder, *folder.parents) if not f.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{folder}: the folder cannot be made: {one_line(error)}") from error
    return missing
