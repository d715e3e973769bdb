"""Networks of a diffusion policy, with a leading member axis: the score of the logged actions, and the guidance.

    score(x, t, s) = body(x, condition(t, s)) / sigma_t     body(x) predicts -noise
    guide(x, t, s) = W = body(x, condition(t, s))           its gradient in x is written out: no autograd in sampling

Both are functions of (noisy action x, time t, state s), split in two: `condition` depends only on state and time,
`body` also on the action. The first is computed once for all candidate actions of a state and, when sampling, for all
times of the solver's plan at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from replaylab.models.mlp import Linear, linear
from replaylab.models.solver import Plan, blend, solve
from replaylab.streams import beside

Generators = Sequence[torch.Generator]

FREQUENCIES = 16
TIME = 2 * FREQUENCIES


# --- parts


class TimeEmbedding(nn.Module):
    """Sines and cosines of random, frozen frequencies, then a linear layer."""

    def __init__(self, generators: Generators):
        super().__init__()
        drawn = torch.stack([30 * torch.randn(1, FREQUENCIES, generator=g) for g in generators])
        self.frequencies = nn.Parameter(drawn, requires_grad=False)  # (members, 1, 16)
        self.linear = Linear(generators, TIME, TIME)

    def forward(self, time: Tensor) -> Tensor:  # (members, rows, 1) -> (members, rows, 32)
        angle = 2 * math.pi * time * self.frequencies
        return self.linear(torch.cat([angle.sin(), angle.cos()], -1))


class Block(nn.Module):
    """Two layers with a shortcut; the condition is added between them. Where the width changes, the shortcut is a
    linear layer, which shares a matrix product with the first layer."""

    def __init__(self, generators: Generators, inputs: int, outputs: int):
        super().__init__()
        self.reshapes = inputs != outputs
        self.first = Linear(generators, inputs, 2 * outputs if self.reshapes else outputs)
        self.second = Linear(generators, outputs, outputs)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:  # (members, rows, inputs), (members, groups, outputs)
        first, shortcut = self.first(x).chunk(2, -1) if self.reshapes else (self.first(x), x)
        return shortcut + silu(self.second(spread(silu(first), condition)))


def spread(x: Tensor, condition: Tensor) -> Tensor:
    """x + condition, where each group of consecutive rows of x shares one row of the condition."""
    members, groups, width = condition.shape
    return (x.view(members, groups, -1, width) + condition[:, :, None]).view(x.shape)


class ScoreNet(nn.Module):
    """The score of the logged actions: a U-shaped residual network, 1.6 million parameters at the default width."""

    def __init__(self, generators: Generators, state: int, action: int, width: int = 512):
        super().__init__()
        wide, middle, narrow = width, width // 2, width // 4
        self.time = TimeEmbedding(generators)
        self.state = Linear(generators, state, 32)
        self.join = Linear(generators, 32 + TIME, 128)
        self.embed = Linear(generators, 128, 128)
        sizes = [
            (action, wide), (wide, middle), (middle, narrow), (narrow, narrow), (2 * narrow, middle), (2 * middle, wide)
        ]  # fmt: skip
        self.widths = [outputs for _, outputs in sizes]
        self.project = Linear(generators, 128, sum(self.widths))  # the conditions of all blocks in one product
        self.blocks = nn.ModuleList(Block(generators, *size) for size in sizes)
        self.out = Linear(generators, 2 * wide, action)

    def condition(self, time: Tensor, state: Tensor) -> Tensor:
        """(members, rows, 1) and (members, rows, state) -> (members, rows, sum of the blocks' widths)."""
        joined = self.join(torch.cat([silu(self.state(state)), self.time(time)], -1))
        return self.project(silu(self.embed(silu(joined))))

    def conditions(self, times: Tensor, state: Tensor) -> Tensor:
        """The same for every state at each of (steps,) times: (members, steps, states, ...). Each state and each time
        is embedded once."""
        members, rows, inner = len(state), state.shape[1], 32
        weight, bias = self.join.weight, self.join.bias
        of_state = torch.baddbmm(bias, silu(self.state(state)), weight[:, :inner])
        of_time = self.time(times.view(1, -1, 1).expand(members, -1, -1)) @ weight[:, inner:]
        joined = of_time[:, :, None] + of_state[:, None]
        return self.project(silu(self.embed(silu(joined.flatten(1, 2))))).view(members, len(times), rows, -1)

    def body(self, action: Tensor, condition: Tensor) -> Tensor:
        """(members, groups * candidates, action), (members, groups, ...) -> the score times sigma."""
        c = condition.split(self.widths, -1)
        down1 = self.blocks[0](action, c[0])
        down2 = self.blocks[1](down1, c[1])
        down3 = self.blocks[2](down2, c[2])
        middle = self.blocks[3](down3, c[3])
        up2 = self.blocks[4](torch.cat([down3, middle], -1), c[4])
        up1 = self.blocks[5](torch.cat([down2, up2], -1), c[5])
        return self.out(torch.cat([down1, up1], -1))

    def forward(self, action: Tensor, time: Tensor, state: Tensor) -> Tensor:
        return self.body(action, self.condition(time, state)) / blend(time)[1]


class GuideNet(nn.Module):
    """W(action, time, state): an MLP with SiLU and one output; `gradient` is its gradient in the action.

    With PyTorch's initialisation the few numbers of an action drown among the 32 of the time and shrink threefold at
    each layer, so the network may ignore the action for thousands of updates. `balanced` weights keep the size of
    signals (He et al., 2015) and give action, time and state an equal share.
    """

    def __init__(self, generators: Generators, state: int, action: int, hidden: Sequence[int], balanced: bool = False):
        super().__init__()
        self.time = TimeEmbedding(generators)
        self.action = action
        self.first = Linear(generators, action + TIME + state, hidden[0])
        self.inner = nn.ModuleList(Linear(generators, a, b) for a, b in pairwise(hidden))
        self.last = Linear(generators, hidden[-1], 1)
        if balanced:
            self._balance([action, TIME, state])

    @torch.no_grad()
    def _balance(self, parts: Sequence[int]) -> None:
        """Scale weights from uniform bounds of 1 / sqrt(inputs) to sqrt(6 / inputs)."""
        for layer in self.inner:
            layer.get_parameter("weight").mul_(math.sqrt(6))
        for size, rows in zip(parts, self.first.weight.split(list(parts), 1), strict=True):
            rows.mul_(math.sqrt(6 * sum(parts) / (len(parts) * size)))

    def condition(self, time: Tensor, state: Tensor) -> Tensor:
        """The part of the first layer that every action of a state shares: (members, rows, hidden)."""
        shared = torch.cat([self.time(time), state], -1)
        return torch.baddbmm(self.first.bias, shared, self.first.weight[:, self.action :])

    def conditions(self, times: Tensor, state: Tensor) -> Tensor:
        """The same at each of (steps,) times: (members, steps, states, hidden)."""
        _, of_time, of_state = self.first.weight.split([self.action, TIME, state.shape[-1]], 1)
        embedded = self.time(times.view(1, -1, 1).expand(len(state), -1, -1)) @ of_time
        return embedded[:, :, None] + torch.baddbmm(self.first.bias, state, of_state)[:, None]

    def _enter(self, action: Tensor, condition: Tensor) -> Tensor:
        return spread(linear(action, self.first.weight[:, : self.action]), condition)

    def body(self, action: Tensor, condition: Tensor) -> Tensor:
        """(members, groups * candidates, action), (members, groups, hidden) -> (members, groups * candidates)."""
        x = self._enter(action, condition)
        for layer in self.inner:
            x = layer(silu(x))
        return self.last(silu(x)).squeeze(-1)

    def forward(self, action: Tensor, time: Tensor, state: Tensor) -> Tensor:
        return self.body(action, self.condition(time, state))

    def gradient(self, action: Tensor, condition: Tensor) -> Tensor:
        """The gradient of `body` in the action, by the chain rule; has the shape of the action."""
        inputs = [self._enter(action, condition)]  # of each SiLU
        for layer in self.inner:
            inputs.append(layer(silu(inputs[-1])))
        weights = [self.first.weight[:, : self.action], *(layer.get_parameter("weight") for layer in self.inner)]
        flow = self.last.weight.transpose(1, 2).expand_as(inputs[-1])
        for weight, x in zip(weights[::-1], inputs[::-1], strict=True):
            flow = torch.ops.aten.silu_backward(flow, x) @ weight.transpose(1, 2)
        return flow


# --- sampling


def guided_sample(
    score: ScoreNet, guide: GuideNet | None, scale: Tensor, states: Tensor, noise: Tensor, plan: Plan
) -> Tensor:
    """Actions from noise, (members, states * candidates, action); the candidates of a state are neighbours.

    Each evaluation uses the score of the logged actions plus `scale` times the gradient of the guidance. The parts that
    depend only on state and time are computed beforehand, for all evaluations at once.
    """
    times, sigmas = plan.tensors(noise.device)
    of_score = score.conditions(times, states)  # (members, evaluations, states, ...)
    of_guide = guide.conditions(times, states) if guide is not None else None
    pulls = scale * sigmas  # the network's output is the score times sigma

    def guess(x: Tensor, i: int) -> Tensor:
        if guide is None or of_guide is None:
            found = score.body(x, of_score[:, i])
        else:  # neither network fills a GPU, so they run in parallel
            pull = beside(partial(guide.gradient, x, of_guide[:, i]), x.device)
            found = torch.addcmul(score.body(x, of_score[:, i]), pull(), pulls[i])
        return torch.add(x / plan.alphas[i], found, alpha=plan.sigmas[i] / plan.alphas[i])

    return solve(guess, noise, plan)
