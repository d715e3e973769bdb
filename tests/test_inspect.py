"""`data info` and `data plot` on small data whose answers are known."""

import json
import time
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from pages import check_page

import replaylab
from replaylab.data import columns
from replaylab.data.episodes import Episodes
from replaylab.data.inspect import format_summary, plot, project, summarize
from replaylab.errors import UsageError


def make(lengths=(3, 2), *, seed=0, **changes) -> Episodes:
    """Healthy data, or with columns replaced."""
    rng = np.random.default_rng(seed)
    rows, episodes = sum(lengths), len(lengths)
    ends = np.zeros(rows, bool)
    ends[np.cumsum(lengths) - 1] = True
    columns = {
        "observations": rng.normal(size=(rows, 2)),
        "actions": rng.uniform(-0.9, 0.9, (rows, 1)),
        "rewards": np.arange(rows, dtype=np.float64),
        "terminated": ends,
        "truncated": np.zeros(rows, bool),
        "final_observations": rng.normal(size=(episodes, 2)),
        "final_known": np.ones(episodes, bool),
    }
    return Episodes(offsets=np.concatenate([[0], np.cumsum(lengths)]), **(columns | changes))


def warnings(**changes) -> str:
    lengths = changes.pop("lengths", (3, 2))
    return "\n".join(summarize(make(lengths, **changes))["warnings"])


def test_numbers_by_hand():
    actions = np.array([[1.0], [-1.0], [0.5], [0.0], [0.985]])
    observations = np.array([[0.0, 1], [0, 2], [0, 3], [4, 4], [0, 5]])
    meta = {"env_id": "d4rl/hopper", "source": "here", "licence": "MIT", "notes": ["a note"]}
    data = make(actions=actions, observations=observations, meta=meta)
    found = summarize(data)
    json.dumps(found, allow_nan=False)
    assert (found["steps"], found["episodes"], found["terminated"], found["truncated"]) == (5, 2, 2, 0)
    returns = found["return"]  # 0 + 1 + 2 and 3 + 4
    assert (returns["mean"], returns["std"], returns["min"], returns["max"]) == (5, 2, 3, 7)
    assert returns["quantiles"]["50%"] == 5 and sum(returns["histogram"]["counts"]) == 2
    assert found["length"]["mean"] == 2.5
    assert found["reward"] == pytest.approx({"mean": 2, "std": np.sqrt(2), "min": 0, "max": 4})
    assert found["observation"]["shape"] == [2] and found["observation"]["dtype"] == "float64"
    first = found["observation"]["columns"][0]
    assert first == pytest.approx({"name": "observation[0]", "mean": 0.8, "std": 1.6, "min": 0, "max": 4})
    assert (found["observation"]["mean"], found["observation"]["max"]) == (pytest.approx(1.9), 5)
    action = found["action"]
    assert action["bounds"] == "assumed" and (action["low"], action["high"]) == ([-1], [1])
    assert action["saturation"] == pytest.approx(3 / 5)  # 1, -1 and 0.985, which is within 0.02 of the bound
    assert found["normalized_return"]["mean"] == pytest.approx(100 * (5 + 20.272305) / (3234.3 + 20.272305))
    assert (found["source"], found["env_id"], found["licence"]) == ("here", "d4rl/hopper", "MIT")
    assert found["bytes"] == data.nbytes
    assert found["warnings"] == ["a note"]


def test_healthy_data_has_no_warnings():
    assert warnings() == ""


def test_nan_and_infinity_name_the_column_and_spoil_nothing_else():
    observations = np.array([[1.0, 1], [np.nan, 2], [3, np.inf], [np.nan, 4], [5, -np.inf]])
    found = summarize(make(observations=observations))
    assert "2 values are NaN: observation[0] (2)" in found["warnings"]
    assert "2 values are infinity: observation[1] (2)" in found["warnings"]
    assert found["observation"]["columns"][0]["mean"] == pytest.approx(3)
    assert found["observation"]["columns"][1]["std"] == pytest.approx(np.std([1, 2, 4]))
    json.dumps(found, allow_nan=False)


