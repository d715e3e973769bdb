"""The dream: a vector environment, judged on real steps and on episodes that are held out, and filmed."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from dreaming import Stub, likeliest, play, small_replay

from replaylab.data.frames import FrameReplay
from replaylab.envs.atari_rgb import PALETTE
from replaylab.models import dream as dreams
from replaylab.models.dream import Dream
from replaylab.models.world import Prediction

CPU = torch.device("cpu")


# --- the dream


def test_dream_is_a_vector_environment():
    torch.manual_seed(0)
    replay = small_replay()
    dream = Dream(Stub(), replay, 16, 3, from_start=1)
    seen, infos = dream.reset()
    assert seen.shape == (16, 4, 2, 3) == (16, *dream.single_observation_space.shape) and infos == {}
    assert dream.single_action_space.n == 3
    assert torch.equal(dream.reset(seed=5)[0].clone(), dream.reset(seed=5)[0])
    seen, _ = dream.reset()
    before = seen.clone()
    actions = torch.tensor([0, 1] * 8)
    seen, rewards, terminated, truncated, infos = dream.step(actions)
    assert (seen[:, :3] == before[:, 1:]).all() and not terminated.any() and not truncated.any()
    assert (seen[:, 3] == before[:, 3] + actions[:, None, None]).all() and rewards.tolist() == [0.0, 1.0] * 8
    before = seen.clone()
    seen, _, terminated, truncated, infos = dream.step(torch.full((16,), 2))
    assert terminated.all() and (infos["final_obs"][:, 3] == before[:, 3] + 2).all()
    real = {tuple(replay.stacks(row)[:, 0, 0].tolist()) for row in replay.steps.rows[: replay.steps.count]}
    assert all(tuple(stack[:, 0, 0].tolist()) in real for stack in seen)  # put into real states at once
    _, _, terminated, truncated, _ = dream.step(torch.zeros(16, dtype=torch.int64))
    assert truncated.all() and not terminated.any()  # cut off, not ended
    dream.reset()
    assert not dream.step(torch.zeros(16, dtype=torch.int64))[3].any()


def test_a_dream_pays_what_is_expected():
    def paid(**about):
        dream = Dream(Stub(**about), small_replay(), 2, 3, expected=True)
        dream.reset()
        return dream.step(torch.tensor([1, 0]))[1].tolist()

    assert paid(sure=0.0) == [0, 0]  # all are as likely
    assert paid(sure=0.0, rarity=np.log([1.0, 4.0, 3.0])) == pytest.approx([0.25, 0.25])
    assert paid(sure=np.log(2.0)) == pytest.approx([0.25, 0])  # 1 : 1 : 2, and 1 : 2 : 1


def test_one_dream_in_sixteen_begins_with_a_game():
    torch.manual_seed(0)
    replay = small_replay()
    dream = Dream(Stub(), replay, 16, 3, from_start=1)
    starts, others = set(), set()
    for _ in range(100):
        seen, _ = dream.reset()
        starts.add(int(seen[15, 3, 0, 0]))
        others |= set(seen[:15, 3, 0, 0].tolist())
    assert starts == {3, 23, 53}
    assert others == {*range(3, 7), 23, 24, *range(53, 59)}


def test_judged_on_real_steps():
    replay = small_replay()
    found = dreams.judge(Stub(), replay, np.array([3, 4, 11, 12, 43, 48]), likeliest)
    # frames: always one more; actions 0 1 0 1 0 2, so told rewards 0 1 0 1 0 0; true ones 0 -1 1 1 0 -1
    assert found["confusion"] == [[0, 1, 1], [0, 2, 0], [0, 1, 1]] and found["steps"] == 6
    assert found["explained"] == pytest.approx(1 - (4 + 1 + 1) / 4)  # squared errors 0 4 1 0 0 1; the rewards' own: 4
    assert found["classes"]["positive"] == {"precision": 0.5, "recall": 0.5, "count": 2}
    assert found["frames"] == pytest.approx(2 / 6) == found["pixels"] == found["changed_pixels"]
    assert found["still_pixels"] == 0


class Rgb(Stub):
    """The palette's stub in colours, one of the three intensities a little wrong at the left."""

    shape = SimpleNamespace(pixels="rgb", stack=4)

    def __init__(self, off):
        self.off = torch.zeros(3, 2, 3, dtype=torch.uint8)
        self.off[1, :, 0] = off

    def predict(self, frames, actions):
        told = frames[:, -3:] ^ self.off  # the newest frame again
        return Prediction(told, actions * 0.0, torch.zeros(len(actions), 3), actions * 0.0, actions * 0.0)


