"""Where an episode ends, by hand-checked rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from replaylab.data.ends import jumps
from replaylab.data.episodes import Episodes, concatenate, from_rows
from replaylab.data.inspect import summarize
from replaylab.errors import DataError


def rows(n: int, start: float = 0.0) -> np.ndarray:
    """Observations that say which row they are: 0, 1, 2, ..."""
    return (start + np.arange(n, dtype=np.float32))[:, None]


def flags(n: int, *at: int) -> np.ndarray:
    out = np.zeros(n, bool)
    out[list(at)] = True
    return out


def simple(n: int = 6, **kwargs) -> Episodes:
    kwargs = {"terminated": flags(n, 2), "truncated": flags(n, n - 1)} | kwargs
    return from_rows(rows(n), np.zeros((n, 1), np.float32), np.ones(n, np.float32), **kwargs)


def test_flags_end_episodes_and_stay_apart():
    e = simple()
    assert e.offsets.tolist() == [0, 3, 6]
    assert e.terminated.tolist() == [False, False, True, False, False, False]
    assert e.truncated.tolist() == [False] * 5 + [True]
    assert e.lengths.tolist() == [3, 3] and e.returns.tolist() == [3, 3]
    assert e.episode_ids.tolist() == [0, 0, 0, 1, 1, 1] and e.timesteps.tolist() == [0, 1, 2, 0, 1, 2]
    assert [(p["terminated"].tolist(), p["truncated"].tolist()) for p in e] == [
        ([False, False, True], [False] * 3), ([False] * 3, [False, False, True])
    ]  # fmt: skip


def test_a_row_may_be_both_terminated_and_truncated():
    e = simple(terminated=flags(6, 5), truncated=flags(6, 5))
    assert e.terminated[5] and e.truncated[5] and e.num_episodes == 1


def test_next_observation_never_comes_from_the_next_episode():
    after = rows(6, 1)
    after[2] = 99  # the true last state of episode 0
    e = simple(next_observations=after)
    assert e.next_observations()[:, 0].tolist() == [1, 2, 99, 4, 5, 6]
    assert e.final_known.all() and e.meta["notes"] == []


def test_a_leaked_first_observation_is_not_taken_for_the_final_one():
    e = simple(next_observations=rows(6, 1))  # row 2 claims that 3, the next episode's first, followed it
    assert e.final_known.tolist() == [False, True]
    assert e.final_observations[:, 0].tolist() == [2, 6]  # the last observation stands in
    rolled = np.roll(rows(6), -1, axis=0)  # np.roll: the last row claims the very first observation
    assert simple(next_observations=rolled).final_known.tolist() == [False, False]
    # the file holds something there, and it may even be true: an episode can end where the next one begins
    [note] = e.meta["notes"]
    assert "observation of 1 of 2 episodes is not trusted: their last next observation is the next episode's" in note


def test_without_next_observations_finals_are_unknown_and_said_so():
    e = simple()
    assert e.final_observations[:, 0].tolist() == [2, 5] and not e.final_known.any()
    assert e.meta["notes"] == ["the final observation of 2 of 2 episodes is not in the file"]


def test_the_tail_is_kept_as_a_truncated_episode():
    e = simple(truncated=flags(6))
    assert e.offsets.tolist() == [0, 3, 6] and e.truncated.tolist() == [False] * 5 + [True]
    assert any("after the last boundary" in note for note in e.meta["notes"])


@pytest.mark.parametrize(("terminated", "what"), [(None, "no episode ends"), (flags(6, 2), "no time limits")])
def test_missing_boundaries_are_noted_with_the_way_out(terminated, what):
    notes = simple(terminated=terminated, truncated=None).meta["notes"]
    assert any(what in n and "--max-episode-steps" in n and "--split discontinuity" in n for n in notes)
    notes = simple(terminated=terminated, truncated=None, max_episode_steps=3).meta["notes"]
    assert not any("--max-episode-steps" in n for n in notes)
    notes = simple(terminated=terminated, truncated=None, next_observations=np.roll(rows(6), -1, axis=0)).meta["notes"]
    assert any(what in n for n in notes)


def test_a_gap_in_next_observations_is_a_boundary():
    after = rows(6, 1)
    after[3] = 50
    e = simple(terminated=None, truncated=None, next_observations=after)
    assert e.offsets.tolist() == [0, 4, 6] and e.truncated[3] and e.final_observations[0, 0] == 50
    assert any("not followed by their next_observation, and so end an episode: 1;" in note for note in e.meta["notes"])


def test_max_episode_steps_counts_from_each_known_end():
    e = simple(10, terminated=flags(10, 1), truncated=None, max_episode_steps=3)
    assert e.offsets.tolist() == [0, 2, 5, 8, 10]
    assert e.truncated.nonzero()[0].tolist() == [4, 7, 9]
    for bad in (0, -1):
        with pytest.raises(DataError, match="max_episode_steps"):
            simple(max_episode_steps=bad)


def test_the_limit_explains_a_gap():
    after = rows(6, 1)
    after[2] = 9
    e = simple(terminated=None, truncated=None, next_observations=after, max_episode_steps=3)
    assert e.offsets.tolist() == [0, 3, 6] and e.final_known.tolist() == [True, True]
    assert e.meta["notes"] == []


def test_a_change_of_id_ends_an_episode():
    e = simple(terminated=flags(6, 1), truncated=None, episode=np.array(["a", "a", "b", "b", "b", "a"]))
    assert e.offsets.tolist() == [0, 2, 5, 6]
    assert e.terminated.nonzero()[0].tolist() == [1] and e.truncated.nonzero()[0].tolist() == [4, 5]
    assert any("come back after other ids (1 x)" in note and "sorted by episode" in note for note in e.meta["notes"])
    assert not any("come back" in note for note in simple(episode=np.array([7, 7, 7, 1, 1, 1])).meta["notes"])
    with pytest.raises(DataError, match="episode holds NaN in row 2"):
        simple(episode=np.array([0, np.nan, 0, 0, 0, 0]))


def swing(episodes: int, steps: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """An oscillator started anew each episode; one step moves it further than a reset does."""
    rng = np.random.default_rng(seed)
    turn = np.array([[np.cos(1.3), np.sin(1.3)], [-np.sin(1.3), np.cos(1.3)]])
    out, state, actions = [], np.zeros(2), rng.normal(size=(episodes * steps, 1))
    for i in range(episodes * steps):
        state = rng.normal(size=2) if i % steps == 0 else turn @ state + 0.05 * actions[i - 1] + rng.normal(0, 0.02, 2)
        out.append(state)
    return np.array(out, np.float32), actions.astype(np.float32)


def test_discontinuity_finds_resets_that_are_smaller_than_steps():
    observations, actions = swing(20, 100, seed=3)
    truth = np.arange(2000) % 100 == 99
    found = jumps(observations, actions)
    assert found[:-1][truth[:-1]].mean() > 0.9 and (found & ~truth).sum() <= 2
    e = from_rows(observations, actions, np.zeros(2000), split="discontinuity")
    assert e.truncated[:-1].tolist() == found[:-1].tolist() and e.truncated[-1]
    assert any("guessed" in note for note in e.meta["notes"])
    assert np.isfinite(jumps(np.full((50, 3), np.nan), actions[:50])).all()  # nothing to say, and no crash
    assert not jumps(observations[98:101], actions[98:101]).any()  # three rows tell nothing of what is usual
    assert not jumps(*swing(1, 5000, seed=3)).any()  # one long episode


@pytest.mark.parametrize("low, middle, high", [(1.5, 3, 100), (1.4, 1.95, 2.5)])
def test_a_jump_is_above_both_two_and_the_cut_between_the_clusters(low, middle, high):
    """Most steps are 1, which is thus the usual one. 3 belongs to the cluster of 1.5, and 1.95 to that of 2.5."""
    steps = np.ones(1000)
    steps[200:209], steps[[300, 400, 600]], steps[[0, 500, 999]] = low, middle, high  # at the log's edges too
    steps *= np.random.default_rng(0).choice([-1, 1], 1000)  # unpredictable
    found = jumps(np.append(0, steps.cumsum())[:, None], np.zeros(1001, np.int64))
    assert np.flatnonzero(found).tolist() == [0, 500, 999]


def test_jumps_of_images_are_large_steps():
    frames = np.random.default_rng(0).integers(0, 20, (60, 300)).astype(np.uint8)
    frames[30:] += 100
    assert np.flatnonzero(jumps(frames, np.zeros(60, np.int64))).tolist() == [29]


def test_a_log_of_one_row():
    e = from_rows([3.0], [[0.5]], [1.0], next_observations=[3.0])
    assert e.observations.tolist() == [[3]] and e.final_observations.tolist() == [[3]] and e.offsets.tolist() == [0, 1]
    assert e.final_known.tolist() == [True]  # there is no next episode whose first observation it could be


def test_discrete_actions_are_integers_of_one_column():
    for actions in (np.arange(6), np.arange(6)[:, None], np.array([0, 1] * 3, bool)):
        e = from_rows(rows(6), actions, np.zeros(6))
        assert e.discrete and e.actions.shape == (6,)
    several = from_rows(rows(6), np.ones((6, 2), int), np.zeros(6))
    assert not several.discrete and several.actions.dtype == np.float32
    assert any("amounts" in note for note in several.meta["notes"])
    with pytest.raises(DataError, match="negative, found -1"):
        from_rows(rows(6), -np.ones(6, int), np.zeros(6))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"actions": np.zeros((5, 1))}, "actions has 5 rows, rewards has 6"),
        ({"observations": np.zeros((6, 0))}, "observations has no columns"),
        ({"observations": np.array(["a"] * 6)}, "observations must be numbers"),
        ({"actions": np.zeros((6, 1), complex)}, "actions must be numbers"),
        ({"rewards": np.zeros((6, 2))}, "rewards must be one number a row"),
        ({"rewards": np.zeros(0)}, "no rows"),
        ({"terminated": np.full(6, np.nan)}, "terminated must be 0 or 1 in every row, found nan"),
        ({"terminated": np.full(6, 2)}, "terminated must be 0 or 1"),
        ({"truncated": np.zeros(7)}, "truncated has 7 entries"),
        ({"next_observations": np.zeros((6, 3))}, "next_observations has shape"),
        ({"split": "x"}, "split must be"),
    ],
)
def test_wrong_rows_are_refused(change, message):
    arguments = {"observations": rows(6), "actions": np.zeros((6, 1)), "rewards": np.zeros(6)} | change
    with pytest.raises(DataError, match=message):
        from_rows(**arguments)


def test_the_type_itself_refuses_what_cannot_be():
    good = simple()
    fields = {k: getattr(good, k) for k in Episodes.__dataclass_fields__}
    for change, message in [
        ({"rewards": np.zeros(0)}, "no rows"),
        ({"rewards": np.ones((6, 1))}, "rewards must be one number a row"),
        ({"offsets": np.array([0, 2, 6])}, "last row of every episode"),
        ({"offsets": np.array([0, 4, 3, 6])}, "offsets must rise"),
        ({"offsets": good.offsets.astype(float)}, "offsets must be one int64"),
        ({"terminated": good.terminated.astype(float)}, "terminated must be one bool"),
        ({"final_known": np.ones(3, bool)}, "final_known has 3"),
        ({"final_observations": np.zeros((2, 2))}, "final_observations has shape"),
        ({"extras": {"x": np.zeros(5)}}, "x has 5 rows"),
        ({"observations": good.observations.astype(">f4")}, "observations must be numbers"),
    ]:
        with pytest.raises(DataError, match=message):
            Episodes(**(fields | change))


def test_split_cuts_further_and_keeps_what_is_known():
    e = simple().split(max_episode_steps=2)
    assert e.offsets.tolist() == [0, 2, 3, 5, 6]
    assert e.final_observations[:, 0].tolist() == [2, 2, 5, 5]  # a new end is followed by the next row
    assert e.final_known.tolist() == [True, False, True, False]
    assert e.terminated.nonzero()[0].tolist() == [2] and simple().split() is not None


def test_select_takes_numbers_or_a_mask():
    e = simple(9, terminated=flags(9, 2, 5))
    assert e.select([2, 0]).observations[:, 0].tolist() == [6, 7, 8, 0, 1, 2]
    assert e.select(np.array([True, False, True])).observations[:, 0].tolist() == [0, 1, 2, 6, 7, 8]
    assert e.select(e.lengths > 2).num_episodes == 3
    for mask, message in ((e.terminated, "shape .9,. cannot select from 3 episodes"), ([False] * 3, "no episodes")):
        with pytest.raises(DataError, match=message):
            e.select(mask)


def test_the_best_episodes_are_as_many_as_fit():
    e = from_rows(rows(9), np.zeros((9, 1)), np.arange(9.0)[::-1], flags(9, 2, 5, 8))  # returns 21, 12 and 3
    for fraction, kept in ((0.1, 3), (0.6, 3), (0.7, 6), (1.0, 9)):
        assert e.top_fraction(fraction).observations[:, 0].tolist() == list(range(kept))


def test_which_rows_have_a_known_successor_and_which_a_known_backup():
    e = simple()  # row 2 is terminated, row 5 truncated, and what followed is known of neither
    assert e.next_known.tolist() == [True, True, False, True, True, False]
    assert e.backup_known.tolist() == [True] * 5 + [False]


def test_concatenate_shifts_offsets_and_keeps_shared_extras():
    a = simple(extras={"x": np.arange(6), "only": np.arange(6), "odd": np.zeros((6, 1))})
    b = simple(extras={"x": np.arange(6), "odd": np.zeros((6, 2))})
    both = concatenate([a, b])
    assert both.offsets.tolist() == [0, 3, 6, 9, 12] and set(both.extras) == {"x"}
    both = concatenate(
        [from_rows(rows(2), np.arange(2), np.ones(2), meta={"num_actions": n, "source": f"{n}"}) for n in (4, 9)]
    )
    assert both.num_actions == 9 and both.meta["source"] == ["4", "9"] and len(both.meta["notes"]) == 6
    with pytest.raises(DataError, match="cannot join"):
        concatenate([a, from_rows(np.zeros((2, 5)), np.zeros((2, 1)), np.zeros(2))])


def test_bounds_as_arrays_are_compared_as_numbers():
    """As Gymnasium's `action_space.low` hands them out."""

    def log(low: float) -> Episodes:
        meta = {"action_low": np.array([low, -1.0]), "action_high": np.array([2.0, 1.0])}
        return from_rows(rows(6), np.zeros((6, 2), np.float32), np.ones(6), meta=meta)

    assert concatenate([log(-2), log(-2)]).action_bounds[0].tolist() == [-2, -1]
    assert "action_low" not in concatenate([log(-2), log(-3)]).meta


