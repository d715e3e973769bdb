"""The kernel that finds the likeliest colour of each pixel."""

from __future__ import annotations

import pytest
import torch
from kernels import DEVICE, SHORT, on_gpu
from torch.nn import functional as F


@on_gpu
@pytest.mark.parametrize("channels", [24, 96])
@pytest.mark.parametrize("kind", [torch.float32, SHORT])
def test_the_likeliest_colours(channels, kind):
    kernel = pytest.importorskip("replaylab.models.world_kernel")
    x = torch.randn(3, channels, 21, 16, device=DEVICE).to(kind).to(memory_format=torch.channels_last)
    weight, bias = torch.randn(128, channels, device=DEVICE).to(kind), torch.randn(128, device=DEVICE).to(kind)
    found = kernel.likeliest_colours(x, weight, bias)
    logits = F.linear(x.permute(0, 2, 3, 1).double(), weight.double(), bias.double())
    assert found.dtype == torch.uint8
    short = logits.amax(-1) - logits.gather(3, found.long()[..., None])[..., 0]
    assert short.max() < 1e-4 and (found == logits.argmax(-1)).float().mean() > 0.999
