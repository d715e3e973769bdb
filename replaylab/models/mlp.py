"""Multi-layer perceptrons with a leading member axis.

Members are independent networks of one shape, computed together by batched matrix products. Seeds of a run and
members of an ensemble are the same thing: another network in the stack. A small network leaves a GPU idle, so eight
of them cost little more than one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

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
        return torch.baddbmm(self.bias, x, self.weight)


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


def generators(seeds: Sequence[int], copies: int = 1) -> list[torch.Generator]:
    """One CPU generator a member, so that a seed starts from the same weights whoever trains beside it."""
    return [torch.Generator().manual_seed(seed * 1_000_003 + copy) for seed in seeds for copy in range(copies)]
