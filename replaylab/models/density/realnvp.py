"""RealNVP (Dinh et al., 2017): an invertible network from data to a standard normal.

A coupling keeps every second column and moves the others by functions of these:

    y = x exp(s) + t,   log |dy/dx| = sum s,   s = tanh(raw): a factor from 1/e to e

The kept columns alternate from one coupling to the next. One network outputs both raw and t of a coupling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from replaylab.errors import UsageError
from replaylab.models.density.base import Density, log_normal
from replaylab.models.mlp import MLP

# Compiling would not save kernels here. `disable` imports the compiler, which takes a second: only with CUDA.
uncompiled: Any = torch.compiler.disable if torch.cuda.is_available() else lambda method: method


class RealNVP(Density):
    def __init__(self, dim: int, couplings: int = 6, hidden: Sequence[int] = (256, 256)):
        super().__init__(dim)
        if dim < 2:
            raise UsageError("realnvp needs two columns at least: one coupling keeps some and moves the others")
        self.couplings, wide = couplings, (dim + 1) // 2  # number of even columns; there may be one odd column fewer
        self.nets = MLP([torch.default_generator] * couplings, wide, hidden, 2 * wide)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Data -> (latent, log |det|)."""
        even, odd, log_det = self._flow(x)
        return self._interleave(even, odd), log_det

    @uncompiled
    def _flow(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The latent's even and odd columns, and log |det|."""
        learns = torch.is_grad_enabled()
        return Flow.apply(learns, x[:, 0::2], x[:, 1::2], *(tensor for layer in self._layers() for tensor in layer))

    def _layers(self) -> list[tuple[Tensor, Tensor]]:
        return [(layer.get_parameter("weight"), layer.get_parameter("bias")) for layer in self.nets.layers]

    def inverse(self, z: Tensor) -> Tensor:
        halves, layers = [z[:, 0::2], z[:, 1::2]], self._layers()
        for i in reversed(range(self.couplings)):
            kept, moved = halves[i % 2], halves[1 - i % 2]
            x = _widened(kept, (self.dim + 1) // 2)
            for weight, bias in layers[:-1]:
                x = torch.relu(x @ weight[i] + bias[i])
            raw, shift = _parts(x @ layers[-1][0][i] + layers[-1][1][i], moved.shape[1])
            halves[1 - i % 2] = (moved - shift) * torch.exp(-torch.tanh(raw))
        return self._interleave(*halves)

    def log_density(self, z: Tensor) -> Tensor:
        even, odd, log_det = self._flow(z)
        return log_normal(even) + log_normal(odd) + log_det

    def _interleave(self, even: Tensor, odd: Tensor) -> Tensor:
        x = even.new_empty(len(even), self.dim)
        x[:, 0::2], x[:, 1::2] = even, odd
        return x


def _widened(x: Tensor, width: int) -> Tensor:
    return x if x.shape[1] == width else F.pad(x, (0, width - x.shape[1]))


def _parts(output: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Raw scale and shift of the `width` columns that a coupling moves."""
    raw, shift = output.chunk(2, -1)
    return raw[:, :width], shift[:, :width]


class Flow(torch.autograd.Function):
    """All couplings, with a handwritten backward pass. The couplings run one after another, but the gradients of their
    weights can wait for the end, where one batched product computes all of them; with autograd, a batch of 128 rows
    takes twice as many kernels. Inputs and gradients of each layer are written to where that product reads them."""

    @staticmethod
    def forward(
        ctx: Any, learns: bool, even: Tensor, odd: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        weights, biases = parameters[0::2], parameters[1::2]
        count, rows, wide = len(weights[0]), len(even), weights[0].shape[1]

        def room(width: int) -> Any:
            return even.new_empty(count, rows, width) if learns else [None] * count

        inputs = [room(w.shape[1]) for w in weights]
        halves, moves = [even, odd], []
        for i in range(count):
            kept, moved = halves[i % 2], halves[1 - i % 2]
            x = _widened(kept, wide)
            x = inputs[0][i].copy_(x) if learns else x
            for w, b, into in zip(weights[:-1], biases[:-1], inputs[1:], strict=True):
                x = torch._addmm_activation(b[i, 0], x, w[i], out=into[i])  # with ReLU
            raw, shift = _parts(torch.addmm(biases[-1][i, 0], x, weights[-1][i]), moved.shape[1])
            scale = torch.tanh(raw)
            factor = scale.exp()
            halves[1 - i % 2] = torch.addcmul(shift, moved, factor)
            moves.append((moved, scale, factor))
        if learns:
            ctx.save_for_backward(*weights, *inputs, *(tensor for move in moves for tensor in move))
        log_det = torch.cat([scale for _, scale, _ in moves], -1).sum(-1)
        return halves[0], halves[1], log_det

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        saved, layers = list(ctx.saved_tensors), (len(ctx.needs_input_grad) - 3) // 2
        weights, inputs, saved = saved[:layers], saved[layers : 2 * layers], saved[2 * layers :]
        moves = [saved[k : k + 3] for k in range(0, len(saved), 3)]
        halves, of_det = list(gradients[:2]), gradients[2][:, None]
        rows = len(of_det)
        into = [of_det.new_empty(len(w), rows, w.shape[2]) for w in weights]  # gradients of the layers' outputs
        into[-1].zero_()  # for couplings that move one column fewer
        for i in reversed(range(len(moves))):
            moved, scale, factor = moves[i]
            of_kept, of_new = halves[i % 2], halves[1 - i % 2]
            of_raw, of_shift = _parts(into[-1][i], moved.shape[1])
            halves[1 - i % 2] = of_moved = of_new * factor
            of_raw.copy_(torch.ops.aten.tanh_backward(torch.addcmul(of_det, of_moved, moved), scale))
            of_shift.copy_(of_new)
            for layer in reversed(range(1, layers)):
                flow = torch.mm(into[layer][i], weights[layer][i].mT)
                torch.ops.aten.threshold_backward.grad_input(flow, inputs[layer][i], 0, grad_input=into[layer - 1][i])
            first = weights[0][i, : of_kept.shape[1]]
            halves[i % 2] = torch.addmm(of_kept, into[0][i], first.mT)
        ones = of_det.new_ones(len(moves), 1, rows)
        found = []
        for x, g in zip(inputs, into, strict=True):
            found += [torch.bmm(x.mT, g), torch.bmm(ones, g)]
        return None, halves[0], halves[1], *found
