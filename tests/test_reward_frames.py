"""The reward model that reads frames, and frames that are moved while it learns."""

from __future__ import annotations

import pytest
import torch

from replaylab.errors import UsageError
from replaylab.models.reward import HEADS, FramesHead
from replaylab.models.world import World, WorldShape
from replaylab.models.world_training import RewardTrainer, shifted


def test_frames_are_moved_sample_by_sample():
    torch.manual_seed(0)
    frames = torch.randint(256, (40, 2, 9, 7), dtype=torch.uint8)
    moved = shifted(frames, 2)
    assert moved.dtype == torch.uint8 and moved.shape == frames.shape
    rows, columns = torch.arange(9), torch.arange(7)
    offsets = set()
    for before, after in zip(frames, moved, strict=True):
        found = [
            (dy, dx)
            for dy in range(-2, 3)
            for dx in range(-2, 3)
            if torch.equal(after, before[:, (rows + dy).clamp(0, 8)][:, :, (columns + dx).clamp(0, 6)])
        ]
        assert len(found) == 1  # both frames of a sample by the same, the rims repeated
        offsets |= set(found)
    assert len(offsets) > 12 and {dy for dy, _ in offsets} == {dx for _, dx in offsets} == {-2, -1, 0, 1, 2}


def test_the_head_sees_frames_and_action_and_learns_nothing_of_the_world():
    torch.manual_seed(0)
    shape = WorldShape(3, 40, 32, hidden=8, compress=3, double=1, bits=8, reward_head="frames")
    world = World(shape)
    frames = torch.randint(128, (6, 4, 40, 32), dtype=torch.uint8)
    actions = torch.tensor([0, 1, 2, 0, 1, 2])
    prediction = world.predict(frames, actions)
    told = prediction.reward_logits
    with torch.no_grad():
        direct, other = (
            world.reward_logits(*world.reward_features(frames, actions, following))
            for following in (prediction.next_frame, frames[:, 0])
        )
    assert not torch.allclose(direct, other)  # the next frame is read too
    torch.testing.assert_close(told, direct)
    assert not torch.allclose(told, world.predict(frames, (actions + 1) % 3).reward_logits)
    assert not torch.allclose(told, world.predict(frames.flip(0), actions).reward_logits)
    trainer = RewardTrainer(world, shift=2)
    before = {name: p.detach().clone() for name, p in world.named_parameters()}
    trainer.update({"frames": frames, "actions": actions, "rewards": torch.tensor([-1, 0, 1, 0, 0, 1])})
    changed = {name.split(".")[0] for name, p in world.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {"reward"}


def test_it_learns_what_a_moved_frame_means():
    """A bright dot beside the left or the right post is worth -1 or 1, wherever both are, unless action 0 is taken."""
    g = torch.Generator().manual_seed(0)

    def moments(count):
        frames = torch.zeros(count, 4, 40, 32, dtype=torch.uint8)
        post = torch.randint(8, 24, (count,), generator=g)
        side = torch.randint(-1, 2, (count,), generator=g)
        row = torch.randint(6, 34, (count,), generator=g)
        actions = torch.randint(0, 2, (count,), generator=g)
        for i in range(count):
            frames[i, :, row[i] - 3 : row[i] + 3, post[i]] = 40
            if side[i]:
                frames[i, :, row[i] - 1 : row[i] + 2, post[i] + 2 * side[i]] = 100
        return {"frames": frames, "actions": actions, "rewards": side * actions}

    torch.manual_seed(0)
    shape = WorldShape(2, 40, 32, hidden=8, compress=3, double=1, bits=8, reward_head="frames")
    world = World(shape)
    trainer = RewardTrainer(world, shift=4)
    log, unseen = moments(400), moments(200)
    for _ in range(150):
        rows = torch.randint(400, (32,), generator=g)
        trainer.update({name: column[rows] for name, column in log.items()})
    told = world.predict(unseen["frames"], unseen["actions"]).reward
    assert (told == unseen["rewards"]).float().mean() > 0.85


def test_sizes():
    assert set(HEADS) == {"mbarc", "simple", "frames"}
    head = FramesHead(15, 18, (105, 80))
    assert sum(p.numel() for p in head.parameters()) == (15 * 64 + 1) * 32 + (32 * 16 + 1) * 64 + (64 * 16 + 1) * 64 + (
        19 * 64 + (64 * 6 * 5 + 1) * 256 + 257 * 3
    )
    with pytest.raises(UsageError, match="known: mbarc, simple, frames"):
        WorldShape(3, reward_head="sound")
