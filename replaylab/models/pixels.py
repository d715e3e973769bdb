"""The image encoder of Mnih et al. (2015), which DQN and the Atari Decision Transformer share."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class NatureCNN(nn.Module):
    """Stacks of frames (batch, stack, 84, 84), as bytes, -> features (batch, 3136), before any dense layer."""

    features = 64 * 7 * 7

    def __init__(self, stack: int = 4):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(stack, 32, 8, stride=4), nn.ReLU(),  # (32, 20, 20)
            nn.Conv2d(32, 64, 4, stride=2), nn.ReLU(),  # (64, 9, 9)
            nn.Conv2d(64, 64, 3), nn.ReLU(),  # (64, 7, 7)
            nn.Flatten(),
        )  # fmt: skip

    def forward(self, frames: Tensor) -> Tensor:
        if frames.is_cuda:  # the layout that tensor cores want; turned while it is still bytes
            frames = frames.contiguous(memory_format=torch.channels_last)
        return self.layers(frames.float() / 255)
