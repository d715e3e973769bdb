"""Statistics against numbers worked out by hand."""

import numpy as np
import pytest

from replaylab.stats import (
    aggregate,
    bootstrap_interval,
    independent_units,
    iqm,
    mean,
    mean_and_error,
    performance_profile,
    probability_of_improvement,
    summarize_scores,
)


def test_iqm_weights_values_on_the_edge_in_part():
    assert iqm([1, 2, 3, 4, 5, 6, 7, 8]) == pytest.approx(4.5)  # the mean of 3, 4, 5, 6
    # n = 5: the middle half reaches from 1.25 to 3.75, so the weights are 0, 0.75, 1, 0.75, 0
    assert iqm([100, 1, 2, 3, 0]) == pytest.approx((0.75 * 1 + 2 + 0.75 * 3) / 2.5)
    # n = 3: from 0.75 to 2.25, weights 0.25, 1, 0.25
    assert iqm([9, 0, 3]) == pytest.approx((0.25 * 0 + 3 + 0.25 * 9) / 1.5)
    assert iqm([7]) == 7
    assert iqm([2, 4]) == 3


def test_iqm_reduces_the_last_axis():
    np.testing.assert_allclose(iqm([[1, 2, 3, 4], [10, 20, 30, 1000]]), [2.5, 25])


def test_iqm_ignores_outliers_and_is_between_median_and_mean_in_noise():
    values = np.r_[np.arange(100), 1e9]
    assert iqm(values) < 60


def test_mean_and_error():
    average, error = mean_and_error([2, 4, 4, 4, 5, 5, 7, 9])  # sum of squares about 5 is 32
    assert average == 5
    assert error == pytest.approx(np.sqrt(32 / 7) / np.sqrt(8))
    average, error = mean_and_error([3])
    assert average == 3 and np.isnan(error)


def test_unit_is_the_seed_or_with_one_seed_the_episode():
    values, strata, unit = independent_units([[0, 2], [10, 20, 30]])
    assert unit == "seed" and values.tolist() == [1, 20] and strata.tolist() == [0, 0]
    values, strata, unit = independent_units(np.array([[1.0, 2, 3]]))
    assert unit == "episode" and values.tolist() == [1, 2, 3]
    # one seed in each of two tasks: episodes, each in its task
    values, strata, unit = independent_units([[1, 2], [5]], groups=["walker", "hopper"])
    assert unit == "episode" and values.tolist() == [1, 2, 5] and strata.tolist() == [1, 1, 0]


def test_bootstrap_of_two_seeds_by_hand():
    # the resampled mean is 0, 5 or 10 with probabilities 1/4, 1/2, 1/4
    scores = [[-1, 1], [9, 11]]
    assert bootstrap_interval(scores, mean) == (0, 10)
    assert bootstrap_interval(scores, mean, confidence=0.4) == (5, 5)


def test_bootstrap_uses_seed_means_not_episodes():
    # both seeds have the mean 5, so nothing varies between seeds, however widely the episodes are spread
    assert bootstrap_interval([[0, 10], [5, 5]], mean) == (5, 5)


def test_bootstrap_keeps_strata_apart():
    scores, tasks = [[0], [10], [1000], [1010]], ["a", "a", "b", "b"]
    # within tasks the mean lies between 500 and 510 (each end has probability 1/16); across tasks it could be 0
    assert bootstrap_interval(scores, mean, groups=tasks) == (500, 510)
    assert bootstrap_interval(scores, mean)[0] < 300


def test_bootstrap_matches_theory_on_many_units():
    values = np.random.default_rng(1).normal(0, 1, 400)
    low, high = bootstrap_interval([values], mean, resamples=4000)
    half = 1.96 * values.std() / np.sqrt(400)
    assert low == pytest.approx(values.mean() - half, abs=0.012)
    assert high == pytest.approx(values.mean() + half, abs=0.012)


def test_bootstrap_is_deterministic_and_does_not_depend_on_the_piece_size(monkeypatch):
    scores = np.random.default_rng(0).normal(size=(1, 50))
    first = bootstrap_interval(scores)
    assert bootstrap_interval(scores) == first
    assert bootstrap_interval(scores, seed=1) != first
    monkeypatch.setattr("replaylab.stats.CHUNK", 1000)
    assert bootstrap_interval(scores) == first


def test_nothing_to_resample_gives_no_interval():
    assert np.isnan(bootstrap_interval([[3.0]])).all()
    assert np.isnan(bootstrap_interval([[3.0], [4.0]], groups=["a", "b"])).all()


