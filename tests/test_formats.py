"""Every format: boundaries by hand-checked numbers, round trips without loss, and files that lie."""

from __future__ import annotations

import itertools
import json
import os
import resource
import struct
import subprocess
import sys
import zipfile

import h5py
import numpy as np
import pytest
from logs import WRITTEN, Evil, assert_same, columns, make, notes, samples, without, write_h5, write_npz

from replaylab.data import FORMATS, from_rows, load, parse_columns, save
from replaylab.data.formats import native
from replaylab.errors import DataError, UsageError

# --- round trips


@pytest.mark.parametrize("kind", ["float32", "discrete", "pixels"])
@pytest.mark.parametrize(("first", "second"), list(itertools.product(WRITTEN, WRITTEN)))
def test_round_trips_lose_nothing(tmp_path, kind, first, second):
    e = make(kind)
    (tmp_path / "1").mkdir()
    one = load(save(e, tmp_path / "1" / WRITTEN[first], format=first))
    two = load(save(one, tmp_path / "2" / WRITTEN[second], format=second))
    assert_same(e, one)
    assert_same(e, two)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2"]
    assert [p.name for p in (tmp_path / "2").iterdir()] == [WRITTEN[second]]


def test_suffix_and_content_decide_the_format(tmp_path):
    for name, kind in WRITTEN.items():
        path = tmp_path / kind
        save(make(), path, format=None if name != "minari" else "minari")
        assert FORMATS[name].sniff(path)
        assert_same(make(), load(path))
        assert_same(make(), load(path, format=name))
    bare = (tmp_path / "log.npz").rename(tmp_path / "no-suffix-at-all")
    assert_same(make(), load(str(bare)))


def test_several_paths_are_joined(tmp_path):
    a = write_npz(tmp_path / "a.npz", columns())
    both = load([a, str(a)])
    assert both.offsets.tolist() == [0, 3, 6, 9, 12]
    with pytest.raises(DataError, match="no files"):
        load([])


def test_splitting_applies_to_files_with_exact_boundaries_too(tmp_path):
    for name, kind in WRITTEN.items():
        e = load(save(make(), tmp_path / kind, format=name), max_episode_steps=2)
        assert e.offsets.tolist() == [0, 2, 3, 5, 7, 9]
        assert e.final_known.tolist() == [True, True, False, True, True]
        assert np.array_equal(e.final_observations[0], make().observations[2])


# --- npz and plain HDF5


def test_npz_by_hand(tmp_path):
    e = load(write_npz(tmp_path / "x.npz", columns() | {"qpos": np.zeros((6, 3)), "weights": np.ones((2, 2))}))
    assert e.offsets.tolist() == [0, 3, 6] and e.returns.tolist() == [3, 12]
    assert e.terminated.nonzero()[0].tolist() == [2] and e.truncated.nonzero()[0].tolist() == [5]
    assert e.final_observations.tolist() == [[103, 103.5], [6, 6.5]] and e.final_known.all()
    assert set(e.extras) == {"qpos"} and set(e.attachments) == {"weights"}
    assert e.meta == {"source": str(tmp_path / "x.npz"), "notes": []}


@pytest.mark.parametrize("write", [write_npz, write_h5])
def test_other_names(tmp_path, write):
    old = columns()
    names = {"OBS": "observations", "Action": "actions", "reward": "rewards", "next_obs": "next_observations"}
    arrays = {new: old[was] for new, was in names.items()}
    arrays |= {"done": old["terminals"].astype(np.float32), "truncated": old["timeouts"].astype(np.int64)}
    e = load(write(tmp_path / "x.npz", arrays))  # the content decides, not the suffix
    assert e.terminated.nonzero()[0].tolist() == [2] and e.truncated.nonzero()[0].tolist() == [5]
    assert notes(e) == ""


