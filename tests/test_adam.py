"""Our Adam is PyTorch's: the same numbers, the same checkpoints."""

from __future__ import annotations

import math

import pytest
import torch
from kernels import INTERPRETED, SHORT, on_gpu
from torch import nn

from replaylab.models import adam as module
from replaylab.models.adam import FlatAdam, adam, clip_gradients, clipped_step

DEVICES = ["cpu"] if INTERPRETED else ["cpu", pytest.param("cuda", marks=on_gpu)]


def gather(self, flat, gradients):
    """The kernels' work in plain PyTorch, for where there is no Triton."""
    for which, start, place, size in flat["table"].tolist():
        part = gradients[which].flatten()[start : min(start + module.BLOCK, size)]
        flat["gradient"][place : place + len(part)] = part
    flat["norms"].zero_()[0] = flat["gradient"].norm()
    flat["step"] += 1


def descend(self, flat, group, norm, limit):
    (beta1, beta2), step = group["betas"], flat["step"].double()
    gradient = flat["gradient"] * (limit / (norm + 1e-6)).clamp(max=1.0)
    flat["exp_avg"].lerp_(gradient, 1 - beta1)
    flat["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    flat["value"] -= group["lr"] * group["weight_decay"] * flat["value"]
    unbias1, unbias2 = ((1 - torch.exp(step * math.log(b))).float() for b in (beta1, beta2))
    flat["value"] -= group["lr"] / unbias1 * flat["exp_avg"] / ((flat["exp_avg_sq"] / unbias2).sqrt() + group["eps"])


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    if request.param == "cpu" and not INTERPRETED:
        monkeypatch.setattr(FlatAdam, "_gather", gather)
        monkeypatch.setattr(FlatAdam, "_descend", descend)
    return torch.device(request.param)


def network(device):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 33), nn.Tanh(), nn.Linear(33, 7), nn.Tanh(), nn.Linear(7, 3)).to(device)


def groups(net):
    parameters = list(net.parameters())
    return [{"params": parameters[:2], "lr": 3e-3}, {"params": parameters[2:], "weight_decay": 0.0}]


def train(net, optimizer, steps, start=0):
    for step in range(start, start + steps):
        g = torch.Generator().manual_seed(step)
        x = torch.randn(16, 5, generator=g).to(next(net.parameters()).device)
        optimizer.zero_grad(set_to_none=True)
        (net(x) - x[:, :3].sin()).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in net.parameters()]