def test_nan_in_rewards_actions_extras_and_final_observations():
    text = warnings(
        rewards=np.array([0, 1, np.nan, 3, 4]),
        actions=np.array([[np.nan], [0.1], [0.2], [0.3], [0.4]]),
        extras={"cost": np.array([0, np.inf, 0, 0, 0])},
        final_observations=np.full((2, 2), np.nan),
    )
    assert "1 value is NaN: reward (1)" in text and "1 value is NaN: action[0] (1)" in text
    assert "1 value is infinity: cost (1)" in text and "final observation[0] (2)" in text


def test_values_whose_squares_overflow_are_named():
    rewards = np.array([0, 1e35, 2, 3, np.nan], np.float32)
    assert "huge: reward: the square of 1e+35 overflows float32" in warnings(rewards=rewards)
    assert "huge" not in warnings(rewards=rewards / 1e20)


def test_one_step_is_one_step():
    assert "1 step in 1 episode," in format_summary(summarize(make((1,))))


def test_everything_not_finite_still_summarizes():
    found = summarize(make(observations=np.full((5, 2), np.nan), rewards=np.full(5, np.nan)))
    assert found["return"]["mean"] is None and found["observation"]["mean"] is None
    json.dumps(found, allow_nan=False)
    assert "NaN" in format_summary(found)


def test_constant_columns():
    observations = np.random.default_rng(0).normal(size=(5, 3))
    observations[:, 1] = 7
    assert "constant: observation[1]" in warnings(observations=observations, final_observations=np.zeros((2, 3)))
    pixels = np.random.default_rng(0).integers(0, 255, (5, 4, 4), np.uint8)
    pixels[:, 0] = 0  # a border that never changes is normal
    found = summarize(make(observations=pixels, final_observations=pixels[:2] + 1))
    assert found["warnings"] == [] and found["observation"]["constant"] == 4


def test_boundary_leak_only_where_the_final_observation_is_known():
    observations = np.arange(10.0).reshape(5, 2)
    final = np.stack([observations[3], [9, 9]])
    assert "final observation of 1 episode is the first" in warnings(
        observations=observations, final_observations=final
    )
    text = warnings(observations=observations, final_observations=final, final_known=np.array([False, True]))
    assert "leak" not in text and "final observation of 1 of 2 episodes is unknown" in text


def test_a_note_about_final_observations_is_not_repeated():
    text = warnings(final_known=np.zeros(2, bool), meta={"notes": ["the final observation of 2 of 2 episodes is gone"]})
    assert text.count("final observation") == 1


def test_training_says_it_too_and_once(tmp_path, capsys):
    settings = {"steps": 1, "hidden": [4], "device": "cpu", "out": tmp_path / "r"}
    for resume in (False, True):
        replaylab.train("bc", make(rewards=np.zeros(5)), resume=resume, **settings)
        assert ("note: the data: every reward is 0" in capsys.readouterr().err) == (not resume)


def test_rewards_that_values_cannot_learn_from_are_named():
    at_the_end = {"rewards": np.array([0, 0, -3, 1, 2.0]), "terminated": np.zeros(5, bool)}
    at_the_end |= {"truncated": np.array([0, 0, 1, 0, 1], bool)}
    text = warnings(**at_the_end, final_known=np.zeros(2, bool))
    assert "83 % of the reward (as sum of |reward|) lies on 2 rows that have no known next observation" in text
    assert "50 % of the reward (as sum of |reward|) lies on 1 row that has" in warnings(
        **at_the_end, final_known=np.array([False, True])
    )
    assert "of the reward" not in warnings(**at_the_end)
    ended = at_the_end | {"terminated": make().terminated}
    assert "of the reward" not in warnings(**ended, final_known=np.zeros(2, bool))
    at_the_end["rewards"] = np.array([7, 7, 1, 1, np.nan])  # a sixteenth
    assert "of the reward" not in warnings(**at_the_end, final_known=np.zeros(2, bool))


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_observations_that_float32_wipes_out(kind):
    z = np.random.default_rng(0).normal(size=1000)
    seconds = 1.7e9 + np.arange(1000)
    wiped = np.stack([1e8 + 3 * z, 1e6 + 0.01 * z, 101325 + 0.01 * z, seconds], 1)
    blank = np.zeros((2, 4))
    text = warnings(lengths=(500, 500), observations=wiped.astype(kind), final_observations=blank)
    assert "large offset: observation[0], observation[1], observation[2], observation[3]: values so far" in text


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_ordinary_observations_are_not_taken_for_wiped_out(kind):
    rng = np.random.default_rng(0)
    z, rare = rng.normal(size=1000), np.arange(1000) == 5
    fine = np.stack([z, 1e12 * z, 1000 + z, 1e7 + rare, 16_000_000 + np.arange(1000) % 3, rare, 1e-8 * z], 1)
    text = warnings(lengths=(500, 500), observations=fine.astype(kind), final_observations=np.zeros((2, 7)))
    assert text == ""
    known = np.full((5, 2), 1.7e9)  # constant, which is said elsewhere
    assert "offset" not in warnings(observations=known)
    assert not any("offset" in text for text in summarize(replaylab.load("sample"))["warnings"])