def test_done_is_read_in_the_light_of_the_other_flags(tmp_path):
    base, ends = without(columns(), "terminals", "timeouts"), columns()["terminals"] | columns()["timeouts"]
    both = load(write_npz(tmp_path / "a.npz", base | {"done": ends, "truncated": columns()["timeouts"]}))
    assert both.terminated.nonzero()[0].tolist() == [2] and both.truncated.nonzero()[0].tolist() == [5]
    derived = load(write_npz(tmp_path / "b.npz", base | {"terminals": columns()["terminals"], "dones": ends}))
    assert derived.terminated.nonzero()[0].tolist() == [2] and derived.truncated.nonzero()[0].tolist() == [5]
    alone = load(write_npz(tmp_path / "c.npz", base | {"dones": ends}))
    assert alone.terminated.nonzero()[0].tolist() == [2, 5] and "time limits among them" in notes(alone)


def test_columns_can_be_told_for_flat_arrays(tmp_path):
    c = columns()
    arrays = {"x": c["observations"][:, 0], "y": c["observations"][:, 1], "u": c["actions"], "r": c["rewards"]}
    arrays |= {"done": np.ones(6), "trip": np.array([4, 4, 4, 9, 9, 9])}
    told = parse_columns(["observations=x,y", "actions=u", "rewards=r", "done=", "episode=trip"])
    assert told["done"] == [] and told["observations"] == ["x", "y"]
    e = load(write_npz(tmp_path / "x.npz", arrays), columns=told)
    assert e.observations.tolist() == c["observations"].tolist()
    assert e.offsets.tolist() == [0, 3, 6] and not e.terminated.any() and e.truncated.sum() == 2
    again = load(tmp_path / "x.npz", columns={role: np.array(names) for role, names in told.items()})
    assert again.observations.tolist() == e.observations.tolist()
    with pytest.raises(DataError, match="no column 'z'"):
        load(tmp_path / "x.npz", columns={"observations": "z"})
    for wrong in (5, ["observations=x"], {"rewards": 3}, {"rewards": {"r": 1}}):
        with pytest.raises(UsageError, match="columns takes names, such as"):
            load(tmp_path / "x.npz", columns=wrong)
    with pytest.raises(DataError, match=r"no observations found: .*--columns observations=NAME"):
        load(tmp_path / "x.npz")
    with pytest.raises(UsageError, match="did you mean 'observations'"):
        parse_columns(["observation=x"])
    with pytest.raises(UsageError, match="ROLE=NAME"):
        parse_columns(["observations"])
    with pytest.raises(UsageError, match="names observations twice: give all of them at once"):
        parse_columns(["observations=x", "observations=y"])  # the second took the place of the first


def test_npz_never_unpickles(tmp_path):
    marker = tmp_path / "executed"
    arrays = columns() | {"info": np.array([Evil(marker)], dtype=object)}
    e = load(write_npz(tmp_path / "x.npz", arrays))
    assert "info holds Python objects" in notes(e)
    arrays["rewards"] = np.array([1.0, None, 2, 3, 4, 5], dtype=object)
    with pytest.raises(DataError, match=r"rewards: 'rewards' holds Python objects .* only arrays of numbers are read"):
        load(write_npz(tmp_path / "y.npz", arrays))
    assert not marker.exists()


def npy(header: str, data: bytes = b"") -> bytes:
    text = header.encode() + b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data


