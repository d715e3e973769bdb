"""The kernels of adafactor.py. A file of its own: it needs Triton, which a CPU build of PyTorch does not bring.

They see a convolution's weights as many small matrices, one for each pair of channels, in any order of memory.
"""

import triton
import triton.language as tl


@triton.jit
def _block(
    count, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ROOM1: tl.constexpr, ROOM2: tl.constexpr, BLOCK: tl.constexpr
):
    """This program's matrices, their rows and columns, and which of them there really are."""
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first, second = tl.arange(0, ROOM1), tl.arange(0, ROOM2)
    in_rows = (n < count)[:, None] & (first < ROWS)[None, :]
    in_columns = (n < count)[:, None] & (second < COLUMNS)[None, :]
    return n, first, second, in_rows, in_columns, in_rows[:, :, None] & (second < COLUMNS)[None, None, :]


@triton.jit
def _places(n, first, second, inner, outer_step, inner_step, first_step, second_step):
    """Where the elements of matrices n are, (matrices, rows, columns)."""
    corner = n // inner * outer_step + n % inner * inner_step
    return corner[:, None, None] + (first * first_step)[None, :, None] + (second * second_step)[None, None, :]


@triton.jit
def _update(g, rows, columns, ROWS: tl.constexpr):
    """The step before it is scaled. Beyond the edges it is not a number."""
    mean = tl.sum(rows, 1) / ROWS
    return g * tl.rsqrt(rows / mean[:, None])[:, :, None] * tl.rsqrt(columns)[:, None, :]


@triton.jit
def observe(
    gradient, value, rows, columns, pace, pace_step, partial, slots, count, inner, eps,
    g0, g1, g2, g3, v0, v1, v2, v3,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, ROOM1: tl.constexpr, ROOM2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients into the moments; the sums of squares of the update and of the weights, a block each."""
    n, first, second, in_rows, in_columns, inside = _block(count, ROWS, COLUMNS, ROOM1, ROOM2, BLOCK)
    factor, fresh = tl.load(pace), tl.load(pace + pace_step)
    g = tl.load(gradient + _places(n, first, second, inner, g0, g1, g2, g3), inside, 0.0) * factor
    square = tl.where(inside, g * g + eps, 0.0)
    row_at, column_at = n[:, None] * ROWS + first[None, :], n[:, None] * COLUMNS + second[None, :]
    r, c = tl.load(rows + row_at, in_rows, 0.0), tl.load(columns + column_at, in_columns, 0.0)
    r += fresh * (tl.sum(square, 2) / COLUMNS - r)
    c += fresh * (tl.sum(square, 1) / ROWS - c)
    tl.store(rows + row_at, r, in_rows)
    tl.store(columns + column_at, c, in_columns)
    u = tl.where(inside, _update(g, r, c, ROWS), 0.0)
    x = tl.load(value + _places(n, first, second, inner, v0, v1, v2, v3), inside, 0.0)
    tl.store(partial + tl.program_id(0), tl.sum(u * u))
    tl.store(partial + slots + tl.program_id(0), tl.sum(x * x))


@triton.jit
def descend(
    gradient, value, rows, columns, pace, pace_step, sums, count, inner, clip, least,
    g0, g1, g2, g3, v0, v1, v2, v3,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, ROOM1: tl.constexpr, ROOM2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The step, relative to the size of the weights."""
    n, first, second, in_rows, in_columns, inside = _block(count, ROWS, COLUMNS, ROOM1, ROOM2, BLOCK)
    factor, rate = tl.load(pace), tl.load(pace + 2 * pace_step)
    numbers = count * ROWS * COLUMNS
    step_size, size = tl.sqrt(tl.load(sums) / numbers), tl.sqrt(tl.load(sums + 1) / numbers)
    share = rate * tl.maximum(size, least) / tl.maximum(step_size / clip, 1.0)
    g = tl.load(gradient + _places(n, first, second, inner, g0, g1, g2, g3), inside, 0.0) * factor
    r = tl.load(rows + n[:, None] * ROWS + first[None, :], in_rows, 0.0)
    c = tl.load(columns + n[:, None] * COLUMNS + second[None, :], in_columns, 0.0)
    at = _places(n, first, second, inner, v0, v1, v2, v3)
    tl.store(value + at, tl.load(value + at, inside) - share * _update(g, r, c, ROWS), inside)
