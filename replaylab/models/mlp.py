"""Multi-layer perceptrons with a leading member axis.

Members are independent networks of one shape, computed together by batched matrix products. Seeds of a run and
members of an ensemble are the same thing: another network in the stack. A small network leaves a GPU idle, so eight
of them cost little more than one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

LONG = 1024  # rows
ALIGNED = 8  # matrices of such widths go the fast way through tensor cores
MANY = 16_384  # rows of all members, from which on that is worth more than filling up a float32 matrix
TILE, TILES = 128, 64  # a matrix product's unit of work; so many keep a GPU busy
ACTIVATIONS = {"relu": torch.relu, "silu": nn.functional.silu, "gelu": nn.functional.gelu, "tanh": torch.tanh}


class Linear(nn.Module):
    """y = x W + b for every member. PyTorch's default initialisation, one generator per member."""

    def __init__(self, generators: Sequence[torch.Generator], inputs: int, outputs: int):
        super().__init__()
        bound = 1 / math.sqrt(inputs)

        def draw(*shape: int) -> nn.Parameter:
            drawn = [torch.empty(shape).uniform_(-bound, bound, generator=g) for g in generators]
            return nn.Parameter(torch.stack(drawn))

        self.weight = draw(inputs, outputs)  # (members, inputs, outputs)
        self.bias = draw(1, outputs)  # (members, 1, outputs)

    def forward(self, x: Tensor) -> Tensor:  # (members, batch, inputs) -> (members, batch, outputs)
        half = torch.is_autocast_enabled(x.device.type)
        if self.weight.shape[2] == 1 and (half or torch.compiler.is_compiling()):
            # a sum, which melts into its neighbours when compiled, and is not rounded to 16 bits
            return (x * self.weight.mT).sum(-1, keepdim=True) + self.bias
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W + b of every member, the way that is fast for its shape."""
    if x.is_cuda and len(x) > 1:
        long, half = x.shape[1] >= LONG, x.element_size() == 2 or torch.is_autocast_enabled(x.device.type)
        # a compiler fills up where the matrix is made; else that is another pass over it
        if (half and long) or (torch.compiler.is_compiling() and (half or x.shape[:2].numel() >= MANY)):
            x, weight = filled_up(x, weight)
        return LongBatch.apply(x, weight, bias) if long else products(x, weight, bias)
    if len(weight) == 1 and bias is not None:  # this product adds the bias itself
        return torch.addmm(bias.flatten(), x.squeeze(0), weight.squeeze(0))[None]
    return products(x, weight, bias)


def filled_up(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Zeros beside the columns of x and below the rows of W, which change no product."""
    lacking = -x.shape[2] % ALIGNED
    return (pad(x, (0, lacking)), pad(weight, (0, 0, 0, lacking))) if lacking else (x, weight)


def products(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """PyTorch's own with a bias copies that first; a compiler adds it where the result is used."""
    if bias is not None and not torch.compiler.is_compiling():
        return torch.baddbmm(bias, x, weight)
    found = torch.bmm(x, weight)
    return found if bias is None else found + bias.to(found.dtype)


class LongBatch(torch.autograd.Function):
    """The same y = x W + b with another backward pass. The weights' gradient is a small matrix summed over the whole
    batch; a batched product gives each such matrix to a few multiprocessors and leaves the rest idle, so the batch is
    cut into parts that are members of their own, and their sums are added."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            kind = torch.get_autocast_dtype(x.device.type)
            x, weight, bias = x.to(kind), weight.to(kind), bias if bias is None else bias.to(kind)
        ctx.biased = bias is not None
        ctx.save_for_backward(x, weight)
        return products(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None]:
        (gradient,), (x, weight) = gradients, ctx.saved_tensors
        members, inputs, outputs = weight.shape
        batch, parts = x.shape[1], 1
        tiles = members * math.ceil(inputs / TILE) * math.ceil(outputs / TILE)
        while parts * tiles < TILES and batch % (2 * parts) == 0:
            parts *= 2
        cut = [y.reshape(members * parts, batch // parts, -1) for y in (x, gradient)]
        for_weight = torch.bmm(cut[0].mT, cut[1]).unflatten(0, (members, parts)).sum(1)
        for_bias = None
        if ctx.biased:
            ones = gradient.new_ones(members * parts, 1, batch // parts)
            for_bias = torch.bmm(ones, cut[1]).unflatten(0, (members, parts)).sum(1)
        for_x = torch.bmm(gradient, weight.mT) if ctx.needs_input_grad[0] else None
        return for_x, for_weight, for_bias


class MLP(nn.Module):
    def __init__(
        self,
        generators: Sequence[torch.Generator],
        inputs: int,
        hidden: Sequence[int],
        outputs: int,
        activation: str = "relu",
    ):
        super().__init__()
        sizes = [inputs, *hidden, outputs]
        self.layers = nn.ModuleList(Linear(generators, a, b) for a, b in pairwise(sizes))
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = self.activation(layer(x))
        return self.layers[-1](x)


@torch.no_grad()
def track(target: nn.Module, network: nn.Module, share: float) -> None:
    """Move the target network's weights towards the network's (Polyak averaging): all the way with a share of 1."""
    torch._foreach_lerp_(list(target.parameters()), list(network.parameters()), share)


def generators(seeds: Sequence[int], copies: int = 1) -> list[torch.Generator]:
    """One CPU generator a member, so that a seed starts from the same weights whoever trains beside it."""
    return [torch.Generator().manual_seed(seed * 1_000_003 + copy) for seed in seeds for copy in range(copies)]