def test_npz_that_lies_about_its_size_is_refused_before_allocation(tmp_path):
    def attempt(header: str, data: bytes = bytes(100), compress=zipfile.ZIP_DEFLATED) -> None:
        with zipfile.ZipFile(tmp_path / "bomb.npz", "w", compress) as archive:
            archive.writestr("observations.npy", npy(header, data))
        load(tmp_path / "bomb.npz")

    shape = "{'descr': '<f4', 'fortran_order': False, 'shape': (%s,), }"
    for n in ("999999999999", "-1", "1e9", "True", "0"):
        with pytest.raises(DataError, match=r"bomb\.npz: observations\.npy"):
            attempt(shape % n)
    with pytest.raises(DataError, match="compressed in a way"):
        attempt(shape % 25, compress=zipfile.ZIP_LZMA)
    with pytest.raises(DataError, match="not a NumPy array"):
        attempt("__import__('os').system('true')")
    with pytest.raises(DataError, match="is there twice"), zipfile.ZipFile(tmp_path / "two.npz", "w") as archive:
        with pytest.warns(UserWarning, match="Duplicate"):
            for _ in range(2):
                archive.writestr("a.npy", npy(shape % 25, bytes(100)))
        archive.close()
        load(tmp_path / "two.npz")


def test_zip_bomb(tmp_path):
    with zipfile.ZipFile(tmp_path / "bomb.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("observations", "actions", "rewards"):
            count = 100 << 20
            header = npy(f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({count},), }}")
            archive.writestr(f"{name}.npy", header + bytes(1 << 20))
            archive.filelist[-1].file_size = len(header) + 4 * count  # 400 MiB each, as the directory will say
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match=r"the archive claims 1\.2 GiB, but the file has only"):
        load(tmp_path / "bomb.npz")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # kB


# --- D4RL


def test_d4rl_v0_without_next_observations_and_timeouts(tmp_path):
    e = load(write_h5(tmp_path / "hopper_medium.hdf5", without(columns(), "next_observations", "timeouts")))
    assert e.offsets.tolist() == [0, 3, 6] and e.env_id == "d4rl/hopper"
    assert e.terminated.nonzero()[0].tolist() == [2] and not e.final_known.any()
    assert e.final_observations[:, 0].tolist() == [2, 5]  # never 3, the next episode's first
    assert "marks no time limits" in notes(e) and "after the last boundary" in notes(e)
    limited = load(tmp_path / "hopper_medium.hdf5", max_episode_steps=2)
    assert limited.offsets.tolist() == [0, 2, 3, 5, 6]


def test_d4rl_v1_with_2d_rewards_and_float_flags(tmp_path):
    c = columns()
    c |= {"rewards": c["rewards"][:, None].astype(float), "terminals": c["terminals"].astype(float)}
    c |= {"timeouts": c["timeouts"].astype(np.float64)}
    e = load(write_h5(tmp_path / "walker2d_medium_replay-v1.hdf5", c))
    assert e.rewards.shape == (6,) and e.rewards.dtype == np.float64 and e.returns.tolist() == [3, 12]
    assert e.terminated.nonzero()[0].tolist() == [2] and e.env_id == "d4rl/walker2d"


def test_d4rl_v2_with_infos_and_metadata(tmp_path):
    c = columns() | {"infos/qpos": np.zeros((6, 3)), "metadata/policy/fc0/bias": np.ones(6)}
    c |= {"metadata/algorithm": np.bytes_(b"SAC"), "metadata/iteration": np.int32(7), "infos/goal": np.ones((2, 2))}
    e = load(write_h5(tmp_path / "ant_expert-v2.hdf5", c))
    assert e.final_observations.tolist() == [[103, 103.5], [6, 6.5]] and e.final_known.all() and notes(e) == ""
    assert set(e.extras) == {"infos/qpos"}
    # six biases are not six rows, and a goal an episode is not a goal a row
    assert set(e.attachments) == {"metadata/policy/fc0/bias", "metadata/iteration", "infos/goal"}
    assert e.meta["metadata"] == {"algorithm": "SAC"} and e.env_id == "d4rl/ant"


def test_antmaze_and_adroit_names_are_not_mujoco_ones(tmp_path):
    known = {"antmaze-umaze-v0.hdf5": "d4rl/antmaze-umaze", "Ant_maze_big-maze_noisy_x.hdf5": "d4rl/antmaze-medium"}
    for name in (*known, "pen-human-v1.hdf5", "ant_colony.hdf5"):
        e = load(write_h5(tmp_path / name, without(columns(), "next_observations") | {"infos/goal": np.zeros((6, 2))}))
        assert e.env_id == known.get(name) and e.extras["infos/goal"].shape == (6, 2) and not e.final_known.any()


