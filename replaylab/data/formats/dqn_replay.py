"""DQN-replay logs: Atari experience as Google's Dopamine writes it, and as the DQN Replay Dataset publishes it.

A folder `Pong/1/replay_logs` holds, for each checkpoint N, six files, each a gzip around one `np.save` array:

    $store$_observation_ckpt.N.gz  uint8 (rows, 84, 84), single frames      $store$_action_ckpt.N.gz    int32 (rows,)
    $store$_reward_ckpt.N.gz       float32 (rows,), clipped to [-1, 1]      $store$_terminal_ckpt.N.gz  uint8 (rows,)
    add_count_ckpt.N.gz            rows ever added to the ring              invalid_range_ckpt.N.gz     see below

Three blank rows stand before each episode's first frame, so that stacks of four never reach into another episode.
`terminal` is also set where an episode ran into Dopamine's limit of 27,000 steps; such an end is truncated here. What
followed an episode's last frame is not stored. Where we write a log whose episodes were cut otherwise, a seventh
file `$store$_truncated_ckpt.N.gz` names those ends; other readers do not look at it.

A published observation file unfolds to 7 GB. It is unfolded once, piece by piece, into a native store (see
native.py) from which frames are memory-mapped.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import math
import os
import re
import tempfile
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from replaylab.data.episodes import Episodes
from replaylab.data.formats import native
from replaylab.data.formats.common import Options
from replaylab.data.formats.dqn_log import FRAME, PADDING, SIX, STACK, STORES, TRUNCATED, Log, file_of
from replaylab.errors import DataError, UsageError
from replaylab.progress import Progress

MAX_STEPS = 27_000  # Dopamine's limit on an episode
MAX_ROWS = 4_000_000  # a checkpoint; the published ones have a million
PIECE = 1024  # rows unfolded at a time
VERSION = 2  # of what an extraction holds

_FILE = re.compile(r"(?:\$store\$_(?:observation|action|reward|terminal)|add_count|invalid_range)_ckpt\.(\d+)\.gz")

# how many actions a game has; the logs do not say, and a rare action may be missing from a part of one
ACTIONS = {
    3: "freeway skiing",
    4: "atlantis breakout",
    6: "air_raid bowling carnival demon_attack name_this_game pong pooyan qbert space_invaders up_n_down",
    7: "assault",
    8: "gopher phoenix tutankham",
    9: "asterix beam_rider crazy_climber enduro ms_pacman video_pinball",
    10: "amidar time_pilot wizard_of_wor",
    14: "asteroids kung_fu_master",
    16: "journey_escape",
    18: "alien bank_heist battle_zone berzerk boxing centipede chopper_command double_dunk elevator_action "
    "fishing_derby frostbite gravitar hero ice_hockey jamesbond kangaroo krull montezuma_revenge pitfall private_eye "
    "riverraid road_runner robotank seaquest solaris star_gunner tennis venture yars_revenge zaxxon",
}
_GAMES = {game.replace("_", ""): (game, count) for count, games in ACTIONS.items() for game in games.split()}


# --- finding the files


def sniff(path: Path) -> bool:
    return _logs(path) is not None


def _logs(path: Path) -> Path | None:
    """The folder with the files: `replay_logs` itself, or the first run of the game or run folder above it."""
    for folder in (path, path / "replay_logs", path / "1" / "replay_logs"):
        if folder.is_dir() and any(_FILE.fullmatch(file.name) for file in folder.iterdir()):
            return folder
    return None


def _checkpoints(folder: Path, last: int | None) -> list[int]:
    numbers = sorted({int(m[1]) for file in folder.iterdir() if (m := _FILE.fullmatch(file.name))})
    if last is not None and not 1 <= last <= len(numbers):
        raise UsageError(f"{last} checkpoints (--num-buffers) were asked for, {folder} has {len(numbers)}")
    numbers = numbers[-last:] if last else numbers
    for number in numbers:
        for name in SIX:
            if not file_of(folder, name, number).is_file():
                raise DataError(f"{file_of(folder, name, number).name} is missing; a checkpoint is six files")
    return numbers


def _about(folder: Path) -> dict[str, Any]:
    """Which game it is: from our own recipe.json, else from the name of the game's folder."""
    places = [folder.resolve(), *folder.resolve().parents[:2]]
    for place in places:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            recipe = json.loads((place / "recipe.json").read_bytes()[: 1 << 20])
            return {key: recipe[key] for key in ("env_id", "num_actions") if key in recipe}
    for place in places:
        if place.name.lower().replace("_", "") in _GAMES:
            game, actions = _GAMES[place.name.lower().replace("_", "")]
            return {"env_id": f"atari/{game}", "num_actions": actions}
    return {}


