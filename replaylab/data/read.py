"""`load` reads any supported file or folder into Episodes. What cannot be read is a one-line error that names the file.

The readers are in formats/; this file finds the right one and checks what it returns.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from replaylab.data.ends import check_meta, refuse_huge
from replaylab.data.episodes import Episodes, concatenate
from replaylab.data.formats import FORMATS, SUFFIXES
from replaylab.data.formats.common import Options, check_columns
from replaylab.data.toys import toy_bandit
from replaylab.errors import DataError, MissingExtra, ReplaylabError, UsageError, nearest

OPTIONS = ("format", "columns", "max_episode_steps", "split")
PART = ("checkpoints", "max_steps", "episodes_per_checkpoint")


def _samples() -> dict[str, Path]:
    """Datasets shipped with the package, by name; a single one is also called `sample`."""
    folder = Path(__file__).parent.parent / "sample"
    if FORMATS["native"].sniff(folder):
        return {"sample": folder}
    found = [p for p in sorted(folder.glob("*")) if p.is_dir() or (p.suffix and p.suffix in SUFFIXES)]
    named = {p.stem: p for p in found if not p.name.startswith((".", "_"))}
    return named | ({"sample": next(iter(named.values()))} if len(named) == 1 else {})


SAMPLES: dict[str, Path] = _samples()
TOYS = {"toy-bandit": toy_bandit}  # generated, not read


def load(
    path_or_paths: str | Path | Sequence[str | Path],
    *,
    format: str | None = None,
    columns: Mapping[str, str | Sequence[str]] | None = None,
    max_episode_steps: int | None = None,
    split: str = "flags",
    **part: int | None,
) -> Episodes:
    """Read logged experience. The format is detected by default; several paths are joined in the order given.

    columns: role -> columns of a flat file, {"observations": ["x1", "x2"], "rewards": "r", ...}.
    max_episode_steps: also end an episode after this many steps.
    split: "flags" ends episodes where the file says so, "discontinuity" also where the observation jumps.
    part: for a DQN-replay log, how much: `checkpoints`, `max_steps`, `episodes_per_checkpoint` (dqn_replay.read).
    """
    if format is not None and format not in FORMATS:
        raise UsageError(f"no format '{format}'{nearest(str(format), FORMATS)}")
    options = Options(check_columns(columns), max_episode_steps, split)
    paths = as_paths(path_or_paths)
    for key in part:
        if key not in PART:
            raise UsageError(f"load takes no '{key}'{nearest(key, (*OPTIONS, *PART))}")
    parts = [_load_one(path, format, options, part) for path in paths]
    if len(parts) > 1:  # say which file a note is about
        for i, (path, log) in enumerate(zip(paths, parts, strict=True)):
            notes = [f"{path}: {note}" for note in log.meta.get("notes", [])]
            parts[i] = replace(log, meta=log.meta | {"notes": notes})
    try:
        return concatenate(parts)
    except DataError:
        for path, log in zip(paths[1:], parts[1:], strict=True):
            _check_join(paths[0], parts[0], path, log)
        raise


def _check_join(first: str | Path, a: Episodes, second: str | Path, b: Episodes) -> None:
    """Of several files that cannot be joined, name the two that differ."""
    try:
        concatenate([a.select([0]), b.select([0])])
    except DataError as error:
        remedy = "; choose the same --columns in both"
        if a.discrete != b.discrete:
            remedy = f"; whole numbers are choices: write amounts as 1.0, not 1, in {first if a.discrete else second}"
        raise DataError(f"{first} and {second}: {error}{remedy}") from error


def as_paths(data: Any) -> list[str | Path]:
    """One path or several as a list; anything else is an error."""
    paths = list(data) if isinstance(data, Iterable) and not isinstance(data, (str, Mapping)) else [data]
    if not paths:
        raise DataError("no files given")
    if not all(isinstance(path, str | Path) for path in paths):
        raise UsageError(f"data is a path or a list of paths, not {type(data).__name__}; arrays: replaylab.from_rows")
    return paths


def _load_one(given: str | Path, format: str | None, options: Options, part: Mapping[str, int | None]) -> Episodes:
    path, name = Path(given), format
    if str(given) in TOYS and not path.exists():
        return TOYS[str(given)]()
    try:
        if not path.exists():
            path = SAMPLES.get(str(given), path)
        name = name or detect(path)
        if part and name != "dqn-replay":
            raise UsageError(f"only a DQN-replay log can be read in part, this is {name}")
        episodes = FORMATS[name].read(path, options, **part)
        check_meta(episodes.meta, episodes.actions)
        for column in ("observations", "actions", "rewards", "final_observations"):
            values = getattr(episodes, column)
            if not isinstance(values, np.memmap):  # memory maps are checked by `train`
                refuse_huge(column, values)
    except MissingExtra:
        raise
    except ReplaylabError as error:
        raise type(error)(f"{given}: {one_line(error)}") from error
    except MemoryError as error:
        raise DataError(f"{given}: does not fit into memory; convert it to the native format in parts") from error
    except Exception as error:  # whatever a library raises on a bad file
        raise DataError(f"{given}: not a readable {name or 'data'} file: {one_line(error)}") from error
    return replace(episodes, meta={"source": str(given)} | episodes.meta)


def detect(path: Path) -> str:
    """The name of the format: by content if that is recognised, else by suffix."""
    if not path.exists():
        if path.is_symlink():
            raise DataError(f"it is a link to {path.readlink()}, which is not there")
        raise DataError(f"no such file or folder{_near(path)}")
    for name, module in FORMATS.items():
        if module.sniff(path):
            return name
    if path.is_dir():
        inside = sorted(p.name for p in path.iterdir() if not p.name.startswith("."))[:8]
        raise DataError(f"this folder is no dataset; it holds {', '.join(inside) or 'nothing'}")
    if not path.is_file():
        raise DataError("not a regular file")
    if path.stat().st_size == 0:
        raise DataError("the file is empty")
    if path.suffix.lower() in SUFFIXES and path.suffix:
        return SUFFIXES[path.suffix.lower()]
    raise DataError(f"the format is not recognised; name it with --format ({', '.join(FORMATS)})")


def _near(path: Path) -> str:
    """'; did you mean X?' for a path that does not exist, else an empty string."""
    folder = path.parent
    while not folder.is_dir():
        path, folder = folder, folder.parent
    there = [p.name for p in folder.iterdir() if not p.name.startswith(".")] + [*SAMPLES, *TOYS]
    close = difflib.get_close_matches(path.name, there, n=1)
    return f"; did you mean '{close[0] if close[0] in SAMPLES | TOYS else folder / close[0]}'?" if close else ""


def one_line(error: BaseException) -> str:
    """An error's text without line breaks, control characters or endless detail."""
    text = " ".join("".join(c if c.isprintable() else " " for c in str(error)).split())
    return (text or type(error).__name__)[:400]
