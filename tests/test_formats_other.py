"""Pickled trajectories and tables; columns and paths that cannot be read."""

from __future__ import annotations

import io
import pickle
import struct
from collections import OrderedDict
from datetime import date
from decimal import Decimal

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from logs import Evil, assert_same, columns, notes, paths, without, write_csv, write_h5, write_npz, write_pickle

from replaylab.data import load
from replaylab.data.formats import table, trajectories
from replaylab.errors import DataError, MissingExtra, UsageError

# --- pickles


@pytest.mark.parametrize("protocol", range(6))
def test_decision_transformer_pickles(tmp_path, protocol):
    e = load(write_pickle(tmp_path / "hopper-medium-v2.pkl", paths(), protocol))
    assert e.offsets.tolist() == [0, 3, 6] and e.returns.tolist() == [3, 12] and e.env_id == "d4rl/hopper"
    assert e.terminated.nonzero()[0].tolist() == [2] and e.truncated.nonzero()[0].tolist() == [5]
    assert e.final_observations.tolist() == [[103, 103.5], [6, 6.5]] and notes(e) == ""
    assert e.observations.dtype == np.float32 and np.array_equal(e.observations, columns()["observations"])


def test_pickled_trajectories_vary(tmp_path):
    dones = [OrderedDict({"dones" if k == "terminals" else k: v for k, v in p.items()}) for p in paths()]
    e = load(write_pickle(tmp_path / "a.pkl", tuple(dones)))
    assert e.terminated.nonzero()[0].tolist() == [2] and e.truncated.nonzero()[0].tolist() == [5]
    longer = [without(p, "next_observations") for p in paths()]
    longer[0]["observations"] = np.concatenate([longer[0]["observations"], [[50, 50]]])
    longer[1]["observations"] = np.concatenate([longer[1]["observations"], [[60, 60]]])
    e = load(write_pickle(tmp_path / "b.pkl", longer))
    assert e.final_observations.tolist() == [[50, 50], [60, 60]] and e.final_known.all()
    listed = [{k: list(v) for k, v in p.items()} for p in paths()]
    assert np.array_equal(load(write_pickle(tmp_path / "c.pkl", listed)).observations, columns()["observations"])
    fortran = [{k: np.asfortranarray(v) for k, v in p.items()} for p in paths()]
    assert np.array_equal(load(write_pickle(tmp_path / "d.pkl", fortran)).observations, columns()["observations"])
    uneven = [paths()[0], paths()[1] | {"actions": np.zeros((2, 1))}]
    with pytest.raises(DataError, match=r"trajectory 1: actions has shape \(2, 1\) beside 3 rewards"):
        load(write_pickle(tmp_path / "e.pkl", uneven))
    for empty in ([], {}, 3, [1]):
        with pytest.raises(DataError):
            load(write_pickle(tmp_path / "f.pkl", empty))


def test_a_trajectory_is_never_joined_to_another(tmp_path):
    same = [p | {"patient": np.full(3, 7)} for p in paths()]
    path = write_pickle(tmp_path / "a.pkl", same)
    for told in ({}, {"episode": "patient"}, {"episode": []}):
        e = load(path, columns=told | {"terminated": []})
        assert e.offsets.tolist() == [0, 3, 6] and "come back" not in notes(e), told
    split = [same[0] | {"patient": np.array([7, 7, 8])}, same[1] | {"patient": np.array([8, 7, 8])}]
    e = load(write_pickle(tmp_path / "b.pkl", split), columns={"episode": "patient"})
    assert e.offsets.tolist() == [0, 2, 3, 4, 5, 6] and "come back after other ids (1 x)" in notes(e)


def test_a_trajectory_without_flags_has_none_set(tmp_path):
    for lacks, other in ((0, 1), (1, 0)):
        some = paths()
        some[other]["terminals"] = np.array([[0], [0], [1]])
        del some[lacks]["terminals"]
        for told in ({}, {"terminated": "terminals"}):
            e = load(write_pickle(tmp_path / "a.pkl", some), columns=told)
            assert e.offsets.tolist() == [0, 3, 6] and e.terminated.nonzero()[0].tolist() == [3 * other + 2]
            assert f"never set: 1 of 2, the first is trajectory {lacks}" in notes(e)
    e = load(write_pickle(tmp_path / "b.pkl", [paths()[0] | {"mood": np.zeros(3)}, paths()[1]]))
    assert notes(e) == "mood holds nothing in some trajectories and is left out"
    with pytest.raises(
        DataError, match="trajectory 1: no rewards found: name them with --columns rewards=NAME; it holds actions"
    ):
        load(write_pickle(tmp_path / "c.pkl", [paths()[0], without(paths()[1], "rewards")]))


