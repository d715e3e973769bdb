"""How a DQN-replay log lies on disk, and writing one. What the files hold is told in dqn_replay.py, which reads."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import numpy as np

from replaylab.errors import DataError

FRAME = (84, 84)
STACK = 4
PADDING = STACK - 1  # blank rows before an episode

# name -> dtype and shape after the rows
STORES: dict[str, tuple[str, tuple[int, ...]]] = {
    "$store$_observation": ("|u1", FRAME),
    "$store$_action": ("<i4", ()),
    "$store$_reward": ("<f4", ()),
    "$store$_terminal": ("|u1", ()),
}
TRUNCATED = "$store$_truncated"
SIX = (*STORES, "add_count", "invalid_range")


def file_of(folder: Path, name: str, number: int) -> Path:
    return folder / f"{name}_ckpt.{number}.gz"


class Log:
    """Whole episodes, one after another, into checkpoints of at least `rows_per_file` rows."""

    def __init__(self, folder: Path, rows_per_file: int, level: int = 1, number: int = 0):
        self.folder, self.rows_per_file, self.level, self.number = folder, rows_per_file, level, number
        self.rows = 0
        self.pieces: dict[str, list[np.ndarray]] = {name: [] for name in (*STORES, TRUNCATED)}
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, frames: np.ndarray, actions: np.ndarray, rewards: np.ndarray, truncated: bool) -> None:
        """One episode; `truncated`: it did not end by game over."""
        end = np.arange(1, len(frames) + 1) == len(frames)
        values = (frames, actions, rewards.clip(-1, 1), end, end & truncated)
        for (name, pieces), value in zip(self.pieces.items(), values, strict=True):
            value = value.astype(STORES.get(name, ("|u1", ()))[0], copy=False)
            pieces += [np.zeros((PADDING, *value.shape[1:]), value.dtype), value]
        self.rows += PADDING + len(frames)
        if self.rows >= self.rows_per_file:
            self.close()

    def close(self) -> None:
        """Write what is pending as one checkpoint; on a full disk, as many of its episodes as fit."""
        if self.rows == 0:
            return
        pending = len(self.pieces[TRUNCATED]) // 2  # episodes: each is a piece of padding and one of rows
        keep = pending
        while keep:
            try:
                self._write({name: pieces[: 2 * keep] for name, pieces in self.pieces.items()})
                break
            except OSError as problem:
                error, keep = problem, keep * 3 // 4
        if keep < pending:
            what = f"{keep} of {pending} episodes of ckpt.{self.number} could be written, all before it are whole"
            raise DataError(f"{self.folder}: {what}: {error}") from error
        self.pieces = {name: [] for name in self.pieces}
        self.rows, self.number = 0, self.number + 1

    def _write(self, columns: dict[str, list[np.ndarray]]) -> None:
        rows = sum(map(len, columns[TRUNCATED]))
        if not any(piece.any() for piece in columns[TRUNCATED]):
            del columns[TRUNCATED]
        columns["add_count"] = [np.array(rows)]
        columns["invalid_range"] = [(np.arange(STACK + 1) - 1) % rows]  # around the cursor, which is at row 0
        parts = {name: self.folder / f".{name}.part" for name in columns}
        try:
            for name, pieces in columns.items():
                save_gzip(parts[name], pieces, self.level)
            for name, part in parts.items():
                os.replace(part, file_of(self.folder, name, self.number))
        finally:
            for part in parts.values():  # no half checkpoint may stay
                part.unlink(missing_ok=True)


def save_gzip(file: Path, pieces: list[np.ndarray], level: int) -> None:
    """One array, given in pieces along its first axis, as Dopamine stores it. The same array gives the same bytes."""
    first = pieces[0]
    shape = (sum(len(piece) for piece in pieces), *first.shape[1:]) if first.ndim else ()
    with file.open("wb") as out, gzip.GzipFile("", "wb", level, out, mtime=0) as stream:
        header = {"descr": first.dtype.str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(stream, header)
        for piece in pieces:
            stream.write(piece.tobytes())
