"""Minari dataset folders, with h5py alone: data/metadata.json and data/main_data.hdf5, one group an episode.

Minari keeps one observation more than actions, so final observations are exact. What its layout has no place for
(unknown final observations, attachments, notes) lies beside it in data/replaylab.npz, which Minari ignores.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from replaylab.data.ends import as_actions, as_flags, as_rewards
from replaylab.data.episodes import MAX_NOTES, Episodes
from replaylab.data.formats._h5 import Writer, child, datasets, open_file
from replaylab.data.formats.common import (
    Options,
    check_size,
    dump_json,
    load_json,
    read_index,
    read_json,
    storage_names,
    write_index,
)
from replaylab.data.formats.npz import INDEX, beside, read_arrays, take, write_arrays
from replaylab.errors import DataError

META, MAIN, OURS = "metadata.json", "main_data.hdf5", "replaylab.npz"
VERSION = "0.5.0"  # of Minari's layout; later versions read it
ABOUT_DATA = {"total_episodes", "total_steps", "dataset_size", "data_format", "jpeg_encoding", "minari_version"}
SPACES = {"observation_space", "action_space"}
PIECE = 4 << 20  # bytes of one episode that may be held twice
MUJOCO = ("hopper", "halfcheetah", "walker2d", "ant")


def sniff(path: Path) -> bool:
    return any((_data(path) / name).is_file() for name in (MAIN, META))


def _data(path: Path) -> Path:
    """The folder with the files, given that folder, the dataset's, or the HDF5 file itself."""
    if path.name == MAIN:
        return path.parent
    return path / "data" if (path / "data").is_dir() else path


def read(path: Path, options: Options) -> Episodes:
    data, notes = _data(path), []
    about = _read_about(data)
    if options.columns.keys() - {"observations"}:
        raise DataError("a Minari dataset names its own columns: only --columns observations=... applies")
    with open_file(data / MAIN) as file:
        names = _names(file, about)
        columns = _layout(_group(file, names[0]), options)
        _check_space(columns["observations"], _json_in(about, "observation_space"))
        lengths = [_length(_group(file, name)) for name in names]  # groups are not kept open: thousands cost memory
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        sizes = sum(column.row_bytes for column in columns.values())
        check_size(MAIN, int(offsets[-1]) * sizes, (data / MAIN).stat().st_size)
        for column in columns.values():
            column.allocate(int(offsets[-1]), len(names))
        for e, name in enumerate(names):
            group = _group(file, name)
            for column in columns.values():
                column.fill(group, e, int(offsets[e]), lengths[e])
    for name in [name for name, column in columns.items() if column.odd]:
        notes.append(f"{name} differs between episodes ({columns.pop(name).odd}) and is left out")
    episodes = _episodes({name: c.values for name, c in columns.items()}, columns["observations"].final, offsets, notes)
    episodes = replace(episodes, meta=_meta(about) | episodes.meta)
    if (data / OURS).is_file():
        episodes = _with_ours(episodes, read_arrays(data / OURS)[0])
    return episodes.split(options.max_episode_steps, options.split)


# --- the HDF5 file


