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
from replaylab.data.formats._h5 import Writer, is_hdf5, open_file
from replaylab.data.formats.common import Options, env_from_name, storage_names, write_index


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
    extras = storage_names(episodes.extras, "replaylab/extras", keep="infos/")
    strings = episodes.meta.get("metadata", {})
    strings = {f"metadata/{k}": str(v).encode() for k, v in strings.items()} if isinstance(strings, dict) else {}
    where = storage_names({**strings, **episodes.attachments}, "replaylab/attachments", keep="metadata/")
    attachments = {name: where[name] for name in episodes.attachments}
    index = write_index(episodes, extras, attachments)
    with Writer(path) as writer:
        for name in ("observations", "actions", "rewards"):
            writer.put(name, getattr(episodes, name))
        writer.put("terminals", episodes.terminated)
        writer.put("timeouts", episodes.truncated)
        if episodes.final_known.all():  # else leave them out, as D4RL v0 does, rather than state stand-ins as facts
            numbers = np.arange(len(episodes))
            following = lambda part: episodes.next_observations(numbers[part])  # noqa: E731
            writer.put("next_observations", episodes.observations, rows=following)
        for name, at in extras.items():
            writer.put(at, episodes.extras[name])
        for name, at in attachments.items():
            writer.put(at, episodes.attachments[name])
        for name in strings.keys() - attachments.keys():  # for other readers; ours takes them from meta
            writer.put(where[name], np.array(strings[name] or b"-"))
        writer.put("replaylab/final_observations", episodes.final_observations)
        writer.put("replaylab/final_known", episodes.final_known)
        writer.put(hdf5.INDEX, index)
