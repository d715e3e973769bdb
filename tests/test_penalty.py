"""Each penalty on numbers worked out by hand from its formula."""

from __future__ import annotations

import math

import pytest
import torch

from replaylab.errors import UsageError
from replaylab.models.penalty import DENSITY, ENSEMBLE, ensemble_penalty, penalty

TAU = -20.0
L = torch.tensor([-50.0, -30.0, -21.0, -20.0, 0.0])  # gaps 30, 10, 1, 0, -20


def check(kind, expected, log_prob=L, tau=TAU):
    torch.testing.assert_close(penalty(kind, log_prob, tau), torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_tanh_penalises_only_below_the_threshold():
    check("tanh", [math.tanh(3), math.tanh(1), math.tanh(0.1), 0, 0])


def test_signed_tanh_rewards_what_is_likely():
    check("signed-tanh", [math.tanh(3), math.tanh(1), math.tanh(0.1), 0, -math.tanh(2)])


def test_linear_is_capped_by_the_quartiles_of_the_batch():
    gaps = torch.tensor([0.0, 1.0, 2.0, 3.0, 100.0])  # Q1 = 1, Q3 = 3: cap 3 + 1.5 * 2 = 6
    check("linear", [0.0, 1, 2, 3, 6], TAU - gaps)
    check("linear", [0.0, 0, 0, 1, 1], torch.tensor([-5.0, -6, -7, -21, -21]))
    assert penalty("linear", (TAU - gaps).double(), TAU).tolist() == [0, 1, 2, 3, 6]


def test_inverse_is_the_ratio_to_the_threshold():
    check("inverse", [1 / (math.exp(-30) + 1e-6), 1 / (math.exp(-10) + 1e-6), 1 / (math.exp(-1) + 1e-6), 0, 0])
    log_prob = torch.tensor([-2.0, 1.0])  # at tau = 0 it is GORMPO's e^tau / (e^l + 1e-6)
    check("inverse", [1 / (math.exp(-2) + 1e-6), 0], log_prob, 0.0)


def test_exponential_starts_at_zero_and_is_capped():
    check("exponential", [math.exp(5) - 1, math.exp(5) - 1, math.e - 1, 0, 0])


def test_softplus_knows_no_threshold():
    check("softplus", [50, 30, 21, 20, math.log(2)], tau=7.0)


def test_indicator():
    check("indicator", [1.0, 1, 1, 0, 0])


@pytest.mark.parametrize("kind", DENSITY)
def test_less_likely_is_never_penalised_less_and_extremes_stay_finite(kind):
    found = penalty(kind, torch.linspace(50, -200, 101), torch.tensor(-12.0))
    assert (found.diff() >= -1e-6).all() and found[-1] > found[0]
    assert penalty(kind, torch.tensor([-1e9, 1e3]), -1e3).isfinite().all()
    assert found.dtype == torch.float32 and found.shape == (101,)


def test_mopos_own():
    means = torch.tensor([[[0.0, 0.0]], [[3.0, 4.0]], [[0.0, 2.0]]])  # (3 members, 1 row, 2 dims), mean (1, 2)
    stds = torch.tensor([[[3.0, 4.0]], [[1.0, 1.0]], [[0.0, 6.0]]])
    assert ensemble_penalty("aleatoric", means, stds).tolist() == [6.0]  # lengths 5, 1.41, 6
    # distances from the mean: sqrt 5, sqrt 8, 1
    assert ensemble_penalty("pairwise", means, stds).tolist() == pytest.approx([math.sqrt(8)])
    # variances (1 + 4 + 1) / 3 = 2 and (4 + 4 + 0) / 3 = 8/3: mean 7/3
    assert ensemble_penalty("ensemble-std", means, stds).tolist() == pytest.approx([math.sqrt(7 / 3)])
    assert set(ENSEMBLE) == {"aleatoric", "pairwise", "ensemble-std"}


def test_unknown_names_get_the_nearest():
    with pytest.raises(UsageError, match="did you mean 'tanh'"):
        penalty("tahn", L, TAU)
    with pytest.raises(UsageError, match="did you mean 'aleatoric'"):
        ensemble_penalty("aleatory", L[None, :, None], L[None, :, None])
