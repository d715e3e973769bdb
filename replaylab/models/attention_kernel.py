"""The kernels of attention.py. A file of its own: it needs Triton, which a CPU build of PyTorch does not bring.

A program has one head of one window. All its keys and values fit on the chip, so the softmax of a row is made at once,
and the way back makes the weights again instead of reading them. Rows are taken ROWS at a time, to fit into registers.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def kept(seed, place, threshold):
    """Whether dropout keeps a weight: a hash of its place, and of a seed that is drawn anew for every update."""
    word = tl.load(seed)
    x = place.to(tl.uint32) ^ (word & 0xFFFFFFFF).to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    x = (x ^ (x >> 16)) + (word >> 32).to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return (x ^ (x >> 16)) >= threshold


@triton.jit
def softmax(q, keys, rows, columns, tokens, scale, PRECISION: tl.constexpr):
    """Weights of the columns that each row may see: itself and what came before."""
    score = tl.dot(q, tl.trans(keys), input_precision=PRECISION) * scale
    score = tl.where((columns <= rows) & (columns < tokens), score, float("-inf"))
    weight = tl.exp(score - tl.max(score, 1)[:, None])
    return weight / tl.sum(weight, 1)[:, None]


@triton.jit
def attend_forward(
    qkv, out, seed, tokens, heads, scale, threshold, boost,
    SIZE: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, DROP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    window, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    wide = heads * SIZE
    at, inner = tl.arange(0, TOKENS), tl.arange(0, SIZE)
    columns, inside = at[None, :], at[:, None] < tokens
    packed = qkv + window * tokens * 3 * wide + head * SIZE
    where = at[:, None] * 3 * wide + inner[None, :]
    keys, values = tl.load(packed + wide + where, inside, 0.0), tl.load(packed + 2 * wide + where, inside, 0.0)
    for start in range(0, TOKENS, ROWS):
        rows = start + tl.arange(0, ROWS)[:, None]
        q = tl.load(packed + rows * 3 * wide + inner[None, :], rows < tokens, 0.0)
        weight = softmax(q, keys, rows, columns, tokens, scale, PRECISION)
        if DROP:
            place = ((window * heads + head) * TOKENS + rows) * TOKENS + columns
            weight = tl.where(kept(seed, place, threshold), weight * boost, 0.0)
        answer = tl.dot(weight.to(values.dtype), values, input_precision=PRECISION)
        place = out + (window * tokens + rows) * wide + head * SIZE + inner[None, :]
        tl.store(place, answer.to(values.dtype), rows < tokens)


@triton.jit
def attend_backward(
    qkv, gradient, result, seed, tokens, heads, scale, threshold, boost,
    SIZE: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, DROP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    window, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    wide = heads * SIZE
    at, inner = tl.arange(0, TOKENS), tl.arange(0, SIZE)
    columns, inside = at[None, :], at[:, None] < tokens
    begin = window * tokens * 3 * wide + head * SIZE
    where = at[:, None] * 3 * wide + inner[None, :]
    packed = qkv + begin
    keys, values = tl.load(packed + wide + where, inside, 0.0), tl.load(packed + 2 * wide + where, inside, 0.0)
    for_keys, for_values = tl.zeros((TOKENS, SIZE), tl.float32), tl.zeros((TOKENS, SIZE), tl.float32)
    for start in range(0, TOKENS, ROWS):
        rows = start + tl.arange(0, ROWS)[:, None]
        q = tl.load(packed + rows * 3 * wide + inner[None, :], rows < tokens, 0.0)
        place = gradient + (window * tokens + rows) * wide + head * SIZE + inner[None, :]
        g = tl.load(place, rows < tokens, 0.0)
        weight = softmax(q, keys, rows, columns, tokens, scale, PRECISION)
        for_weight = tl.dot(g, tl.trans(values), input_precision=PRECISION)
        dropped = weight
        if DROP:
            place = ((window * heads + head) * TOKENS + rows) * TOKENS + columns
            keep = kept(seed, place, threshold)
            dropped = tl.where(keep, weight * boost, 0.0)
            for_weight = tl.where(keep, for_weight * boost, 0.0)
        for_values += tl.dot(tl.trans(dropped.to(g.dtype)), g, input_precision=PRECISION)
        for_score = weight * (for_weight - tl.sum(for_weight * weight, 1)[:, None]) * scale
        for_score = for_score.to(g.dtype)
        for_q = tl.dot(for_score, keys, input_precision=PRECISION)
        for_keys += tl.dot(tl.trans(for_score), q, input_precision=PRECISION)
        tl.store(result + begin + rows * 3 * wide + inner[None, :], for_q.to(g.dtype), rows < tokens)
    tl.store(result + begin + wide + where, for_keys.to(values.dtype), inside)
    tl.store(result + begin + 2 * wide + where, for_values.to(values.dtype), inside)


@torch.library.custom_op("replaylab::window_attention", mutates_args=())  # a compiler leaves the kernels as they are
def window_attention(qkv: Tensor, dropout: float, seed: Tensor) -> Tensor:
    """(windows, tokens, 3, heads, size) -> (windows, tokens, heads, size)."""
    windows, tokens, _, heads, size = qkv.shape
    out = qkv.new_empty(windows, tokens, heads, size)
    settings = _settings(dropout, tokens, size)
    attend_forward[(windows, heads)](qkv.contiguous(), out, seed, tokens, heads, **settings)
    return out


@torch.library.custom_op("replaylab::window_attention_backward", mutates_args=())
def window_attention_backward(gradient: Tensor, qkv: Tensor, dropout: float, seed: Tensor) -> Tensor:
    """The gradient of qkv, from that of the answer."""
    windows, tokens, _, heads, size = qkv.shape
    qkv, gradient, settings = qkv.contiguous(), gradient.contiguous(), _settings(dropout, tokens, size)
    result = torch.empty_like(qkv)
    attend_backward[(windows, heads)](qkv, gradient, result, seed, tokens, heads, **settings)
    return result


def _remember(ctx: Any, inputs: tuple[Tensor, float, Tensor], output: Tensor) -> None:
    qkv, ctx.dropout, seed = inputs
    ctx.save_for_backward(qkv, seed)


def _back(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    qkv, seed = ctx.saved_tensors
    return window_attention_backward(gradient, qkv, ctx.dropout, seed), None, None


window_attention.register_fake(lambda qkv, dropout, seed: qkv.new_empty(*qkv.shape[:2], *qkv.shape[3:]))
window_attention_backward.register_fake(lambda gradient, qkv, dropout, seed: qkv.new_empty(qkv.shape))
window_attention.register_autograd(_back, setup_context=_remember)


def _settings(drop: float, tokens: int, size: int) -> dict[str, Any]:
    whole = max(16, triton.next_power_of_2(tokens))
    precision = "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    shape = {"SIZE": size, "TOKENS": whole, "ROWS": min(whole, 64), "num_warps": 8 if size >= 64 else 4}
    dropout = {"threshold": int(drop * 2**32), "boost": 1 / (1 - drop), "DROP": drop > 0}
    return {"scale": size**-0.5, "PRECISION": precision} | shape | dropout
