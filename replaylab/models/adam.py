"""Adam and AdamW for many small tensors, and for weights with a twin.

PyTorch's fused Adam gives a block of threads 65,536 numbers, so that the few hundred thousand parameters of our
networks keep a handful of multiprocessors busy for 50 microseconds and more: a third of a captured update. Here
parameters and moments of a group lie in one buffer each, and one kernel with a block for every 1,024 numbers does the
step in a few microseconds. The same formula; used on CUDA, where Triton comes with PyTorch.

A twin is a copy of the weights in the precision that a loss is computed in. It gives the gradients, and the kernel that
steps the weights writes the twin's too, so that neither weights nor gradients are converted anywhere else.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from replaylab.streams import beside

ALIGN = 64  # numbers: every tensor begins where matrix products like it, at a multiple of 256 bytes
BLOCK = 1024
LARGE = 65_536  # numbers of a tensor that is worth a kernel of its own


def adam(
    parameters: Iterable[nn.Parameter | dict[str, Any]],
    lr: float | Tensor = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    flat: bool = True,  # many small tensors
    twins: Iterable[Tensor] | None = None,
) -> torch.optim.Optimizer:
    """AdamW (Adam, where nothing decays) in the fastest form for where the parameters are. It may be captured."""
    given = list(parameters)
    groups = [dict(group) for group in given if isinstance(group, dict)] or [{"params": given}]
    cuda = groups[0]["params"][0].is_cuda
    if twins is not None:
        return TwinAdam(groups, lr, betas, eps, weight_decay, twins)
    if flat and cuda and importlib.util.find_spec("triton"):
        return FlatAdam(groups, lr, betas, eps, weight_decay)
    return FusedAdam(groups, lr, betas, eps, weight_decay, fused=True, capturable=cuda)


def clipped_step(optimizer: torch.optim.Optimizer, seeds: int, limit: float) -> Tensor:
    """A step of `adam`'s optimiser with each seed's gradient, the whole of it, scaled down to the limit (0: no limit).
    The norms before, (seeds,)."""
    if isinstance(optimizer, FlatAdam | TwinAdam) and seeds == 1:
        return optimizer.clipped_step(limit)
    norms = clip_gradients([p for group in optimizer.param_groups for p in group["params"]], seeds, limit)
    optimizer.step()
    return norms


def anneal(optimizer: torch.optim.Optimizer, lr: float, done: Tensor, steps: int) -> None:
    """Set the learning rate, a tensor in the first group, for the update after `done`: it falls from `lr` to 0 along a
    cosine."""
    optimizer.param_groups[0]["lr"].copy_(lr * (1 + torch.cos(math.pi * done / steps)) / 2)


class FusedAdam(torch.optim.AdamW):
    """PyTorch's. Its kernel takes weights and moments as they lie in memory, so loaded moments are put in the order of
    their weights: convolutions may have their channels last, a file has not."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for p, entries in self.state.items():
            for name in ("exp_avg", "exp_avg_sq"):
                entries[name] = torch.empty_like(p).copy_(entries[name])


