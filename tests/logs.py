"""Small logs with known answers, in every format."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet

from replaylab.data import Episodes, save
from replaylab.data.episodes import from_rows
from replaylab.data.formats import dqn_replay

WRITTEN = {"native": "store", "minari": "things-v0", "npz": "log.npz", "d4rl": "log.hdf5"}


def make(kind: str = "float32") -> Episodes:
    """Three episodes of 3, 2 and 4 rows: terminated, truncated, and both; one final observation is unknown."""
    n, rng = 9, np.random.default_rng(7)
    terminated, truncated = np.zeros(n, bool), np.zeros(n, bool)
    terminated[[2, 8]] = truncated[[4, 8]] = True
    shape = (40, 33, 3) if kind == "pixels" else (2,)
    dtype = {"pixels": np.uint8, "discrete": np.float64}.get(kind, np.float32)
    actions = rng.uniform(-1, 1, (n, 2)).astype(np.float32) if kind == "float32" else rng.integers(0, 4, n)
    meta = {
        "env_id": "d4rl/hopper",
        "source": "by hand",
        "licence": "CC0",
        "notes": ["one", "zwei ä"],
        "deep": {"a": [1]},
    }
    meta |= {"metadata": {"algorithm": "SAC", "policy/kind": "tanh"}}
    meta |= {"action_low": [-1.0, -2.0], "action_high": [1.0, 2.0]} if kind == "float32" else {"num_actions": 5}
    return Episodes(
        observations=(rng.normal(size=(n, *shape)) * 50).astype(dtype),
        actions=actions,
        rewards=rng.normal(size=n).astype(dtype if dtype != np.uint8 else np.float32),
        terminated=terminated,
        truncated=truncated,
        offsets=np.array([0, 3, 5, 9]),
        final_observations=(rng.normal(size=(3, *shape)) * 50).astype(dtype),
        final_known=np.array([True, False, True]),
        extras={
            "infos/qpos": rng.normal(size=(n, 3)),
            "infos/deep/flag": rng.integers(0, 2, n).astype(bool),
            "timestep": np.arange(n, dtype=np.int32),
            "../../etc/passwd": np.arange(n),
            "a": np.zeros(n),
            "a/b": np.ones(n),
            "": np.arange(n, dtype=np.uint8),
            "spaced ütf/\n": np.arange(n, dtype=np.float16),
        },
        attachments={
            "metadata/iteration": np.array(3, np.int32),
            "metadata/policy/fc0/weight": rng.normal(size=(4, 2)).astype(np.float32),
            "metadata/algorithm/x": np.arange(9),  # collides with the string of that name, and is as long as the rows
            "empty": np.zeros((0, 4)),
            "..": np.arange(3),
        },
        meta=meta,
    )


def assert_same(a: Episodes, b: Episodes) -> None:
    def equal(name: str, x: np.ndarray, y: np.ndarray) -> None:
        assert (x.dtype, x.shape) == (y.dtype, y.shape), name
        assert x.tobytes() == y.tobytes(), name

    for name in Episodes.__dataclass_fields__:
        if name in ("extras", "attachments"):
            assert set(getattr(a, name)) == set(getattr(b, name))
            for key, value in getattr(a, name).items():
                equal(key, value, getattr(b, name)[key])
        elif name != "meta":
            equal(name, getattr(a, name), getattr(b, name))
    assert a.meta == b.meta


def columns(n: int = 6) -> dict[str, np.ndarray]:
    """Row i observes i and i + 0.5; its true successor is i + 1. Row 2 terminates, row 5 is truncated."""
    observations = np.arange(n, dtype=np.float32)[:, None] + np.array([0, 0.5], np.float32)
    after = observations + 1
    after[2] += 100
    return {
        "observations": observations,
        "actions": np.linspace(-1, 1, n, dtype=np.float32)[:, None],
        "rewards": np.arange(n, dtype=np.float32),
        "next_observations": after,
        "terminals": np.arange(n) == 2,
        "timeouts": np.arange(n) == 5,
    }


def without(arrays: dict, *names: str) -> dict:
    return {k: v for k, v in arrays.items() if k not in names}


def write_h5(path: Path, arrays: dict) -> Path:
    with h5py.File(path, "w") as file:
        for name, value in arrays.items():
            file[name] = value
    return path


def write_npz(path: Path, arrays: dict) -> Path:
    np.savez(path, **arrays)
    return path


def notes(e: Episodes) -> str:
    return " | ".join(e.meta["notes"])


def paths() -> list[dict]:
    c = columns()
    return [{k: v[rows] for k, v in without(c, "timeouts").items()} for rows in (slice(0, 3), slice(3, 6))]


def write_pickle(path: Path, value, protocol: int = 4) -> Path:
    path.write_bytes(pickle.dumps(value, protocol=protocol))
    return path


def write_csv(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def samples(folder: Path) -> dict[str, Path]:
    """One small valid file of each kind."""
    folder.mkdir(exist_ok=True)
    found = {name: save(make(), folder / kind, format=name) for name, kind in WRITTEN.items()}
    found["hdf5"] = write_h5(folder / "flat.h5", {k.upper(): v for k, v in columns().items()})
    np.savez_compressed(folder / "flat.npz", **columns())
    found["flat npz"] = folder / "flat.npz"
    found["list"] = write_pickle(folder / "list.pkl", paths())
    found["dict"] = write_pickle(folder / "dict.pkl", columns(), 5)
    found["csv"] = write_csv(folder / "x.csv", "obs_0,obs_1,action,reward,done\n" + "1,2,0.5,1.0,0\n" * 9)
    wide = {f"obs_{i}": np.arange(9.0) for i in range(2)} | {"action": np.ones(9), "reward": np.ones(9)}
    pyarrow.parquet.write_table(pa.table(wide), folder / "x.parquet")
    found["parquet"] = folder / "x.parquet"
    found["dqn-replay"] = folder / "Pong"
    frames = np.arange(30, dtype=np.uint8)[:, None, None] * np.ones((84, 84), np.uint8)
    ends = np.arange(30) % 10 == 9
    dqn_replay.write(from_rows(frames, np.arange(30) % 4, np.ones(30), ends), found["dqn-replay"])
    return found


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)