def test_what_we_write_is_plain_d4rl(tmp_path):
    save(make(), tmp_path / "x.hdf5")
    with h5py.File(tmp_path / "x.hdf5") as file:
        assert file["terminals"].dtype == bool and file["timeouts"][()].tolist() == make().truncated.tolist()
        assert file["infos/qpos"].shape == (9, 3) and file["metadata/policy/kind"][()] == b"tanh"
        assert "next_observations" not in file  # one of them is unknown, and a stand-in would be read as a fact
    known = make().select([0, 2])
    save(known, tmp_path / "y.hdf5")
    with h5py.File(tmp_path / "y.hdf5") as file:
        assert np.array_equal(file["next_observations"][()], known.next_observations())


def test_hdf5_with_a_group_an_episode_is_told_what_to_do(tmp_path):
    arrays = {f"data/demonstration_{i}/{name}": v for i in range(20) for name, v in columns().items()}
    with pytest.raises(DataError, match=r"demonstration_0/actions: join them to one array a column, and add ids"):
        load(write_h5(tmp_path / "x.h5", arrays))
    arrays = {f"quite_a_long_name_of_a_column_{i}": np.zeros(3) for i in range(30)}
    with pytest.raises(DataError, match="no observations found: name them with --columns observations=NAME; it holds"):
        load(write_h5(tmp_path / "y.h5", arrays))


def test_hdf5_does_not_reach_into_other_files(tmp_path):
    other = write_h5(tmp_path / "secret.hdf5", {"observations": np.ones((6, 2))})
    for link in (h5py.ExternalLink(str(other), "observations"), h5py.SoftLink("/actions")):
        path = write_h5(tmp_path / "x.hdf5", without(columns(), "observations"))
        with h5py.File(path, "a") as file:
            file["observations"] = link
        with pytest.raises(DataError, match="link to somewhere else"):
            load(path)
    path = write_h5(tmp_path / "y.hdf5", without(columns(), "observations"))
    with h5py.File(path, "a") as file:
        file.create_dataset("observations", (6, 2), "f4", external=[(str(other), 0, 48)])
    with pytest.raises(DataError, match="stored in another file"):
        load(path)
    layout = h5py.VirtualLayout((6, 2), "f8")
    layout[:] = h5py.VirtualSource(str(other), "observations", (6, 2))
    with h5py.File(path, "a") as file:
        del file["observations"]
        file.create_virtual_dataset("observations", layout)
    with pytest.raises(DataError, match="stored in another file"):
        load(path)


def test_hdf5_bomb(tmp_path):
    with h5py.File(tmp_path / "x.hdf5", "w") as file:
        for name, value in without(columns(), "observations").items():
            file[name] = value
        file.create_dataset("observations", (1 << 33, 1), "f4", chunks=(1 << 20, 1))
        file["strings"] = np.array([b"a"] * 6)
    with pytest.raises(DataError, match=r"the file claims 32\.0 GiB"):
        load(tmp_path / "x.hdf5")


# --- the native store


def test_native_stays_on_the_disk(tmp_path):
    e = load(save(make(), tmp_path / "store"))
    for array in (e.observations, e.actions, e.rewards, e.extras["infos/qpos"]):
        assert isinstance(array, np.memmap) and not array.flags.writeable
    index = json.loads((tmp_path / "store" / "meta.json").read_text())
    assert index["schema"] == 1 and index["meta"]["env_id"] == "d4rl/hopper" and index["meta"]["licence"] == "CC0"
    assert index["arrays"]["observations"]["shape"] == [9, 2] and len(index["arrays"]["rewards"]["sha256"]) == 64


