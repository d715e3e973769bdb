"""The kernels of adafactor.py. A file of its own: it needs Triton, which a CPU build of PyTorch does not bring.

They see a convolution's weights as many small matrices, one for each pair of channels, in any order of memory. A thread
has its matrices whole, a tile for each place in them, so that means over rows and columns need no other thread.
Neighbouring threads have neighbouring channels: fast where these are neighbours in memory too, as with channels last.
"""
# Triton takes no other way to make a tuple longer:
# mypy: disable-error-code="assignment"
# ruff: noqa: RUF005

import triton
import triton.language as tl

SLOTS = tl.constexpr(1024)  # of the blocks' sums read at once


@triton.jit
def _corners(n, inner, steps):
    """Where the matrices of the channel pairs n begin; `steps` are a tensor's strides."""
    return n // inner * steps[0] + n % inner * steps[1]


@triton.jit
def _numbers(pointer, corner, steps, inside, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The matrices, place by place: a tuple of tiles. All are under way before the first is needed."""
    found = ()
    for i in tl.static_range(ROWS * COLUMNS):
        at = corner + (i // COLUMNS) * steps[2] + (i % COLUMNS) * steps[3]
        found = found + (tl.load(pointer + at, inside, 0.0).to(tl.float32),)
    return found


@triton.jit
def _line(pointer, corner, step, inside, LENGTH: tl.constexpr):
    """The moments of all rows, or of all columns."""
    found = ()
    for i in tl.static_range(LENGTH):
        found = found + (tl.load(pointer + corner + i * step, inside, 0.0),)
    return found


@triton.jit
def _scales(rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """What the rows and columns of a gradient are multiplied with to make the step."""
    mean = rows[0] / ROWS
    for i in tl.static_range(1, ROWS):
        mean += rows[i] / ROWS
    by_row, by_column = (), ()
    for i in tl.static_range(ROWS):
        by_row = by_row + (tl.rsqrt(rows[i] / mean),)
    for i in tl.static_range(COLUMNS):
        by_column = by_column + (tl.rsqrt(columns[i]),)
    return by_row, by_column


@triton.jit
def observe(
    gradient, weights, rows, columns, pace, pace_step, partial, blocks, count, inner, eps,
    g_steps, w_steps, r_steps, c_steps,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients into the moments; the sums of squares of the step and of the weights, one of each from a block."""
    block = tl.program_id(0)
    n = block * BLOCK + tl.arange(0, BLOCK)
    inside = n < count
    factor, fresh = tl.load(pace), tl.load(pace + pace_step)
    g = _numbers(gradient, _corners(n, inner, g_steps), g_steps, inside, ROWS, COLUMNS)
    w = _numbers(weights, _corners(n, inner, w_steps), w_steps, inside, ROWS, COLUMNS)
    row_at, column_at = _corners(n, inner, r_steps), _corners(n, inner, c_steps)
    old_rows = _line(rows, row_at, r_steps[2], inside, ROWS)
    old_columns = _line(columns, column_at, c_steps[2], inside, COLUMNS)
    size = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(ROWS * COLUMNS):
        size += w[i] * w[i]
    tl.store(partial + blocks + block, tl.sum(size, 0))
    r, c = (), ()
    for a in tl.static_range(ROWS):
        square = tl.zeros((BLOCK,), tl.float32)
        for b in tl.static_range(COLUMNS):
            square += (g[a * COLUMNS + b] * factor) * (g[a * COLUMNS + b] * factor)
        r = r + (old_rows[a] + fresh * (square / COLUMNS + eps - old_rows[a]),)
        tl.store(rows + row_at + a * r_steps[2], r[a], inside)
    for b in tl.static_range(COLUMNS):
        square = tl.zeros((BLOCK,), tl.float32)
        for a in tl.static_range(ROWS):
            square += (g[a * COLUMNS + b] * factor) * (g[a * COLUMNS + b] * factor)
        c = c + (old_columns[b] + fresh * (square / ROWS + eps - old_columns[b]),)
        tl.store(columns + column_at + b * c_steps[2], c[b], inside)
    by_row, by_column = _scales(r, c, ROWS, COLUMNS)
    step = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(ROWS * COLUMNS):
        u = g[i] * factor * by_row[i // COLUMNS] * by_column[i % COLUMNS]
        step += u * u
    tl.store(partial + block, tl.sum(tl.where(inside, step, 0.0), 0))  # 0 / 0 beyond the edge


@triton.jit
def descend(
    gradient, value, twin, rows, columns, pace, pace_step, partial, blocks, count, inner, clip, least,
    g_steps, v_steps, t_steps, r_steps, c_steps,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, TWIN: tl.constexpr,
):  # fmt: skip
    """The step, relative to the size of the weights; into their twin too."""
    block = blocks - 1 - tl.program_id(0)  # backwards: what `observe` saw last may still be in the cache
    n = block * BLOCK + tl.arange(0, BLOCK)
    inside = n < count
    g = _numbers(gradient, _corners(n, inner, g_steps), g_steps, inside, ROWS, COLUMNS)
    corner = _corners(n, inner, v_steps)
    x = _numbers(value, corner, v_steps, inside, ROWS, COLUMNS)
    r = _line(rows, _corners(n, inner, r_steps), r_steps[2], inside, ROWS)
    c = _line(columns, _corners(n, inner, c_steps), c_steps[2], inside, COLUMNS)
    factor, rate = tl.load(pace), tl.load(pace + 2 * pace_step)
    step, size = tl.zeros((SLOTS,), tl.float32), tl.zeros((SLOTS,), tl.float32)
    for start in range(0, blocks, SLOTS):
        slot = start + tl.arange(0, SLOTS)
        step += tl.load(partial + slot, slot < blocks, 0.0)
        size += tl.load(partial + blocks + slot, slot < blocks, 0.0)
    numbers = count * ROWS * COLUMNS
    step_size, size_now = tl.sqrt(tl.sum(step, 0) / numbers), tl.sqrt(tl.sum(size, 0) / numbers)
    share = rate * tl.maximum(size_now, least) / tl.maximum(step_size / clip, 1.0) * factor
    by_row, by_column = _scales(r, c, ROWS, COLUMNS)
    twin_corner = _corners(n, inner, t_steps)
    for a in tl.static_range(ROWS):
        for b in tl.static_range(COLUMNS):
            new = x[a * COLUMNS + b] - share * (g[a * COLUMNS + b] * by_row[a] * by_column[b])
            tl.store(value + corner + a * v_steps[2] + b * v_steps[3], new, inside)
            if TWIN:
                tl.store(twin + twin_corner + a * t_steps[2] + b * t_steps[3], new.to(twin.dtype.element_ty), inside)
