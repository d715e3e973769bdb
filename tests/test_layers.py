"""Layers computed in other shapes give the same numbers and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from replaylab.models.layers import blocks, folded, gathered, spread, standardize, unfold


def assert_same(layer, x, found, wanted):
    torch.testing.assert_close(found, wanted)
    flow, inputs = torch.randn_like(wanted), [x, layer.weight, layer.bias]
    for ours, theirs in zip(*(torch.autograd.grad(y, inputs, flow) for y in (found, wanted)), strict=True):
        torch.testing.assert_close(ours, theirs)


def inputs(*shape):
    return torch.randn(3, 5, *shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("size", [(13, 10), (6, 5), (27, 20)])
@pytest.mark.parametrize(("kernel", "stride", "padding"), [(4, 2, 1), (3, 1, 1), (8, 4, 2), (1, 1, 0)])
def test_a_convolution_as_a_product(kernel, stride, padding, size):
    layer = nn.Conv2d(5, 7, kernel, stride, padding).double().to(memory_format=torch.channels_last)
    x = inputs(*size)
    wanted = layer(x)
    assert folded(x.shape[2:], layer) == list(wanted.shape[2:])
    assert_same(layer, x, gathered(layer, x), wanted)
    if kernel == 2 * stride:
        found = F.conv2d(blocks(F.pad(x, 4 * [padding]), stride), blocks(layer.weight, stride), layer.bias)
        assert_same(layer, x, found, layer(x))


@pytest.mark.parametrize(("size", "wanted"), [((6, 5), (13, 10)), ((3, 2), (6, 5)), ((13, 10), (26, 20))])
def test_a_transposed_convolution_as_a_product(size, wanted):
    layer = nn.ConvTranspose2d(5, 7, 4, 2, 1).double().to(memory_format=torch.channels_last)
    x = inputs(*size)
    assert_same(layer, x, spread(layer, x, torch.Size(wanted)), unfold(layer, x, torch.Size(wanted)))


def test_standardize():
    x = inputs(8, 9) * 3 + 5
    torch.testing.assert_close(standardize(x, 0.0), F.instance_norm(x, eps=0.0), rtol=1e-5, atol=1e-5)
    assert standardize(torch.full((1, 2, 3, 4), 7.3)).abs().max() < 0.01  # not a number times a tiny deviation