def test_pickled_lists_of_lists_are_arrays(tmp_path):
    listed = [{k: v.tolist() for k, v in p.items()} for p in paths()]
    e = load(write_pickle(tmp_path / "a.pkl", listed))
    assert np.array_equal(e.observations, columns()["observations"]) and e.actions.shape == (6, 1)
    assert e.offsets.tolist() == [0, 3, 6] and e.terminated.nonzero()[0].tolist() == [2] and notes(e) == ""
    flat = {k: v.tolist() for k, v in columns().items()} | {"image": np.zeros((6, 2, 3)).tolist(), "info": [{}] * 6}
    e = load(write_pickle(tmp_path / "c.pkl", flat))
    assert e.extras["image"].shape == (6, 2, 3) and "info holds a list of dict and is left out" in notes(e)
    for bad, message in (
        ([[1.0], [1.0, 2.0], [1.0]], "lists of different lengths"),
        ([[1.0], 2.0, [1.0]], "lists of different lengths"),
        ([["a"]] * 3, "a list of str"),
        ([np.zeros(2), np.zeros(3), np.zeros(2)], "arrays of different shapes"),
        ([], "an empty list"),
        (None, "one NoneType"),
    ):
        told = f"observations: 'observations' holds {message}; only arrays of numbers are read"
        with pytest.raises(DataError, match=told):
            load(write_pickle(tmp_path / "d.pkl", columns() | {"observations": bad}))
        with pytest.raises(DataError, match=f"trajectory 1: {told}"):
            load(write_pickle(tmp_path / "d.pkl", [paths()[0], paths()[1] | {"observations": bad}]))


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_gormpo_pickles(tmp_path, protocol):
    c = columns() | {"next_observations": columns()["next_observations"][:-1]}
    e = load(write_pickle(tmp_path / "walker2d_medium_expert_sparse_73.pkl", c, protocol))
    assert len(e) == 5 and e.offsets.tolist() == [0, 3, 5] and "one next_observation fewer" in notes(e)
    assert e.env_id == "d4rl/walker2d"


def test_malicious_pickles_are_named_and_never_run(tmp_path):
    marker = tmp_path / "executed"
    bad = [Evil(marker), {"observations": Evil(marker)}, [paths()[0] | {"x": Evil(marker)}]]
    bad += [{"observations": np.array([Evil(marker)], dtype=object)}]
    for i, value in enumerate(bad):
        for protocol in range(6):
            with pytest.raises(DataError, match=r"asks for (posix|os|nt)\.?system"):
                load(write_pickle(tmp_path / f"{i}.pkl", value, protocol))
    code = f"cos\nsystem\n(S'touch {marker}'\ntR.".encode()
    for raw, message in [
        (code, "asks for os.system"),
        (b"\x80\x04" + code, "asks for os.system"),
        (b"\x80\x02cbuiltins\neval\n(X\x01\x00\x00\x001tR.", "asks for builtins.eval"),
        (b"\x80\x02cnumpy\nload\n.", "asks for numpy.load"),
        (b"\x80\x04(K\x01K\x02\x8c\x02os\x8c\x06system\x93.", "asks for os.system"),
        (b"\x80\x02(i" + b"os\nsystem\n.", "INST"),
        (b"\x80\x02K\x01Q.", "BINPERSID"),
        (b"\x80\x02\x82\x01.", "EXT1"),
        (b"\x80\x02ccollections\nOrderedDict\n)\x81.", "NEWOBJ"),
        (b"\x80\x02}(K\x01b.", "cut off|malformed|state"),
        (b"\x80\x02cnumpy\ndtype\n}b.", "state"),
        (b"\x80\x02K\x01)R.", "not data"),
    ]:
        (tmp_path / "x.pkl").write_bytes(raw)
        with pytest.raises(DataError, match=message):
            load(tmp_path / "x.pkl")
    assert not marker.exists()


