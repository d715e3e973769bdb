"""Values from logged actions alone: semi-gradient DICE (Mao et al., 2024), with a leading axis of seeds.

The optimal policy pi* maximises the return minus alpha times an f-divergence from the data, with f(w) = (w - 1)^2 for
w >= 1 and w log w - w + 1 below. The dual problem needs V and Q only at logged actions:

    V    minimises E[f*(y) + V / alpha],   y = (Q - V) / alpha,   f*(y) = y^2 / 4 + y for y >= 0, else e^y - 1
    w    = f*'(y) = pi*(a | s) / pi_D(a | s) is y / 2 + 1 for y >= 0, else e^y
    W    the guidance, minimises E[w e^-W + W], so that W = log E[w | a_t, s]
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from replaylab.models import draws
from replaylab.models.gpt import LayerNorm
from replaylab.models.mlp import MLP, Linear

TWINS = 2
AGGREGATES = ("mean", "min", "lcb", "first")


# Losses return their gradients too, which are short formulas: half the kernels of autograd, and no overflow.


def conjugate(y: Tensor) -> Tensor:
    """f*(y)."""
    return torch.where(y >= 0, y.square() / 4 + y, torch.expm1(y))


def ratio(y: Tensor) -> Tensor:
    """w = f*'(y): how much likelier the optimal policy takes an action than the data does."""
    return torch.where(y >= 0, y / 2 + 1, y.exp())


def weights(y: Tensor, least: float = 1e-40, most: float = 100.0) -> Tensor:
    """The same ratio, clipped."""
    return ratio(y).clamp(least, most)


def value_loss(value: Tensor, target: Tensor, alpha: float) -> tuple[Tensor, Tensor, Tensor]:
    """E[f*(y) + V / alpha] (seeds,), its gradient in V (seeds, batch), and y."""
    y = (target - value) / alpha
    return conjugate(y).mean(1) + value.mean(1) / alpha, (1 - ratio(y)) / (alpha * y.shape[1]), y


def guide_loss(energy: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """E[w e^-W + W] and its gradient, from W (seeds, batch, copies) and w (seeds, batch).

    Both are multiplied by e^-m, where m is the largest -W of the batch (at least -1), so that nothing overflows. Values
    of -W above 80 count as 80.
    """
    exponent = (-energy).clamp(max=80)
    largest = draws.most(exponent.amax((1, 2), keepdim=True)).clamp(min=-1)
    pushed, scale = weight[..., None] * (exponent - largest).exp(), (-largest).exp()
    return (pushed + scale * energy).mean((1, 2)), (scale - pushed) / energy[0].numel()


def spread(name: str, values: Tensor) -> dict[str, Tensor]:  # (seeds, rows) -> (seeds,) each
    return {name: values.mean(1), f"{name}_min": values.amin(1), f"{name}_max": values.amax(1)}


def aggregated(values: Tensor, how: str) -> Tensor:  # (seeds, members, rows) -> (seeds, rows)
    if how == "lcb":
        return values.mean(1) - values.std(1, correction=0)
    return values[:, 0] if how == "first" else values.amin(1) if how == "min" else values.mean(1)


class Value(nn.Module):
    """V(s), or Q of the vector (s, a): an MLP with LayerNorm, which limits extrapolation away from the data."""

    def __init__(self, generators: Sequence[torch.Generator], inputs: int, hidden: Sequence[int]):
        super().__init__()
        sizes = [inputs, *hidden]
        self.layers = nn.ModuleList(Linear(generators, a, b) for a, b in zip(sizes, [*hidden, 1], strict=True))
        self.norms = nn.ModuleList(LayerNorm(len(generators), width) for width in hidden)

    def forward(self, x: Tensor) -> Tensor:  # (seeds, rows, state) -> (seeds, rows)
        for layer, norm in zip(self.layers[:-1], self.norms, strict=True):
            x = torch.relu(norm(layer(x)))
        return self.layers[-1](x).squeeze(-1)


class Critics(nn.Module):
    """Q(s, a): twins with target networks, from which V learns, and an ensemble that ranks candidates (and, if it
    learns Q - V, also gives y). Both are one stack of networks, so that one forward and one backward pass do all."""

    shares: Tensor

    def __init__(
        self,
        generators: Sequence[torch.Generator],
        seeds: int,
        inputs: int,
        hidden: Sequence[int],
        original: bool,
        normed: bool = False,
        least: bool = True,
    ):
        super().__init__()
        self.least = least  # V learns from the smaller of the two targets, or from their mean
        self.seeds, self.members = seeds, len(generators) // seeds
        shares = torch.ones(self.members, 1)
        shares[TWINS:] /= max(self.members - TWINS, 1)
        self.register_buffer("shares", shares, persistent=False)  # in the loss: sum of the twins, mean of the ensemble
        make = Value if normed else partial(MLP, outputs=1)
        self.nets = make(generators, inputs, hidden)
        if original:
            self._original_init(generators)
        twins = [g for i, g in enumerate(generators) if i % self.members < TWINS]
        self.targets = make(twins, inputs, hidden).requires_grad_(False)
        self.track(1.0)

    @torch.no_grad()
    def _original_init(self, generators: Sequence[torch.Generator]) -> None:
        """The original's ensemble mistakes fan-out for fan-in: its bounds follow the number of outputs."""
        for tensor in self.nets.layers.parameters():
            bound = tensor.shape[-1] ** -0.5
            for i, generator in enumerate(generators):
                if i % self.members >= TWINS:
                    tensor[i] = torch.empty(tensor.shape[1:]).uniform_(-bound, bound, generator=generator)

    def _values(self, net: nn.Module, members: int, states: Tensor, actions: Tensor) -> Tensor:
        inputs = torch.cat([actions, states], -1).repeat_interleave(members, 0)
        return net(inputs).view(self.seeds, members, -1)

    def forward(self, states: Tensor, actions: Tensor) -> Tensor:  # (seeds, rows, ...) -> (seeds, members, rows)
        return self._values(self.nets, self.members, states, actions)

    def loss(self, values: Tensor, goal: Tensor, base: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Mean squared error of each Q, (seeds, members), and the gradient of the total loss in the values. With `base`
        = V(s), the ensemble learns goal - V(s)."""
        error = values - goal[:, None]
        if base is not None:
            error[:, TWINS:] += base[:, None]
        return error.square().mean(2), error * self.shares * (2 / error.shape[2])

    def target(self, states: Tensor, actions: Tensor) -> Tensor:  # (seeds, rows)
        values = self._values(self.targets, TWINS, states, actions)
        return values.amin(1) if self.least else values.mean(1)

    def judge(self, states: Tensor, actions: Tensor) -> Tensor:
        """The Qs that select actions, (seeds, judges, rows): the ensemble, or the target twins if there is none."""
        if self.members > TWINS:
            return self(states, actions)[:, TWINS:]
        return self._values(self.targets, TWINS, states, actions)

    @torch.no_grad()
    def track(self, share: float) -> None:
        """Move the target networks towards the twins."""
        slow = [p.view(self.seeds, TWINS, *p.shape[1:]) for p in self.targets.parameters()]
        fast = [p.view(self.seeds, self.members, *p.shape[1:])[:, :TWINS] for p in self.nets.parameters()]
        torch._foreach_lerp_(slow, fast, share)
