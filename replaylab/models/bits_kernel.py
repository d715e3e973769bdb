"""The kernels of bits.py. A file of its own: it needs Triton, which a CPU build of PyTorch does not bring.

A step of the LSTM is a product too small for the chip, and the next one waits for it. So a program takes ROWS samples
through all steps: states stay in registers, and 16-bit weights in the 227 KB that a Hopper multiprocessor may share
between threads. Weights of 32 bits do not fit and are read again in every step. The steps are a loop at run time:
written out, they would not fit into the cache for instructions.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16  # the fewest that tensor cores take
WARPS = 8


@triton.jit
def tanh(x, FAST: tl.constexpr):
    if FAST:  # one instruction, wrong by 2^-11: less than the rounding to 16 bits
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def sigmoid(x, FAST: tl.constexpr):
    if FAST:
        return 0.5 * tanh(0.5 * x, FAST) + 0.5
    return tl.sigmoid(x)


@triton.jit
def turned(weights, OUT: tl.constexpr, UNITS: tl.constexpr):
    """The first OUT rows of a (rows, UNITS) matrix, as columns."""
    return tl.load(weights + tl.arange(0, OUT)[None, :] * UNITS + tl.arange(0, UNITS)[:, None])


@triton.jit
def upright(weights, UNITS: tl.constexpr):
    return tl.load(weights + tl.arange(0, UNITS)[:, None] * UNITS + tl.arange(0, UNITS)[None, :])


@triton.jit
def forth(x, kept, weights, start, OUT: tl.constexpr, UNITS: tl.constexpr, PRECISION: tl.constexpr):
    """start + x @ OUT rows of the weights, as kept on the chip or read now."""
    right = turned(weights, OUT, UNITS) if kept is None else kept
    return tl.dot(x, right, start, input_precision=PRECISION)


@triton.jit
def back(x, kept, weights, start, UNITS: tl.constexpr, PRECISION: tl.constexpr):
    right = upright(weights, UNITS) if kept is None else kept
    return tl.dot(x, right, start, input_precision=PRECISION)


@triton.jit
def draw_forward(
    gates, memory, table, both, offset, noise, drawn, batch, steps, memory_step,
    ROWS: tl.constexpr, UNITS: tl.constexpr, BYTES: tl.constexpr,
    FITS: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    unit, byte = tl.arange(0, UNITS), tl.arange(0, BYTES)
    inside = (row < batch)[:, None]
    kind = both.dtype.element_ty
    w_in = both + BYTES * UNITS
    w_forget, w_value, w_out = w_in + UNITS * UNITS, w_in + 2 * UNITS * UNITS, w_in + 3 * UNITS * UNITS
    k_byte = turned(both, BYTES, UNITS) if FITS else None
    k_in, k_forget = turned(w_in, UNITS, UNITS) if FITS else None, turned(w_forget, UNITS, UNITS) if FITS else None
    k_value, k_out = turned(w_value, UNITS, UNITS) if FITS else None, turned(w_out, UNITS, UNITS) if FITS else None
    at = gates + row[:, None] * 4 * UNITS + unit[None, :]
    let_in = tl.load(at, inside, 0.0).to(tl.float32)
    forget = tl.load(at + UNITS, inside, 0.0).to(tl.float32)
    value = tl.load(at + 2 * UNITS, inside, 0.0).to(tl.float32)
    out = tl.load(at + 3 * UNITS, inside, 0.0).to(tl.float32)
    cell = tl.load(memory + row[:, None] * memory_step + unit[None, :], inside, 0.0).to(tl.float32)
    # products begin with the offset, not with what comes from memory: they do not wait for it
    b_byte = tl.load(offset + byte).to(tl.float32)[None, :]
    b_in = tl.broadcast_to(tl.load(offset + BYTES + unit).to(tl.float32)[None, :], (ROWS, UNITS))
    b_forget = tl.broadcast_to(tl.load(offset + BYTES + UNITS + unit).to(tl.float32)[None, :], (ROWS, UNITS))
    b_value = tl.broadcast_to(tl.load(offset + BYTES + 2 * UNITS + unit).to(tl.float32)[None, :], (ROWS, UNITS))
    b_out = tl.broadcast_to(tl.load(offset + BYTES + 3 * UNITS + unit).to(tl.float32)[None, :], (ROWS, UNITS))
    noise += row[:, None] * BYTES + byte[None, :]
    extra = tl.load(noise, inside, 0.0)
    for step in range(steps):
        cell = sigmoid(forget, FAST) * cell + sigmoid(let_in, FAST) * tanh(value, FAST)
        hidden = (sigmoid(out, FAST) * tanh(cell, FAST)).to(kind)
        chosen = tl.argmax(forth(hidden, k_byte, both, b_byte + extra, BYTES, UNITS, PRECISION), 1)
        tl.store(drawn + row * steps + step, chosen.to(tl.int64), row < batch)
        at = table + chosen[:, None] * 4 * UNITS + unit[None, :]
        add_in, add_forget = tl.load(at), tl.load(at + UNITS)
        add_value, add_out = tl.load(at + 2 * UNITS), tl.load(at + 3 * UNITS)
        noise += batch * BYTES
        extra = tl.load(noise, inside & (step + 1 < steps), 0.0)
        let_in = forth(hidden, k_in, w_in, b_in, UNITS, UNITS, PRECISION)
        forget = forth(hidden, k_forget, w_forget, b_forget, UNITS, UNITS, PRECISION)
        value = forth(hidden, k_value, w_value, b_value, UNITS, UNITS, PRECISION)
        out = forth(hidden, k_out, w_out, b_out, UNITS, UNITS, PRECISION)
        let_in, forget, value, out = let_in + add_in, forget + add_forget, value + add_value, out + add_out


@triton.jit
def states_forward(
    inward, hidden, memory, weight, states, slopes, batch, steps, hidden_step, memory_step,
    ROWS: tl.constexpr, UNITS: tl.constexpr, FITS: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The slopes are all that the way back multiplies with: of cell and output by the hidden state, of input, forget
    and value by the cell, of the cell by the one before."""
    row, unit = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, UNITS)
    inside = (row < batch)[:, None]
    kind = weight.dtype.element_ty
    w_forget, w_value, w_out = weight + UNITS * UNITS, weight + 2 * UNITS * UNITS, weight + 3 * UNITS * UNITS
    k_in, k_forget = turned(weight, UNITS, UNITS) if FITS else None, turned(w_forget, UNITS, UNITS) if FITS else None
    k_value, k_out = turned(w_value, UNITS, UNITS) if FITS else None, turned(w_out, UNITS, UNITS) if FITS else None
    state = tl.load(hidden + row[:, None] * hidden_step + unit[None, :], inside, 0.0).to(kind)
    cell = tl.load(memory + row[:, None] * memory_step + unit[None, :], inside, 0.0).to(tl.float32)
    at = inward + row[:, None] * steps * 4 * UNITS + unit[None, :]
    add_in, add_forget = tl.load(at, inside, 0.0), tl.load(at + UNITS, inside, 0.0)
    add_value, add_out = tl.load(at + 2 * UNITS, inside, 0.0), tl.load(at + 3 * UNITS, inside, 0.0)
    for step in range(steps):
        at += 4 * UNITS
        more = inside & (step + 1 < steps)
        next_in, next_forget = tl.load(at, more, 0.0), tl.load(at + UNITS, more, 0.0)
        next_value, next_out = tl.load(at + 2 * UNITS, more, 0.0), tl.load(at + 3 * UNITS, more, 0.0)
        let_in = sigmoid(forth(state, k_in, weight, add_in.to(tl.float32), UNITS, UNITS, PRECISION), FAST)
        forget = sigmoid(forth(state, k_forget, w_forget, add_forget.to(tl.float32), UNITS, UNITS, PRECISION), FAST)
        value = tanh(forth(state, k_value, w_value, add_value.to(tl.float32), UNITS, UNITS, PRECISION), FAST)
        out = sigmoid(forth(state, k_out, w_out, add_out.to(tl.float32), UNITS, UNITS, PRECISION), FAST)
        before = cell
        cell = forget * cell + let_in * value
        bent = tanh(cell, FAST)
        state = (out * bent).to(kind)
        place = row[:, None] * steps + step
        tl.store(states + place * UNITS + unit[None, :], state, inside)
        to = slopes + place * 6 * UNITS + unit[None, :]
        tl.store(to, (out * (1 - bent * bent)).to(kind), inside)
        tl.store(to + UNITS, (bent * out * (1 - out)).to(kind), inside)
        tl.store(to + 2 * UNITS, (value * let_in * (1 - let_in)).to(kind), inside)
        tl.store(to + 3 * UNITS, (before * forget * (1 - forget)).to(kind), inside)
        tl.store(to + 4 * UNITS, (let_in * (1 - value * value)).to(kind), inside)
        tl.store(to + 5 * UNITS, forget.to(kind), inside)
        add_in, add_forget, add_value, add_out = next_in, next_forget, next_value, next_out