def test_pickle_bombs(tmp_path):
    nested = b"\x80\x04)" + b"\x94h\x00h\x00\x86" + b"".join(b"\x94h%ch%c\x86" % (i, i) for i in range(1, 60))
    for raw in [
        b"\x80\x04r\xff\xff\xff\xff.",  # a memo of 4 billion entries
        b"\x80\x04N" + b"r\xff\xff\xff\x7f.",
        b"\x80\x05\x96" + struct.pack("<Q", 1 << 50),  # a bytearray of a petabyte
        b"\x80\x04\x8e" + struct.pack("<Q", 1 << 62) + b"x",
        b"\x80\x04\x95" + struct.pack("<Q", 1 << 60) + b".",
        b"\x80\x04\x8b\xff\xff\xff\x7f.",  # a whole number of 2 GB
        b"\x80\x02L" + b"9" * 50_000 + b"L\n.",
        b"(" * 1_000_000 + b".",
        b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b".",
        nested + b"N\x86.",
        nested + b"\x94}h\x3cNs.",  # as a key, its hash would take 2 ** 60 steps
    ]:
        (tmp_path / "x.pkl").write_bytes(raw)
        with pytest.raises(DataError):
            load(tmp_path / "x.pkl")
    big = np.zeros((1 << 16, 10), np.float32)
    trajectory = {"observations": big, "actions": big, "rewards": big[:, 0].copy()}
    path = write_pickle(tmp_path / "y.pkl", [trajectory] * 30_000)  # 5 MB that unfold into 165 GB
    with pytest.raises(DataError, match="the pickle claims"):
        load(path)
    shared = [[0.0] * 10_000] * 100_000  # a list that is named 100,000 times: 8 GB
    path = write_pickle(tmp_path / "z.pkl", [trajectory | {"observations": shared}])
    with pytest.raises(DataError, match=r"trajectory 0: observations claims 7\.5 GiB"):
        load(path)
    for items in ([], [[]]):
        items.append(items)
        with pytest.raises(DataError, match="'observations' holds"):
            load(write_pickle(tmp_path / "z.pkl", {"observations": items, "actions": big, "rewards": big[:, 0]}))


def test_the_interpreter_reads_what_pickle_reads():
    value = {
        "a": [1, -5, 2**70, 1.5, True, None, "ü", b"x", (1,), (1, 2, 3, 4), ()],
        "n": np.float32(3),
        "o": OrderedDict(x=1),
    }
    for protocol in range(6):
        read = trajectories._Interpreter().run(io.BytesIO(pickle.dumps(value, protocol=protocol)))
        assert read == value


# --- tables


CSV = """trip,x1,x2,a,r,end,name
a,0,0.5,-1.0,0.25,False,p
a,1,1.5,0.5,1,True,q
b,2,2.5,0.5,2,False,r
"""
TOLD = {"observations": ["x1", "x2"], "actions": "a", "rewards": "r", "terminated": "end", "episode": "trip"}


@pytest.fixture(params=["pyarrow", "plain"])
def csv_reader(request, monkeypatch):
    if request.param == "plain":
        real = table.require

        def refuse(module, purpose):
            if module == "pyarrow.csv":
                raise MissingExtra("no pyarrow")
            return real(module, purpose)

        monkeypatch.setattr(table, "require", refuse)
        monkeypatch.setattr(table, "PIECE", 2)
    return request.param


def test_csv_with_a_mapping(tmp_path, csv_reader):
    for i, text in enumerate((CSV, CSV.replace(",", ";"), CSV.replace(",", "\t"), "\ufeff" + CSV)):
        e = load(write_csv(tmp_path / f"{i}.csv", text), columns=TOLD)
        assert e.observations.tolist() == [[0, 0.5], [1, 1.5], [2, 2.5]] and e.actions.tolist() == [[-1], [0.5], [0.5]]
        assert e.offsets.tolist() == [0, 2, 3] and e.terminated.tolist() == [False, True, False]
        assert e.truncated.tolist() == [False, False, True] and "columns left out: name" in notes(e)


