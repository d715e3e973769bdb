"""What the formats share: column names -> roles -> Episodes, limits on sizes, and the index our own files carry."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from replaylab.data.ends import as_flags, as_numbers, id_changes
from replaylab.data.episodes import Episodes, from_rows
from replaylab.errors import DataError, UsageError, nearest

# role -> names it goes by in files; the first that a file has is taken, in any mixture of upper and lower case
ROLES: dict[str, tuple[str, ...]] = {
    "observations": ("observations", "observation", "obs", "states", "state"),
    "actions": ("actions", "action", "acts", "act"),
    "rewards": ("rewards", "reward", "rews", "rew"),
    "next_observations": ("next_observations", "next_observation", "next_obs", "next_states", "next_state"),
    "terminated": ("terminated", "terminals", "terminal", "terminations", "termination"),
    "done": ("dones", "done"),
    "truncated": ("truncated", "timeouts", "timeout", "truncations", "truncation"),
    "episode": ("episode", "episode_id", "episode_ids", "episode_index", "trajectory_id"),
}

GIB = 1 << 30
MAX_JSON = 64 << 20
SCHEMA = 1  # of the index in our own npz, d4rl, minari and native files


@dataclass(frozen=True)
class Options:
    """What the caller of `load` asked for."""

    columns: Mapping[str, Sequence[str]] = field(default_factory=dict)  # role -> column names
    max_episode_steps: int | None = None
    split: str = "flags"


def parse_columns(words: Iterable[str]) -> dict[str, list[str]]:
    """`["observations=x1,x2", "rewards=r"]`, as on the command line -> {"observations": ["x1", "x2"], ...}."""
    columns = {}
    for word in words:
        role, equals, names = word.partition("=")
        if not equals:
            raise UsageError(f"--columns takes ROLE=NAME,NAME, not '{word}'")
        if role in columns:
            raise UsageError(f"--columns names {role} twice: give all of them at once, as {role}=NAME,NAME")
        columns[role] = [name for name in names.split(",") if name]
    return check_columns(columns)


def check_columns(columns: Mapping[str, str | Sequence[str]] | None) -> dict[str, list[str]]:
    """Roles that exist, each with a list of names. An empty list says: the file has none."""
    columns = {} if columns is None else columns
    if not isinstance(columns, Mapping) or any(
        isinstance(names, Mapping) or not isinstance(names, Iterable) for names in columns.values()
    ):
        raise UsageError("columns takes names, such as {observations: [x1, x2], rewards: r}")
    for role in columns:
        if role not in ROLES:
            raise UsageError(f"no column role '{role}'{nearest(str(role), ROLES)}")
    return {role: [names] if isinstance(names, str) else list(names) for role, names in columns.items()}


# --- sizes: nothing is allocated before these agree with what lies on the disk


def first_bytes(path: Path, count: int) -> bytes:
    """Nothing for what is no file."""
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        return file.read(count)


def check_size(what: str, needed: int, stored: int) -> None:
    """Refuse what would unfold into far more than the file could honestly hold."""
    if needed > 64 * GIB:
        raise DataError(f"{what} would take {needed / GIB:.0f} GiB of memory; at most 64 GiB are read")
    if needed > GIB and needed > 1000 * stored:
        raise DataError(f"{what} claims {needed / GIB:.1f} GiB, but the file has only {stored} bytes")


# --- names -> roles -> Episodes


def choose(names: Sequence[str], columns: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Which columns play which role: as told, else by the usual names, else numbered ones (obs_0, obs_1, ...)."""
    chosen = {}
    for role, aliases in ROLES.items():
        if role in columns:
            for name in columns[role]:
                if name not in names:
                    raise DataError(f"{role}: no column '{name}'{nearest(name, names)}")
            found = list(columns[role])
        else:
            found = _guess(names, aliases)
        if found:
            chosen[role] = found
    for role in ("observations", "actions", "rewards"):
        if role not in chosen:
            raise DataError(f"no {role} found: {_remedy(role, names)}")
    return chosen


