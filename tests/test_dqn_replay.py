"""DQN-replay logs: the layout of Dopamine, written here a second time by hand, and what may be wrong with a file."""

from __future__ import annotations

import gzip
import json
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replaylab.data.episodes import Episodes, from_rows
from replaylab.data.formats import dqn_log, dqn_replay, native
from replaylab.data.formats.common import Options
from replaylab.data.sample import FrameStacks, Store
from replaylab.errors import DataError, UsageError

TINY = Path(__file__).parent / "data" / "dqn_replay" / "Breakout"
Rows = list[tuple[int, int, float, int]]  # number drawn into the frame, action, reward, terminal


class Dopamine:
    """What Dopamine's logged replay buffer does, row by row, in a ring of `capacity` rows."""

    def __init__(self, folder: Path, capacity: int):
        self.folder, self.capacity, self.logged = folder, capacity, 0
        self.store = {
            "observation": np.zeros((capacity, 84, 84), np.uint8),
            "action": np.zeros(capacity, np.int32),
            "reward": np.zeros(capacity, np.float32),
            "terminal": np.zeros(capacity, np.uint8),
        }
        self.add_count = np.array(0)
        folder.mkdir(parents=True)

    def add(self, number: int, action: int, reward: float, terminal: int) -> None:
        if self.add_count == 0 or self.store["terminal"][(self.add_count - 1) % self.capacity]:
            for _ in range(3):
                self._put(0, 0, 0.0, 0)
        self._put(number, action, reward, terminal)

    def _put(self, *values: float) -> None:
        for column, value in zip(self.store.values(), values, strict=True):
            column[self.add_count % self.capacity] = value
        self.add_count += 1
        if self.add_count % self.capacity == self.capacity - 1:  # one row before the ring is full
            self.log()

    def log(self) -> None:
        cursor = int(self.add_count) % self.capacity
        invalid = np.array([(cursor - 1 + i) % self.capacity for i in range(5)])
        arrays = {f"$store$_{name}": column for name, column in self.store.items()}
        for name, array in (arrays | {"add_count": self.add_count, "invalid_range": invalid}).items():
            with gzip.open(self.folder / f"{name}_ckpt.{self.logged}.gz", "wb") as file:
                np.save(file, array, allow_pickle=False)
        self.logged += 1


def play(lengths: list[int]) -> Rows:
    """Episodes whose frames are numbered 1, 2, ... throughout."""
    numbers = iter(range(1, 256))
    return [(next(numbers), t % 4, 1.0 if t % 3 == 0 else -0.5, t == n - 1) for n in lengths for t in range(n)]


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    folder = tmp_path / "Pong" / "1" / "replay_logs"
    ring = Dopamine(folder, 40)
    for row in play([10, 14, 8, 20]):
        ring.add(*row)
    assert ring.logged == 1
    return folder


def rewrite(file: Path, array: np.ndarray) -> None:
    with gzip.open(file, "wb") as out:
        np.save(out, array)


def frame_numbers(episodes: Episodes) -> list[int]:
    assert (episodes.observations == episodes.observations[:, :1, :1]).all()
    return episodes.observations[:, 0, 0].tolist()


# --- reading what Dopamine writes