def test_csv_guesses_numbered_columns(tmp_path, csv_reader):
    head = ",obs_1,obs_0,obs_10,Action,reward,done,truncated,episode_id\n"  # as pandas writes its index
    e = load(write_csv(tmp_path / "x.csv", head + "0,1,0,10,3,1.5,0,0,5\n1,1,0,10,0,1.5,1,0,5\n"))
    assert e.observations.tolist() == [[0, 1, 10]] * 2 and e.actions.tolist() == [3, 0] and e.discrete
    assert e.terminated.tolist() == [False, True] and "discrete choices" in notes(e) and "left out: ''" in notes(e)


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("", "column 'x2', row 2 is empty"),
        ("oops", "column 'x2', row 2 holds 'oops', not a number: encode text, categories and dates as numbers, or"),
        ("nan", "column 'x2', row 2 is NaN"),
    ],
)
def test_bad_cells_are_named(tmp_path, csv_reader, cell, message):
    with pytest.raises(DataError, match=message):
        load(write_csv(tmp_path / "x.csv", CSV.replace("1.5", cell)), columns=TOLD)


def test_csv_without_rows(tmp_path, csv_reader):
    for text, told in (("", "the file is empty"), (CSV.splitlines()[0] + "\n", "the table has no rows")):
        with pytest.raises(DataError, match=told):
            load(write_csv(tmp_path / "x.csv", text), columns=TOLD)


@pytest.mark.parametrize(
    "text", ["", "\n", "a,b\n", CSV[:40], CSV + "1,2\n", CSV.replace("x2", "x1"), "\0\0\0", "x\xff"]
)
def test_broken_csv(tmp_path, csv_reader, text):
    (tmp_path / "x.csv").write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=r"x\.csv: "):
        load(tmp_path / "x.csv", columns=TOLD)


def test_a_name_that_two_columns_have_is_told(tmp_path, csv_reader):
    with pytest.raises(DataError, match="2 columns are named 'x1'"):
        load(write_csv(tmp_path / "x.csv", CSV.replace("x2", "x1")), columns=TOLD | {"observations": ["x1"]})


@pytest.mark.parametrize("ids", ["00 000 01 1", "1.1 1.10 1.100 2", "12345678901234567890 12345678901234567891 3 4"])
def test_csv_ids_are_compared_as_text(tmp_path, csv_reader, ids):
    rows = "".join(f"{name},{i},0.5,1.0\n" * 2 for i, name in enumerate(ids.split()))
    e = load(write_csv(tmp_path / "x.csv", "episode,obs,action,reward\n" + rows))
    assert e.offsets.tolist() == [0, 2, 4, 6, 8]


def test_an_empty_id_is_refused(tmp_path, csv_reader):
    rows = "".join(f"{name},1,0.5,1.0\n" for name in ("a", "a", "b", "", "b"))
    with pytest.raises(DataError, match="column 'episode', row 4 is empty"):
        load(write_csv(tmp_path / "x.csv", "episode,obs,action,reward\n" + rows))


def test_an_id_can_be_an_observation_too(tmp_path, csv_reader):
    told = {"observations": ["day", "x"], "episode": "day"}
    e = load(
        write_csv(tmp_path / "x.csv", "day,x,action,reward\n07,1,0.5,1.0\n7,2,0.5,1.0\n9,3,0.5,1.0\n"), columns=told
    )
    assert e.observations.tolist() == [[7, 1], [7, 2], [9, 3]] and e.num_episodes == 3 and "left out" not in notes(e)
    if csv_reader == "pyarrow":
        data = {"day": [7, 7, 9], "x": [1.0, 2, 3], "action": [0.5] * 3, "reward": [1.0] * 3}
        pyarrow.parquet.write_table(pa.table(data), tmp_path / "x.parquet")
        e = load(tmp_path / "x.parquet", columns=told)
        assert e.observations.tolist() == [[7, 1], [7, 2], [9, 3]] and e.num_episodes == 2


