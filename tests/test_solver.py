"""The sampler against golden vectors, the score and guidance networks against their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import silu

from replaylab.errors import UsageError
from replaylab.models.mlp import generators
from replaylab.models.score import GuideNet, ScoreNet, guided_sample
from replaylab.models.solver import alpha_sigma, blend, half_log_snr, orders, plan, solve, time_of


def count(net):
    return sum(p.numel() for p in net.parameters())


# --- schedule and solver


def test_schedule():
    known = {
        0.001: (0.99994503, 0.01048542, 4.557715), 0.1: (0.94672180, 0.32205254, 1.078291),
        0.5: (0.28118288, 0.95965420, -1.227568), 1.0: (0.00657159, 0.99997841, -5.024978),
    }  # fmt: skip
    for time, (alpha, sigma, half) in known.items():
        np.testing.assert_allclose(alpha_sigma(time), (alpha, sigma), atol=1e-8)
        assert abs(half_log_snr(time) - half) < 1e-6 and abs(time_of(half_log_snr(time)) - time) < 1e-12
        found = [float(x) for x in blend(torch.tensor(time, dtype=torch.float64))]
        np.testing.assert_allclose(found, (alpha, sigma), atol=1e-8)


def test_which_steps_are_of_which_order():
    assert orders(15, 2) == [2] * 7 + [1] and orders(16, 2) == [2] * 7 + [1, 1] and orders(10, 2) == [2] * 4 + [1, 1]
    assert orders(1, 2) == [1] and orders(2, 2) == [1, 1] and orders(5, 1) == [1] * 5
    for evaluations, order in ((15, 2), (10, 2), (7, 1)):
        assert len(plan(evaluations, order).times) == evaluations == sum(orders(evaluations, order))
    grid = plan(15, 2).times
    np.testing.assert_allclose(grid[:4] + grid[-2:], [1.0, 0.9334, 0.8668, 0.8002, 0.1342, 0.0676], atol=1e-12)
    assert plan(15, 2) is plan(15, 2)
    for wrong in ((0, 2), (15, 3)):
        with pytest.raises(UsageError, match="order 1 or 2"):
            plan(*wrong)


def exact(mean, deviation, extra=0.0, steps=15, order=2, power=1.0):
    """Solve with the exact score of normal data, plus a constant."""
    table = plan(steps, order, power)

    def guess(x, i):
        alpha, sigma = table.alphas[i], table.sigmas[i]
        score = -(x - alpha * mean) / (alpha**2 * deviation**2 + sigma**2) + extra
        return (x + sigma**2 * score) / alpha

    return solve(guess, torch.tensor([-1.5, 0.0, 1.0], dtype=torch.float64), table).tolist()


def test_golden_vectors():
    np.testing.assert_allclose(exact(0.3, 0.5), [-0.36656034, 0.29910861, 0.74288790], atol=1e-6)
    np.testing.assert_allclose(exact(0.3, 0.5, extra=2.0), [4.62574273, 5.29141167, 5.73519097], atol=1e-6)
    np.testing.assert_allclose(exact(-0.8, 0.1), [-0.87275798, -0.79969996, -0.75099462], atol=1e-6)


@pytest.mark.parametrize("order", [1, 2])
def test_many_steps_come_to_the_exact_answer(order):
    np.testing.assert_allclose(exact(0.3, 0.5, steps=4000, order=order), [-0.4511, 0.2990, 0.7991], atol=1e-3)


def test_early_times_keep_the_spread():
    times = plan(4, 2, 2.0).times
    np.testing.assert_allclose(times, [1e-3 + 0.999 * u**2 for u in (1, 0.75, 0.5, 0.25)], atol=1e-12)
    full = np.ptp(exact(0.3, 0.1, steps=4000))
    lost = [1 - np.ptp(exact(0.3, 0.1, power=power)) / full for power in (1.0, 2.0)]
    assert lost[0] > 0.3 and abs(lost[1]) < 0.1


# --- the networks


@pytest.mark.parametrize(
    ("state", "action", "score", "guide"),
    [(11, 3, 1_627_955, 210_737), (17, 6, 1_634_294, 213_041), (29, 8, 1_638_776, 216_625)],
)
def test_as_many_parameters_as_the_original(state, action, score, guide):
    assert count(ScoreNet(generators([0]), state, action)) == score
    assert count(GuideNet(generators([0]), state, action, [256] * 4)) == guide
    assert count(ScoreNet(generators([0, 1, 2]), state, action)) == 3 * score
    frozen = [p.numel() for p in ScoreNet(generators([0]), state, action).parameters() if not p.requires_grad]
    assert frozen == [16]


def make(members=(0, 1), state=4, action=2):
    score = ScoreNet(generators(members), state, action, width=32)
    guide = GuideNet(generators(members), state, action, [16, 16, 16], balanced=True)
    return score, guide


def test_the_score_network_is_the_one_described():
    """Rebuilt layer by layer from its weights, for one member."""
    net, _ = make()
    action, time, state = torch.randn(2, 5, 2), torch.rand(2, 5, 1) + 0.01, torch.randn(2, 5, 4)
    i = 1

    def linear(layer, x, part=slice(None)):
        return x @ layer.weight[i][:, part] + layer.bias[i][0, part]

    angle = 2 * math.pi * time[i] * net.time.frequencies[i]
    embedded = linear(net.time.linear, torch.cat([angle.sin(), angle.cos()], -1))
    e = linear(net.embed, silu(linear(net.join, torch.cat([silu(linear(net.state, state[i])), embedded], -1))))
    offsets = np.concatenate([[0], np.cumsum(net.widths)])

    def block(k, x):
        width, layer = net.widths[k], net.blocks[k].first
        h = silu(linear(layer, x, slice(width)))
        h = h + linear(net.project, silu(e), slice(offsets[k], offsets[k + 1]))
        shortcut = x if x.shape[-1] == width else linear(layer, x, slice(width, None))
        return silu(linear(net.blocks[k].second, h)) + shortcut

    assert net.widths == [32, 16, 8, 8, 16, 32]
    d1 = block(0, action[i])
    d2 = block(1, d1)
    d3 = block(2, d2)
    u2 = block(4, torch.cat([d3, block(3, d3)], -1))
    u1 = block(5, torch.cat([d2, u2], -1))
    expected = linear(net.out, torch.cat([d1, u1], -1)) / blend(time)[1][i]
    torch.testing.assert_close(net(action, time, state)[i], expected, rtol=1e-4, atol=1e-5)


def test_the_guidance_network_is_the_one_described():
    _, net = make()
    action, time, state = torch.randn(2, 5, 2), torch.rand(2, 5, 1), torch.randn(2, 5, 4)
    i, x = 0, torch.cat([action[0], net.time(time)[0], state[0]], -1)
    for layer in (net.first, *net.inner):
        x = silu(x @ layer.weight[i] + layer.bias[i])
    expected = (x @ net.last.weight[i] + net.last.bias[i])[:, 0]
    torch.testing.assert_close(net(action, time, state)[i], expected, rtol=1e-4, atol=1e-5)


def test_balanced_weights_let_the_action_through():
    plain, balanced = (GuideNet(generators([0]), 11, 3, [256] * 4, balanced=b) for b in (False, True))
    a, t, s = torch.randn(1, 1000, 3), torch.rand(1, 1000, 1), torch.randn(1, 1000, 11)
    sizes = [net.gradient(a, net.condition(t, s)).norm(dim=-1).mean() for net in (plain, balanced)]
    assert sizes[1] > 10 * sizes[0]


def test_the_gradient_by_hand_is_autograd():
    _, net = make()
    action, condition = (
        torch.randn(2, 12, 2, requires_grad=True),
        net.condition(torch.rand(2, 3, 1), torch.randn(2, 3, 4)),
    )
    (expected,) = torch.autograd.grad(net.body(action, condition).sum(), action)
    torch.testing.assert_close(net.gradient(action, condition), expected)


@pytest.mark.parametrize("guided", [False, True])
def test_cached_sampling_is_plain_sampling(guided):
    """Against the networks called as a whole at every evaluation, with autograd for the guidance."""
    score, guide = make()
    states, candidates, table = torch.randn(2, 3, 4), 5, plan(7, 2)
    noise, repeated = torch.randn(2, 15, 2), states.repeat_interleave(candidates, 1)

    def guess(x, i):
        alpha, sigma = table.alphas[i], table.sigmas[i]
        time = torch.full((2, 15, 1), table.times[i])
        found = score(x, time, repeated)
        if guided:
            x = x.detach().requires_grad_()
            found = found + 1.7 * torch.autograd.grad(guide(x, time, repeated).sum(), x)[0]
        return (x + sigma**2 * found) / alpha

    expected = solve(guess, noise, table).detach()
    with torch.no_grad():
        found = guided_sample(score, guide if guided else None, torch.tensor(1.7), states, noise, table)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


# --- random numbers
