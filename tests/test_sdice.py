"""Diffusion-DICE's formulas: the spec's numbers, slopes against autograd, optima that are known."""

from __future__ import annotations

import math

import numpy as np
import torch

from replaylab.models.mlp import generators
from replaylab.models.score import GuideNet
from replaylab.models.sdice import Critics, Value, conjugate, guide_loss, value_loss, weights
from replaylab.models.solver import blend


def count(net):
    return sum(p.numel() for p in net.parameters())


def test_conjugate_and_weights():
    y = torch.tensor([-3, -1, 0.5, 2, 10], dtype=torch.float64)
    np.testing.assert_allclose(conjugate(y), [-0.950213, -0.632121, 0.5625, 3, 35], atol=1e-6)
    np.testing.assert_allclose(weights(y), [0.049787, 0.367879, 1.25, 2, 6], atol=1e-6)
    y = torch.tensor([-9.0, -2.0, 0.3, 60.0], requires_grad=True)
    torch.testing.assert_close(torch.autograd.grad(conjugate(y).sum(), y)[0], weights(y.detach()))  # its derivative
    assert weights(torch.tensor(500.0)) == 100 and 0 < weights(torch.tensor(-500.0)) < 1e-39


def test_guide_loss():
    energy = torch.tensor([[[0.1, -0.2], [0.3, 1.5]]], dtype=torch.float64)
    weight = torch.tensor([[2, 0.5]], dtype=torch.float64)
    np.testing.assert_allclose(guide_loss(energy, weight)[0], [1.31702145], atol=1e-6)
    larger = torch.tensor([[[3.0, 4.0]]], dtype=torch.float64)
    np.testing.assert_allclose(guide_loss(larger, weight[:, :1])[0], [9.69910875], atol=1e-6)
    scale = math.exp(-0.2)  # a constant to autograd: the slope is that of the loss without it, times it
    plain = torch.autograd.functional.jacobian(lambda e: (weight[..., None] * (-e).exp() + e).mean(), energy)
    torch.testing.assert_close(guide_loss(energy, weight)[1], plain * scale)
    loss, slope = guide_loss(torch.tensor([[[-1e4, 5.0]]]), torch.tensor([[2.0]]))
    assert loss.isfinite().all() and slope.isfinite().all() and slope[0, 0, 0] < 0


def test_slopes_are_autograd():
    value, target = torch.randn(2, 30, requires_grad=True), torch.randn(2, 30)
    expected = torch.autograd.grad(value_loss(value, target, 0.3)[0].sum(), value)[0]
    torch.testing.assert_close(value_loss(value.detach(), target, 0.3)[1], expected)
    far = torch.tensor([[-500.0, 500.0]])
    assert all(part.isfinite().all() for part in value_loss(far, -far, 0.1))
    critics = Critics(generators([0, 1], 5), 2, 3, [8], original=False)
    values, goal = torch.randn(2, 5, 30, requires_grad=True), torch.randn(2, 30)
    errors = (values - goal[:, None]).square().mean(2)
    loss = errors[:, 0] + errors[:, 1] + errors[:, 2:].mean(1)
    torch.testing.assert_close(critics.loss(values.detach(), goal)[1], torch.autograd.grad(loss.sum(), values)[0])


def test_guidance_learns_the_log_of_the_mean_weight():
    """Two actions, -1 with weight 2 and 1 with weight 0.4: what noise makes of them is known in closed form."""
    torch.manual_seed(0)
    net = GuideNet(generators([0]), 1, 1, [32, 32], balanced=True)
    optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], 5e-3)
    time, state = torch.full((1, 1, 1), 0.2), torch.zeros(1, 1, 1)
    alpha, sigma = (float(x) for x in blend(time))
    for _ in range(400):
        sign = torch.randint(0, 2, (1, 512)) * 2.0 - 1
        noisy = alpha * sign + sigma * torch.randn(1, 512)
        energy = net.body(noisy.view(1, -1, 1), net.condition(time, state))
        _, slope = guide_loss(energy[..., None].detach(), torch.where(sign < 0, 2.0, 0.4))
        optimizer.zero_grad()
        energy.backward(slope[..., 0])
        optimizer.step()
    x = torch.linspace(-1, 1, 9)
    share = torch.sigmoid(-2 * alpha * x / sigma**2)  # chance that the action was -1
    found = net.body(x.view(1, -1, 1), net.condition(time, state))[0].detach()
    torch.testing.assert_close(found, (2 * share + 0.4 * (1 - share)).log(), rtol=0, atol=0.12)


def test_v_weighs_the_data_by_one():
    """At the optimum of the value loss the mean weight of a state is 1."""
    target, value = torch.randn(1, 500), torch.zeros(1, 1)
    for _ in range(500):
        _, slope, y = value_loss(value.expand(1, 500), target, 0.3)
        value -= 0.1 * slope.sum(1, keepdim=True)
    assert abs(float(weights(y).mean()) - 1) < 1e-3


def test_the_originals_first_weights_leave_layer_norms_alone():
    gens = generators([0], 4)
    critics = Critics(gens, 1, 14, [256, 256], original=True, normed=True)
    assert all((norm.weight == 1).all() and (norm.bias == 0).all() for norm in critics.nets.norms)
    first = critics.nets.layers[0].weight.abs().amax((1, 2))  # (twins, ensemble); fans 14 and, wrongly, 256
    assert (first[:2] > 0.2).all() and (first[2:] <= 1 / 16).all()


def test_as_many_parameters_as_the_original():
    for state, action, twins, value, ten in (
        (11, 3, 139_778, 70_145, 698_890), (17, 6, 144_386, 71_681, 721_930), (29, 8, 151_554, 74_753, 757_770),
    ):  # fmt: skip
        critics = Critics(generators([0], 12), 1, state + action, [256, 256], original=True)
        assert count(critics.targets) == twins and count(critics.nets) == twins + ten
        assert count(Value(generators([0]), state, [256, 256])) == value
    first, _, last = critics.nets.layers
    assert 1 / 17 < first.weight[2:].abs().max() <= 1 / 16 < 0.15 < first.weight[:2].abs().max()
    assert 0.99 < last.weight[2:].abs().max() <= 1 and last.weight[:2].abs().max() <= 1 / 16
