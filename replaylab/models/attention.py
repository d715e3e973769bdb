"""Causal attention within short windows.

A window of a Decision Transformer has 60 or 90 tokens. PyTorch's kernels are made for thousands: they want queries,
keys and values copied apart, and take five kernels for the way back. Ours takes them as the layer before has made
them, one kernel there and one back. Used on Hopper GPUs, where Triton comes with PyTorch; elsewhere PyTorch's own.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor
from torch.nn import functional as F

LONGEST = 128  # tokens whose weights fit on the chip
SIZES = (16, 32, 64, 128)  # of a head


def hopper() -> bool:
    found = torch.cuda.is_available() and importlib.util.find_spec("triton") is not None
    return found and torch.cuda.get_device_capability()[0] == 9


if WINDOWS := hopper():  # here, so that torch.compile need not look
    from replaylab.models.attention_kernel import window_attention


def attend(qkv: Tensor, dropout: float, seed: Tensor) -> Tensor:
    """(windows, tokens, 3, heads, size) -> (windows, tokens, heads, size): every token sees itself and those before.
    Weights are dropped as the seed says, (1,) 64-bit integers; PyTorch's own kernels draw for themselves."""
    if WINDOWS and qkv.is_cuda and qkv.shape[1] <= LONGEST and qkv.shape[4] in SIZES:
        return window_attention(qkv, dropout, seed)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (windows, heads, tokens, size) each
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout).transpose(1, 2)