def test_whole_number_actions():
    assert "whole numbers" in warnings(actions=np.array([[0.0], [1], [2], [1], [0]]))


def test_actions_outside_their_bounds():
    actions = np.array([[0.5], [2.0], [-3.0], [1.0], [0.2]])
    text = warnings(actions=actions, meta={"action_low": [-1], "action_high": [1]})
    assert "action values outside the declared bounds: 2" in text
    assert "outside" not in warnings(actions=actions)


def test_discrete_actions_with_gaps():
    found = summarize(make(actions=np.array([0, 3, 3, 0, 5])))
    assert found["action"]["num_actions"] == 6 and found["action"]["counts"] == {"0": 2, "3": 2, "5": 1}
    assert "action ids that never occur: 1, 2, 4" in found["warnings"]
    assert "below 0" in warnings(actions=np.array([0, -1, 1, 0, 1]))
    assert "really discrete" in warnings(actions=np.array([0, 10**9, 1, 0, 1]))


def test_duplicated_episodes():
    data = make((3, 2, 4))
    twice = data.select([0, 1, 0, 2, 0])
    assert "2 episodes repeated: the same rows occur earlier in the data" in summarize(twice)["warnings"]
    other = replace(twice, observations=twice.observations + np.arange(len(twice))[:, None])
    assert not any("repeated" in text for text in summarize(other)["warnings"])


def test_lengths_rewards_and_missing_boundaries():
    assert "1 episode of length 1" in warnings(lengths=(1, 4))
    assert "every reward is 0" in warnings(rewards=np.zeros(5))
    ends = np.array([False] * 4 + [True])
    one = {"lengths": (5,), "terminated": np.zeros(5, bool), "truncated": ends}
    assert "boundaries missing" in warnings(**one)


def test_statistics_do_not_depend_on_the_piece_size(monkeypatch):
    x = np.random.default_rng(0).normal(1e6, 1, (1000, 3)).astype(np.float32)
    x[5, 1] = np.nan
    monkeypatch.setattr(columns, "PIECE", 100)
    found = columns.column_statistics(x)
    np.testing.assert_allclose(found.mean, np.nanmean(x.astype(np.float64), 0))
    np.testing.assert_allclose(found.std, np.nanstd(x.astype(np.float64), 0), rtol=1e-9)
    assert found.nan.tolist() == [0, 1, 0]


def test_statistics_of_frames_are_exact_on_any_number_of_cores(monkeypatch):
    x = np.random.default_rng(0).integers(0, 256, (700, 3, 5), np.uint8)
    x[:300, 0, 0], x[:, 2, 4] = 255, 87
    monkeypatch.setattr(columns, "PIECE", 15 * 256)  # as many rows as float32 can sum
    found = []
    for cores in (1, 3):
        monkeypatch.setattr(columns.os, "cpu_count", lambda cores=cores: cores)
        found.append(columns.column_statistics(x))
    flat = x.reshape(700, 15)
    np.testing.assert_allclose(found[0].mean, flat.mean(0), rtol=1e-12)
    np.testing.assert_allclose(found[0].std, flat.std(0), rtol=1e-12)
    assert (found[0].low == flat.min(0)).all() and (found[0].high == flat.max(0)).all()
    assert found[0].std[-1] == 0 and (found[0].finite == 700).all()
    assert (found[0].squares == found[1].squares).all() and (found[0].mean == found[1].mean).all()


