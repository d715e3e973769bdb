"""A replay whose frames are numbered, and a world whose answers are known."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from replaylab.data.frames import FrameReplay
from replaylab.envs.atari_rgb import PALETTE
from replaylab.models.world import Imagined, Prediction

CPU = torch.device("cpu")


def frame(number):
    return np.full((2, 3), number, np.uint8)


def play(replay, lane, first, steps, terminal=True):
    """A game whose frames are numbered: three that filled the stack, the first one shown, one a step."""
    assert replay.begin(lane, np.stack([frame(first + i) for i in range(4)]))
    for i, reward in enumerate(steps):
        last = terminal and i == len(steps) - 1
        replay.add(lane, i % 3, reward, frame(first + 4 + i), last, False)


def small_replay(**options):
    replay = FrameReplay(2, 40, (2, 3), CPU, gamma=0.5, **options)
    play(replay, 0, 0, [0, -7, 0, 4])  # rows 3..6 of lane 0; ends on row 7
    play(replay, 0, 20, [1, 1], terminal=False)  # rows 11, 12; cut off on row 13
    play(replay, 1, 50, [0, 0, 0, 0, 0, -1], terminal=False)  # rows 43..48
    replay.commit()
    return replay


class Stub:
    """A world in which the next frame is the newest plus the action, action 1 is rewarded and 2 ends the game."""

    shape = SimpleNamespace(pixels="palette", stack=4, actions=3)
    colours = torch.tensor(PALETTE, dtype=torch.float32)

    def __init__(self, sure=3.0, rarity=(0.0, 0.0, 0.0)):
        self.sure, self.rarity = sure, torch.tensor(rarity)

    def look(self, frames):
        return frames

    def imagine(self, frames, actions):
        following = frames[:, -1] + actions[:, None, None].to(torch.uint8)
        going = torch.where(actions == 2, 0.1, 0.9)
        return Imagined(following, 10.0 + 0 * going, going, (frames, actions))

    def reward_logits(self, frames, actions):
        return self.sure * torch.nn.functional.one_hot((actions == 1).long() + 1, 3)

    def predict(self, frames, actions):
        told = self.imagine(frames, actions)
        logits = self.reward_logits(*told.of_interest) + self.rarity
        return Prediction(told.next_frame, (actions == 1).float(), logits, told.value, told.continues)


def likeliest(reward, logits):
    """What a dream of the original pays."""
    return reward