def test_bad_shapes_are_refused():
    for bad in ([], [[1.0], []]):
        with pytest.raises(ValueError, match="at least one score"):
            bootstrap_interval(bad)
    with pytest.raises(ValueError, match="1 groups for 2 seeds"):
        bootstrap_interval([[1], [2]], groups=["a"])


def test_summary_is_plain_json():
    found = summarize_scores([[0, 2], [10, 20, 30]])
    assert found["mean"] == 10.5 and found["error"] == pytest.approx(9.5)
    assert found["iqm"] == 10.5 and (found["low"], found["high"]) == (1, 20)
    assert (found["unit"], found["seeds"], found["episodes"]) == ("seed", 2, 5)
    alone = summarize_scores([[7.0]])
    assert alone["mean"] == 7 and alone["error"] is None and alone["low"] is None


# --- many tasks


def test_aggregates_of_two_tasks_by_hand():
    tasks = [[0.0, 10.0, 20.0, 30.0], [100.0, 110.0, 120.0, 150.0]]
    # the middle half of 0 10 20 30 100 110 120 150
    assert aggregate(tasks, "iqm")[0] == pytest.approx((20 + 30 + 100 + 110) / 4)
    assert aggregate(tasks, "mean")[0] == pytest.approx((15 + 120) / 2)
    assert aggregate([*tasks, [44.0, 46.0, 99.0]], "median")[0] == pytest.approx(63)  # of 15, 63, 120
    # below 100 by 100, 90, 80, 70 on the first task; the second has no gap, and its excess makes up for nothing
    assert aggregate(tasks, "gap")[0] == pytest.approx((85 + 0) / 2)


def test_a_task_counts_once_however_many_seeds_it_has():
    # mass 1/2 on 0 (one seed), 1/8 on each of 8, 16, 24, 32: between 25 % and 75 % lie 0.25 of 0, and 8 and 16
    tasks = [[0.0], [8.0, 16.0, 24.0, 32.0]]
    assert aggregate(tasks, "iqm")[0] == pytest.approx((0.25 * 0 + 0.125 * 8 + 0.125 * 16) / 0.5)
    assert aggregate(tasks, "mean")[0] == pytest.approx(10)
    same = np.random.default_rng(0).normal(size=(3, 5))
    assert aggregate(same, "iqm")[0] == pytest.approx(float(iqm(same.reshape(-1))))


def test_aggregate_intervals_are_stratified():
    # the first task never varies; the second one's mean is 0, 5 or 10 with probabilities 1/4, 1/2, 1/4
    for kind in ("mean", "median"):  # of two tasks the same
        assert aggregate([[1000.0, 1000.0], [0.0, 10.0]], kind) == (502.5, 500.0, 505.0)
    assert aggregate([[1000.0, 1000.0], [0.0, 10.0]], "mean", confidence=0.4)[1:] == (502.5, 502.5)
    assert np.isnan(aggregate([[1.0], [2.0]], "mean")[1:]).all()
    with pytest.raises(ValueError, match="at least one score"):
        aggregate([[1.0], []])


def test_performance_profile_by_hand():
    tasks = [[10.0, 30.0], [20.0, 40.0, 60.0, 80.0]]
    share, low, high = performance_profile(tasks, [0, 10, 25, 80])
    # 10 is not above 10; at 25 one of two and three of four
    np.testing.assert_allclose(share, [1, 0.75, 0.625, 0])
    assert low[0] == high[0] == 1 and low[3] == high[3] == 0  # every resample agrees at the ends
    assert low[2] < 0.625 < high[2]
    assert [x.tolist() for x in performance_profile([[1.0], [0.0, 2.0]], [1])] == [[0.25], [0], [0.5]]
    assert np.isnan(performance_profile([[1.0]], [0])[1]).all()


def test_probability_of_improvement_by_hand():
    # first task: of the pairs (3,1) (3,3) (5,1) (5,3) three are won and one is a tie; second: always lost
    value, low, high = probability_of_improvement([[3.0, 5.0], [0.0]], [[1.0, 3.0], [9.0, 9.0]])
    assert value == pytest.approx((3.5 / 4 + 0) / 2)
    assert low == pytest.approx(0.25) and high == pytest.approx(0.5)  # all ties, or all won
    assert probability_of_improvement([[1.0, 2.0]], [[1.0, 2.0]])[0] == 0.5
    with pytest.raises(ValueError, match="tasks"):
        probability_of_improvement([[1.0]], [[1.0], [2.0]])