def test_large_data_stays_on_disk(tmp_path, monkeypatch):
    rows = 4000
    file = np.lib.format.open_memmap(tmp_path / "frames.npy", "w+", np.uint8, (rows, 64, 64))  # 16 MiB
    file[:, :32] = np.random.default_rng(0).integers(0, 255, (rows, 1, 1), np.uint8)
    data = make(
        (rows // 2, rows // 2),
        observations=np.load(tmp_path / "frames.npy", mmap_mode="r"),
        final_observations=np.zeros((2, 64, 64), np.uint8),
    )
    monkeypatch.setattr(columns, "PIECE", 2**16)
    tracemalloc.start()
    found = summarize(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * 2**20  # every core holds a piece
    assert found["observation"]["columns"] == [] and found["observation"]["constant"] == 32 * 64


def test_fast_enough():
    data = make((500,) * 600, observations=np.random.default_rng(0).normal(size=(300_000, 11)).astype(np.float32),
                final_observations=np.zeros((600, 11), np.float32))  # fmt: skip
    start = time.perf_counter()
    summarize(data)
    assert time.perf_counter() - start < 2  # about 0.2 s on an idle core


def test_terminal_text_is_aligned():
    text = format_summary(summarize(make(meta={"source": ["a.npz", "b.npz"]})))
    assert "a.npz, b.npz" in text and "5 steps in 2 episodes" in text
    rows = [line for line in text.splitlines() if line.startswith(("return", "length", "reward", "observation["))]
    assert len(rows) == 5 and len({len(row) for row in rows}) == 1
    many = make(observations=np.random.default_rng(0).normal(size=(5, 40)), final_observations=np.zeros((2, 40)))
    assert "more columns" in format_summary(summarize(many))


def test_projection_finds_the_plane():
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(400, 2)) * [3, 1]
    observations = np.c_[hidden @ [1, 0], hidden @ [1, 0.1], hidden @ [0, 1], np.full(400, 5.0)]
    found = project(make((200, 200), observations=observations, final_observations=np.zeros((2, 4))))
    assert found is not None
    rows, points, share = found
    assert points.shape == (400, 2) and len(rows) == 400
    assert share.sum() == pytest.approx(1)  # three columns of a two-dimensional thing
    assert abs(np.corrcoef(points[:, 0], hidden[:, 0])[0, 1]) > 0.99
    assert project(make(observations=np.ones((5, 2)))) is None


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"actions": np.array([0, 2, 1, 0, 2])},
        {"observations": np.full((5, 2), np.nan)},
        {"observations": np.ones((5, 2)), "rewards": np.zeros(5), "actions": np.full((5, 1), 1e300)},
        {"rewards": np.array([0, np.inf, 1e308, 1e308, -np.inf]), "actions": np.full((5, 1), np.nan)},
        {"observations": np.zeros((5, 4, 4, 3), np.uint8), "final_observations": np.zeros((2, 4, 4, 3), np.uint8)},
        {"actions": np.random.default_rng(0).normal(size=(5, 30))},
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
def test_page_is_whole_whatever_the_data(tmp_path, changes):
    meta = {"source": "<script>alert(1)</script>", "notes": ["<b>note</b>"]}
    with pytest.raises(UsageError, match=r"must end in \.html"):
        plot(make(), tmp_path / "page.md")
    path = plot(make(meta=meta, **changes), tmp_path / "folder" / "page.html", title="My <data>")
    page = check_page(path)
    assert "<script" not in page.html and "<b>note" not in page.html
    assert "My <data>" in page.text and "<b>note</b>" in page.text
    assert "Action support" in page.text and "States" in page.text
