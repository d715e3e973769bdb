"""Random numbers as a function of (seed, step, place), made on the device.

A generator of the device deals its numbers out by place in the stack, so that a seed's would depend on who trains
beside it. A hash of a counter does not, is captured in a graph like any arithmetic, and leaves no state to save.

A process that has only a part of each batch draws the numbers of the whole one and keeps those of its own rows, so that
a row meets the same noise wherever it is learnt from: `count = whole(...)`, then `own`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, distributed

part, parts = 0, 1  # of every batch, which part this process has, and of how many; `take` sets them


def take(which: int, of: int) -> None:
    """From now on this process has one of several equal parts of every batch: rows that stand side by side."""
    global part, parts
    part, parts = which, of


def _signed(bits: int) -> int:
    """A 64-bit pattern as the integer that torch.int64 takes it for."""
    return bits - 2**64 if bits >= 2**63 else bits


GOLDEN, MIX1, MIX2 = (_signed(v) for v in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def mix(x: Tensor) -> Tensor:
    """A 64-bit integer hash, the finaliser of splitmix64. Multiplication wraps; masks take off copies of the sign."""
    x = (x ^ (x >> 30 & 2**34 - 1)) * MIX1
    x = (x ^ (x >> 27 & 2**37 - 1)) * MIX2
    return x ^ (x >> 31 & 2**33 - 1)


def keys(seeds: Sequence[int], stream: int = 0) -> Tensor:  # (seeds, 1)
    """Where each seed's numbers begin; streams of a seed have nothing to do with each other."""
    return mix(torch.tensor([[seed * 1_000_003 + stream] for seed in seeds]))


def uniforms(keys: Tensor, step: Tensor, count: int) -> Tensor:  # (seeds, 1), () -> (seeds, count)
    """Uniform in (-1, 1), never one of the two."""
    # ^ 1 keeps the compiler from taking the product for an address, which it would compute in 32 bits
    place = torch.arange(1, count + 1, device=keys.device) ^ 1
    bits = mix(mix(keys + step * GOLDEN) + place * GOLDEN) >> 42  # signed, 22 bits: float32 holds them and a half
    return (bits.float() + 0.5) * 2**-21


def normals(keys: Tensor, step: Tensor, count: int) -> Tensor:  # the same, from the standard normal
    return normal(uniforms(keys, step, count))


def whole(count: int) -> int:
    """How many numbers all processes need where this one needs `count`."""
    return parts * count


def own(drawn: Tensor, sizes: Sequence[int]) -> list[Tensor]:  # (seeds, whole(sum of sizes), ...)
    """Cut into tables with this process's rows of each, of these sizes. A table has its rows in the batch's order."""
    tables = drawn.split([whole(size) for size in sizes], 1)
    return [table.unflatten(1, (parts, size))[:, part] for table, size in zip(tables, sizes, strict=True)]


def most(values: Tensor) -> Tensor:
    """The largest of what all processes hold, element by element."""
    if parts > 1:
        distributed.all_reduce(values := values.clone(), distributed.ReduceOp.MAX)
    return values


def normal(uniform: Tensor) -> Tensor:
    return math.sqrt(2) * torch.erfinv(uniform)
