"""The kernel that finds the likeliest colour of each pixel; and the whole world model as a GPU computes it."""

from __future__ import annotations

import pytest
import torch
from kernels import DEVICE, INTERPRETED, SHORT, on_gpu, plain_instructions
from tiny_world import make_batch, tiny
from torch.nn import functional as F


@on_gpu
@pytest.mark.parametrize(("channels", "colours", "batch"), [(24, 128, 3), (96, 128, 3), (36, 64, 1), (8, 256, 2)])
@pytest.mark.parametrize("kind", [torch.float32, SHORT])
def test_the_likeliest_colours(channels, colours, batch, kind):
    kernel = pytest.importorskip("replaylab.models.world_kernel")
    x = torch.randn(batch, channels, 21, 16, device=DEVICE).to(kind).to(memory_format=torch.channels_last)
    weight, bias = torch.randn(colours, channels, device=DEVICE).to(kind), torch.randn(colours, device=DEVICE).to(kind)
    found = kernel.likeliest_colours(x, weight, bias)
    logits = F.linear(x.permute(0, 2, 3, 1).double(), weight.double(), bias.double())
    assert found.dtype == torch.uint8
    short = logits.amax(-1) - logits.gather(3, found.long()[..., None])[..., 0]
    assert short.max() < 1e-4 and (found == logits.argmax(-1)).float().mean() > 0.999


@pytest.mark.skipif(not INTERPRETED, reason="a CPU takes the branches of a GPU, in Triton's interpreter")
@pytest.mark.parametrize("few", [0, 10**9])  # layers as they are, and as products
@pytest.mark.parametrize("shape", [{"reward_head": "frames", "bits": 8}, {"pixels": "rgb", "height": 53, "width": 40}])
def test_a_gpu_s_branches_give_the_cpu_s_numbers(shape, few, monkeypatch):
    """The loss with all gradients, and a step of a dream."""
    from replaylab.models import bits, bits_kernel, layers, world, world_kernel

    for name in ("dropout", "dropout2d"):  # drawn in the order of memory, which differs
        monkeypatch.setattr(F, name, lambda x, *_: x)
    model = tiny(precision="fp32", **{"palette": 64} | shape)
    batch = make_batch(model, 2)
    given = [batch[name] for name in ("frames", "actions", "next_frames", "values", "continues")]

    def numbers():
        torch.manual_seed(0)
        model.zero_grad()
        found = model.world_loss(*given, torch.tensor(0.4), batch["rewards"])
        found["loss"].backward()
        told = model.predict(batch["frames"], batch["actions"])
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        return [x.detach().float() for x in (*found.values(), *told, *gradients)]

    wanted = numbers()
    plain_instructions(bits_kernel, monkeypatch)
    monkeypatch.setattr(bits, "bits_kernel", bits_kernel, raising=False)
    monkeypatch.setattr(world, "likeliest_colours", world_kernel.likeliest_colours, raising=False)
    for module, name, value in ((bits, "KERNELS", True), (world, "KERNELS", True), (layers, "FEW", few)):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    for ours, theirs in zip(numbers(), wanted, strict=True):
        assert (ours - theirs).norm() <= 1e-3 * theirs.norm() + 1e-6
