"""The kernel of adam.py. A file of its own: it needs Triton, which a CPU build of PyTorch does not bring."""

import triton
import triton.language as tl


@triton.jit
def gather(gradients, flat, norms, step, table, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Gradients from wherever they are into one buffer, and the norm of each block of it; one step more is counted.
    The table says for each block: which tensor, where in it, where in the buffer, and the tensor's size."""
    block, near = tl.program_id(0), tl.arange(0, BLOCK)
    entry = table + 4 * block
    which, start, place, size = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    inside = start + near < size
    g = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(COUNT):
        if which == i:
            g = tl.load(gradients[i] + start + near, inside, 0.0)
    tl.store(flat + place + near, g, inside)
    tl.store(norms + block, tl.sqrt(tl.sum(g * g, 0)))
    if block == 0:
        tl.store(step, tl.load(step) + 1)


@triton.jit
def _adam(x, g, m, v, rate, step, beta1, log_beta1, beta2, log_beta2, eps, decay):
    """New weights and moments; `step` points to the count of steps, this one included."""
    done = tl.load(step).to(tl.float64)
    unbias1 = (1.0 - tl.exp(done * log_beta1)).to(tl.float32)  # 1 - beta^step; in float32 the first steps would be off
    unbias2 = (1.0 - tl.exp(done * log_beta2)).to(tl.float32)
    m += (1.0 - beta1) * (g - m)
    v = beta2 * v + (1.0 - beta2) * g * g
    x -= rate * decay * x
    x -= rate / unbias1 * m / (tl.sqrt(v / unbias2) + eps)
    return x, m, v


@triton.jit
def descend(
    value, gradient, exp_avg, exp_avg_sq, lr, norm, limit, step, size,
    beta1, log_beta1, beta2, log_beta2, eps, decay,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Adam with gradients whose norm is scaled down to the limit."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    share = tl.minimum(limit / (tl.load(norm) + 1e-6), 1.0)
    x, g = tl.load(value + at, inside), tl.load(gradient + at, inside) * share
    m, v = tl.load(exp_avg + at, inside), tl.load(exp_avg_sq + at, inside)
    x, m, v = _adam(x, g, m, v, tl.load(lr), step, beta1, log_beta1, beta2, log_beta2, eps, decay)
    tl.store(value + at, x, inside)
    tl.store(exp_avg + at, m, inside)
    tl.store(exp_avg_sq + at, v, inside)


@triton.jit
def descend_twin(
    value, twin, gradient, exp_avg, exp_avg_sq, share, step, size, lr,
    beta1, log_beta1, beta2, log_beta2, eps, decay,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The same for one tensor, whose gradient comes in another precision, as the copy of its new weights."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    x, g = tl.load(value + at, inside), tl.load(gradient + at, inside).to(tl.float32) * tl.load(share)
    m, v = tl.load(exp_avg + at, inside), tl.load(exp_avg_sq + at, inside)
    x, m, v = _adam(x, g, m, v, lr, step, beta1, log_beta1, beta2, log_beta2, eps, decay)
    tl.store(value + at, x, inside)
    tl.store(twin + at, x.to(twin.dtype.element_ty), inside)
    tl.store(exp_avg + at, m, inside)
    tl.store(exp_avg_sq + at, v, inside)