# --- reading


def read(
    path: Path,
    options: Options | None = None,
    *,
    checkpoints: int | None = None,
    max_steps: int | None = None,
    episodes_per_checkpoint: int | None = None,
    cache: Path | None = None,
) -> Episodes:
    """Episodes of a log, memory-mapped from an extraction that is made on first use.

    checkpoints: only the last so many. max_steps: about so many rows, taken evenly from the beginnings of the
    checkpoints in whole episodes, at least one from each. episodes_per_checkpoint: at most so many from each.
    cache: where extractions are kept; default: `.replaylab` beside the files, or ~/.cache/replaylab.
    """
    options = options or Options()
    if options.columns:
        raise DataError("a DQN-replay log has its own column names: --columns does not apply")
    for name, value in (("max_steps", max_steps), ("episodes_per_checkpoint", episodes_per_checkpoint)):
        if value is not None and value < 1:
            raise UsageError(f"{name} must be at least 1, not {value}")
    folder = _logs(path)
    if folder is None:
        raise DataError("no DQN-replay logs: no file is named like $store$_observation_ckpt.0.gz")
    numbers = _checkpoints(folder, checkpoints)
    files = [file_of(folder, name, number) for number in numbers for name in (*SIX, TRUNCATED)]
    stamps = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()]
    choice = [VERSION, stamps, max_steps, episodes_per_checkpoint]
    key = hashlib.sha256(json.dumps(choice).encode()).hexdigest()[:16]
    store = (cache or _cache(folder)) / key
    if not native.sniff(store):
        try:
            _extract(folder, numbers, max_steps, episodes_per_checkpoint, store)
        except OSError as error:
            raise DataError(f"cannot extract frames to {store.parent}: {error}") from error
    episodes = native.read(store, options)
    episodes.meta.update(_about(folder))
    return episodes


def _cache(folder: Path) -> Path:
    if os.access(folder, os.W_OK):
        return folder / ".replaylab"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "replaylab" / "dqn-replay"


@dataclass
class Part:
    """One checkpoint while it is unfolded."""

    number: int
    columns: tuple[np.ndarray, ...]  # actions, rewards, terminal, truncated
    stretches: list[tuple[int, int]]
    keep: np.ndarray  # (rows,) whether a row is kept; `suspect` ones only if their frames are not blank
    suspect: np.ndarray
    age: np.ndarray  # (rows,) rows since the episode's first, up to three
    cut: bool = False  # ends in the middle of a game


