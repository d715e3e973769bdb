"""One small module a format: `sniff(path)`, `read(path, options)` and, where it can be, `write(episodes, path)`.

`read.load` tries the formats in this order and `write.save` picks one; nothing else needs to know them.
"""

from __future__ import annotations

from types import ModuleType

from replaylab.data.formats import d4rl, dqn_replay, hdf5, minari, native, npz, table, trajectories

FORMATS: dict[str, ModuleType] = {
    "native": native,
    "minari": minari,
    "dqn-replay": dqn_replay,
    "npz": npz,
    "d4rl": d4rl,
    "hdf5": hdf5,
    "table": table,
    "trajectories": trajectories,
}

# what a name says when the content does not (an empty or damaged file, a file still to be written)
SUFFIXES = {
    "": "native",
    ".npz": "npz",
    ".hdf5": "d4rl",
    ".h5": "d4rl",
    ".csv": "table",
    ".tsv": "table",
    ".parquet": "table",
    ".pq": "table",
    ".pkl": "trajectories",
    ".pickle": "trajectories",
}