@triton.jit
def states_backward(
    for_states, weight, slopes, for_inward, for_hidden, for_memory, batch, steps,
    ROWS: tl.constexpr, UNITS: tl.constexpr, FITS: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """From the last step to the first. A step begins with the products of the one after it, while its own numbers are
    read; the last step has nothing after it, zeros."""
    row, unit = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, UNITS)
    inside = (row < batch)[:, None]
    kind = weight.dtype.element_ty
    w_forget, w_value, w_out = weight + UNITS * UNITS, weight + 2 * UNITS * UNITS, weight + 3 * UNITS * UNITS
    k_in, k_forget = upright(weight, UNITS) if FITS else None, upright(w_forget, UNITS) if FITS else None
    k_value, k_out = upright(w_value, UNITS) if FITS else None, upright(w_out, UNITS) if FITS else None
    for_in, for_forget = tl.zeros((ROWS, UNITS), kind), tl.zeros((ROWS, UNITS), kind)
    for_value, for_out = tl.zeros((ROWS, UNITS), kind), tl.zeros((ROWS, UNITS), kind)
    for_cell, zero = tl.zeros((ROWS, UNITS), tl.float32), tl.zeros((ROWS, UNITS), tl.float32)
    for later in range(steps):
        place = row[:, None] * steps + (steps - 1 - later)
        at = slopes + place * 6 * UNITS + unit[None, :]
        by_state, of_out = tl.load(at, inside, 0.0), tl.load(at + UNITS, inside, 0.0)
        of_in, of_forget = tl.load(at + 2 * UNITS, inside, 0.0), tl.load(at + 3 * UNITS, inside, 0.0)
        of_value, of_cell = tl.load(at + 4 * UNITS, inside, 0.0), tl.load(at + 5 * UNITS, inside, 0.0)
        told = tl.load(for_states + place * UNITS + unit[None, :], inside, 0.0)
        for_state = back(for_in, k_in, weight, zero, UNITS, PRECISION)
        for_state = back(for_forget, k_forget, w_forget, for_state, UNITS, PRECISION)
        for_state = back(for_value, k_value, w_value, for_state, UNITS, PRECISION)
        for_state = back(for_out, k_out, w_out, for_state, UNITS, PRECISION)
        for_state += told
        for_cell += for_state * by_state
        for_in = (for_cell * of_in).to(kind)
        for_forget = (for_cell * of_forget).to(kind)
        for_value = (for_cell * of_value).to(kind)
        for_out = (for_state * of_out).to(kind)
        for_cell *= of_cell
        to = for_inward + place * 4 * UNITS + unit[None, :]
        tl.store(to, for_in, inside)
        tl.store(to + UNITS, for_forget, inside)
        tl.store(to + 2 * UNITS, for_value, inside)
        tl.store(to + 3 * UNITS, for_out, inside)
    for_state = back(for_in, k_in, weight, zero, UNITS, PRECISION)
    for_state = back(for_forget, k_forget, w_forget, for_state, UNITS, PRECISION)
    for_state = back(for_value, k_value, w_value, for_state, UNITS, PRECISION)
    for_state = back(for_out, k_out, w_out, for_state, UNITS, PRECISION)
    to = row[:, None] * UNITS + unit[None, :]
    tl.store(for_hidden + to, for_state.to(kind), inside)
    tl.store(for_memory + to, for_cell.to(for_memory.dtype.element_ty), inside)