def _extract(folder: Path, numbers: list[int], max_steps: int | None, per: int | None, store: Path) -> None:
    """Unfold the files into a native store, several at a time, written aside and renamed at the end."""
    store.parent.mkdir(parents=True, exist_ok=True)
    parts: list[Part] = []
    seen: Counter[str] = Counter()
    rows = 0
    for done, number in enumerate(numbers):
        share = None if max_steps is None else max(1, (max_steps - rows) // (len(numbers) - done))
        parts.append(_plan(folder, number, share, per, seen))
        rows += int((parts[-1].keep & ~parts[-1].suspect).sum())
    bar = Progress("unpack", sum(part.stretches[-1][1] for part in parts), unit="frames")
    bar.say(f"unpacking {bar.total:,} frames of {folder}, once: they are kept in {store.parent}")
    with tempfile.TemporaryDirectory(prefix="part-", dir=store.parent) as aside:
        found = _unfold_all(folder, parts, Path(aside), bar)
        for part in parts:
            seen["begin in the middle of a game"] += any(part.keep[start] for start, _ in part.stretches)
            seen["end in the middle of a game"] += part.cut
        notes = [f"{count} of {len(parts)} checkpoints {what}" for what, count in seen.items() if count]
        rows = sum(len(columns["rewards"]) for columns in found)
        if max_steps is not None and rows < 0.9 * max_steps:
            notes.append(f"{max_steps:,} steps were asked for, the checkpoints gave {rows:,}")
            bar.say(f"note: {notes[-1]}")
        _join(Path(aside) / "store", found, notes)
        try:
            os.rename(Path(aside) / "store", store)
        except OSError:
            if not native.sniff(store):  # otherwise another process was faster
                raise


def _unfold_all(folder: Path, parts: list[Part], aside: Path, bar: Progress) -> list[dict[str, np.ndarray]]:
    """Every checkpoint, as many at a time as there are cores: inflating leaves the other threads alone."""
    lock, halt = threading.Lock(), threading.Event()

    def tell(frames: int) -> None:
        if halt.is_set():
            raise DataError("stopped")
        with lock:
            bar.update(bar.done + frames)

    with ThreadPoolExecutor(min(len(parts), os.cpu_count() or 1)) as pool:
        try:
            found = list(pool.map(lambda part: _unfold(folder, part, aside, tell), parts))
        except BaseException:  # a bad file, or Ctrl-C: the other threads need not go on
            halt.set()
            raise
    bar.close()
    return found


def _join(store: Path, found: list[dict[str, np.ndarray]], notes: list[str]) -> None:
    """The unfolded checkpoints as one native store."""
    found = [columns for columns in found if len(columns["rewards"])]
    if not found:
        raise DataError("the logs hold no rows")
    frames = [columns.pop("frames") for columns in found]
    columns: dict[str, Any] = {name: np.concatenate([part[name] for part in found]) for name in found[0]}
    ends = [np.flatnonzero(part["terminated"] | part["truncated"]) for part in found]
    last = np.flatnonzero(columns["terminated"] | columns["truncated"])
    episodes = Episodes(
        observations=np.broadcast_to(np.uint8(0), (len(columns["rewards"]), *FRAME)),  # `frames` stand in for it
        **columns,
        offsets=np.concatenate([[0], last + 1]).astype(np.int64),
        final_observations=np.concatenate([part[rows] for part, rows in zip(frames, ends, strict=True)]),
        final_known=np.zeros(len(last), bool),
        meta={"frame_stack": STACK, "reward_clipping": True, "notes": notes},
    )
    native.write(episodes, store, observations=frames)


def _plan(folder: Path, number: int, share: int | None, per: int | None, seen: Counter[str]) -> Part:
    """What is to be read of a checkpoint, as far as its small files tell."""
    actions, rewards, terminal, told = _columns(folder, number)
    stretches = _stretches(folder, number, len(actions), seen)
    start, stop = stretches[0]
    limit = _limit(terminal[start:stop], share, per)
    stretches = stretches if limit is None else [(start, start + limit)]
    keep, ends = np.zeros(len(actions), bool), terminal.copy()
    for start, stop in stretches:
        keep[start:stop] = ends[stop - 1] = True
    age = _age(ends)
    # only directly behind an end, and three rows at most: a black screen later in a game is no padding
    suspect = keep & (age < PADDING) & (actions == 0) & (rewards == 0) & ~terminal
    return Part(
        number, (actions, rewards, terminal, told), stretches, keep, suspect, np.minimum(age, PADDING).astype(np.uint8)
    )


def _unfold(folder: Path, part: Part, aside: Path, tell: Callable[[int], None]) -> dict[str, np.ndarray]:
    """The columns of a checkpoint without the padding; its frames are a file under `aside`, memory-mapped."""
    actions, rewards, terminal, told = part.columns
    keep, file = part.keep, aside / f"frames-{part.number}"
    with file.open("wb") as out:
        for start, frames in _frames(folder, part.number, len(actions), part.stretches[-1][1]):
            piece = slice(start, start + len(frames))
            for row in start + np.flatnonzero(part.suspect[piece]):
                keep[row] = frames[row - start].any() or (part.age[row] > 0 and keep[row - 1])
            out.write(frames[keep[piece]].data)
            tell(len(frames))
    rows = np.flatnonzero(keep)
    over, cut = terminal[rows], np.zeros(len(rows), bool)
    for _, stop in part.stretches:
        last = np.searchsorted(rows, stop)
        cut[last - 1 : last] = ~over[last - 1 : last]  # empty where nothing but padding is left
    part.cut = bool(cut.any())
    ends = over | cut
    truncated = cut | ends & (told[rows] | (_age(ends) + 1 == MAX_STEPS))
    return {
        "actions": actions[rows],
        "rewards": rewards[rows],
        "terminated": over & ~truncated,
        "truncated": truncated,
        "frames": np.memmap(file, np.uint8, "r", shape=(len(rows), *FRAME)) if len(rows) else np.zeros((0, *FRAME)),
    }


def _columns(folder: Path, number: int) -> tuple[np.ndarray, ...]:
    """Actions, rewards, terminal and, where we wrote it, truncated."""
    actions, rewards, terminal = (_array(file_of(folder, name, number), *STORES[name]) for name in list(STORES)[1:])
    told = np.zeros_like(terminal)
    if file_of(folder, TRUNCATED, number).is_file():
        told = _array(file_of(folder, TRUNCATED, number), "|u1", ())
    sizes = {len(column) for column in (actions, rewards, terminal, told)}
    if len(sizes) > 1:
        raise DataError(f"the files of ckpt.{number} have {' and '.join(map(str, sorted(sizes)))} rows")
    for name, bad in (("action", actions < 0), ("reward", ~np.isfinite(rewards)), ("terminal", terminal > 1)):
        if bad.any():
            raise DataError(f"$store$_{name}_ckpt.{number}.gz: row {np.argmax(bad)} holds no {name}")
    return actions, rewards, terminal.astype(bool), told.astype(bool)


def _stretches(folder: Path, number: int, rows: int, seen: Counter[str]) -> list[tuple[int, int]]:
    """Runs of rows that follow one another in time.

    The files are images of a ring. `add_count` says how far it was written: with fewer adds than rows, what lies
    behind is unused; with more, the cursor `add_count % rows` separates the newest rows from those of the lap before,
    which make a stretch of their own. The published logs were written one row before the ring was full, so each has
    one stale row at its end; a stretch that short is left out. `invalid_range`, the rows around the cursor that a
    sampler must avoid, follows from the cursor: it must be there and readable, but it tells nothing new.
    """
    count = _array(file_of(folder, "add_count", number))
    _array(file_of(folder, "invalid_range", number))
    if count.size != 1 or count.dtype.kind not in "iu" or int(count.reshape(())) < 1:
        raise DataError(f"add_count_ckpt.{number}.gz does not hold a positive number")
    added = int(count.reshape(()))
    if added <= rows:
        return [(0, added)]
    cursor = added % rows
    found = [(a, b) for a, b in ((0, cursor), (cursor, rows)) if b - a > PADDING]
    if not found:
        raise DataError(f"ckpt.{number} has only {rows} rows")
    if len(found) == 2:
        seen["hold rows of an earlier lap of the ring, which are read as a part of their own"] += 1
    return found


def _limit(terminal: np.ndarray, share: int | None, per: int | None) -> int | None:
    """How many rows to read so that whole episodes fill the share; None: read everything."""
    ends = np.flatnonzero(terminal)
    if len(ends) == 0:
        return share if share is not None and share < len(terminal) else None
    if share is None and per is None:
        return None
    steps = np.cumsum(np.diff(ends + 1, prepend=0) - PADDING)
    count = len(ends) if share is None else max(1, int((steps <= share).sum()))
    return None if count == len(ends) and per is None else int(ends[min(count, per or count) - 1]) + 1


def _age(ends: np.ndarray) -> np.ndarray:
    """(rows,) rows since the episode's first."""
    index = np.arange(len(ends))
    first = np.where(np.concatenate([[True], ends[:-1]]), index, 0)
    return index - np.maximum.accumulate(first)


# --- one file


@contextlib.contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Whatever is wrong with a file is said with its name."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{file.name}: {error}") from error
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise DataError(f"{file.name} is damaged or not a gzipped array: {error}") from error


