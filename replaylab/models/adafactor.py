"""Adafactor: a step relative to the size of each weight, from a second moment kept as row and column means.

`torch.optim.Adafactor` follows the same rules but reads three numbers per tensor back to the host in every step, so
it cannot be captured in a CUDA graph. Here the step count is a tensor and nothing is read back. The limit on the norm
of the whole gradient is built in, which saves a pass over all gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from replaylab.fuse import fused

EPS_SQUARE, EPS_SCALE = 1e-30, 1e-3  # added to squared gradients; the least size a tensor counts with


def rms(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()


def adafactor(
    params: list[Tensor],
    grads: list[Tensor],
    moments: list[tuple[Tensor, ...]],  # (rows, columns) of the last two axes, or (squares,) of a vector
    step: Tensor,
    lr: float,
    decay: float,
    clip: float,
    max_norm: float,
) -> Tensor:
    """One step in place; the norm of the whole gradient before it was limited."""
    step += 1
    fresh = step**decay  # share of this step in the moments
    rate = step.rsqrt().clamp(max=lr)
    norm = torch.stack(torch._foreach_norm(grads)).norm()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for param, raw, moment in zip(params, grads, moments, strict=True):
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
    return norm


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
        self.rule: Callable[..., Tensor] = fused(adafactor, compile)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        params = [p for p in group["params"] if p.grad is not None]
        moments = [self._moments(p) for p in params]
        count = self.state[params[0]].setdefault("step", torch.zeros((), device=params[0].device))
        settings = [group[k] for k in ("lr", "decay", "clip", "max_norm")]
        self.norm = self.rule(params, [p.grad for p in params], moments, count, *settings)

    def _moments(self, param: Tensor) -> tuple[Tensor, ...]:
        state = self.state[param]
        if param.ndim < 2:
            return (state.setdefault("square", torch.zeros_like(param)),)
        if "rows" not in state:
            state["rows"] = param.new_zeros(param.shape[:-1])
            state["columns"] = param.new_zeros(param.shape[:-2] + param.shape[-1:])
        return state["rows"], state["columns"]