@pytest.mark.parametrize("role", ["terminated", "done", "truncated"])
def test_an_outcome_repeated_on_every_row_is_of_the_last_one(tmp_path, csv_reader, role):
    def read(flags):
        text = "".join(
            f"{name},{i},0.5,1.0,{flag}\n" for i, (name, flag) in enumerate(zip("aaabbcc", flags, strict=True))
        )
        return load(write_csv(tmp_path / "x.csv", f"episode,obs,action,reward,{role}\n" + text))

    marked, repeated, within = read("0010001"), read("1110011"), read("1010001")
    assert marked.lengths.tolist() == repeated.lengths.tolist() == [3, 2, 2] and within.lengths.tolist() == [1, 2, 2, 2]
    ends = [] if role == "truncated" else [2, 6]
    assert np.flatnonzero(repeated.terminated).tolist() == np.flatnonzero(marked.terminated).tolist() == ends
    assert f"'{role}' is the same on all rows of an episode id" in notes(repeated)
    assert "the same on all rows" not in notes(marked) + notes(within)
    early = "before the last row of their episode id, each of which ends an episode: 1;"
    assert (early in notes(within)) == (role != "truncated") and early not in notes(marked) + notes(repeated)


def test_both_csv_readers_agree_on_a_million_cells(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    rows = np.column_stack([np.repeat(np.arange(100), 1000), rng.normal(size=(100_000, 9))])
    head = "episode," + ",".join(f"obs_{i}" for i in range(6)) + ",action_0,action_1,reward"
    np.savetxt(tmp_path / "x.csv", rows, "%.17g", ",", header=head, comments="")
    fast = load(tmp_path / "x.csv")
    assert fast.num_episodes == 100 and np.array_equal(fast.observations, rows[:, 1:7])
    monkeypatch.setattr(table, "_csv_arrow", lambda arrow, *rest: table._csv_plain(*rest))
    assert_same(fast, load(tmp_path / "x.csv"))


def test_parquet(tmp_path):
    data = {"trip": ["a", "a", "b"], "x1": [0, 1, 2], "x2": [0.5, 1.5, 2.5], "a": [-1.0, 0.5, 0.5], "r": [0.25, 1, 2]}
    data |= {"end": [False, True, False]}
    pyarrow.parquet.write_table(pa.table(data), tmp_path / "x.parquet")
    e = load(tmp_path / "x.parquet", columns=TOLD)
    assert e.observations.tolist() == [[0, 0.5], [1, 1.5], [2, 2.5]] and e.offsets.tolist() == [0, 2, 3]
    assert e.terminated.tolist() == [False, True, False] and e.truncated.tolist() == [False, False, True]
    data["x2"][1] = None
    pyarrow.parquet.write_table(pa.table(data), tmp_path / "x.parquet")
    with pytest.raises(DataError, match="column 'x2', row 2 is empty"):
        load(tmp_path / "x.parquet", columns=TOLD)
    pyarrow.parquet.write_table(pa.table(data)[:0], tmp_path / "x.parquet")
    with pytest.raises(DataError, match="the table has no rows"):
        load(tmp_path / "x.parquet", columns=TOLD)


def test_columns_without_numbers_are_told_what_they_hold(tmp_path, csv_reader):
    for cell in ("male", "2026-01-31", "10:00"):
        text = "obs_0,obs_1,action,reward\n" + f"1,{cell},0.5,1.0\n" * 3
        with pytest.raises(DataError, match=f"'obs_1', row 1 holds '{cell}.*: encode .* with --columns ROLE=NAME"):
            load(write_csv(tmp_path / "x.csv", text))


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        (["male", "male"], "male"),
        (pa.array(["male", "male"]).dictionary_encode(), "male"),
        ([date(2026, 1, 31)] * 2, "2026-01-31"),
        ([["a", "b"], ["c", "d"]], "a"),
    ],
)
def test_parquet_without_numbers(tmp_path, values, shown):
    data = {"obs_0": [0.5, 1.5], "obs_1": values, "action": [0.5, 0.5], "reward": [1.0, 2.0]}
    pyarrow.parquet.write_table(pa.table(data), tmp_path / "x.parquet")
    with pytest.raises(DataError, match=f"'obs_1', row 1 holds '{shown}', not a number: encode"):
        load(tmp_path / "x.parquet")
    pyarrow.parquet.write_table(pa.table(data | {"obs_1": [Decimal("1.5"), Decimal("2.25")]}), tmp_path / "x.parquet")
    assert load(tmp_path / "x.parquet").observations.tolist() == [[0.5, 1.5], [1.5, 2.25]]


