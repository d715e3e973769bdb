"""Adafactor: a step relative to the size of each weight, from a second moment kept as row and column means.

`torch.optim.Adafactor` follows the same rules but reads three numbers per tensor back to the host in every step, so
it cannot be captured in a CUDA graph. Here the step count is a tensor and nothing is read back. The limit on the norm
of the whole gradient is built in, which saves a pass over all gradients. On CUDA convolutions, nearly all of a world
model's weights, have kernels of their own, where Triton comes with PyTorch; the rest is compiled and runs beside them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from replaylab.fuse import fused
from replaylab.models.adam import gradient_norm
from replaylab.streams import beside

NUMBERS, WARPS = 32, 4  # weights that a thread steps, if a convolution's matrices are not larger; of 32 threads a block
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
    twins: list[Tensor | None],  # copies in another precision, which get the new weights too
    grads: list[Tensor],
    moments: list[tuple[Tensor, ...]],  # (rows, columns) of the last two axes, or (squares,) of a vector
    paces: list[tuple[Tensor, ...]],  # one for each: all kernels that share a number are tried for fusion, in minutes
    clip: float,
) -> None:
    """One step in place."""
    for param, twin, raw, moment, (factor, fresh, rate) in zip(params, twins, grads, moments, paces, strict=True):
        grad = raw.to(param.dtype) * factor
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
        if twin is not None:
            twin.copy_(param)


class Adafactor(torch.optim.Optimizer):
    """`lr` is the largest relative step; it falls as 1/sqrt(steps) once that is smaller. One group of parameters. With
    twins (see adam.py) the gradients are theirs."""

    norm: Tensor  # of the last gradient

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 0.01,
        decay: float = -0.8,
        clip: float = 1.0,
        max_norm: float = float("inf"),
        compile: bool = False,
        twins: Iterable[Tensor] | None = None,
    ):
        # `capturable` makes torch restore the step count to the parameters' device
        super().__init__(params, {"lr": lr, "decay": decay, "clip": clip, "max_norm": max_norm, "capturable": True})
        self.twins = dict(zip(self.param_groups[0]["params"], twins, strict=True)) if twins is not None else {}
        self.pace: Callable[..., Tensor] = fused(pace, compile)
        self.rule: Callable[..., None] = fused(adafactor, compile)
        self.kernels = compile and importlib.util.find_spec("triton") is not None
        disable: Any = torch.compiler.disable  # kernels already; a decorator would load the compiler
        self._beside = disable(self._beside)  # type: ignore[method-assign]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        params = [p for p in group["params"] if self.twins.get(p, p).grad is not None]
        twins = [self.twins.get(p) for p in params]
        grads = [(p if t is None else t).grad for p, t in zip(params, twins, strict=True)]
        moments = [self._moments(p) for p in params]
        self.norm = gradient_norm(grads)
        count = self.state[params[0]]
        if "step" not in count:
            count["step"] = torch.zeros((), device=params[0].device)
        paces = self.pace(count["step"], self.norm, len(params), group["lr"], group["decay"], group["max_norm"])
        each = list(zip(params, twins, grads, moments, zip(*paces.unbind(), strict=True), strict=True))
        convolutions = [one for one in each if self._special(one[0])]
        others = [one for one in each if not self._special(one[0])]
        if convolutions:
            self._beside(others, convolutions, paces, group["clip"])
        else:
            self._others(others, group["clip"])

    def _beside(self, others: list[Any], convolutions: list[Any], paces: Tensor, clip: float) -> None:
        done = beside(lambda: self._others(others, clip), paces.device, urgent=True)
        self._convolutions(convolutions, paces, clip)
        done()

    def _others(self, each: list[Any], clip: float) -> None:
        if each:
            self.rule(*map(list, zip(*each, strict=True)), clip)

    def _convolutions(self, each: list[Any], paces: Tensor, clip: float) -> None:
        """A convolution's two kernels follow each other: much of what the second reads is still in the cache."""
        from replaylab.models.adafactor_kernel import descend, observe

        for param, twin, grad, (rows, columns), pace in each:
            outer, inner, *sizes = param.shape
            near = twin if twin is not None else param  # half as many bytes, and its root mean square is the same
            most = min(max(NUMBERS // (sizes[0] * sizes[1]), 1), 4)
            block = 32 * WARPS << most.bit_length() - 1
            blocks = -(-outer * inner // block)
            partial = paces.new_empty(2, blocks)  # sums of squares of the updates and of the weights
            pacing, counts = (pace[0], paces.shape[1], partial, blocks), (outer * inner, inner)
            strides = grad.stride(), rows.stride(), columns.stride()
            observe[(blocks,)](
                grad, near, rows, columns, *pacing, *counts, EPS_SQUARE, strides[0], near.stride(), *strides[1:],
                *sizes, block, num_warps=WARPS,
            )  # fmt: skip
            descend[(blocks,)](
                grad, param, near, rows, columns, *pacing, *counts, clip, EPS_SCALE, strides[0], param.stride(),
                near.stride(), *strides[1:], *sizes, block, twin is not None, num_warps=WARPS,
            )  # fmt: skip

    def _special(self, param: Tensor) -> bool:
        return self.kernels and param.ndim == 4

    def _moments(self, param: Tensor) -> tuple[Tensor, ...]:
        state = self.state[param]
        if param.ndim < 2:
            if "square" not in state:
                state["square"] = torch.zeros_like(param)
            return (state["square"],)
        if "rows" not in state:
            state["rows"], state["columns"] = self._zeros(param)
        return state["rows"], state["columns"]

    def _zeros(self, param: Tensor) -> tuple[Tensor, Tensor]:
        """For moments of rows and columns; in the kernels' case in the order of memory of their weights."""
        kept = torch.preserve_format if self._special(param) else torch.contiguous_format
        return tuple(torch.zeros_like(some, memory_format=kept) for some in (param[..., 0], param[..., 0, :]))  # type: ignore[return-value]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for param, state in self.state.items():
            if "rows" in state:  # a file has lost the order of memory
                found = state["rows"], state["columns"]
                state["rows"], state["columns"] = (z.copy_(f) for z, f in zip(self._zeros(param), found, strict=True))
