"""A world model small enough for a test, and a batch for it."""

from __future__ import annotations

import torch

from replaylab.models.world import World, WorldShape

TINY = {"height": 20, "width": 16, "hidden": 8, "compress": 3, "double": 2, "bits": 16, "palette": 8}


def tiny(seed=0, precision="auto", **changes):
    return World(WorldShape(3, **TINY | changes), seed, precision=precision)


def make_batch(world, size=4, seed=0):
    g, shape = torch.Generator().manual_seed(seed), world.shape
    k, top = (1, shape.palette) if shape.pixels == "palette" else (3, 256)
    board = (shape.height, shape.width)
    following = torch.randint(top, (size, k, *board), generator=g, dtype=torch.uint8)
    return {
        "frames": torch.randint(top, (size, k * shape.stack, *board), generator=g, dtype=torch.uint8),
        "actions": torch.randint(shape.actions, (size,), generator=g),
        "next_frames": following if k == 3 else following[:, 0],
        "values": torch.rand(size, generator=g),
        "continues": torch.ones(size),
        "rewards": torch.randint(-1, 2, (size,), generator=g, dtype=torch.int8),
        "first": torch.ones(size, dtype=torch.bool),
    }
