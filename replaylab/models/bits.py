"""The world model's latent bits: they say which of the possible next frames comes (SimPLe's discrete latents).

In training a convolutional posterior reads them from the true next frame, and an LSTM prior learns to predict them from
the past alone, one byte at a time. In a dream the prior draws them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from replaylab.models.attention import hopper
from replaylab.models.layers import convolve, linear

if KERNELS := hopper():  # here, so that torch.compile need not look
    from replaylab.models import bits_kernel
if TYPE_CHECKING:
    from replaylab.models.world import WorldShape

FLIPPED, PREDICTED, USED = 0.1, 0.5, 0.8  # share of bits flipped; of bits from the prior; of samples that use bits
PRIOR_DROPOUT = 0.1
MEMORY = 128  # width of the LSTM


def mixed(first: Tensor, second: Tensor, share: Tensor, per_sample: bool = False) -> Tensor:
    """Each element, or each sample, from `first` with probability `share`."""
    shape = (len(first), *[1] * (first.ndim - 1)) if per_sample else first.shape
    return torch.where(torch.rand(shape, device=first.device) < share, first, second)


def cut_normal(like: Tensor, deviation: float) -> Tensor:
    """Normal noise truncated at two deviations, by inverting its distribution function."""
    edge = math.erf(math.sqrt(2))
    return deviation * math.sqrt(2) * torch.erfinv((2 * torch.rand_like(like) - 1) * edge)


def modulated(x: Tensor, gate_and_shift: Tensor) -> Tensor:  # (batch, c, h, w), (batch, 2 c)
    gate, shift = gate_and_shift[..., None, None].to(x.dtype).chunk(2, 1)
    return x * gate.sigmoid() + shift


class AttentionPool(nn.Module):
    """Pools a feature map into `outputs` numbers: from its mean and its means under four learned attentions."""

    def __init__(self, channels: int, outputs: int, interleaved: bool):
        super().__init__()
        self.heads, self.out = nn.Linear(channels, 4), nn.Linear(5 * channels, outputs)
        self.interleaved = interleaved

    def forward(self, x: Tensor) -> Tensor:  # (batch, c, h, w) -> (batch, outputs)
        flat = x.flatten(2).transpose(1, 2)  # (batch, positions, c)
        scores = linear(self.heads, flat)  # (batch, positions, 4)
        if self.interleaved:  # the original reads (4, positions) as if it were (positions, 4)
            scores = scores.transpose(1, 2).reshape(scores.shape)
        attention = scores.float().softmax(1).to(x.dtype) / flat.shape[1]
        pooled = torch.cat([flat.mean(1, keepdim=True), attention.transpose(1, 2) @ flat], 1)
        return linear(self.out, pooled.flatten(1))


class Bits(nn.Module):
    """The posterior that reads bits from the next frame, and the LSTM prior that draws them."""

    powers: Tensor

    def __init__(self, shape: WorldShape):
        super().__init__()
        self.original = shape.fidelity == "original"
        inputs, wide = 3 * (shape.stack + 1), shape.channels[-1]
        first, second = 4 * shape.hidden // 3, 16 * shape.hidden // 3
        self.embed = nn.Linear(inputs, shape.hidden)
        self.conv1 = nn.Conv2d(shape.hidden, first, 8, 4, 2)
        self.conv2 = nn.Conv2d(first, second, 8, 4, 2)
        self.pool1 = AttentionPool(first, 2 * inputs, self.original)
        self.pool2 = AttentionPool(second, 2 * inputs, self.original)
        self.read = nn.Linear(4 * inputs, shape.bits)
        self.write = nn.Linear(shape.bits, 2 * wide)
        self.start = nn.Linear(shape.bottom, 3 * MEMORY)  # first input, hidden and cell state of the LSTM
        self.cell = nn.LSTMCell(MEMORY, MEMORY)
        self.byte_out, self.byte_in = nn.Linear(MEMORY, 256), nn.Linear(256, MEMORY)
        self.register_buffer("powers", 2 ** torch.arange(8), persistent=False)

    def posterior(self, seen: Tensor, target: Tensor, action: Tensor, timing: Tensor) -> Tensor:
        """From frames (batch, h, w, 12) and the next one (batch, h, w, 3) to (batch, bits) real numbers."""
        x = linear(self.embed, torch.cat([seen, target], 3)).permute(0, 3, 1, 2)
        x = convolve(self.conv1, modulated(x + timing.to(x.dtype), action))
        deep = convolve(self.conv2, torch.relu(x))
        return linear(self.read, torch.cat([self.pool1(x), self.pool2(deep)], 1)).float()

    def mix(self, layer: Tensor, real: Tensor, drawn: Tensor, epsilon: Tensor) -> Tensor:
        """The layer with bits put in. As epsilon falls from 1 to 0 in training: at first none, at last hard bits in
        80 % of the samples, half of these bits from the prior."""
        soft = torch.tanh(real + cut_normal(real, 0.2))
        hard = soft + (torch.where(soft < 0, -1.0, 1.0) - soft).detach()
        hard = torch.where(torch.rand_like(hard) < FLIPPED, -hard, hard)
        # the original ends with soft bits, though dreams only have hard ones
        bits = mixed(hard, soft, epsilon if self.original else 1 - epsilon)
        bits = mixed(drawn, bits, (1 - epsilon) * PREDICTED)
        return mixed(self.put(layer, bits), layer, (1 - epsilon) * USED, per_sample=not self.original)

    def put(self, layer: Tensor, bits: Tensor) -> Tensor:
        return modulated(layer, linear(self.write, bits.to(layer.dtype)))

    # --- the prior

    def _begin(self, layer: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Gates of the first step, cell state, a table of what each byte adds to the gates, and the weights and biases
        that turn a hidden state into logits and its part of the next gates in one product."""
        kind, cell = layer.dtype, self.cell
        first, hidden, memory = linear(self.start, layer.flatten(1)).chunk(3, 1)
        inward = cell.weight_ih.to(kind)
        bias = (cell.bias_ih + cell.bias_hh).to(kind)
        table = F.linear(self.byte_in.weight.t().to(kind) + self.byte_in.bias.to(kind), inward, bias)  # (256, gates)
        gates = F.linear(first, inward, bias) + F.linear(hidden, cell.weight_hh.to(kind))
        both = torch.cat([self.byte_out.weight, cell.weight_hh]).to(kind)
        offset = F.pad(self.byte_out.bias, (0, len(cell.weight_hh))).to(kind)
        return gates, memory.float(), table, both, offset

    def prior_loss(self, layer: Tensor, real: Tensor) -> Tensor:
        """Cross-entropy of the bytes, each predicted from those before it."""
        bytes_ = self.pack(real > 0)  # (batch, bytes)
        cell, kind = self.cell, layer.dtype
        first, hidden, memory = linear(self.start, layer.flatten(1)).chunk(3, 1)
        words = linear(self.byte_in, F.one_hot(bytes_[:, :-1], 256).to(kind))
        inputs = torch.cat([first[:, None], F.dropout(words, PRIOR_DROPOUT)], 1)  # (batch, bytes, memory)
        inward = F.linear(inputs, cell.weight_ih.to(kind), (cell.bias_ih + cell.bias_hh).to(kind))
        run = bits_kernel.lstm_states if KERNELS and layer.is_cuda else lstm_states
        states = run(inward, hidden, memory, cell.weight_hh.to(kind))
        logits = linear(self.byte_out, F.dropout(states, PRIOR_DROPOUT))
        return F.cross_entropy(logits.flatten(0, 1).float(), bytes_.flatten())

    @torch.no_grad()
    def draw(self, layer: Tensor) -> Tensor:  # (batch, bits) of -1 and 1
        noise = torch.rand(self.read.out_features // 8, len(layer), 256, device=layer.device)
        gumbel = -(-noise.clamp(1e-20).log()).clamp(1e-20).log()  # argmax(logits + Gumbel noise) is a sample
        run = bits_kernel.draw_bytes if KERNELS and layer.is_cuda else draw_bytes
        return self.unpack(run(*self._begin(layer), gumbel))

    def pack(self, bits: Tensor) -> Tensor:  # (batch, bits) booleans -> (batch, bytes), the lowest bit first
        return (bits.unflatten(1, (-1, 8)) * self.powers).sum(2)

    def unpack(self, bytes_: Tensor) -> Tensor:
        return torch.where(bytes_[..., None] & self.powers > 0, 1.0, -1.0).flatten(1)


# --- the LSTM over bytes; on Hopper GPUs in one kernel, for every step is too small for one of its own


def lstm_states(inward: Tensor, hidden: Tensor, memory: Tensor, weight: Tensor) -> Tensor:
    """Hidden states (batch, steps, n) from what the inputs add to the gates (batch, steps, 4 n), the first hidden and
    cell state (batch, n) and the recurrent weights."""
    memory, states = memory.float(), []
    for gates in inward.unbind(1):
        hidden, memory = lstm(torch.addmm(gates, hidden, weight.t()), memory)
        states.append(hidden)
    return torch.stack(states, 1)


def draw_bytes(gates: Tensor, memory: Tensor, table: Tensor, both: Tensor, offset: Tensor, noise: Tensor) -> Tensor:
    """(batch, steps) bytes, by noise (steps, batch, 256) and what `Bits._begin` makes."""
    drawn = []
    for extra in noise:
        hidden, memory = lstm(gates, memory)
        logits, onward = torch.addmm(offset, hidden, both.t()).split([256, len(both) - 256], 1)
        drawn.append((logits.float() + extra).argmax(1))
        gates = table[drawn[-1]] + onward
    return torch.stack(drawn, 1)


def lstm(gates: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """The elementwise part of an LSTM step: (batch, 4 n) gates, (batch, n) cell state -> hidden and cell state."""
    let_in, forget, value, out = gates.float().chunk(4, 1)
    memory = forget.sigmoid() * memory + let_in.sigmoid() * value.tanh()
    return (out.sigmoid() * memory.tanh()).to(gates.dtype), memory
