from __future__ import annotations

import pytest
import torch

from replaylab.models.mlp import MLP, Linear, LongBatch, filled_up, generators, products


def test_members_are_independent_and_equal_single_networks():
    together = MLP(generators([5, 6, 7]), 3, [8, 8], 2)
    x = torch.randn(3, 10, 3)
    for i, seed in enumerate([5, 6, 7]):
        alone = MLP(generators([seed]), 3, [8, 8], 2)
        torch.testing.assert_close(together(x)[i : i + 1], alone(x[i : i + 1]))
    together(x)[1].sum().backward()
    gradient = together.layers[0].weight.grad
    assert gradient[1].abs().sum() > 0 and gradient[0].abs().sum() == 0 == gradient[2].abs().sum()


def test_a_member_is_the_network_torch_would_make():
    mlp = MLP(generators([0]), 3, [16], 2)
    linear = [torch.nn.Linear(3, 16), torch.nn.Linear(16, 2)]
    for ours, theirs in zip(mlp.layers, linear, strict=True):
        theirs.weight.data, theirs.bias.data = ours.weight[0].T, ours.bias[0, 0]
    x = torch.randn(1, 5, 3)
    torch.testing.assert_close(mlp(x)[0], linear[1](torch.relu(linear[0](x[0]))))
    assert mlp.layers[0].weight.abs().max() <= 3**-0.5


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_ways_to_multiply_have_the_same_gradients(kind, biased):
    layer = Linear(generators([0, 1, 2]), 5, 4)
    x = torch.randn(3, 48, 5, requires_grad=True)
    target = torch.randn(3, 48, 4)
    found = []
    bias = layer.bias if biased else None
    ways = [products, LongBatch.apply, lambda x, weight, bias: products(*filled_up(x, weight), bias)]
    for function in ways:
        with torch.autocast("cpu", kind, enabled=kind != torch.float32):
            y = function(x, layer.weight, bias)
        of = [x, layer.weight, layer.bias] if biased else [x, layer.weight]
        found.append([y, *torch.autograd.grad((y.float() - target).square().sum(), of)])
    near = {"rtol": 1e-4, "atol": 1e-4} if kind == torch.float32 else {"rtol": 0.05, "atol": 0.3}
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, **near)


def test_odd_widths_are_filled_up_and_even_ones_left_alone():
    x, weight = filled_up(torch.ones(2, 3, 14), torch.ones(2, 14, 5))
    assert x.shape == (2, 3, 16) and weight.shape == (2, 16, 5) and x.sum() == 2 * 3 * 14
    assert filled_up(x, weight)[0] is x