@dataclass
class _Column:
    """One array for all episodes, allocated once and filled straight from the file, episode by episode."""

    paths: list[str]  # in an episode's group; several are joined side by side
    dtypes: list[np.dtype]
    shapes: list[tuple[int, ...]]  # of a row
    entries: tuple[int, ...]  # how many more than rewards there may be
    optional: bool = False
    odd: str = ""  # what was wrong with an optional column

    @property
    def row_bytes(self) -> int:
        return sum(d.itemsize * math.prod(s) for d, s in zip(self.dtypes, self.shapes, strict=True))

    def allocate(self, rows: int, episodes: int) -> None:
        dtype = np.result_type(*self.dtypes).newbyteorder("=")
        shape = self.shapes[0] if len(self.paths) == 1 else (sum(map(math.prod, self.shapes)),)
        self.values = np.empty((rows, *shape), dtype)
        self.final = np.empty((episodes, *shape), dtype)  # the entry after the last row, where there is one

    def fill(self, group: Any, episode: int, start: int, length: int) -> None:
        rows, at = slice(start, start + length), 0
        for path, dtype, shape in zip(self.paths, self.dtypes, self.shapes, strict=True):
            node = child(group, path)
            found: tuple[int, ...] = node.shape if node is not None else ()
            fits = found and found[0] - length in self.entries and found[1:] == shape and node.dtype == dtype
            if not fits:
                self.odd = f"{group.name}/{path} " + (f"is {node.dtype} {found}" if found else "is missing")
                if not self.optional:
                    raise DataError(f"{self.odd} beside {length} rewards")
                return
            alone = len(self.paths) == 1
            if alone and length * dtype.itemsize * math.prod(shape) > PIECE:  # straight to its place
                node.read_direct(self.values, np.s_[:length], rows)
                self.final[episode] = node[length] if found[0] > length else 0
                return
            part = ... if alone else np.s_[..., at : at + math.prod(shape)]
            values = node[()] if alone else node[()].reshape(found[0], -1)
            self.values[rows][part] = values[:length]
            if found[0] > length:
                self.final[episode, ...][part] = values[length]
            at += math.prod(shape)


def _layout(group: Any, options: Options) -> dict[str, _Column]:
    """The columns there are, judged by the first episode."""
    nodes, rows = datasets(group), _length(group)
    seen = [name for name in nodes if name == "observations" or name.startswith("observations/")]
    parts = _observation_parts(seen, options)
    want: dict[str, tuple[list[str], tuple[int, ...]]] = {"observations": (parts, (1,))}
    want |= {name: ([name], (0,)) for name in ("actions", "rewards", "terminations", "truncations")}
    want |= {f"observation/{n.split('/', 1)[1]}": ([n], (1,)) for n in seen if n not in parts}
    want |= {name: ([name], (0, 1)) for name in nodes if name.startswith("infos/")}
    columns = {}
    for name, (paths, entries) in want.items():
        found = [take(nodes, path) for path in paths]
        optional = "/" in name
        if any(not node.shape or node.dtype.kind not in "fiub" for node in found):
            if optional:
                continue
            raise DataError(f"{name} is stored as {found[0].dtype}, not as plain arrays (Minari: jpeg_encoding=False)")
        if optional and found[0].shape[0] - rows not in entries:
            continue
        columns[name] = _Column(paths, [n.dtype for n in found], [n.shape[1:] for n in found], entries, optional)
    return columns


def _check_space(column: _Column, space: Mapping[str, Any]) -> None:
    """JPEG images are stored as rows of bytes; they must not be taken for observations."""
    if space.get("type") == "Box" and space.get("shape") != list(column.shapes[0]):
        raise DataError(
            f"observations has rows of shape {column.shapes[0]}, {META} says {space.get('shape')!s:.40} "
            "(JPEG images are not read: write them with Minari's jpeg_encoding=False)"
        )


def _observation_parts(seen: list[str], options: Options) -> list[str]:
    """Which parts of a Dict observation are the observation: those told, else `observation` and `desired_goal`."""
    if seen == ["observations"]:
        return seen
    wanted = options.columns.get("observations") or ["observation", "desired_goal"]
    parts = [n for w in wanted for n in seen if n == f"observations/{w}" or n.startswith(f"observations/{w}/")]
    if not parts or not any(n.split("/")[1] == wanted[0] for n in parts):
        held = ", ".join(n.removeprefix("observations/") for n in seen) or "nothing"
        raise DataError(f"observations holds {held}: say which to join with --columns observations=NAME,NAME")
    return parts