@pytest.mark.parametrize("piece", [3, 4096])
def test_reads_dopamines_own_layout(logs: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(dqn_replay, "PIECE", piece)  # padding may lie across the border of two pieces
    episodes = dqn_replay.read(logs)
    # 39 rows: three pads and 10 rows, three and 14, three and the first 6 of the third episode
    assert frame_numbers(episodes) == list(range(1, 31))
    assert episodes.lengths.tolist() == [10, 14, 6]
    assert episodes.terminated[episodes.last_rows].tolist() == [True, True, False]
    assert episodes.truncated[episodes.last_rows].tolist() == [False, False, True]
    rows = play([10, 14, 8])[:30]
    assert episodes.actions.tolist() == [row[1] for row in rows]
    assert episodes.rewards.tolist() == [row[2] for row in rows]
    assert not episodes.final_known.any()
    assert isinstance(episodes.observations, np.memmap) and episodes.observations.dtype == np.uint8
    assert episodes.meta["frame_stack"] == 4 and episodes.env_id == "atari/pong" and episodes.num_actions == 6
    assert episodes.meta["notes"] == ["1 of 1 checkpoints end in the middle of a game"]


def test_second_lap_of_the_ring(tmp_path: Path) -> None:
    ring = Dopamine(tmp_path / "Pong" / "replay_logs", 40)
    for row in play([10, 14, 8, 20, 10]):
        ring.add(*row)
    assert ring.logged == 1
    ring.add(100, 1, 1.0, 1)  # the second file is due when 79 rows have been added
    while ring.logged < 2:
        ring.add(101, 1, 1.0, 0)
    episodes = dqn_replay.read(tmp_path / "Pong")
    numbers = frame_numbers(episodes)
    # the first file ends with 30; 31 is the one stale row at the end of the second file, and is left out
    assert numbers[29:35] == [30, 32, 33, 34, 35, 36] and 31 not in numbers
    assert "1 of 2 checkpoints begin in the middle of a game" in episodes.meta["notes"]


def test_a_ring_in_the_middle_of_a_lap_is_two_stretches(tmp_path: Path) -> None:
    ring = Dopamine(tmp_path / "x", 40)
    for row in play([10, 14, 8, 20]):
        ring.add(*row)  # 64 rows: the cursor is at 24
    ring.logged = 0
    ring.log()
    episodes = dqn_replay.read(tmp_path / "x", cache=tmp_path / "cache")
    newest, older = list(range(32, 53)), list(range(19, 32))  # 31 is the last row of the first lap
    assert frame_numbers(episodes) == newest + older
    assert np.flatnonzero(episodes.truncated).tolist() == [33]  # the newest part ended with a game
    assert episodes.terminated.sum() == 3 and episodes.env_id is None
    assert any("earlier lap" in note for note in episodes.meta["notes"])


def test_a_part_of_a_ring_begins_behind_a_short_newest_stretch(tmp_path: Path) -> None:
    ring = Dopamine(tmp_path / "x", 40)
    for row in play([10, 14, 9]):
        ring.add(*row)  # 42 rows: the cursor is at 2, behind the frames 32 and 33
    ring.logged = 0
    ring.log()
    episodes = dqn_replay.read(tmp_path / "x", cache=tmp_path / "cache", max_steps=12)
    assert frame_numbers(episodes) == list(range(1, 11))


def test_unused_rows_behind_the_cursor_are_left_out(tmp_path: Path) -> None:
    ring = Dopamine(tmp_path / "x", 40)
    for row in play([10]):
        ring.add(*row)
    ring.log()
    assert len(dqn_replay.read(tmp_path / "x")) == 10


def test_black_screens_are_not_padding(tmp_path: Path) -> None:
    ring = Dopamine(tmp_path / "x", 40)
    for row in [(0, 0, 0.0, 0), (7, 1, 0.0, 0), (0, 0, 0.0, 0), (0, 0, 0.0, 1), (9, 0, 1.0, 1)]:
        ring.add(*row)
    ring.log()
    episodes = dqn_replay.read(tmp_path / "x")
    assert frame_numbers(episodes) == [0, 7, 0, 0, 9] and episodes.lengths.tolist() == [4, 1]


def test_the_step_limit_is_no_terminal(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dqn_replay, "MAX_STEPS", 14)
    episodes = dqn_replay.read(logs)
    assert episodes.terminated[episodes.last_rows].tolist() == [True, False, False]
    assert episodes.truncated[episodes.last_rows].tolist() == [False, True, True]


# --- which part


def test_every_folder_of_the_tree_will_do(logs: Path) -> None:
    for path in (logs, logs.parent, logs.parent.parent):
        assert dqn_replay.sniff(path) and len(dqn_replay.read(path)) == 30
    assert not dqn_replay.sniff(logs.parent.parent.parent)
    with pytest.raises(DataError, match="no DQN-replay logs"):
        dqn_replay.read(logs.parent.parent.parent)


def test_parts_of_a_log(tmp_path: Path) -> None:
    log = dqn_log.Log(tmp_path, rows_per_file=60)
    for i in range(12):
        frames = np.full((17, 84, 84), i + 1, np.uint8)
        log.add(frames, np.zeros(17, np.int64), np.zeros(17), truncated=False)
    log.close()
    assert log.number == 4  # three episodes of 20 rows each a file

    def kept(**options: int) -> list[int]:
        return list(dict.fromkeys(frame_numbers(dqn_replay.read(tmp_path, **options))))

    assert kept() == list(range(1, 13))
    assert kept(checkpoints=2) == [7, 8, 9, 10, 11, 12]
    assert kept(episodes_per_checkpoint=1) == [1, 4, 7, 10]
    assert kept(checkpoints=2, max_steps=70) == [7, 8, 10, 11]  # 35 steps each: two episodes of 17
    assert kept(max_steps=1) == [1, 4, 7, 10]
    assert dqn_replay.read(tmp_path, max_steps=190).meta["notes"] == []
    few = dqn_replay.read(tmp_path, max_steps=500_000).meta["notes"]
    assert few == ["500,000 steps were asked for, the checkpoints gave 204"]
    with pytest.raises(UsageError, match=r"5 checkpoints \(--num-buffers\) were asked for, .* has 4"):
        dqn_replay.read(tmp_path, checkpoints=5)
    with pytest.raises(UsageError, match="max_steps"):
        dqn_replay.read(tmp_path, max_steps=0)


def test_extraction_happens_once(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = dqn_replay.read(logs)

    def extract(*args: object) -> None:
        raise AssertionError("extracted again")

    with monkeypatch.context() as patch:
        patch.setattr(dqn_replay, "_extract", extract)
        assert (dqn_replay.read(logs).observations == first.observations).all()
    rewrite(logs / "$store$_action_ckpt.0.gz", np.full(40, 3, np.int32))
    assert (dqn_replay.read(logs).actions == 3).all()  # a changed file is read anew


def test_checkpoints_are_unfolded_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the order of their numbers, whoever finishes first; and the user is told what takes so long."""
    log = dqn_log.Log(tmp_path, rows_per_file=1)
    for number in range(1, 8):
        length = 30 - 4 * number
        log.add(np.full((length, 84, 84), number, np.uint8), np.arange(length) % 3, np.zeros(length), number == 3)
    monkeypatch.setattr(dqn_replay.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(dqn_replay, "PIECE", 2)
    episodes = dqn_replay.read(tmp_path)
    assert frame_numbers(episodes) == [n for n in range(1, 8) for _ in range(30 - 4 * n)]
    assert episodes.final_observations[:, 0, 0].tolist() == list(range(1, 8))
    assert np.flatnonzero(episodes.truncated).tolist() == [26 + 22 + 18 - 1]
    native.verify(next((tmp_path / ".replaylab").iterdir()))
    assert "unpacking 119 frames of" in capsys.readouterr().err  # 98 and the padding
    dqn_replay.read(tmp_path)
    assert capsys.readouterr().err == ""


def test_one_bad_file_stops_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = dqn_log.Log(tmp_path, rows_per_file=1)
    for number in range(1, 8):
        log.add(np.full((40, 84, 84), number, np.uint8), np.zeros(40, int), np.zeros(40), False)
    rewrite(tmp_path / "$store$_observation_ckpt.0.gz", np.zeros((43, 84, 85), np.uint8))
    monkeypatch.setattr(dqn_replay.os, "cpu_count", lambda: 2)
    read = Counter[int]()
    real = dqn_replay._frames

    def frames(folder: Path, number: int, *args: int) -> Any:
        for piece in real(folder, number, *args):
            read[number] += 1
            time.sleep(0.01)
            yield piece

    monkeypatch.setattr(dqn_replay, "PIECE", 1)
    monkeypatch.setattr(dqn_replay, "_frames", frames)
    with pytest.raises(DataError, match=r"ckpt\.0\.gz: holds"):
        dqn_replay.read(tmp_path)
    assert sum(read.values()) < 43 and not any((tmp_path / ".replaylab").iterdir())


# --- writing


def test_round_trip(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    terminated, truncated = np.zeros((2, 50), bool)
    terminated[[9, 30]], truncated[[40, 49]] = True, True
    frames = rng.integers(0, 256, (50, 84, 84), dtype=np.uint8)
    meta = {"env_id": "atari/qbert", "num_actions": 6}
    episodes = from_rows(
        frames, rng.integers(0, 6, 50), rng.normal(0, 2, 50).astype(np.float32), terminated, truncated, meta=meta
    )
    dqn_replay.write(episodes, tmp_path / "any-name")
    again = dqn_replay.read(tmp_path / "any-name")
    assert (again.observations == frames).all() and (again.actions == episodes.actions).all()
    assert (again.rewards == episodes.rewards.clip(-1, 1)).all()
    assert (again.terminated == terminated).all() and (again.truncated == truncated).all()
    assert again.env_id == "atari/qbert" and again.num_actions == 6 and again.meta["notes"] == []


def test_files_are_dopamines(tmp_path: Path) -> None:
    """Read back with nothing but gzip and numpy, as other readers do."""
    log = dqn_log.Log(tmp_path, rows_per_file=100)
    for length in (5, 4):
        log.add(np.full((length, 84, 84), 9, np.uint8), np.full(length, 2), np.full(length, 7.0), truncated=False)
    log.close()
    assert len(list(tmp_path.iterdir())) == 6

    def get(name: str) -> np.ndarray:
        with gzip.open(tmp_path / f"{name}_ckpt.0.gz") as file:
            return np.load(file, allow_pickle=False)

    pads = [0, 1, 2, 8, 9, 10]
    blank = np.isin(np.arange(15), pads)
    assert get("$store$_observation").dtype == np.uint8 and get("$store$_observation").shape == (15, 84, 84)
    assert (get("$store$_observation")[:, 0, 0] == np.where(blank, 0, 9)).all()
    assert get("$store$_action").dtype == np.int32 and (get("$store$_action") == np.where(blank, 0, 2)).all()
    assert get("$store$_reward").dtype == np.float32 and (get("$store$_reward") == np.where(blank, 0, 1)).all()
    assert get("$store$_terminal").dtype == np.uint8 and np.flatnonzero(get("$store$_terminal")).tolist() == [7, 14]
    assert get("add_count").shape == () and get("add_count") == 15
    assert get("invalid_range").tolist() == [14, 0, 1, 2, 3]


def test_a_full_disk_leaves_whole_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = dqn_log.Log(tmp_path, rows_per_file=10)
    episode = (np.full((8, 84, 84), 5, np.uint8), np.zeros(8, int), np.zeros(8), False)
    log.add(*episode)
    real = dqn_log.save_gzip

    def full(file: Path, *args: object) -> None:
        if "terminal" in file.name:
            file.write_bytes(b"half a file")
            raise OSError(28, "No space left on device")
        real(file, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(dqn_log, "save_gzip", full)
    with pytest.raises(DataError, match="No space left"):
        log.add(*episode)
    assert len(list(tmp_path.iterdir())) == 6
    assert len(dqn_replay.read(tmp_path)) == 8


def test_a_full_disk_leaves_the_episodes_that_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = dqn_log.Log(tmp_path, rows_per_file=10_000)
    for number in range(1, 9):
        log.add(np.full((7, 84, 84), number, np.uint8), np.zeros(7, int), np.zeros(7), number == 2)
    real = dqn_log.save_gzip

    def full(file: Path, pieces: list[np.ndarray], level: int) -> None:
        if "observation" in file.name and sum(map(len, pieces)) > 50:
            file.write_bytes(b"half a file")
            raise OSError(28, "No space left on device")
        real(file, pieces, level)

    monkeypatch.setattr(dqn_log, "save_gzip", full)
    with pytest.raises(DataError, match=r"4 of 8 episodes of ckpt\.0 could be written, .*No space left"):
        log.close()
    assert not list(tmp_path.glob("*.part"))
    assert frame_numbers(dqn_replay.read(tmp_path)) == [n for n in range(1, 5) for _ in range(7)]


def test_other_data_is_refused(tmp_path: Path) -> None:
    vectors = from_rows(np.zeros((5, 3)), np.zeros((5, 2)), np.zeros(5))
    with pytest.raises(DataError, match="84 x 84"):
        dqn_replay.write(vectors, tmp_path / "x")


# --- files that are not what they should be


def declare(shape: tuple[int, ...], dtype: str = "<i4") -> bytes:
    """A gzipped .npy header that promises much, with little behind it."""
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return gzip.compress(b"\x93NUMPY\x01\x00v\x00" + text.encode() + b"\0" * 100)


def damage(logs: Path, what: str) -> str:
    """Break one file; returns its name."""
    name = {"missing": "$store$_reward", "add_count": "add_count", "frames": "$store$_observation"}.get(what)
    name = name or ("$store$_observation" if what.endswith("frames") else "$store$_action")
    file = logs / f"{name}_ckpt.0.gz"
    data = file.read_bytes()
    if what == "missing":
        file.unlink()
    elif what.startswith("cut"):
        file.write_bytes(data[: len(data) // 2])
    elif what == "not gzip":
        file.write_bytes(b"hello")
    elif what == "not an array":
        file.write_bytes(gzip.compress(b"hello"))
    elif what == "empty":
        file.write_bytes(b"")
    elif what == "pickle":
        rewrite(file, np.array([{}] * 40, object))
    elif what == "dtype":
        rewrite(file, np.zeros(40, np.float64))
    elif what == "shape":
        rewrite(file, np.zeros((40, 2), np.int32))
    elif what == "negative":
        rewrite(file, np.full(40, -1, np.int32))
    elif what == "bomb":
        file.write_bytes(declare((10**13,)))
    elif what == "bomb of frames":
        file.write_bytes(declare((10**13, 84, 84), "|u1"))
    elif what == "other frames":
        rewrite(file, np.zeros((40, 64, 64), np.uint8))
    elif what == "fortran frames":
        rewrite(file, np.asfortranarray(np.zeros((40, 84, 84), np.uint8)))
    elif what == "add_count":
        rewrite(file, np.array(0))
    return file.name


KINDS = ["missing", "cut", "cut frames", "not gzip", "not an array", "empty", "pickle", "dtype", "shape", "negative"]
KINDS += ["bomb", "bomb of frames", "other frames", "fortran frames", "add_count"]


@pytest.mark.parametrize("what", KINDS)
def test_bad_files_are_named(logs: Path, what: str) -> None:
    name = damage(logs, what)
    with pytest.raises(DataError) as caught:
        dqn_replay.read(logs)
    assert name in str(caught.value), str(caught.value)
    assert not list(logs.glob(".replaylab/*"))  # nothing half written


def test_siblings_must_agree(logs: Path) -> None:
    rewrite(logs / "$store$_reward_ckpt.0.gz", np.zeros(39, np.float32))
    with pytest.raises(DataError, match="39 and 40 rows"):
        dqn_replay.read(logs)


def test_columns_cannot_be_renamed(logs: Path) -> None:
    with pytest.raises(DataError, match="columns"):
        dqn_replay.read(logs, Options(columns={"rewards": ["r"]}))


# --- the log we ship, and stacks


def test_shipped_log(tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path / "Breakout", ignore=shutil.ignore_patterns(".replaylab"))
    episodes = dqn_replay.read(tmp_path / "Breakout")
    assert len(episodes) == 4000 and episodes.num_episodes == 22 and episodes.env_id == "atari/breakout"
    assert episodes.terminated.sum() == 18 and episodes.truncated.sum() == 4  # four games were running at the end
    assert set(episodes.rewards.tolist()) == {0.0, 1.0} and episodes.num_actions == 4
    assert (np.bincount(episodes.actions) > 900).all()  # random play
    assert episodes.observations[episodes.offsets[:-1]].any((1, 2)).all()  # no padding among the first frames
    assert json.loads((TINY / "recipe.json").read_text())["seed"] == 0
    assert sum(f.stat().st_size for f in TINY.rglob("*") if f.is_file() and ".replaylab" not in f.parts) < 2 << 20
    (tmp_path / "Breakout" / "recipe.json").unlink()  # the folder's name says it too
    assert dqn_replay.read(tmp_path / "Breakout").meta["num_actions"] == 4


@pytest.mark.parametrize("resident", [True, False])
def test_stacks_by_hand(resident: bool) -> None:
    frames = np.repeat(np.arange(1, 10, dtype=np.uint8), 4).reshape(9, 2, 2)
    ends = np.isin(np.arange(9), [4, 8])  # rows 0..4 hold 1..5, rows 5..8 hold 6..9
    episodes = from_rows(frames, np.zeros(9, int), np.zeros(9), ends)
    stacks = FrameStacks(Store(episodes, "cpu", resident=resident), 4)
    found = stacks(torch.tensor([[0, 2, 4], [5, 6, 8]]))
    assert found.shape == (2, 3, 4, 2, 2) and found.dtype == torch.uint8
    assert found[..., 1, 1].tolist() == [
        [[0, 0, 0, 1], [0, 1, 2, 3], [2, 3, 4, 5]],
        [[0, 0, 0, 6], [0, 0, 6, 7], [6, 7, 8, 9]],
    ]