def test_native_checksums(tmp_path):
    path = save(make(), tmp_path / "store")
    native.verify(path)
    data = bytearray((path / "rewards.npy").read_bytes())
    data[-1] ^= 1
    (path / "rewards.npy").write_bytes(data)
    load(path)  # sizes still agree: only verify reads every byte
    with pytest.raises(DataError, match="rewards does not match its checksum"):
        native.verify(path)


def test_native_meta_that_lies(tmp_path):
    path = save(make(), tmp_path / "store")
    np.save(tmp_path / "x.npy", make().observations)
    good = json.loads((path / "meta.json").read_text())

    def with_array(**change):
        return good | {"arrays": good["arrays"] | {"observations": good["arrays"]["observations"] | change}}

    for bad, message in [
        (with_array(file="../x.npy"), "no file of this store"),
        (with_array(file=str(tmp_path / "x.npy")), "no file of this store"),
        (with_array(file=None), "no file of this store"),
        (with_array(file="gone.npy"), "gone.npy is missing"),
        (with_array(shape=[10, 2]), "meta.json says <f4 \\[10, 2\\]"),
        (with_array(dtype="<f8"), "meta.json says <f8"),
        (good | {"schema": 2}, "schema"),
        (good | {"arrays": None}, "no 'arrays'"),
        (good | {"arrays": {}}, "observations is missing"),
        (good | {"extras": {"../x": "../x"}}, "../x is missing"),
        (good | {"meta": {"env_id": 3}}, "env_id must be a name"),
        (good | {"meta": {"notes": "x"}}, "notes must be"),
        (good | {"meta": {"action_low": [1], "action_high": [2]}}, "action_low must be 2 finite numbers"),
        ([], "not a JSON object"),
    ]:
        (path / "meta.json").write_text(json.dumps(bad))
        with pytest.raises(DataError, match=message):
            load(path)
    (path / "meta.json").write_text(json.dumps(good))
    with (path / "observations.npy").open("r+b") as file:
        file.truncate(150)
    with pytest.raises(DataError, match="its header promises"):
        load(path)


# --- whatever is wrong, one line