def _names(file: Any, about: Mapping[str, Any]) -> list[str]:
    names = {int(m[1]): name for name in file if (m := re.fullmatch(r"episode_(\d{1,9})", name))}
    if not names or sorted(names) != list(range(len(names))):
        raise DataError(f"{MAIN} does not hold episode_0, episode_1, ...")
    if about.get("total_episodes", len(names)) != len(names):
        raise DataError(f"{META} counts {about['total_episodes']!s:.20} episodes, {MAIN} holds {len(names)}")
    return [names[i] for i in range(len(names))]


def _group(file: Any, name: str) -> Any:
    group = child(file, name)
    if not hasattr(group, "keys"):
        raise DataError(f"{MAIN}: {name} is not a group")
    return group


def _length(group: Any) -> int:
    rewards = child(group, "rewards")
    if rewards is None or len(rewards.shape) != 1 or rewards.shape[0] < 1:
        raise DataError(f"{group.name}/rewards is missing or has the wrong shape")
    return rewards.shape[0]


# --- columns -> Episodes


def _episodes(columns: dict[str, np.ndarray], final: np.ndarray, offsets: np.ndarray, notes: list[str]) -> Episodes:
    rewards = as_rewards(columns.pop("rewards"))
    terminated = as_flags("terminations", columns.pop("terminations"), len(rewards))
    truncated = as_flags("truncations", columns.pop("truncations"), len(rewards))
    ends = np.zeros(len(rewards), bool)
    ends[offsets[1:] - 1] = True
    truncated |= ends & ~terminated
    observations = columns.pop("observations")
    if observations.ndim == 1:
        observations, final = observations[:, None], final[:, None]
    episodes = Episodes(
        observations=observations,
        actions=as_actions(columns.pop("actions"), len(rewards), notes),
        rewards=rewards,
        terminated=terminated & ends,
        truncated=truncated & ends,
        offsets=offsets,
        final_observations=final,
        final_known=np.ones(len(offsets) - 1, bool),
        extras=columns,
        meta={"notes": notes},
    )
    if inner := int(((terminated | truncated) & ~ends).sum()):
        notes.append(f"{inner} ends lie before the last row of their episode, which is split there")
        episodes = episodes.cut(terminated, truncated)
    return episodes


def _with_ours(episodes: Episodes, ours: Mapping[str, np.ndarray]) -> Episodes:
    """What `write` put beside Minari's files."""
    known, more = take(ours, "final_known"), beside(ours, read_index(take(ours, INDEX)))
    if len(known) != episodes.num_episodes or any(len(e) != len(episodes) for e in more["extras"].values()):
        note = f"{OURS} is older than the episodes beside it and is not used"
        return replace(episodes, meta=episodes.meta | {"notes": [*episodes.meta["notes"], note][:MAX_NOTES]})
    return replace(episodes, final_known=known, **more | {"extras": more["extras"] | episodes.extras})


# --- metadata.json


def _read_about(data: Path) -> dict[str, Any]:
    if not (data / META).is_file():
        raise DataError(f"{META} is missing (datasets of Minari before 0.5 are not read)")
    about = read_json(data / META)
    if about.get("data_format", "hdf5") != "hdf5":
        raise DataError(f"{META}: data_format {about['data_format']!s:.20} is not read, only hdf5")
    return about


def _meta(about: Mapping[str, Any]) -> dict[str, Any]:
    """What metadata.json says about the data, as our meta; what we have no name for is kept under `minari`."""
    meta: dict[str, Any] = {k: about[k] for k in ("dataset_id", "description", "author") if k in about}
    if licence := about.get("license", about.get("licence")):
        meta["licence"] = licence
    space = _json_in(about, "action_space")
    if space.get("type") == "Box" and np.isfinite(np.asarray([space.get("low"), space.get("high")], float)).all():
        meta |= {f"action_{end}": np.ravel(space[end]).tolist() for end in ("low", "high")}
    elif space.get("type") == "Discrete":
        meta["num_actions"] = space.get("n", 0) + space.get("start", 0)
    namespace = str(about.get("dataset_id", "")).split("/")[0].lower()
    env = _json_in(about, "env_spec").get("id") or (f"d4rl/{namespace}" if namespace in MUJOCO else None)
    if env:
        meta["env_id"] = env
    rest = {k: v for k, v in about.items() if k not in ABOUT_DATA | SPACES | meta.keys()}
    return meta | ({"minari": rest} if rest else {})