def _remedy(role: str, names: Sequence[str]) -> str:
    """What to do where a role has no column. The names come last: a long line is cut."""
    inside = [name for name in names if "/" in name and name.rpartition("/")[2].lower() in ROLES["actions"]]
    if len(inside) > 1:
        return (
            f"each array holds one episode, as {inside[0]}: join them to one array a column, and add ids as `episode`"
        )
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return f"name them with --columns {role}=NAME; it holds {', '.join(sorted(names)[:20])}{more}"


def _guess(names: Sequence[str], aliases: tuple[str, ...]) -> list[str]:
    lower = {name.lower(): name for name in reversed(names)}
    for alias in aliases:
        if alias in lower:
            return [lower[alias]]
    for alias in aliases:
        numbered = [(int(m[1]), n) for n in names if (m := re.fullmatch(rf"{alias}[_.\-\[]?(\d{{1,6}})\]?", n.lower()))]
        if numbered:
            return [name for _, name in sorted(numbered)]
    return []


def assemble(
    arrays: Mapping[str, np.ndarray], options: Options, meta: dict[str, Any], unread: Mapping[str, str] | None = None
) -> Episodes:
    """Named arrays -> Episodes. Columns without a role are kept: one value a row in extras, the rest in attachments.

    `unread` is what else the file has, and what it holds: nothing that a role could need.
    """
    unread = unread or {}
    chosen = choose([*arrays, *unread], options.columns)
    for role, names in chosen.items():
        for name in names:
            if name in unread:
                raise DataError(f"{role}: '{name}' holds {unread[name]}; only arrays of numbers are read")
    roles = {role: _stack(role, [arrays[name] for name in names]) for role, names in chosen.items()}
    used = {name for names in chosen.values() for name in names}
    rows = len(roles["rewards"]) if roles["rewards"].ndim else 0
    extras, attachments, notes = {}, {}, list(meta.get("notes", []))
    notes += [f"{name} holds {what} and is left out" for name, what in unread.items()]
    for name, array in arrays.items():
        if name in used or array.size == 0:
            continue
        if array.dtype.kind not in "fiub" or array.dtype.itemsize > 8:
            notes.append(f"{name} holds {array.dtype}, not numbers, and is left out")
        elif array.ndim and len(array) == rows and not name.startswith("metadata/"):
            extras[name] = as_numbers(name, array, rows)
        else:
            attachments[name] = array.astype(array.dtype.newbyteorder("="), copy=False)
    last = id_changes(roles["episode"], rows, []) if rows and "episode" in roles else None
    if last is not None:
        _end_once(roles, last, notes)
    terminated, truncated = _flags(roles, rows, notes)
    if last is not None and (early := as_flags("terminated", terminated, rows) & ~last).any():
        notes.append(
            "terminated rows before the last row of their episode id, each of which ends an episode: "
            f"{early.sum()}; if an id is one episode, mark only its last row"
        )
    return from_rows(
        roles["observations"],
        roles["actions"],
        roles["rewards"],
        terminated,
        truncated,
        roles.get("next_observations"),
        episode=roles.get("episode"),
        max_episode_steps=options.max_episode_steps,
        split=options.split,
        extras=extras,
        attachments=attachments,
        meta=meta | {"notes": notes},
    )


def _stack(role: str, columns: list[np.ndarray]) -> np.ndarray:
    if len(columns) == 1:
        return columns[0]
    if len({len(c) if c.ndim else -1 for c in columns}) > 1:
        raise DataError(f"{role}: its columns have different lengths")
    return np.concatenate([c.reshape(len(c), -1) for c in columns], axis=1)


def _end_once(roles: dict[str, np.ndarray], last: np.ndarray, notes: list[str]) -> None:
    """A flag that never changes within an id tells how the episode ended: leave it on the id's last row alone."""
    for role in ("terminated", "done", "truncated"):
        flags = as_flags(role, roles.get(role), len(last))
        changes = (flags[1:] != flags[:-1]) & ~last[:-1]
        if (flags & ~last).any() and not changes.any():
            roles[role] = flags & last
            notes.append(f"'{role}' is the same on all rows of an episode id: it is taken to mark its last row")