@torch.library.custom_op("replaylab::draw_bytes", mutates_args=())  # a compiler leaves the kernels as they are
def draw_bytes(gates: Tensor, memory: Tensor, table: Tensor, both: Tensor, offset: Tensor, noise: Tensor) -> Tensor:
    """What `bits.draw_bytes` draws, (batch, steps)."""
    steps, batch, bytes_ = noise.shape
    memory, drawn = _rows(memory), table.new_empty(batch, steps, dtype=torch.int64)
    given = (gates.contiguous(), memory, table.contiguous(), both.contiguous(), offset, noise.contiguous(), drawn)
    draw_forward[_grid(batch)](*given, batch, steps, memory.stride(0), BYTES=bytes_, **_settings(both))
    return drawn


@torch.library.custom_op("replaylab::lstm_states", mutates_args=())
def states_and_slopes(inward: Tensor, hidden: Tensor, memory: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """What `bits.lstm_states` says, (batch, steps, n), and what the way back needs, (batch, steps, 6, n)."""
    (batch, steps, _), units = inward.shape, hidden.shape[1]
    hidden, memory, weight = _rows(hidden), _rows(memory), weight.contiguous()
    states, slopes = inward.new_empty(batch, steps, units), inward.new_empty(batch, steps, 6, units)
    given, strides = (inward.contiguous(), hidden, memory, weight, states, slopes), (hidden.stride(0), memory.stride(0))
    states_forward[_grid(batch)](*given, batch, steps, *strides, **_settings(weight))
    return states, slopes


@torch.library.custom_op("replaylab::lstm_states_backward", mutates_args=())
def states_gradients(for_states: Tensor, weight: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of all but the weights, from that of the states."""
    batch, steps, units = for_states.shape
    weight, for_inward = weight.contiguous(), slopes.new_empty(batch, steps, 4 * units)
    for_hidden, for_memory = slopes.new_empty(batch, units), slopes.new_empty(batch, units, dtype=torch.float32)
    given = (for_states.contiguous(), weight, slopes, for_inward, for_hidden, for_memory)
    states_backward[_grid(batch)](*given, batch, steps, **_settings(weight))
    return for_inward, for_hidden, for_memory


def lstm_states(inward: Tensor, hidden: Tensor, memory: Tensor, weight: Tensor) -> Tensor:
    return states_and_slopes(inward, hidden, memory, weight)[0]


def _remember(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    _, hidden, memory, weight = inputs
    ctx.kind = memory.dtype
    ctx.set_materialize_grads(False)  # nobody asks for the slopes' gradient
    ctx.save_for_backward(hidden, weight, *output)


def _back(ctx: Any, for_states: Tensor, _: None) -> tuple[Tensor, ...]:
    hidden, weight, states, slopes = ctx.saved_tensors
    for_inward, for_hidden, for_memory = states_gradients(for_states, weight, slopes)
    before = torch.cat([hidden[:, None], states[:, :-1]], 1)
    for_weight = for_inward.flatten(0, 1).t() @ before.flatten(0, 1)
    return for_inward, for_hidden, for_memory.to(ctx.kind), for_weight


def _no_gradients(for_states: Tensor, weight: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    batch, steps, units = for_states.shape
    whole, part = slopes.new_empty(batch, steps, 4 * units), slopes.new_empty(batch, units)
    return whole, part, part.new_empty(part.shape, dtype=torch.float32)


def _no_states(inward: Tensor, hidden: Tensor, memory: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    batch, steps, units = *inward.shape[:2], hidden.shape[1]
    return inward.new_empty(batch, steps, units), inward.new_empty(batch, steps, 6, units)


draw_bytes.register_fake(
    lambda gates, memory, table, both, offset, noise: table.new_empty(*noise.shape[1::-1], dtype=torch.int64)
)
states_and_slopes.register_fake(_no_states)
states_and_slopes.register_autograd(_back, setup_context=_remember)
states_gradients.register_fake(_no_gradients)


def _rows(x: Tensor) -> Tensor:  # parts of a wider matrix may stay there
    return x if x.stride(1) == 1 else x.contiguous()


def _grid(batch: int) -> tuple[int]:
    return (triton.cdiv(batch, ROWS),)


def _settings(weights: Tensor) -> dict[str, Any]:
    short = weights.element_size() == 2
    precision = "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"  # x3: to rounding of float32
    choices = {"FITS": short, "FAST": short, "PRECISION": precision}
    return choices | {"ROWS": ROWS, "UNITS": weights.shape[1], "num_warps": WARPS, "num_stages": 1}
