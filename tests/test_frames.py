"""The replay of frames: values, stacks and windows that stay inside a game, saving and restoring."""

from __future__ import annotations

import numpy as np
import torch
from dreaming import frame, play, small_replay

from replaylab.data.frames import FrameReplay

CPU = torch.device("cpu")


def test_values_go_back_to_the_seam_and_survive_minus_one():
    replay = small_replay()
    assert replay.rewards[3:7].tolist() == [0, -1, 0, 1]  # signs
    # v = r + v' / 2 from the end: 1, 0.5, -0.75, -0.375; the next game does not leak in
    assert replay.values[3:7].tolist() == [-0.375, -0.75, 0.5, 1.0]
    assert replay.values[11:13].tolist() == [1.5, 1.0]
    assert replay.values[43:49].tolist() == [-(0.5**k) for k in (5, 4, 3, 2, 1, 0)]
    assert replay.values[[0, 7, 8, 13, 49]].tolist() == [0] * 5  # rows without a step
    original = small_replay(terminal_reward=False)
    assert original.values[3:7].tolist() == [-0.5, -1.0, 0.0, 0.0]  # the last reward of a game never enters
    assert original.values[11:13].tolist() == [1.5, 1.0]


def test_stacks_and_next_frames_stay_inside_a_game():
    replay = small_replay()
    rows = torch.tensor([3, 6, 11, 12, 48])
    assert replay.stacks(rows)[:, :, 0, 0].tolist() == [
        [0, 1, 2, 3], [3, 4, 5, 6], [20, 21, 22, 23], [21, 22, 23, 24], [55, 56, 57, 58],
    ]  # fmt: skip
    assert replay.next_frames(rows)[:, 0, 0].tolist() == [4, 7, 24, 25, 59]
    batch = replay.batch(rows)
    assert batch["continues"].tolist() == [1, 0, 1, 1, 1] and batch["actions"].tolist() == [0, 0, 0, 1, 2]
    assert batch["rewards"].tolist() == [0, 1, 1, 1, -1]
    assert sorted(replay.steps.rows[: replay.steps.count].tolist()) == [*range(3, 7), 11, 12, *range(43, 49)]
    assert replay.starts.rows[: replay.starts.count].tolist() == [3, 11, 43]
    torch.manual_seed(0)
    drawn = replay.steps.draw(12_000)
    counts = torch.bincount(drawn, minlength=80)[[*range(3, 7), 11, 12, *range(43, 49)]]
    assert counts.sum() == 12_000 and (counts - 1000).abs().max() < 120  # nothing else, all alike


def test_windows_stay_inside_a_segment_or_fall_back_to_the_longest():
    replay = small_replay()
    steps = np.flatnonzero(replay.host["valid"])
    assert [rows.tolist() for rows in replay.windows(4, steps)[:1]] == [[3, 43, 44, 45]]
    assert replay.windows(4, steps, terminals=False)[0].tolist() == [43, 44, 45]
    assert replay.windows(4, steps[steps < 20])[0].tolist() == [3]
    rows, length = replay.windows(50, steps)
    assert (rows.tolist(), length) == ([43], 6)
    only = FrameReplay(1, 20, (2, 3), CPU)
    play(only, 0, 0, [1])  # a game of one step
    only.commit()
    steps = np.flatnonzero(only.host["valid"])
    assert only.windows(50, steps)[1] == 1 and only.windows(50, steps, terminals=False)[1] == 0


def test_a_game_that_goes_on_in_the_next_epoch_has_no_seam():
    replay = small_replay()
    before = len(replay)
    replay.add(0, 2, 1, frame(26), True, False)
    replay.commit()
    assert replay.fresh.tolist() == [13] and len(replay) == before + 1
    assert replay.values[11:14].tolist() == [1.75, 1.5, 1.0] and replay.ahead[11:14].tolist() == [3, 2, 1]
    assert replay.segments[11:15].tolist() == [1] * 4 and replay.terminal[13]


def test_replay_saved_and_put_back():
    replay = small_replay()
    other = FrameReplay(2, 40, (2, 3), CPU, gamma=0.5)
    other.load_state(replay.state())
    for r in (replay, other):
        r.add(1, 1, 1, frame(60), True, False)
        r.commit()
    for name in ("frames", "actions", "rewards", "segments", "valid", "terminal", "values", "ahead"):
        assert torch.equal(getattr(replay, name), getattr(other, name)), name
    assert torch.equal(replay.steps.rows, other.steps.rows) and replay.fresh.tolist() == other.fresh.tolist()
    assert not replay.begin(0, np.zeros((40, 2, 3), np.uint8))  # no room
