"""Our Adafactor: PyTorch's numbers, numbers by hand, a limit on the whole gradient."""

from __future__ import annotations

import math

import pytest
import torch
from kernels import DEVICE, INTERPRETED, SHORT, on_gpu
from torch import nn

from replaylab.models.adafactor import Adafactor


def test_adafactor_follows_pytorch_s():
    g = torch.Generator().manual_seed(0)
    shapes = [(7,), (5, 6), (3, 4, 4, 4), (2, 1)]
    ours = [nn.Parameter(torch.randn(s, generator=g) * 10.0**-i) for i, s in enumerate(shapes)]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    mine = Adafactor(ours)
    official = torch.optim.Adafactor(theirs, lr=0.01, beta2_decay=-0.8, eps=(1e-15, 1e-3), d=1.0, weight_decay=0.0)
    for _ in range(5):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=g) * 3
            b.grad = a.grad.clone()
        mine.step()
        official.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)


def test_adafactor_by_hand():
    p = nn.Parameter(torch.tensor([3.0, 4.0]))
    optimizer = Adafactor([p])
    p.grad = torch.tensor([2.0, -5.0])
    optimizer.step()  # the first update is the sign; its size 0.01 of the root mean square
    size = math.sqrt(12.5)
    torch.testing.assert_close(p, torch.tensor([3 - 0.01 * size, 4 + 0.01 * size]))
    optimizer.state[p]["step"].fill_(39_999)
    before = p.detach().clone()
    optimizer.step()  # step 40,000: 1/sqrt is 0.005, and gradients as before keep the update at 1
    torch.testing.assert_close((p - before).abs(), torch.full((2,), 0.005 * float(before.square().mean().sqrt())))
    nothing = nn.Parameter(torch.zeros(2))
    nothing.grad = torch.ones(2)
    Adafactor([nothing]).step()
    torch.testing.assert_close(nothing, torch.full((2,), -1e-5))  # counts as 1e-3 large


def test_the_whole_gradient_is_limited():
    found = []
    for limit in (float("inf"), 1.0):
        params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))]
        optimizer = Adafactor(params, max_norm=limit)
        for scale in (1.0, 50.0):
            for p in params:
                p.grad = torch.full_like(p, scale)
            optimizer.step()
        assert math.isclose(optimizer.norm, 50 * math.sqrt(7), rel_tol=1e-5)
        found.append(optimizer.state[params[0]]["square"])
    fresh = 2**-0.8
    torch.testing.assert_close(found[1], torch.full((3,), 1 / 7))
    torch.testing.assert_close(found[0], torch.full((3,), (1 - fresh) + fresh * 2500))


def test_a_twin_gives_the_gradients_and_gets_the_weights():
    g = torch.Generator().manual_seed(0)
    shapes = [(7,), (5, 6), (3, 4, 4, 4)]
    alone = [nn.Parameter(torch.randn(s, generator=g)) for s in shapes]
    ours = [nn.Parameter(p.detach().clone()) for p in alone]
    twins = [p.detach().bfloat16().requires_grad_() for p in ours]
    optimizers = Adafactor(alone, max_norm=3.0), Adafactor(ours, max_norm=3.0, twins=twins)
    for _ in range(3):
        for a, b, twin in zip(alone, ours, twins, strict=True):
            twin.grad = torch.randn(a.shape, generator=g).bfloat16()
            a.grad, b.grad = twin.grad.float(), torch.ones_like(b)  # the last is what someone left there
        for optimizer in optimizers:
            optimizer.step()
        assert torch.equal(optimizers[0].norm, optimizers[1].norm)
        for a, b, twin in zip(alone, ours, twins, strict=True):
            assert torch.equal(a, b) and torch.equal(twin, b.bfloat16())


@on_gpu
@pytest.mark.parametrize("twinned", [False, True])
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_the_kernels_of_convolutions_follow_the_formula(order, twinned, monkeypatch):
    """On the device against the plain rule on the CPU: squares, odd sizes, matrices and vectors beside them; and more
    blocks than have their sums read at once."""
    if INTERPRETED:  # four of nine
        monkeypatch.setattr("replaylab.models.adafactor_kernel.SLOTS", 4)
    g = torch.Generator().manual_seed(0)
    shapes = [(7,), (60, 70, 1, 1) if INTERPRETED else (1024, 520, 1, 1), (6, 5, 4, 4), (9, 4, 3, 3), (5, 6)]
    shapes += [(3, 7, 8, 8), (4, 4, 1, 1), (1, 70, 2, 5), (30, 30, 4, 4)]
    plain = [nn.Parameter(torch.randn(s, generator=g) * 10.0**-i) for i, s in enumerate(shapes)]
    orders = [order if p.ndim == 4 else torch.preserve_format for p in plain]
    fast = [nn.Parameter(p.detach().to(DEVICE).clone(memory_format=o)) for p, o in zip(plain, orders, strict=True)]
    twins = [p.detach().to(SHORT).requires_grad_() for p in fast] if twinned else None
    optimizers = Adafactor(plain, max_norm=20.0), Adafactor(fast, max_norm=20.0, compile=not INTERPRETED, twins=twins)
    optimizers[1].kernels |= INTERPRETED
    assert optimizers[1].kernels
    for step in range(4):
        for a, b in zip(plain, twins or fast, strict=True):
            growing = 3 * 10.0 ** (step - 3)  # so that steps are clipped too
            a.grad = (torch.randn(a.shape, generator=g) * growing).to(b.dtype).float()
            b.grad = torch.empty_like(b).copy_(a.grad) if step else a.grad.to(b)  # in any order of memory
        for optimizer in optimizers:
            optimizer.step()
        if step == 1:  # through a file
            saved = optimizers[1].state_dict()
            for entries in saved["state"].values():
                entries |= {name: moment.cpu().contiguous() for name, moment in entries.items()}
            optimizers[1].load_state_dict(saved)
    for b, twin in zip(fast, twins or (), strict=twinned):
        assert torch.equal(twin, b.to(SHORT))
    for a, b in zip(plain, fast, strict=True):
        torch.testing.assert_close(a, b.cpu(), rtol=1e-4, atol=1e-7)
        for name, moment in optimizers[0].state[a].items():
            torch.testing.assert_close(moment, optimizers[1].state[b][name].cpu(), rtol=1e-4, atol=1e-9)