@pytest.mark.parametrize("grouped", [False, True])
def test_the_same_steps_as_torch(device, grouped):
    settings = {"lr": 1e-2, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.1}
    ours, theirs = network(device), network(device)
    start = [p.detach().clone() for p in theirs.parameters()]
    given = (lambda n: groups(n)) if grouped else (lambda n: list(n.parameters()))
    first = [train(n, make(given(n), **settings), 1) for n, make in ((ours, flat), (theirs, torch.optim.AdamW))]
    for before, a, b in zip(start, *first, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        assert not torch.equal(before, a)
    ours, theirs = network(device), network(device)
    both = [train(n, make(given(n), **settings), 60) for n, make in ((ours, flat), (theirs, torch.optim.AdamW))]
    for a, b in zip(*both, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-5)


def flat(given, **settings):
    given = given if isinstance(given[0], dict) else [{"params": given}]
    return FlatAdam(given, **settings)


def test_a_checkpoint_goes_on_where_it_stopped(device):
    whole = train(net := network(device), flat(list(net.parameters()), lr=1e-2), 20)
    net = network(device)
    optimizer = flat(list(net.parameters()), lr=1e-2)
    train(net, optimizer, 10)
    kept = optimizer.state_dict(), {k: v.clone() for k, v in net.state_dict().items()}
    other = network(device)
    resumed = flat(list(other.parameters()), lr=1e-2)
    other.load_state_dict(kept[1])
    resumed.load_state_dict(kept[0])
    for a, b in zip(whole, train(other, resumed, 10, 10), strict=True):
        assert torch.equal(a, b)


def test_a_rate_that_is_a_tensor_can_change(device):
    net = network(device)
    optimizer = flat(list(net.parameters()), lr=torch.tensor(1e-2, device=device))
    before = train(net, optimizer, 1)
    optimizer.param_groups[0]["lr"].fill_(0.0)
    for a, b in zip(before, train(net, optimizer, 3), strict=True):
        assert torch.equal(a, b)


def test_parameters_begin_where_matrix_products_like_it(device):
    net = network(device)
    optimizer = flat(list(net.parameters()), lr=1e-2)
    base = optimizer.flat[0]["value"].data_ptr()
    assert all((p.data_ptr() - base) % (4 * module.ALIGN) == 0 for p in net.parameters())


def test_which_one_is_used():
    net = network("cpu")
    assert isinstance(adam(net.parameters(), 1e-3), torch.optim.AdamW)
    if torch.cuda.is_available():
        assert isinstance(adam(network("cuda").parameters(), 1e-3), FlatAdam)


@pytest.mark.parametrize("limit", [0.0, 1e-3, 1e3])
@pytest.mark.parametrize("grouped", [False, True])
def test_clipped_steps_are_clipping_and_a_step(device, grouped, limit):
    given = (lambda n: groups(n)) if grouped else (lambda n: list(n.parameters()))
    found = []
    for how in ("together", "apart"):
        net = network(device)
        optimizer = flat(given(net), lr=1e-2, eps=1e-3)  # so large that the size of a gradient matters
        for step in range(3):
            optimizer.zero_grad(set_to_none=True)
            x = torch.randn(16, 5, generator=torch.Generator().manual_seed(step)).to(device)
            (net(x) - x[:, :3].sin()).square().mean().backward()
            if how == "together":
                norm = clipped_step(optimizer, 1, limit)
            else:
                norm = clip_gradients(net.parameters(), 1, limit)
                optimizer.step()
        found.append([norm, *(p.detach().clone() for p in net.parameters())])
    assert found[0][0].shape == (1,) and found[0][0] > 0
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_gradients_are_clipped_for_each_seed_by_itself():
    parameters = [torch.nn.Parameter(torch.zeros(2, 3)), torch.nn.Parameter(torch.zeros(2, 2, 2))]
    parameters[0].grad = torch.tensor([[3.0, 0, 0], [0.1, 0, 0]])
    parameters[1].grad = torch.tensor([[[4.0, 0], [0, 0]], [[0, 0], [0, 0]]])
    norms = clip_gradients(parameters, 2, 1.0)
    torch.testing.assert_close(norms, torch.tensor([5.0, 0.1]))
    torch.testing.assert_close(parameters[0].grad, torch.tensor([[0.6, 0, 0], [0.1, 0, 0]]))
    torch.testing.assert_close(parameters[1].grad[0, 0], torch.tensor([0.8, 0]))
    alone = [torch.nn.Parameter(torch.zeros(1, 2))]
    alone[0].grad = torch.tensor([[30.0, 40.0]])
    clip_gradients(alone, 1, 0.25)
    torch.testing.assert_close(alone[0].grad, torch.tensor([[0.15, 0.2]]))


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("limit", [0.0, 1.0])
def test_a_twin_gives_the_gradients_and_gets_the_weights(where, limit):
    """On a GPU: two large tensors, one of them without a whole number of blocks, and two small ones."""
    g = torch.Generator().manual_seed(0)
    shapes, settings = [(40, 32, 8, 8), (257, 301), (9, 4, 3, 3), (7,)], {"weight_decay": 0.1, "eps": 1e-3}
    alone = [nn.Parameter(torch.randn(s, generator=g)) for s in shapes]
    ours = [nn.Parameter(p.detach().to(where, copy=True)) for p in alone]
    ours[0].data = ours[0].data.contiguous(memory_format=torch.channels_last)
    twins = [p.detach().to(SHORT).requires_grad_() for p in ours]
    plain, twinned = adam(alone, 1e-2, **settings, flat=False), adam(ours, 1e-2, **settings, twins=twins)
    twinned.kernels |= INTERPRETED
    for step in range(4):
        for a, b, twin in zip(alone, ours, twins, strict=True):
            a.grad = torch.randn(a.shape, generator=g).to(SHORT).float()
            twin.grad = torch.empty_like(twin).copy_(a.grad) if step else a.grad.to(twin)  # in any order of memory
            b.grad = torch.ones_like(b)  # someone left it there
        norms = [clipped_step(optimizer, 1, limit).cpu() for optimizer in (plain, twinned)]
        torch.testing.assert_close(*norms)
        if step == 1:  # through a file
            saved = twinned.state_dict()
            for entries in saved["state"].values():
                entries |= {name: moment.cpu().contiguous() for name, moment in entries.items()}
            twinned.load_state_dict(saved)
    for a, b, twin in zip(alone, ours, twins, strict=True):
        torch.testing.assert_close(a, b.cpu(), rtol=1e-5, atol=1e-6)
        assert torch.equal(twin, b.to(SHORT))
        for name, moment in plain.state[a].items():
            torch.testing.assert_close(moment, twinned.state[b][name].cpu(), rtol=1e-5, atol=1e-7)


def test_loaded_moments_lie_in_memory_as_their_weights_do():
    torch.manual_seed(0)
    weights = torch.randn(4, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    gradients = [torch.randn(4, 3, 2, 2).contiguous(memory_format=torch.channels_last) for _ in range(3)]

    def after(p, optimizer, gradients):
        for p.grad in gradients:
            optimizer.step()
        return p

    whole, first, second = (torch.nn.Parameter(weights.clone()) for _ in range(3))
    after(whole, adam([whole], 0.1, flat=False), gradients)
    optimizer, resumed = adam([first], 0.1, flat=False), adam([second], 0.1, flat=False)
    after(first, optimizer, gradients[:2])
    saved = optimizer.state_dict()
    for name in ("exp_avg", "exp_avg_sq"):  # as a file holds them
        saved["state"][0][name] = saved["state"][0][name].contiguous()
    second.data.copy_(first.data)
    resumed.load_state_dict(saved)
    assert torch.equal(after(second, resumed, gradients[2:]), whole)
