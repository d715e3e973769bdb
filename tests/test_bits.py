"""The world model's LSTM over bytes: its kernels against the plain loops."""

from __future__ import annotations

import copy

import pytest
import torch
from kernels import DEVICE, INTERPRETED, SHORT, on_hopper, plain_instructions
from tiny_world import tiny

from replaylab.models import bits as module
from replaylab.models.bits import KERNELS, MEMORY, lstm

pytestmark = on_hopper
if KERNELS or INTERPRETED:
    from replaylab.models import bits_kernel

KINDS = pytest.mark.parametrize("kind", [torch.float32, SHORT])
SIZES = pytest.mark.parametrize(("batch", "steps"), [(1, 1), (1, 16), (4, 16), (16, 16), (20, 3), (64, 16)])


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    plain_instructions(bits_kernel, monkeypatch)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    torch.manual_seed(0)
    yield
    torch.set_float32_matmul_precision(before)


def normal(*shape, scale=1.0):
    return scale * torch.randn(*shape, device=DEVICE)


def apart(found, wanted):
    return ((found.float() - wanted).norm() / wanted.norm()).item()


@SIZES
@KINDS
def test_states_and_gradients(kind, batch, steps):
    """Against the loop in float32 on the same numbers. A step that begins with the wrong rows is wrong by its whole
    size, so rounding may be far larger here than it is."""
    inward, weight = normal(batch, steps, 4 * MEMORY), normal(4 * MEMORY, MEMORY, scale=0.09)
    given = [x.to(kind) for x in (inward, normal(batch, 3 * MEMORY), weight)]
    along = normal(batch, steps, MEMORY).to(kind)

    def both_ways(run, kind):
        inward, start, weight = leaves = [x.detach().to(kind).requires_grad_() for x in given]
        states = run(inward, *start.chunk(3, 1)[1:], weight)
        return states, *torch.autograd.grad(states, leaves, along.to(kind))

    found, wanted = both_ways(bits_kernel.lstm_states, kind), both_ways(module.lstm_states, torch.float32)
    assert {x.dtype for x in found} == {kind}
    limit = 1e-5 if kind == torch.float32 else 0.02
    assert max(apart(f, w) for f, w in zip(found, wanted, strict=True)) < limit


@SIZES
@KINDS
def test_bytes_are_those_of_the_loop(kind, batch, steps):
    """In float32 the same for the same noise. In 16 bits some are not, and then every byte after it: but each is, after
    those before it, the most likely one to rounding."""
    gates, table = normal(batch, 4 * MEMORY).to(kind), normal(256, 4 * MEMORY).to(kind)
    both, memory = normal(256 + 4 * MEMORY, MEMORY, scale=0.2).to(kind), normal(batch, 3 * MEMORY)[:, -MEMORY:]
    offset = torch.cat([normal(256), normal(4 * MEMORY, scale=0.0)]).to(kind)
    noise = normal(steps, batch, 256)
    drawn = bits_kernel.draw_bytes(gates, memory, table, both, offset, noise)
    if kind == torch.float32:
        assert torch.equal(drawn, module.draw_bytes(gates, memory, table, both, offset, noise))
    for extra, chosen in zip(noise, drawn.unbind(1), strict=True):
        hidden, memory = lstm(gates, memory)
        logits, onward = torch.addmm(offset, hidden, both.t()).split([256, 4 * MEMORY], 1)
        score = logits.float() + extra
        assert (score.amax(1) - score.gather(1, chosen[:, None])[:, 0]).max() < (1e-4 if kind == torch.float32 else 0.1)
        gates = table[chosen] + onward


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
@pytest.mark.parametrize("compiled", [False, True])
def test_the_prior_learns_as_on_the_cpu(monkeypatch, compiled):
    monkeypatch.setattr(module, "PRIOR_DROPOUT", 0.0)
    bits, layer, real = tiny(3, bits=32).bits, torch.randn(5, 32, 2, 2), torch.randn(5, 32)
    on_gpu = copy.deepcopy(bits).cuda()
    bits.prior_loss(layer, real).backward()
    run = torch.compile(on_gpu.prior_loss, fullgraph=True) if compiled else on_gpu.prior_loss
    run(layer.cuda(), real.cuda()).backward()
    for (name, ours), theirs in zip(on_gpu.named_parameters(), bits.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(
                ours.grad.cpu(), theirs.grad, rtol=1e-3, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
            )
    draw = torch.compile(on_gpu.draw, fullgraph=True) if compiled else on_gpu.draw
    assert draw(layer.cuda()).abs().eq(1).all()