def _flags(roles: Mapping[str, np.ndarray], rows: int, notes: list[str]) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Terminated and truncated. `done` alone means either, so it is read in the light of the other two."""
    terminated, done, truncated = (roles.get(role) for role in ("terminated", "done", "truncated"))
    if done is None:
        return terminated, truncated
    done = as_flags("done", done, rows)
    if terminated is not None:
        if truncated is None and (ended := done & ~as_flags("terminated", terminated, rows)).any():
            truncated = ended
        return terminated, truncated
    if truncated is not None:
        return done & ~as_flags("truncated", truncated, rows), truncated
    notes.append("'done' does not tell an end from a time limit: all are taken as terminated, time limits among them")
    return done, np.zeros(rows, bool)


# --- what our own files carry beside the columns: names of extras and attachments, and meta

COLUMNS = ("observations", "actions", "rewards", "terminated", "truncated")
EPISODE_COLUMNS = ("offsets", "final_observations", "final_known")


def write_index(episodes: Episodes, extras: Mapping[str, str], attachments: Mapping[str, str]) -> np.ndarray:
    """JSON as bytes: where each extra and attachment is stored, and meta."""
    index = {"schema": SCHEMA, "extras": extras, "attachments": attachments, "meta": episodes.meta}
    return np.frombuffer(dump_json(index).encode(), np.uint8)


def read_index(array: np.ndarray) -> dict[str, Any]:
    if array.dtype != np.uint8 or array.ndim != 1:
        raise DataError("replaylab index is not text")
    return check_index(load_json("replaylab index", array.tobytes()))


def check_index(index: dict[str, Any]) -> dict[str, Any]:
    if index.get("schema") != SCHEMA:
        raise DataError(f"replaylab index has no schema this version reads (it reads {SCHEMA})")
    for key in ("extras", "attachments", "meta"):
        if not isinstance(index.get(key), dict):
            raise DataError(f"replaylab index has no '{key}'")
    return index


def storage_names(names: Iterable[str], prefix: str, keep: str = "") -> dict[str, str]:
    """Where to store each name: under `prefix`, or at its own path where that begins with `keep`.

    A name that is no plain path, or that is a folder of another, is stored under a number.
    """
    names = list(names)
    where = {}
    for i, name in enumerate(names):
        plain = re.fullmatch(r"[\w\-]+(/[\w\-]+)*", name, re.ASCII) and not any(n.startswith(name + "/") for n in names)
        if plain and keep and name.startswith(keep):
            where[name] = name
        else:
            where[name] = f"{prefix}/{name if plain else f'#{i}'}"
    return where


def dump_json(value: Any, indent: int | None = None) -> str:
    def plain(x: Any) -> Any:
        if isinstance(x, np.ndarray | np.generic):
            return x.tolist()
        if isinstance(x, Path):
            return str(x)
        raise TypeError(f"meta holds a {type(x).__name__}, which JSON cannot store")

    return json.dumps(value, default=plain, indent=indent)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object in a file of a sane size."""
    if path.stat().st_size > MAX_JSON:
        raise DataError(f"{path.name} is larger than {MAX_JSON >> 20} MiB")
    return load_json(path.name, path.read_bytes())


def load_json(what: str, data: bytes | str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{what} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"{what} is not a JSON object")
    return value


def env_from_name(stem: str) -> dict[str, str]:
    """{"env_id": ...} where a D4RL file name says it: hopper_medium-v2, antmaze-umaze-v2, Ant_maze_big-maze_..."""
    name = stem.lower()
    if match := re.match(r"(hopper|halfcheetah|walker2d|ant)[-_](random|medium|expert|full)", name):
        return {"env_id": f"d4rl/{match[1]}"}
    if match := re.match(r"antmaze[-_](umaze|medium|large)|ant_maze_(u|big|hardest)-maze", name):
        size = match[1] or {"u": "umaze", "big": "medium", "hardest": "large"}[match[2]]
        return {"env_id": f"d4rl/antmaze-{size}"}
    return {}
