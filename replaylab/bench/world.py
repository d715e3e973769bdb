"""MBARC's world model: an update of 4 frames, and one step of 16 dreams."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from replaylab.bench.common import Rows, seconds_per_call
from replaylab.fuse import fused
from replaylab.models.world import World, WorldShape, snapshot
from replaylab.models.world_training import RewardTrainer, WorldTrainer
from replaylab.step import Graph


def noise_batch(shape: WorldShape, size: int, device: torch.device) -> dict[str, Tensor]:
    channels, values = (1, shape.palette) if shape.pixels == "palette" else (3, 256)

    def frames(count: int) -> Tensor:
        lead = (size, count * channels) if count * channels > 1 else (size,)
        return torch.randint(values, (*lead, shape.height, shape.width), device=device, dtype=torch.uint8)

    return {
        "frames": frames(shape.stack),
        "actions": torch.randint(shape.actions, (size,), device=device),
        "next_frames": frames(1),
        "values": torch.rand(size, device=device),
        "continues": torch.ones(size, device=device),
        "rewards": torch.randint(-1, 2, (size,), device=device),
        "first": torch.zeros(size, dtype=torch.bool, device=device),
    }


def make_world(pixels: str, device: torch.device) -> tuple[World, str]:
    """A world model and its description; on a CPU a narrow one, which takes seconds."""
    shape = WorldShape(3, pixels=pixels, hidden=96 if device.type == "cuda" else 16)
    world = World(shape).to(device)
    millions = sum(p.numel() for p in world.parameters()) / 1e6
    return world, f"{pixels}, {millions:.1f}M parameters, {str(world.compute).removeprefix('torch.')}"


def train(device: torch.device) -> Rows:
    cuda = device.type == "cuda"
    on_cuda = (("palette", False), ("palette", True), ("rgb", True))  # compiled ones last: that takes minutes
    for pixels, compile in on_cuda if cuda else on_cuda[:1]:
        world, about = make_world(pixels, device)
        update = partial(
            WorldTrainer(world, twin=snapshot(world), compile=compile).update, noise_batch(world.shape, 4, device)
        )
        yield from _timed(update, f"world update, batch 4, {about}", device, compile)
    world, about = make_world("palette", device)
    size = 32 if cuda else 4
    update = partial(RewardTrainer(world, trunk=snapshot(world)).update, noise_batch(world.shape, size, device))
    yield from _timed(update, f"reward head update, batch {size}, {about}", device, cuda)


def step(device: torch.device) -> Rows:
    on_cuda = (("palette", False, 16), ("palette", True, 16), ("rgb", True, 16), ("palette", True, 64))
    for pixels, compile, size in on_cuda if device.type == "cuda" else on_cuda[:1]:
        world, about = make_world(pixels, device)
        dream, batch = snapshot(world), noise_batch(world.shape, size, device)
        predict = fused(dream.predict, compile)
        call = partial(predict, batch["frames"], batch["actions"])
        yield from _timed(call, f"world step, {size} frames, {about}", device, compile)


def _timed(call: Callable[[], Any], what: str, device: torch.device, compiled: bool) -> Rows:
    cuda = device.type == "cuda"
    body = Graph(call, device)
    began = time.perf_counter()
    for _ in range(5 if cuda else 1):  # compiles, warms up and captures
        body()
    ready = time.perf_counter() - began
    what += ", compiled + captured" if compiled else ", captured" if cuda else ", eager"
    yield what, 1e3 * seconds_per_call(body, device, 100 if cuda else 1, 5 if cuda else 1), "ms"
    yield f"{what}: until the first replay", ready, "s"


CASES = {"mbarc-world-train": train, "mbarc-world-step": step}