def test_parquet_with_lists(tmp_path):
    data = {"observations": [[0.0, 1], [2, 3]], "actions": [[0.5], [0.25]], "rewards": [1.0, 2], "done": [False, True]}
    pyarrow.parquet.write_table(pa.table(data), tmp_path / "x.parquet")
    e = load(tmp_path / "x.parquet")
    assert e.observations.tolist() == [[0, 1], [2, 3]] and e.actions.tolist() == [[0.5], [0.25]]
    data["observations"][1] = [2.0]
    pyarrow.parquet.write_table(pa.table(data), tmp_path / "x.parquet")
    with pytest.raises(DataError, match="lists of different lengths"):
        load(tmp_path / "x.parquet")


# --- what is refused, and whose note it is


def test_the_notes_of_joined_files_name_their_file(tmp_path):
    one = write_npz(tmp_path / "one.npz", without(columns(), "next_observations"))
    joined = load([one, write_npz(tmp_path / "two.npz", columns())])
    assert joined.meta["notes"] == [f"{one}: the final observation of 2 of 2 episodes is not in the file"]


def test_files_that_cannot_be_joined_are_named(tmp_path):
    head = "obs,action,reward\n"
    a, b, c = (write_csv(tmp_path / f"{n}.csv", head + f"1,{n},1.0\n") for n in ("0.5", "1.0", "1"))
    d = write_csv(tmp_path / "wide.csv", "obs_0,obs_1,action,reward\n1,1,0.5,1.0\n")
    with pytest.raises(DataError, match=r"0\.5\.csv and \S*/1\.csv: cannot join actions .*1\.0, not 1, in \S*/1\.csv$"):
        load([a, b, c])
    with pytest.raises(DataError, match=r"0\.5\.csv and \S*wide\.csv: cannot join observations .*the same --columns"):
        load([a, b, d])


def test_what_is_no_path_is_refused():
    for data in (np.zeros((3, 2)), 3, [np.zeros(2)], columns()):
        with pytest.raises(UsageError, match=r"a path or a list of paths, not .*from_rows"):
            load(data)
    with pytest.raises(DataError, match="no files"):
        load([])
    with pytest.raises(UsageError, match="load takes no 'max_episode_step'; did you mean 'max_episode_steps'"):
        load("sample", max_episode_step=3)


def test_a_link_to_nowhere_is_told(tmp_path):
    (tmp_path / "log.npz").symlink_to("gone.npz")
    with pytest.raises(DataError, match=r"log.npz: it is a link to gone.npz, which is not there"):
        load(tmp_path / "log.npz")


def test_columns_that_are_there_but_not_read_are_named(tmp_path):
    path = write_h5(tmp_path / "x.h5", columns() | {"observations": np.array([b"a"] * 6), "name": np.array([b"b"] * 6)})
    for options in ({}, {"columns": {"observations": "observations"}}):
        with pytest.raises(DataError, match="observations: 'observations' holds text; only arrays of numbers"):
            load(path, **options)
    with h5py.File(path, "a") as file:
        del file["observations"]
        file["obs"] = columns()["observations"]
        file["state"] = np.array([np.zeros(n) for n in range(6)], h5py.vlen_dtype(float))
    assert "name holds text and is left out | state holds lists of varying length and is left out" in notes(load(path))


def test_numbers_that_float32_cannot_hold_are_refused(tmp_path):
    huge = columns() | {"observations": columns()["observations"].astype(np.float64) * 1e300}
    with pytest.raises(DataError, match=r"x\.npz: observations reach 5\.5e\+300, which float32 cannot hold"):
        load(write_npz(tmp_path / "x.npz", huge))
    rare = columns()["rewards"].astype(np.float64)
    rare[:2] = np.nan, -np.inf  # `data info` tells of these
    assert len(load(write_npz(tmp_path / "y.npz", columns() | {"rewards": rare}))) == 6
