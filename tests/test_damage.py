"""Damage with answers worked out by hand: which rows go, what follows the rows that stay, who is labelled."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from conftest import make_episodes

from replaylab.data.damage import corrupt, first_component, keep_rows, sparsify
from replaylab.data.episodes import Episodes, from_rows
from replaylab.errors import UsageError


def line(rows: int = 8) -> Episodes:
    """Two episodes of four rows on a line: observation (-7, -5, ... 7, 0), actions (-, +, -, +, ...)."""
    observations = np.stack([np.arange(-rows + 1, rows, 2.0), np.zeros(rows)], 1).astype(np.float32)
    actions = np.tile([[-1.0], [1.0]], (rows // 2, 1)).astype(np.float32)
    terminated = np.arange(rows) == rows // 2 - 1
    truncated = np.arange(rows) == rows - 1
    meta = {"env_id": "d4rl/hopper", "action_low": -1, "action_high": 1, "notes": ["old"]}
    rewards = np.arange(rows, dtype=np.float32)
    extras = {"row": np.arange(rows)}
    following = observations + np.where(terminated | truncated, 0.5, 2.0)[:, None].astype(np.float32) * [1, 0]
    return from_rows(observations, actions, rewards, terminated, truncated, following, extras=extras, meta=meta)


def exact(full: Episodes, part: Episodes) -> None:
    """Every row that is left has the columns and the successor it had; `extras['row']` says which row it was."""
    rows = part.extras["row"]
    for name in ("observations", "actions", "rewards", "terminated"):
        np.testing.assert_array_equal(getattr(part, name), getattr(full, name)[rows])
    np.testing.assert_array_equal(part.next_observations(), full.next_observations(rows))


# --- keeping some rows


def test_pieces_end_truncated_with_their_true_successor():
    full = make_episodes((5, 3, 8))  # episodes 0 and 2 terminate, 1 is truncated
    full = replace(full, extras={"row": np.arange(16)}, attachments={"w": np.ones(3)})
    keep = np.ones(16, bool)
    keep[[2, 5, 15]] = False  # in the middle of 0, the first of 1, the last of 2
    part = keep_rows(full, keep)
    exact(full, part)
    assert part.offsets.tolist() == [0, 2, 4, 6, 13]
    assert part.terminated[part.last_rows].tolist() == [False, True, False, False]
    assert part.truncated[part.last_rows].tolist() == [True, False, True, True]
    assert part.final_known.all() and "w" in part.attachments
    np.testing.assert_array_equal(part.final_observations[0], full.observations[2])
    np.testing.assert_array_equal(part.final_observations[3], full.observations[15])


def test_an_unknown_final_observation_stays_unknown():
    full = make_episodes((4, 4))
    full = replace(full, final_known=np.array([False, True]))
    part = keep_rows(full, np.arange(8) != 1)
    assert part.lengths.tolist() == [1, 2, 4] and part.final_known.tolist() == [True, False, True]


def test_equal_observations_on_both_sides_of_a_hole_are_not_joined():
    full = from_rows(np.zeros((6, 2), np.float32), np.zeros((6, 1), np.float32), np.zeros(6))
    assert keep_rows(full, np.arange(6) != 3).lengths.tolist() == [3, 2]


def test_keeping_all_rows_changes_nothing():
    full = make_episodes()
    part = keep_rows(full, np.ones(len(full), bool))
    np.testing.assert_array_equal(part.offsets, full.offsets)
    np.testing.assert_array_equal(part.final_observations, full.final_observations)
    np.testing.assert_array_equal(part.truncated, full.truncated)


# --- pca-quadrant


def test_first_component_by_hand():
    # along (3, 4) / 5 with coordinates -10, 0, 10; across it nothing
    along, axis = first_component(np.array([[94.0, -58.0], [100.0, -50.0], [106.0, -42.0]]))
    np.testing.assert_allclose(axis, [0.6, 0.8])
    np.testing.assert_allclose(along, [-10, 0, 10], atol=1e-12)
    # the largest entry decides the sign: turning the data round turns the coordinates, not the axis
    flipped, same = first_component(np.array([[6.0, 8.0], [0.0, 0.0], [-6.0, -8.0]]))
    np.testing.assert_allclose(same, axis)
    np.testing.assert_allclose(flipped, -along, atol=1e-12)
    _, mixed = first_component(np.array([[-4.0, 3.0], [4.0, -3.0]]))
    np.testing.assert_allclose(mixed, [0.8, -0.6])


def test_equal_entries_of_a_component_take_the_sign_of_the_first():
    for scale in (1.0, 0.3, 1e-3):
        values = np.array([[1.0, -1.0], [-1.0, 1.0], [0.1, 0.1], [-0.1, -0.1]]) * scale
        np.testing.assert_allclose(first_component(values)[1], np.sqrt([0.5, 0.5]) * [1, -1])


def test_pca_quadrant_by_hand():
    full = line()
    # observations along x: -7 -5 -3 -1 1 3 5 7, mean 0; actions alternate -1, 1
    part = sparsify(full, "pca-quadrant", threshold=-2.0, keep=0.0)
    assert part.extras["row"].tolist() == [1, 3, 4, 5, 6, 7]  # rows 0 and 2 are left below and act below
    exact(full, part)
    assert part.lengths.tolist() == [1, 1, 4]  # row 1 lost its follower, row 3 ends its episode anyway
    assert part.truncated[part.last_rows].tolist() == [True, False, True]
    (record,) = part.meta["damage"]
    assert (record["recipe"], record["seed"]) == ("pca-quadrant", 0)
    assert (record["rows"], record["in_region"], record["removed"]) == (8, 2, 2)
    assert record["params"]["threshold"] == -2 and record["params"]["observation_axis"] == [1.0, 0.0]
    assert part.meta["notes"] == ["old"] and part.env_id == "d4rl/hopper" and "damage" not in full.meta


def test_the_threshold_of_a_known_robot_is_gormpos():
    part = sparsify(line(), "pca-quadrant", keep=0.0)  # hopper: below -5, so -7 alone
    assert part.extras["row"].tolist() == list(range(1, 8))
    for env_id, threshold in (("d4rl/halfcheetah", -20), ("walker2d-medium-v2", -10), ("Hopper-v5", -5)):
        renamed = replace(line(80), meta={"env_id": env_id})
        assert sparsify(renamed, "pca-quadrant").meta["damage"][0]["params"]["threshold"] == threshold
    with pytest.raises(UsageError, match="no threshold for 'Swimmer-v5': pass threshold"):
        sparsify(replace(line(), meta={"env_id": "Swimmer-v5"}), "pca-quadrant")
    with pytest.raises(UsageError, match="no threshold for data that names no environment: pass"):
        sparsify(replace(line(), meta={}), "pca-quadrant")


def test_pca_quadrant_keeps_one_in_a_hundred_and_repeats():
    full = line(40_000)
    part = sparsify(full, "pca-quadrant", threshold=0.0, seed=3)
    (record,) = part.meta["damage"]
    assert record["in_region"] == 10_000 and 9860 < record["removed"] < 9940  # 9900 +- 4 standard deviations
    assert len(part) == 40_000 - record["removed"]
    np.testing.assert_array_equal(
        part.extras["row"], sparsify(full, "pca-quadrant", threshold=0.0, seed=3).extras["row"]
    )
    other = sparsify(full, "pca-quadrant", threshold=0.0, seed=4)
    assert not np.array_equal(part.extras["row"], other.extras["row"])


def test_a_recipe_that_removes_nothing_says_so(capsys):
    part = sparsify(line(), "pca-quadrant", threshold=-100.0)
    assert capsys.readouterr().err == "note: pca-quadrant removed nothing: 0 of 8 rows lie in its region\n"
    assert part.meta["notes"] == ["old", "pca-quadrant removed nothing: 0 of 8 rows lie in its region"]


# --- reward-action-box


def test_reward_action_box_by_hand():
    full = line()
    full = replace(full, actions=np.array([[0], [-1], [2], [-3], [4], [-5], [6], [-7]], np.float32))
    # rewards 0..7 and norms 0..7: 2..5 lie in both ranges; half of those four go
    part = sparsify(full, "reward-action-box", drop=0.5, reward=(2, 7), action_norm=(0, 5), absolute=True)
    exact(full, part)
    (record,) = part.meta["damage"]
    assert (record["in_region"], record["removed"], len(part)) == (4, 2, 6)
    assert {0, 1, 6, 7} <= set(part.extras["row"].tolist())
    assert record["params"] == {"drop": 0.5, "absolute": True, "reward": [2.0, 7.0], "action_norm": [0.0, 5.0]}
    gone = sparsify(full, "reward-action-box", drop=1.0, reward=(2, 7), action_norm=(0, 5), absolute=True)
    assert gone.extras["row"].tolist() == [0, 1, 6, 7] and gone.lengths.tolist() == [2, 2]


def test_quantiles_of_the_box_are_those_of_the_data():
    full = line()
    full = replace(full, actions=np.arange(8, dtype=np.float32)[::-1, None])
    part = sparsify(full, "reward-action-box", drop=1.0, reward=(0.5, 1.0), action_norm=(0.0, 1.0))
    assert part.extras["row"].tolist() == [0, 1, 2, 3]  # the median reward is 3.5
    assert part.meta["damage"][0]["params"]["reward_box"] == [3.5, 7.0]
    assert len(sparsify(full, "reward-action-box")) == 8  # large rewards go with small actions here


def test_a_seed_counts_from_zero():
    with pytest.raises(UsageError, match="seed must be at least 0, not -1"):
        sparsify(line(), "pca-quadrant", threshold=0.0, seed=-1)
    with pytest.raises(UsageError, match="seed must be at least 0, not -1"):
        corrupt(line(), 1.0, seed=-1, episodes_count=1)


def test_damages_add_up_in_meta():
    once = sparsify(line(), "pca-quadrant", threshold=-6.0, keep=0.0)
    twice = sparsify(once, "reward-action-box", drop=0.5, reward=(0, 1), action_norm=(0, 1), seed=9)
    assert [r["recipe"] for r in twice.meta["damage"]] == ["pca-quadrant", "reward-action-box"]
    exact(line(), twice)


@pytest.mark.parametrize(
    ("recipe", "params", "message"),
    [
        ("pca", {}, "unknown recipe 'pca'"),
        ("pca-quadrant", {"treshold": 1}, "unknown parameter 'treshold'; did you mean 'threshold'"),
        ("pca-quadrant", {"rng": 1}, "unknown parameter 'rng'"),
        ("pca-quadrant", {"keep": 1.5}, "keep must be from 0 to 1"),
        ("reward-action-box", {"drop": -1}, "drop must be from 0 to 1"),
        ("reward-action-box", {"reward": (0.5, 2.0)}, "reward must be two rising quantiles from 0 to 1"),
        ("reward-action-box", {"action_norm": (3, 1), "absolute": True}, "action_norm must be two rising numbers"),
        ("reward-action-box", {"drop": 1, "reward": (0, 1), "action_norm": (0, 1)}, "removes all 8 rows"),
    ],
)
def test_wrong_settings_are_named(recipe, params, message):
    with pytest.raises(UsageError, match=message):
        sparsify(line(), recipe, **params)


def test_discrete_actions_are_refused():
    for damage in (lambda e: sparsify(e, "reward-action-box"), lambda e: corrupt(e, 1.0, episodes_count=1)):
        with pytest.raises(UsageError, match="needs vectors of real numbers; actions are int64"):
            damage(make_episodes(discrete=True))


# --- corrupt


def test_corrupt_is_a_clean_half_and_the_same_rows_shifted():
    full = make_episodes([20] * 12, observation=6)
    full = replace(full, meta={"env_id": "x"}, extras={"row": np.arange(240)}, attachments={"w": np.ones(2)})
    test = corrupt(full, 1.4, seed=5)
    half = len(test) // 2
    assert test.num_episodes == 20 and half == 200
    assert test.extras["ood"].tolist() == [False] * half + [True] * half
    rows = test.extras["row"]
    np.testing.assert_array_equal(rows[:half], rows[half:])
    assert len(set(full.episode_ids[rows[:half]])) == 10
    exact_half = test.select(range(10))
    exact(full, exact_half)
    for name in ("rewards", "terminated", "truncated"):
        np.testing.assert_array_equal(getattr(test, name)[half:], getattr(test, name)[:half])
    shift = test.observations[half:] - test.observations[:half]
    assert abs(shift.mean() - 1.4) < 0.02 and abs(shift.std() - 0.1) < 0.01 and np.unique(shift).size > 1000
    moved = test.actions[half:]
    assert moved.max() == 1.0 and moved.min() >= -1.0  # the box of data within [-1, 1]
    free = moved < 1
    added = (moved - test.actions[:half])[free]
    assert free.sum() > 50 and abs(added.mean() - 1.4) < 0.1
    assert "w" in test.attachments and test.env_id == "x"
    (record,) = test.meta["damage"]
    assert record["recipe"] == "corrupt" and record["params"] == {"distance": 1.4, "scale": 0.1} and record["seed"] == 5
    assert record["episodes"] == sorted(set(full.episode_ids[rows]))


def test_next_observations_of_the_shifted_half_are_shifted():
    full = make_episodes((6, 4, 7))
    test = corrupt(full, -2.0, episodes_count=3)
    following = test.next_observations()
    np.testing.assert_array_equal(following[17], test.observations[18])  # one shift an observation, not two
    np.testing.assert_allclose(following[17:] - following[:17], -2.0, atol=0.6)  # ends of episodes too
    assert test.final_known.all()


def test_numpys_numbers_are_taken():
    full = line(80)
    given = {"drop": np.float32(0.5), "reward": np.array([0, 1], np.float32)}
    found = sparsify(full, "reward-action-box", seed=np.int64(3), **given)
    assert found.meta["damage"] == sparsify(full, "reward-action-box", seed=3, drop=0.5, reward=[0, 1]).meta["damage"]


def test_corrupt_repeats_with_its_seed_only():
    full = make_episodes([5] * 12)
    one, same, other = (corrupt(full, 1.0, seed=s) for s in (1, 1, 2))
    np.testing.assert_array_equal(one.observations, same.observations)
    np.testing.assert_array_equal(one.actions, same.actions)
    assert not np.array_equal(one.observations, other.observations)
    still = corrupt(full, 0.0, scale=0.0)
    np.testing.assert_array_equal(still.observations[len(still) // 2 :], still.observations[: len(still) // 2])


@pytest.mark.parametrize("settings", [{"episodes_count": 4}, {"episodes_count": 0}, {"scale": -1}])
def test_corrupt_refuses_what_cannot_be(settings):
    with pytest.raises(UsageError):
        corrupt(make_episodes(), 1.0, **{"episodes_count": 3} | settings)
