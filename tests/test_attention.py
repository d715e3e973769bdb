"""Attention within short windows, by PyTorch and by our kernels: against the formula."""

from __future__ import annotations

import pytest
import torch
from kernels import DEVICE, INTERPRETED, SHORT, on_hopper

from replaylab.models.attention import LONGEST, SIZES, attend

by_kernel = attend  # on a GPU it chooses them itself
if INTERPRETED:
    from replaylab.models.attention_kernel import window_attention as by_kernel


def expected(qkv: torch.Tensor) -> torch.Tensor:
    """The formula, written out."""
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    later = torch.ones(qkv.shape[1], qkv.shape[1], dtype=torch.bool, device=qkv.device).triu(1)
    score = (q @ k.mT / qkv.shape[-1] ** 0.5).masked_fill(later, float("-inf"))
    return (score.softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize(("tokens", "heads", "size"), [(60, 1, 128), (90, 8, 16), (7, 2, 24), (150, 2, 16)])
@pytest.mark.parametrize("kernel", [False, pytest.param(True, marks=on_hopper)])
def test_values_and_gradients(tokens, heads, size, kernel):
    if kernel and INTERPRETED and (tokens > LONGEST or size not in SIZES):
        pytest.skip("attend would not take the kernels")
    run, device = (by_kernel, DEVICE) if kernel else (attend, "cpu")
    qkv = torch.randn(3, tokens, 3, heads, size, device=device, requires_grad=True)
    seed = torch.zeros(1, dtype=torch.int64, device=device)
    weights = torch.randn(3, tokens, heads, size, device=device)
    ours, theirs = (torch.autograd.grad((f * weights).sum(), qkv)[0] for f in (run(qkv, 0.0, seed), expected(qkv)))
    torch.testing.assert_close(run(qkv, 0.0, seed), expected(qkv), rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(ours, theirs, rtol=5e-3, atol=5e-3)


@on_hopper
def test_dropout_keeps_its_share_and_follows_the_seed():
    """With equal keys and values of one, an answer is the share of weights that were kept, scaled up."""
    qkv = torch.zeros(400, 60, 3, 1, 16, device=DEVICE, dtype=SHORT)
    qkv[:, :, 2] = 1
    answers = [by_kernel(qkv, 0.3, torch.tensor([seed], device=DEVICE)).float() for seed in (1, 1, 2)]
    assert torch.equal(answers[0], answers[1]) and not torch.equal(answers[0], answers[2])
    assert answers[0].mean().item() == pytest.approx(1, abs=0.01)
    assert answers[0][:, 0, 0, 0].float().unique().numel() == 2  # the first token sees one weight: kept or not


@on_hopper
def test_gradients_go_through_the_weights_that_were_kept():
    """Linear in the values: for them the gradient is exact, whatever the step."""
    torch.manual_seed(0)
    qkv = torch.randn(5, 60, 3, 2, 32, device=DEVICE, requires_grad=True)
    seed, along = torch.tensor([77], device=DEVICE), torch.zeros(5, 60, 3, 2, 32, device=DEVICE)
    along[:, :, 2] = torch.randn(5, 60, 2, 32, device=DEVICE)
    weights = torch.randn(5, 60, 2, 32, device=DEVICE)
    told = (torch.autograd.grad((by_kernel(qkv, 0.3, seed) * weights).sum(), qkv)[0] * along).sum()
    with torch.no_grad():
        seen = ((by_kernel(qkv + along, 0.3, seed) - by_kernel(qkv, 0.3, seed)) * weights).sum()
    torch.testing.assert_close(told, seen, rtol=2e-2, atol=0.5)
