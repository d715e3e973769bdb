"""Flat HDF5 with the usual column names. Row-aligned arrays in groups (infos/qpos) become extras."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from replaylab.data.ends import as_flags
from replaylab.data.episodes import Episodes
from replaylab.data.formats._h5 import is_hdf5, read_all
from replaylab.data.formats.common import Options, assemble, read_index
from replaylab.data.formats.npz import beside, take

INDEX = "replaylab/index"  # marks a file of ours; beside it lies what D4RL's layout has no place for


def sniff(path: Path) -> bool:
    return is_hdf5(path)


def read(path: Path, options: Options) -> Episodes:
    arrays, strings, unread = read_all(path)
    if INDEX in arrays and not options.columns:
        return _read_ours(arrays).split(options.max_episode_steps, options.split)
    meta = {"metadata": {name.removeprefix("metadata/"): value for name, value in strings.items()}} if strings else {}
    return assemble(arrays, options, meta, unread)


def _read_ours(arrays: dict[str, np.ndarray]) -> Episodes:
    rewards = take(arrays, "rewards")
    terminated = as_flags("terminals", take(arrays, "terminals"), len(rewards))
    truncated = as_flags("timeouts", take(arrays, "timeouts"), len(rewards))
    return Episodes(
        observations=take(arrays, "observations"),
        actions=take(arrays, "actions"),
        rewards=rewards,
        terminated=terminated,
        truncated=truncated,
        offsets=np.concatenate([[0], np.flatnonzero(terminated | truncated) + 1]).astype(np.int64),
        final_observations=take(arrays, "replaylab/final_observations"),
        final_known=take(arrays, "replaylab/final_known"),
        **beside(arrays, read_index(arrays[INDEX])),
    )