def test_colours_are_judged_by_the_pixel_however_they_are_told():
    replay = small_replay()
    replay.frames[44:50] = 64
    replay.frames[49, 0, 0] = 72  # one pixel of the last frame changes, not its red
    rows = np.arange(43, 49)
    stills = [dreams.judge(Rgb(off), replay, rows, likeliest) for off in (0, 1, 64)]
    changed = (6 + 1) / 36  # the frame from 53 to 64, and the pixel
    assert [s["still_pixels"] for s in stills] == [pytest.approx(1 - changed)] * 3
    assert [s["pixels"] for s in stills] == pytest.approx([1 - changed, (29 - 9) / 36, (29 - 9) / 36])
    assert stills[1]["near_pixels"] == stills[0]["near_pixels"] == stills[0]["pixels"] > stills[2]["near_pixels"]
    assert [s["changed_pixels"] for s in stills] == [0.0] * 3
    palette = dreams.judge(Stub(), replay, rows[:1] + 1, likeliest)  # action 1: all pixels told as the next colour
    assert palette["pixels"] == palette["near_changed_pixels"] == 0.0 and palette["still_pixels"] == 1.0


# --- episodes that are held out


def lanes_of(*lanes):
    """A replay whose lanes hold games of so many steps; the last one of a lane still runs."""
    replay = FrameReplay(len(lanes), 400, (2, 3), CPU)
    for lane, games in enumerate(lanes):
        for i, steps in enumerate(games):
            play(replay, lane, 0, [0] * steps, terminal=i < len(games) - 1)
    return replay


def test_whole_episodes_are_held_out_but_no_more_than_needed():
    none = np.zeros(0, np.int64)
    for few in ([[30]], [[30]] * 3, [[20, 20, 20]], [[97, 1], [1], [1]]):  # too little would be left to learn from
        assert len(dreams.hold_out(lanes_of(*few), none, 0, 0.05)) == 0, few
    assert 0 not in dreams.hold_out(lanes_of([97], [1], [1], [1]), none, 0, 0.05)
    assert len(dreams.hold_out(lanes_of(*[[30]] * 4), none, 0, 0.05)) == 1  # running games, one of four
    assert len(dreams.hold_out(lanes_of(*[[30]] * 4), none, 0, 0.0)) == 0
    short = lanes_of(*[[10] * 25] * 4)  # 100 games
    held = dreams.hold_out(short, none, 0, 0.05)
    assert len(held) == len(set(held)) == 5 and (np.diff(held) > 0).all()
    assert dreams.hold_out(short, held, 60, 0.05).tolist() == held.tolist()  # enough
    more = dreams.hold_out(short, held, 60, 0.1)
    assert len(more) == 10 and set(held) < set(more) and min(set(more) - set(held)) >= 60  # new ones only
    one = lanes_of([10] * 25)  # a game alone: what still runs would hold all that follows
    assert 24 not in dreams.hold_out(one, none, 20, 0.25)


# --- the film


def test_film_shows_reality_and_dream_side_by_side():
    Image = pytest.importorskip("PIL.Image")
    import io

    replay = small_replay()
    rows = np.flatnonzero(replay.host["valid"])
    scene = dreams.exciting_scene(Stub(), replay, rows, 6)
    assert scene["real"][:, 0, 0].tolist() == [54, 55, 56, 57, 58, 59]
    assert scene["dream"][:, 0, 0].tolist() == [53, 54, 56, 56, 57, 59]  # the same actions: 0 1 2 0 1 2
    assert scene["real_rewards"].tolist() == [0, 0, 0, 0, 0, -1]
    assert scene["dream_rewards"].tolist() == [0, 1, 0, 0, 1, 0]
    unlikely = dreams.exciting_scene(Stub(rarity=[-9.0, 0.0, -9.0]), replay, rows, 6)
    assert unlikely["dream_rewards"].tolist() == [0] * 6  # the head was shown rewards far too often
    picture = Image.open(io.BytesIO(dreams.film(scene, PALETTE, scale=2)))
    assert picture.size == (2 * (3 + 2 + 3), 2 * (2 + 3))
    shown = np.asarray(picture.convert("RGB")).astype(int)
    assert abs(shown[0, 0] - PALETTE[54]).max() < 8 and abs(shown[0, 12] - PALETTE[53]).max() < 8