def test_returns_to_go_and_statistics():
    e = from_rows(rows(6), np.zeros((6, 1)), np.arange(6.0), flags(6, 2))
    assert e.returns_to_go().tolist() == [3, 3, 2, 12, 9, 5]
    mean, std = e.observation_stats()
    assert mean[0] == 2.5 and np.isclose(std[0], np.std(np.arange(6)))


@pytest.mark.parametrize(
    ("low", "high", "meta", "box"),
    [
        ([0, 0], [0.1, 0.5], {}, ([0, 0], [0.1, 0.5])),  # doses: a policy must not answer negative ones
        ([0, 0], [1, 1], {}, ([0, 0], [1, 1])),
        ([-0.01, -0.5], [0.02, 0.5], {}, ([-0.01, -0.5], [0.02, 0.5])),  # small units
        ([-0.1, 0], [0.1, 0.9], {}, ([-0.1, 0], [0.1, 0.9])),  # no column has both signs and goes beyond a half
        ([-0.1, -0.6], [0.1, 0.2], {}, ([-1, -1], [1, 1])),  # like a robot's
        ([-1, -1.5], [1, 0.2], {}, ([-1, -1.5], [1, 0.2])),
        ([0, 0], [0.1, 0.5], {"env_id": "d4rl/hopper"}, ([-1, -1], [1, 1])),
        ([0, 0], [0.1, 0.5], {"action_low": -2, "action_high": 3}, ([-2, -2], [3, 3])),
        ([0, 0], [0.1, 0], {"action_low": [0, 0], "action_high": [1, 0]}, ([0, 0], [1, 0])),  # one never varies
    ],
)
def test_the_box_of_actions(low, high, meta, box):
    actions = np.array([low, high] * 3, np.float32)
    e = from_rows(rows(6), actions, np.zeros(6), flags(6, 5), meta=meta)
    np.testing.assert_array_equal(e.action_bounds, np.array(box, np.float32))
    told = summarize(e)["action"]
    np.testing.assert_array_equal([told["low"], told["high"]], np.array(box, np.float32))


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"observations": [[1.0, 2.0], [3.0]] + [[0.0]] * 4}, "observations cannot be read as an array"),
        ({"rewards": [[1.0, 2.0], [3.0]] + [[0.0]] * 4}, "rewards cannot be read as an array"),
        ({"terminated": torch.zeros(6, requires_grad=True)}, "terminated cannot be read as an array"),
        ({"episode": [[1], [2, 3]]}, "episode cannot be read as an array"),
        ({"episode": [None, "a", 1, 1, 1, 1]}, "episode must be all numbers or all names"),
        ({"max_episode_steps": "2"}, "max_episode_steps must be a whole number of at least 1, not 2"),
        ({"max_episode_steps": 2.5}, "max_episode_steps must be a whole number of at least 1, not 2.5"),
        ({"extras": {"q": [1, 2]}}, "q has 2 rows, rewards has 6"),
        ({"meta": "d4rl/hopper"}, "meta must be names with values, not 'd4rl/hopper'"),
        ({"meta": {"notes": "one"}}, "notes must be a list of sentences"),
        ({"meta": {"env_id": 3}}, "env_id must be a name"),
        ({"meta": {"action_low": [-1, -1], "action_high": [1, 1]}}, "action_low must be 1 finite numbers"),
        ({"meta": {"action_low": 1, "action_high": -1}}, "action_low is above action_high"),
        ({"meta": {"action_low": -np.inf, "action_high": np.inf}}, "action_low must be 1 finite numbers"),
        ({"meta": {"action_low": "a", "action_high": 1}}, "action_low must be 1 finite numbers"),
        ({"actions": np.arange(6), "meta": {"num_actions": 3}}, "num_actions is 3, but action 5 occurs"),
        ({"actions": np.arange(6), "meta": {"num_actions": "x"}}, "num_actions is x, but action 5 occurs"),
    ],
)
def test_arrays_that_do_not_fit_are_one_line(wrong, told):
    given = {"observations": rows(6), "actions": np.zeros((6, 1), np.float32), "rewards": np.ones(6)} | wrong
    with pytest.raises(DataError, match=told):
        from_rows(**given)


def test_what_numpy_and_gymnasium_hand_out_is_taken():
    ids = np.arange(6)
    e = from_rows(ids[::-1, None] / 2, ids[::-1], ids[::-1], extras={"q": [0] * 6}, meta={"num_actions": np.int64(9)})
    assert e.num_actions == 9 and e.extras["q"].tolist() == [0] * 6
    assert torch.tensor(e.rewards).tolist() == [5, 4, 3, 2, 1, 0]  # torch reads no reversed view
    assert torch.tensor(e.observations)[0].item() == 2.5 and torch.tensor(e.actions)[0].item() == 5
    assert simple(max_episode_steps=2.0).lengths.tolist() == [2, 1, 2, 1]


@pytest.mark.parametrize("wrong", [[0.5], [2], [0, 2], [-3], 0, slice(1), [[0]]])
def test_episodes_are_selected_by_their_numbers(wrong):
    assert simple().select([-1, 0]).num_episodes == 2
    with pytest.raises(DataError, match="episodes are selected by a list of their numbers, 0 to 1"):
        simple().select(wrong)