class TwinAdam(FusedAdam):
    """One group of parameters, whose gradients are those of their twins. PyTorch's step for the small ones."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float | Tensor,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        twins: Iterable[Tensor],
    ):
        (group,) = groups
        cuda = group["params"][0].is_cuda
        super().__init__(groups, lr, betas, eps, weight_decay, fused=True, capturable=cuda)
        self.twins = list(zip(group["params"], twins, strict=True))
        self.kernels = cuda and importlib.util.find_spec("triton") is not None
        disable: Any = torch.compiler.disable  # kernels already; a decorator would load the compiler
        self.clipped_step = disable(self.clipped_step)  # type: ignore[method-assign]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.clipped_step(0.0)

    @torch.no_grad()
    def clipped_step(self, limit: float) -> Tensor:  # -> (1,)
        learnt = [(p, twin) for p, twin in self.twins if twin.grad is not None]
        norm = gradient_norm([twin.grad for _, twin in learnt])
        share = _share(norm, limit or math.inf)
        large = [(p, twin) for p, twin in learnt if self._special(p, twin)]
        small = [(p, twin) for p, twin in learnt if not self._special(p, twin)]
        done = beside(lambda: self._small(small, share), norm.device, urgent=True)
        self._large(large, share)
        done()
        return norm[None]

    def _special(self, p: Tensor, twin: Tensor) -> bool:
        return self.kernels and p.numel() >= LARGE and p.stride() == twin.stride()

    def _small(self, learnt: list[tuple[Tensor, Tensor]], share: Tensor) -> None:
        if not learnt:
            return
        params, twins = map(list, zip(*learnt, strict=True))
        gradients = [torch.empty_like(p) for p in params]
        torch._foreach_copy_(gradients, [twin.grad for twin in twins])
        torch._foreach_mul_(gradients, share)
        self.zero_grad()  # what others have left there must not be stepped along
        for p, gradient in zip(params, gradients, strict=True):
            p.grad = gradient
        super().step()
        self.zero_grad()
        torch._foreach_copy_(twins, params)

    def _large(self, learnt: list[tuple[Tensor, Tensor]], share: Tensor) -> None:
        if not learnt:
            return
        from replaylab.models.adam_kernel import descend_twin

        (group,) = self.param_groups
        first, second = group["betas"]
        settings = (first, math.log(first), second, math.log(second), group["eps"], group["weight_decay"])
        states = [self._state(p) for p, _ in learnt]
        torch._foreach_add_([state["step"] for state in states], 1)
        for (p, twin), state in zip(learnt, states, strict=True):
            gradient: Any = twin.grad
            if gradient.stride() != p.stride():  # the kernel takes all as they lie in memory
                gradient = torch.empty_like(twin).copy_(gradient)
            moments, size = (state["exp_avg"], state["exp_avg_sq"]), p.numel()
            descend_twin[(-(-size // BLOCK),)](
                p, twin, gradient, *moments, share, state["step"], size, group["lr"], *settings, BLOCK, num_warps=8
            )  # four numbers a thread: as many of float32 as can be read at once, and not more of bf16

    def _state(self, p: Tensor) -> dict[str, Tensor]:
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros((), device=p.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        return state


class FlatAdam(torch.optim.Optimizer):
    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ):
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.flat = [self._flatten(group) for group in self.param_groups]
        blocks = [len(flat["table"]) for flat in self.flat]
        self.norms = torch.zeros(sum(blocks), device=self.flat[0]["value"].device)  # of each block's gradient
        for flat, norms in zip(self.flat, self.norms.split(blocks), strict=True):
            flat["norms"] = norms
        disable: Any = torch.compiler.disable  # they are three kernels already; a decorator would load the compiler
        self.step, self.clipped_step = disable(self.step), disable(self.clipped_step)  # type: ignore[method-assign]

    def _flatten(self, group: dict[str, Any]) -> dict[str, Any]:
        """Move the parameters into one buffer, where they stay; their moments are views of two more."""
        parameters, device = group["params"], group["params"][0].device
        if not isinstance(group["lr"], Tensor):
            group["lr"] = torch.tensor(group["lr"], device=device)
        sizes = [-(-p.numel() // ALIGN) * ALIGN for p in parameters]
        names = ("value", "gradient", "exp_avg", "exp_avg_sq")
        flat: dict[str, Any] = {name: torch.zeros(sum(sizes), device=device) for name in names}
        flat["step"] = torch.zeros((), device=device)
        start, table = 0, []
        for i, (p, size) in enumerate(zip(parameters, sizes, strict=True)):
            views = {name: flat[name][start : start + p.numel()].view(p.shape) for name in names}
            views["value"].copy_(p.data)
            p.data = views["value"]
            self.state[p] = {"step": flat["step"], "exp_avg": views["exp_avg"], "exp_avg_sq": views["exp_avg_sq"]}
            table += [(i, place, start + place, p.numel()) for place in range(0, p.numel(), BLOCK)]
            start += size
        flat["table"] = torch.tensor(table, device=device)
        return flat

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.clipped_step(0.0)

    @torch.no_grad()
    def clipped_step(self, limit: float) -> Tensor:  # -> (1,)
        for group, flat in zip(self.param_groups, self.flat, strict=True):
            self._gather(flat, [p.grad.contiguous() for p in group["params"]])
        norm = torch.linalg.vector_norm(self.norms)
        for group, flat in zip(self.param_groups, self.flat, strict=True):
            self._descend(flat, group, norm, limit or math.inf)
        return norm[None]

    def _gather(self, flat: dict[str, Any], gradients: list[Tensor]) -> None:
        from replaylab.models.adam_kernel import gather

        where = [flat[name] for name in ("gradient", "norms", "step", "table")]
        gather[(len(flat["table"]),)](tuple(gradients), *where, len(gradients), BLOCK)

    def _descend(self, flat: dict[str, Any], group: dict[str, Any], norm: Tensor, limit: float) -> None:
        from replaylab.models.adam_kernel import descend

        columns = [flat[name] for name in ("value", "gradient", "exp_avg", "exp_avg_sq")]
        first, second = group["betas"]
        settings = (first, math.log(first), second, math.log(second), group["eps"], group["weight_decay"])
        size = flat["value"].numel()
        descend[(-(-size // BLOCK),)](*columns, group["lr"], norm, limit, flat["step"], size, *settings, BLOCK)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        views = {p: dict(entries) for p, entries in self.state.items()}
        super().load_state_dict(state_dict)
        for p, entries in views.items():  # back into the buffers that the kernel works on
            for name, view in entries.items():
                view.copy_(self.state[p][name])
            self.state[p] = entries


def clip_gradients(parameters: Iterable[nn.Parameter], seeds: int, limit: float) -> Tensor:
    """Scale each seed's gradient down to the limit (0: no limit); the norms before, (seeds,). Nothing is read back."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if seeds == 1:  # in any order of memory
        norms = torch.stack(torch._foreach_norm(gradients)).norm()[None]
        if limit > 0:
            torch._foreach_mul_(gradients, _share(norms, limit)[0])
        return norms
    gradients = [gradient.view(seeds, -1) for gradient in gradients]
    norms = torch.linalg.vector_norm(torch.cat(gradients, 1), dim=1)
    if limit > 0:
        share = _share(norms, limit)[:, None]
        for gradient in gradients:
            gradient.mul_(share)
    return norms


def gradient_norm(gradients: list[Any]) -> Tensor:
    """Of all together, in any order of memory and any precision."""
    return torch.stack(torch._foreach_norm(gradients, dtype=torch.float32)).norm()


def _share(norms: Tensor, limit: float) -> Tensor:
    return (limit / (norms + 1e-6)).clamp(max=1.0)
