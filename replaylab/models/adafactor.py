"""Adafactor: a step relative to the size of each weight, from a second moment kept as row and column means.

`torch.optim.Adafactor` follows the same rules but reads three numbers per tensor back to the host in every step, so
it cannot be captured in a CUDA graph. Here the step count is a tensor and nothing is read back. The limit on the norm
of the whole gradient is built in, which saves a pass over all gradients. On CUDA convolutions, nearly all of a world
model's weights, have kernels of their own, where Triton comes with PyTorch; the rest is compiled.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from replaylab.fuse import fused

NUMBERS = 2048  # of the weights a block of threads steps
EPS_SQUARE, EPS_SCALE = 1e-30, 1e-3  # added to squared gradients; the least size a tensor counts with


def rms(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()


def pace(step: Tensor, norm: Tensor, count: int, lr: float, decay: float, max_norm: float) -> Tensor:
    """Counts a step. What `count` tensors are updated with, (3, count): the gradients' factor, this step's share in
    the moments, and the relative step."""
    step += 1
    found = torch.stack([(max_norm / (norm + 1e-6)).clamp(max=1.0), step**decay, step.rsqrt().clamp(max=lr)])
    return found[:, None].expand(-1, count).contiguous()


def adafactor(
    params: list[Tensor],
    grads: list[Tensor],
    moments: list[tuple[Tensor, ...]],  # (rows, columns) of the last two axes, or (squares,) of a vector
    paces: list[tuple[Tensor, ...]],  # one for each: all kernels that share a number are tried for fusion, in minutes
    clip: float,
) -> None:
    """One step in place."""
    for param, raw, moment, (factor, fresh, rate) in zip(params, grads, moments, paces, strict=True):
        grad = raw * factor
        square = grad.square() + EPS_SQUARE
        if len(moment) == 2:
            rows, columns = moment
            rows.lerp_(square.mean(-1), fresh)
            columns.lerp_(square.mean(-2), fresh)
            row_scale = (rows / rows.mean(-1, keepdim=True)).rsqrt()
            update = grad * row_scale.unsqueeze(-1) * columns.rsqrt().unsqueeze(-2)
        else:
            moment[0].lerp_(square, fresh)
            update = grad * moment[0].rsqrt()
        size = rate * rms(param).clamp(min=EPS_SCALE) / (rms(update) / clip).clamp(min=1.0)
        param.sub_(update * size)


class Adafactor(torch.optim.Optimizer):
    """`lr` is the largest relative step; it falls as 1/sqrt(steps) once that is smaller. One group of parameters."""

    norm: Tensor  # of the last gradient

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 0.01,
        decay: float = -0.8,
        clip: float = 1.0,
        max_norm: float = float("inf"),
        compile: bool = False,
    ):
        # `capturable` makes torch restore the step count to the parameters' device
        super().__init__(params, {"lr": lr, "decay": decay, "clip": clip, "max_norm": max_norm, "capturable": True})
        self.pace: Callable[..., Tensor] = fused(pace, compile)
        self.rule: Callable[..., None] = fused(adafactor, compile)
        self.kernels = compile and importlib.util.find_spec("triton") is not None
        self.partial: Tensor | None = None  # sums of squares of the convolutions' updates and weights, by block
        disable: Any = torch.compiler.disable  # kernels already; a decorator would load the compiler
        self._convolutions = disable(self._convolutions)  # type: ignore[method-assign]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        params = [p for p in group["params"] if p.grad is not None]
        count = self.state[params[0]].setdefault("step", torch.zeros((), device=params[0].device))
        self.norm = torch.stack(torch._foreach_norm([p.grad for p in params])).norm()
        paces = self.pace(count, self.norm, len(params), group["lr"], group["decay"], group["max_norm"])
        each = [(p, p.grad, self._moments(p), pace) for p, *pace in zip(params, *paces.unbind(), strict=True)]
        convolutions = [one for one in each if self.kernels and one[0].ndim == 4]
        if others := [one for one in each if not (self.kernels and one[0].ndim == 4)]:
            self.rule(*map(list, zip(*others, strict=True)), group["clip"])
        if convolutions:
            self._convolutions(convolutions, paces, group["clip"])

    def _convolutions(self, each: list[Any], paces: Tensor, clip: float) -> None:
        from replaylab.models.adafactor_kernel import descend, observe

        jobs = []
        for param, grad, moments, _ in each:
            outer, inner, *sizes = param.shape
            room = [1 << (size - 1).bit_length() for size in sizes]
            block = NUMBERS // math.prod(room)
            grid = (-(-outer * inner // block),)
            front = (grad, param, *moments, paces, paces.shape[1])
            jobs.append((grid, front, (outer * inner, inner), (*grad.stride(), *param.stride(), *sizes, *room, block)))
        if self.partial is None:
            self.partial = paces.new_zeros(len(jobs), 2, max(grid[0] for grid, *_ in jobs))
        for partial, (grid, front, counts, back) in zip(self.partial, jobs, strict=True):
            observe[grid](*front, partial, self.partial.shape[2], *counts, EPS_SQUARE, *back)
        for sums, (grid, front, counts, back) in zip(self.partial.sum(2), jobs, strict=True):
            descend[grid](*front, sums, *counts, clip, EPS_SCALE, *back)

    def _moments(self, param: Tensor) -> tuple[Tensor, ...]:
        state = self.state[param]
        if param.ndim < 2:
            return (state.setdefault("square", torch.zeros_like(param)),)
        if "rows" not in state:
            state["rows"] = param.new_zeros(param.shape[:-1])
            state["columns"] = param.new_zeros(param.shape[:-2] + param.shape[-1:])
        return state["rows"], state["columns"]
