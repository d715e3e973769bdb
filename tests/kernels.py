"""Where our kernels are tested: on a GPU, or on a CPU in Triton's interpreter (`make test-kernels`), which is slow, but
finds what is wrong with indices and formulas. What it cannot tell is whether they compile, fit the chip, or race."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from replaylab.models.attention import hopper

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
DEVICE = "cpu" if INTERPRETED else "cuda"
SHORT = torch.float16 if INTERPRETED else torch.bfloat16  # the interpreter's products of bf16 are wrong
on_gpu = pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs a GPU or the interpreter")
on_hopper = pytest.mark.skipif(not (INTERPRETED or hopper()), reason="needs a Hopper GPU or the interpreter")


def plain_instructions(module, monkeypatch):
    """The interpreter knows no assembly: a kernel's one instruction for tanh becomes the formula that it rounds."""
    if INTERPRETED:
        formula = module.tanh
        monkeypatch.setattr(module, "tanh", lambda x, FAST: formula(x, False))
