"""D4RL's HDF5: observations, actions, rewards, terminals, and as the version has it timeouts, next_observations,
infos/* and metadata/*.

v0 has no next_observations (and some files no timeouts): final observations are then unknown, and said to be. v1 has
2-D rewards and float flags. v2 stores the true next observation at ends as well, so final observations are known.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from replaylab.data.episodes import Episodes
from replaylab.data.formats import hdf5
from replaylab.data.formats._h5 import is_hdf5, open_file, write_array
from replaylab.data.formats.common import Options, env_from_name, storage_names, write_index
from replaylab.errors import require


def sniff(path: Path) -> bool:
    if not is_hdf5(path):
        return False
    try:
        with open_file(path) as file:
            return "observations" in file and "terminals" in file
    except (OSError, RuntimeError, KeyError, ValueError):  # damaged: the plain hdf5 reader says how
        return False


def read(path: Path, options: Options) -> Episodes:
    episodes = hdf5.read(path, options)
    return replace(episodes, meta=env_from_name(path.stem) | episodes.meta)


def write(episodes: Episodes, path: Path) -> None:
    """D4RL's layout for everybody; final observations, names and meta in a group `replaylab` of our own."""
    h5py = require("h5py", "writing HDF5")
    extras = storage_names(episodes.extras, "replaylab/extras", keep="infos/")
    strings = episodes.meta.get("metadata", {})
    strings = {f"metadata/{k}": str(v).encode() for k, v in strings.items()} if isinstance(strings, dict) else {}
    where = storage_names({**strings, **episodes.attachments}, "replaylab/attachments", keep="metadata/")
    attachments = {name: where[name] for name in episodes.attachments}
    names = {"terminated": "terminals", "truncated": "timeouts"}
    with h5py.File(path, "w") as file:
        for name in ("observations", "actions", "rewards", "terminated", "truncated"):
            write_array(file, names.get(name, name), getattr(episodes, name))
        if episodes.final_known.all():  # else leave them out, as D4RL v0 does, rather than state stand-ins as facts
            _write_next(file, episodes)
        for name, at in extras.items():
            write_array(file, at, episodes.extras[name])
        for name, at in attachments.items():
            write_array(file, at, episodes.attachments[name])
        for name in strings.keys() - attachments.keys():  # for other readers; ours takes them from meta
            file[where[name]] = np.bytes_(strings[name])
        write_array(file, "replaylab/final_observations", episodes.final_observations)
        write_array(file, "replaylab/final_known", episodes.final_known)
        write_array(file, hdf5.INDEX, write_index(episodes, extras, attachments))


def _write_next(file, episodes: Episodes) -> None:
    array = episodes.observations
    dataset = file.create_dataset(
        "next_observations", array.shape, array.dtype, compression="gzip", compression_opts=1, shuffle=True
    )
    step = max(1, (1 << 24) // array[:1].nbytes)
    for start in range(0, len(array), step):
        rows = np.arange(start, min(start + step, len(array)))
        dataset[start : start + step] = episodes.next_observations(rows)