def _json_in(about: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Minari stores spaces and specs as JSON inside JSON."""
    value = about.get(key, "{}")
    return load_json(f"{META}: {key}", value if isinstance(value, str) else dump_json(value))


# --- writing


def write(episodes: Episodes, path: Path) -> None:
    data = path / "data"
    data.mkdir(parents=True)
    where = storage_names(episodes.extras, "extras", keep="infos/")
    infos = {name: episodes.extras[name] for name in where if where[name] == name}
    apart = {name: at for name, at in where.items() if name not in infos}
    columns = {"actions": episodes.actions, "rewards": episodes.rewards, **infos}
    columns |= {"terminations": episodes.terminated, "truncations": episodes.truncated}
    attachments = storage_names(episodes.attachments, "attachments")
    index = write_index(episodes, apart, attachments)  # first, as it refuses what JSON cannot store
    with Writer(data / MAIN) as writer:
        for e in range(episodes.num_episodes):
            rows = slice(episodes.offsets[e], episodes.offsets[e + 1])
            seen = np.concatenate([episodes.observations[rows], episodes.final_observations[e : e + 1]])
            writer.put(f"episode_{e}/observations", seen, compress=False)
            for name, column in columns.items():
                writer.put(f"episode_{e}/{name}", column[rows], compress=False)
            writer.file[f"episode_{e}"].attrs.update({"id": e, "total_steps": len(seen) - 1})
    arrays = {at: episodes.extras[name] for name, at in apart.items()}
    arrays |= {at: episodes.attachments[name] for name, at in attachments.items()}
    write_arrays(data / OURS, {**arrays, "final_known": episodes.final_known, INDEX: index})
    (data / META).write_text(dump_json(_about(episodes, path.name)))


def _about(episodes: Episodes, name: str) -> dict[str, Any]:
    meta = episodes.meta
    told = meta.get("dataset_id")
    ours = told if isinstance(told, str) and re.fullmatch(r"([-\w]{2,}/)*[-\w]+-v\d+", told) else None
    plain = re.sub(r"[^-\w]", "_", re.sub(r"-v\d+$", "", name))
    about = dict(meta["minari"]) if isinstance(meta.get("minari"), dict) else {}
    about |= {k: meta[k] for k in ("description", "author") if k in meta}
    if isinstance(about.get("author"), str):
        about["author"] = [about["author"]]  # Minari makes a set of it
    return about | {
        "dataset_id": ours or f"{plain}-v{(re.findall(r'-v([0-9]+)$', name) or [0])[0]}",
        "total_episodes": episodes.num_episodes,
        "total_steps": len(episodes),
        "data_format": "hdf5",
        "jpeg_encoding": False,
        "observation_space": dump_json(_box(episodes.observations)),
        "action_space": dump_json(_action_space(episodes)),
        "minari_version": VERSION,
    }


def _action_space(episodes: Episodes) -> dict[str, Any]:
    if episodes.discrete:
        return {"type": "Discrete", "dtype": "int64", "start": 0, "n": episodes.num_actions}
    low, high = episodes.action_bounds
    known = np.isfinite([low, high]).all()
    return _box(episodes.actions) | ({"low": low.tolist(), "high": high.tolist()} if known else {})


def _box(rows: np.ndarray) -> dict[str, Any]:
    shape, dtype = rows.shape[1:], rows.dtype
    ends = (-np.inf, np.inf) if dtype.kind == "f" else (0, 1) if dtype.kind == "b" else None
    low, high = ends or (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
    box = {"type": "Box", "dtype": str(dtype), "shape": list(shape)}
    return box | {"low": np.full(shape, low).tolist(), "high": np.full(shape, high).tolist()}
