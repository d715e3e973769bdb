"""The kernel of adam.py. A file of its own: it needs Triton, which a CPU build of PyTorch does not bring."""

import triton
import triton.language as tl


@triton.jit
def descend(
    value, gradient, exp_avg, exp_avg_sq, lr, share, step, size,
    beta1, log_beta1, beta2, log_beta2, eps, decay,
    BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    rate, done = tl.load(lr), tl.load(step).to(tl.float64)
    unbias1 = (1.0 - tl.exp(done * log_beta1)).to(tl.float32)  # 1 - beta^step; in float32 the first steps would be off
    unbias2 = (1.0 - tl.exp(done * log_beta2)).to(tl.float32)
    x, g = tl.load(value + at, inside), tl.load(gradient + at, inside) * tl.load(share)
    m, v = tl.load(exp_avg + at, inside), tl.load(exp_avg_sq + at, inside)
    m += (1.0 - beta1) * (g - m)
    v = beta2 * v + (1.0 - beta2) * g * g
    x -= rate * decay * x
    x -= rate / unbias1 * m / (tl.sqrt(v / unbias2) + eps)
    tl.store(value + at, x, inside)
    tl.store(exp_avg + at, m, inside)
    tl.store(exp_avg_sq + at, v, inside)