def _header(stream: Any) -> tuple[tuple[int, ...], np.dtype]:
    version = np.lib.format.read_magic(stream)
    header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
    if header is None:
        raise DataError(f"is written in version {version} of the .npy format")
    shape, fortran, dtype = header(stream)
    if dtype.hasobject or (fortran and len(shape) > 1) or any(type(n) is not int or n < 0 for n in shape):
        raise DataError(f"holds {dtype} of shape {shape}, which Dopamine does not write")
    return shape, dtype


def _array(file: Path, dtype: str | None = None, shape: tuple[int, ...] = ()) -> np.ndarray:
    """A whole array of (rows, *shape), or of a few numbers of any kind. What the header declares is checked before
    anything of that size is made."""
    with _naming(file), gzip.open(file) as stream:
        found, kind = _header(stream)
        if dtype is None and math.prod(found) > 1024:
            raise DataError(f"declares {math.prod(found)} numbers, expected a few")
        if dtype and (kind.str != dtype or len(found) < 1 or found[1:] != shape or not 1 <= found[0] <= MAX_ROWS):
            raise DataError(f"declares {kind.str} of shape {found}, expected {dtype} of (rows, ...)")
        size = math.prod(found) * kind.itemsize
        data = stream.read(size)
        if len(data) != size or stream.read(1):
            raise DataError("has not the size its header declares")
    return np.frombuffer(data, kind).reshape(found)