@pytest.mark.parametrize("name", ["x.npz", "x.hdf5", "x.pkl", "x.csv", "x.parquet", "x.h5", "x"])
@pytest.mark.parametrize(
    "content", [b"", b"hello", bytes(5000), b"PK\x03\x04", b"\x89HDF\r\n\x1a\n", b"\x80\x04.", b"PAR1"]
)
def test_a_file_that_is_something_else(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        load(tmp_path / name)
    assert str(caught.value).startswith(f"{tmp_path / name}: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["npz", "d4rl", "hdf5", "flat npz", "list", "dict", "parquet"])
def test_truncated_files(tmp_path, kind):
    path = samples(tmp_path / "good")[kind]
    data = path.read_bytes()
    cut = tmp_path / f"cut{path.suffix}"
    for length in {*range(0, len(data), max(1, len(data) // 97)), len(data) - 1}:
        cut.write_bytes(data[:length])
        with pytest.raises(DataError, match=r"cut\."):
            load(cut)


def test_a_missing_path_suggests_near_names(tmp_path):
    (tmp_path / "hopper-medium.npz").write_bytes(b"x")
    with pytest.raises(DataError, match=r"no such file or folder; did you mean '.*hopper-medium\.npz'"):
        load(tmp_path / "hoper-medium.npz")
    with pytest.raises(DataError, match=r"no such file or folder$"):
        load(tmp_path / "zzz" / "deep" / "x.npz")
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    with pytest.raises(DataError, match="no dataset; it holds inner"):
        load(tmp_path / "folder")
    with pytest.raises(UsageError, match="did you mean 'minari'"):
        load(tmp_path, format="minary")
    os.mkfifo(tmp_path / "pipe.npz")
    with pytest.raises(DataError, match="not a regular file"):
        load(tmp_path / "pipe.npz")


def test_nan_in_the_data_does_not_stop_loading(tmp_path):
    c = columns()
    c["observations"][1], c["rewards"][3], c["actions"][0] = np.nan, np.inf, np.nan
    e = load(write_npz(tmp_path / "x.npz", without(c, "next_observations")))
    assert np.isnan(e.observations[1]).all() and np.isinf(e.rewards[3])
    with pytest.raises(DataError, match=r"x\.npz: terminated must be 0 or 1 in every row, found nan"):
        load(write_npz(tmp_path / "x.npz", c | {"terminals": np.full(6, np.nan)}))


# --- saving


def test_save_refuses_to_replace_unless_told(tmp_path):
    for name, kind in WRITTEN.items():
        path = save(make(), tmp_path / kind, format=name)
        with pytest.raises(DataError, match="exists already"):
            save(make("discrete"), path, format=name)
        assert_same(make(), load(path))
        save(make("discrete"), path, format=name, overwrite=True)
        assert_same(make("discrete"), load(path))
    save(make(), tmp_path / "store", overwrite=True, format="npz")  # a file in the place of a folder, and back
    save(make(), tmp_path / "store", overwrite=True)
    assert_same(make(), load(tmp_path / "store"))
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    with pytest.raises(DataError, match="no dataset and is not replaced"):
        save(make(), tmp_path / "home", overwrite=True)
    (tmp_path / "store" / "letter.txt").write_text("dear")
    with pytest.raises(DataError, match=r"letter\.txt is no part of a dataset, and the whole folder would be replaced"):
        save(make(), tmp_path / "store", overwrite=True)
    assert (tmp_path / "store" / "letter.txt").read_text() == "dear"
    (tmp_path / "store" / "letter.txt").unlink()
    for bad in ("x.csv", "x.pkl", "x.unknown"):
        with pytest.raises(UsageError, match="known: d4rl, dqn-replay, minari, native, npz"):
            save(make(), tmp_path / bad)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*WRITTEN.values(), "home"])


@pytest.mark.parametrize("name", WRITTEN)
def test_a_full_disk_leaves_nothing_behind(tmp_path, name):
    rows = 20_000
    rng = np.random.default_rng(0)
    ends = np.arange(rows) % 100 == 99

    e = from_rows(rng.normal(size=(rows, 8)), rng.normal(size=(rows, 2)), rng.normal(size=rows), ends)
    keep = save(make(), tmp_path / WRITTEN[name], format=name)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        for target in (tmp_path / "new" / "deep" / WRITTEN[name], keep):
            with pytest.raises(DataError, match="could not be written") as caught:
                save(e, target, format=name, overwrite=True)
            assert "\n" not in str(caught.value)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [p.name for p in tmp_path.iterdir()] == [WRITTEN[name]]
    assert_same(make(), load(keep))


def test_a_name_may_end_in_a_number(tmp_path):
    assert_same(make(), load(save(make(), tmp_path / "hopper-ood-1.4")))
    with pytest.raises(UsageError, match=r"'hopper.v2' does not tell the format"):
        save(make(), tmp_path / "hopper.v2")


def test_meta_that_is_not_json_is_refused(tmp_path):
    e = make()
    e.meta["x"] = object()
    for name, kind in WRITTEN.items():
        with pytest.raises(DataError, match="meta holds a object, which JSON cannot store"):
            save(e, tmp_path / kind, format=name)
    assert not list(tmp_path.iterdir())


def test_reading_needs_no_optional_package_until_used():
    code = "import sys, replaylab.data; assert not {'h5py', 'pyarrow', 'minari'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_toy_is_made_on_the_spot():
    log = load("toy-bandit")
    assert log.num_episodes == len(log) == 100_000 and log.meta["dataset_id"] == "toy-bandit"
    with pytest.raises(DataError, match="did you mean 'toy-bandit'"):
        load("toy-bandti")