def _frames(folder: Path, number: int, rows: int, stop: int) -> Iterator[tuple[int, np.ndarray]]:
    """(first row, frames) in pieces, up to row `stop`."""
    file = file_of(folder, "$store$_observation", number)
    with _naming(file), gzip.open(file) as stream:
        shape, dtype = _header(stream)
        if dtype != np.uint8 or shape != (rows, *FRAME):
            raise DataError(f"holds {dtype.str} of shape {shape}, expected |u1 of {(rows, *FRAME)} as its siblings say")
        for start in range(0, stop, PIECE):
            count = min(PIECE, stop - start)
            data = stream.read(count * math.prod(FRAME))
            if len(data) != count * math.prod(FRAME):
                raise DataError(f"ends in row {start + len(data) // math.prod(FRAME)} of {rows}")
            yield start, np.frombuffer(data, np.uint8).reshape(count, *FRAME)


# --- writing


def write(episodes: Episodes, path: Path) -> None:
    """`path/1/replay_logs`. Rewards are clipped and what followed an episode's last row is lost, as in every log."""
    if episodes.observations.dtype != np.uint8 or episodes.observations.shape[1:] != FRAME or not episodes.discrete:
        raise DataError("DQN-replay logs hold frames of 84 x 84 bytes and discrete actions; this is other data")
    log = Log(path / "1" / "replay_logs", rows_per_file=1_000_000)
    for first, stop in zip(episodes.offsets[:-1], episodes.offsets[1:], strict=True):
        rows = slice(first, stop)
        log.add(
            episodes.observations[rows], episodes.actions[rows], episodes.rewards[rows], episodes.truncated[stop - 1]
        )
    log.close()
    about = {key: episodes.meta[key] for key in ("env_id", "num_actions", "recipe") if key in episodes.meta}
    (path / "recipe.json").write_text(json.dumps(about, indent=1))
