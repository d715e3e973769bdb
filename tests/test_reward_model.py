from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from replaylab.errors import UsageError
from replaylab.models.reward import (
    UPDATES,
    MbarcHead,
    SimpleHead,
    categories,
    confusion,
    correction,
    draw_epoch,
    expected,
    focal_loss,
    focal_weights,
    masses_of,
    precision_recall,
    sampling_weights,
)
from replaylab.models.world import World, WorldShape
from replaylab.models.world_training import RewardTrainer, WorldTrainer

COLOURS = torch.tensor([[0, 0, 0], [200, 72, 72], [92, 186, 92], [45, 50, 184]])


def buffer(rewards, ends=(), cuts=()):
    """Rewards of a buffer whose games end at `ends`, and whose stretches begin anew at `cuts`."""
    rewards = torch.as_tensor(rewards, dtype=torch.int8)
    terminal, segments = torch.zeros(len(rewards), dtype=torch.bool), torch.zeros(len(rewards), dtype=torch.int64)
    terminal[list(ends)] = True
    segments[list(cuts)] = 1
    return rewards, segments.cumsum(0), terminal


def random_buffer(negatives=True, rows=20_000):
    g = torch.Generator().manual_seed(0)
    luck = torch.rand(rows, generator=g)
    rewards = (luck < 0.02).long() - ((luck > 0.99) & negatives).long()
    return buffer(rewards, range(499, rows, 500), range(0, rows, 1000))


# --- categories


def test_near_and_far_zeros():
    log = buffer([0, 0, 1, 0, 0, -1, 0, 0])
    assert categories(*log).tolist() == [0, 1, 2, 1, 1, 3, 1, 0]
    assert categories(*log, backward=True).tolist() == [0, 0, 2, 1, 0, 3, 1, 0]  # only after a reward
    assert categories(*log, window=2).tolist() == [1, 1, 2, 1, 1, 3, 1, 1]


def test_nothing_is_near_across_an_end_or_a_seam():
    rewards = [0, 1, 0, 0, 1, 0]
    assert categories(*buffer(rewards)).tolist() == [1, 2, 1, 1, 2, 1]
    assert categories(*buffer(rewards, ends=[1, 3])).tolist() == [1, 2, 0, 0, 2, 1]
    assert categories(*buffer(rewards, cuts=[2, 4])).tolist() == [1, 2, 0, 0, 2, 1]
    assert categories(*buffer(rewards, ends=[4])).tolist() == [1, 2, 1, 1, 2, 0]
    assert categories(*buffer([1])).tolist() == [2] and categories(*buffer([0, 1]), window=9).tolist() == [1, 2]


def test_frames_that_lead_up_to_a_reward():
    log = buffer([0, 0, 0, 1, 0, 0, -1, 0], ends=[4])
    assert categories(*log, classes="lead-up", window=2).tolist() == [2, 0, 0, 1, 2, 0, 3, 2]
    assert categories(*log, classes="lead-up").tolist() == [2, 2, 0, 1, 2, 0, 3, 2]


def test_masses():
    here = torch.tensor([True, True, True, True])
    no_negative, no_reward = torch.tensor([1, 1, 1, 0]).bool(), torch.tensor([1, 1, 0, 0]).bool()
    default = (0.35, 0.05, 0.6)
    assert masses_of(no_negative, default, "near").tolist() == pytest.approx([0.35, 0.05, 0.6, 0])
    assert masses_of(here, default, "near").tolist() == pytest.approx([0.35, 0.05, 0.3, 0.3])
    assert masses_of(no_reward, default, "near").tolist() == pytest.approx([0.875, 0.125, 0, 0])
    assert masses_of(no_reward, (0, 0, 1), "near").tolist() == [0.5, 0.5, 0, 0]  # all of it for what is not there
    assert masses_of(here, (0.4, 0.1, 0.2, 0.3), "near").tolist() == pytest.approx([0.4, 0.1, 0.2, 0.3])
    assert masses_of(here, default, "lead-up").tolist() == pytest.approx([0.35, 0.025, 0.6, 0.025])
    for wrong in ((0.5, 0.5), (1, -1, 1), (0, 0, 0)):
        with pytest.raises(UsageError, match="masses"):
            masses_of(here, wrong, "near")


# --- draws


def shares(kind, rows, classes):
    return torch.bincount(kind[rows.flatten()], minlength=classes) / rows.numel()


@pytest.mark.parametrize("negatives", [False, True])
@pytest.mark.parametrize("settings", [{}, {"window": 3}, {"backward": True}])
def test_mbarc_draws_its_masses(negatives, settings):
    torch.manual_seed(0)
    log = random_buffer(negatives)
    rows = draw_epoch("mbarc", *log, **settings)
    assert rows.shape == (1500, 32)
    expected = torch.tensor([0.35, 0.05, 0.3, 0.3] if negatives else [0.35, 0.05, 0.6, 0.0])
    assert (shares(categories(*log, **settings), rows, 4) - expected).abs().max() < 0.01
    own = draw_epoch("mbarc", *log, masses=(0.1, 0.2, 0.7), **settings)
    assert (shares(categories(*log, **settings), own, 4)[:2] - torch.tensor([0.1, 0.2])).abs().max() < 0.01


def test_mbarc_draws_of_the_other_reading():
    torch.manual_seed(0)
    log = random_buffer(negatives=False)
    rows = draw_epoch("mbarc", *log, classes="lead-up", window=4)
    found = shares(categories(*log, "lead-up", 4), rows, 4)
    assert (found - torch.tensor([0.35, 0.05, 0.6, 0.0])).abs().max() < 0.01


def test_draws_within_a_category_are_even():
    torch.manual_seed(0)
    log = random_buffer()
    rows = draw_epoch("mbarc", *log, updates=15_000).flatten()
    positive = torch.nonzero(log[0] == 1)[:, 0]
    times = torch.bincount(rows, minlength=len(log[0]))[positive].float()
    expected = 0.3 * 480_000 / len(positive)
    assert abs(times.mean() / expected - 1) < 0.02 and times.std() < 1.2 * math.sqrt(expected)


def test_the_other_strategies():
    torch.manual_seed(0)
    log = random_buffer(negatives=False)
    counts = torch.bincount(log[0].long() + 1, minlength=3).double()
    kind = log[0].long() + 1

    rows = draw_epoch("class-balanced", *log)
    assert rows.shape == (450, 32)
    assert (shares(kind, draw_epoch("class-balanced", *log, updates=3000), 3)[1:] - 0.5).abs().max() < 0.01
    rows = draw_epoch("square-root", *log)
    assert rows.shape == (475, 32)
    roots = counts.sqrt() / counts.sqrt().sum()
    assert (shares(kind, draw_epoch("square-root", *log, updates=3000), 3) - roots).abs().max() < 0.01
    assert draw_epoch("online", *log).shape == (0, 32)
    plain = draw_epoch("online", *log, updates=3000)
    assert (shares(kind, plain, 3) - counts / counts.sum()).abs().max() < 0.01
    assert UPDATES == {"online": 0, "class-balanced": 450, "square-root": 475, "progressive": 1000, "mbarc": 1500}


def test_weights_by_hand():
    log = buffer([0] * 6 + [1] * 3 + [-1])
    balanced = sampling_weights("class-balanced", *log)
    assert balanced[[0, 6, 9]].tolist() == pytest.approx([0.4001, 0.7001, 0.9001])
    total = math.sqrt(6) + math.sqrt(3) + 1
    rooted = sampling_weights("square-root", *log)
    assert rooted[[0, 6, 9]].tolist() == pytest.approx([1 - math.sqrt(n) / total + 1e-4 for n in (6, 3, 1)])
    half = sampling_weights("progressive", *log, progress=0.5)
    assert half[[0, 6, 9]].tolist() == pytest.approx([1 / 6 + w / 2 + 1e-4 for w in (0.4, 0.7, 0.9)])
    ours = sampling_weights("mbarc", *log)  # far 5, near 1, positive 3, negative 1
    expected = [0.35 * 48_000 / 5, 0.05 * 48_000 / 1, 0.3 * 48_000 / 3, 0.3 * 48_000 / 1]
    assert ours[[0, 5, 6, 9]].tolist() == pytest.approx(expected)


def test_progressive_goes_from_natural_to_balanced():
    torch.manual_seed(0)
    log = random_buffer(negatives=False)
    rows = draw_epoch("progressive", *log)
    assert rows.shape == (1000, 32)
    rewarded = (log[0][rows.flatten()] == 1).float()
    counts = torch.bincount(log[0].long() + 1, minlength=3).double()

    def expected(t):  # in stretch t of 641 draws
        weights = (1 - t / 50) / 3 + t / 50 * (1 - counts / counts.sum()) + 1e-4
        return float(weights[2] * counts[2] / (weights * counts).sum())

    last = 32_000 - 49 * 641  # the stretch of t = 50 is not reached
    for first, until in ((0, 10), (20, 30), (40, 49)):
        wanted = np.mean([expected(t) for t in range(first, until)])
        assert abs(rewarded[first * 641 : until * 641].mean() - wanted) < 0.02
    assert abs(rewarded[-last:].mean() - expected(49)) < 0.06 and expected(49) < 0.5


def test_wrong_names():
    log = random_buffer(rows=2000)
    with pytest.raises(UsageError, match="strategy"):
        sampling_weights("greedy", *log)
    with pytest.raises(UsageError, match="classes"):
        sampling_weights("mbarc", *log, classes="central")


# --- losses and scores


def test_focal_loss_by_hand():
    weights = focal_weights(torch.tensor([0, 9_000, 100]))
    raw = [1e-4 / (1 - 0.9999**n) for n in (1, 9_000, 100)]  # an absent class counts as one
    assert weights.tolist() == pytest.approx([3 * w / sum(raw) for w in raw], rel=1e-4)
    logits = torch.tensor([[0.0, math.log(3), 0.0], [math.log(2), 0.0, 0.0]])  # p = 3/5 of class 1; p = 1/4 of class 2
    by_class = torch.tensor([0.5, 1.0, 1.5])
    expected = (1.0 * 0.4**2 * -math.log(0.6) + 1.5 * 0.75**2 * -math.log(0.25)) / 2
    assert float(focal_loss(logits, torch.tensor([1, 2]), by_class)) == pytest.approx(expected)


def test_what_is_expected_allows_for_the_draws():
    """Two moments: after A 10 % are rewarded, after B 1 % punished. A head that was shown 35, 30, 35 % of -1, 0, 1
    believes in far more of both; corrected, it expects what there is."""
    chances = torch.tensor([[0.0, 0.90, 0.10], [0.01, 0.99, 0.0]])  # of -1, 0, 1 after A and B, both as often
    real, shown = chances.mean(0), torch.tensor([0.35, 0.30, 0.35])
    counts = [(share * 10**6).round().long() for share in (real, shown)]
    told = [torch.arange(-1, 2).repeat_interleave(count) for count in counts]
    logits = (chances * shown / real).log().clamp(min=-100)  # the best head of these draws, by Bayes' rule
    assert expected(logits)[0] > 0.6 and expected(logits)[1] < -0.6
    torch.testing.assert_close(expected(logits + correction(*told)), torch.tensor([0.10, -0.01]), rtol=1e-3, atol=1e-5)
    same = correction(torch.zeros(5), torch.zeros(7))
    assert same.abs().max() < 0.3  # nothing seen of a class is no reason for infinities


def test_scores_by_hand():
    actual, told = torch.tensor([0, 0, 0, 1, 1, -1]), torch.tensor([0, 1, 0, 1, 0, 0])
    matrix = confusion(told, actual)
    assert matrix.tolist() == [[0, 1, 0], [0, 2, 1], [0, 1, 1]]
    found = precision_recall(matrix)
    assert found["positive"] == {"precision": 0.5, "recall": 0.5, "count": 2}
    assert found["zero"] == {"precision": 0.5, "recall": pytest.approx(2 / 3), "count": 3}
    assert found["negative"] == {"precision": None, "recall": 0.0, "count": 1}


# --- heads


def test_the_mbarc_head_knows_where_and_the_simple_one_does_not():
    maps = torch.randn(3, 16, 2, 2), torch.randn(3, 8, 16, 16)
    mirrored = [x.flip(2, 3) for x in maps]
    torch.manual_seed(0)
    simple, ours = SimpleHead(16, 8), MbarcHead(16, 8, 3, 4)
    torch.testing.assert_close(simple(*maps, False), simple(*mirrored, False))
    assert (ours(*maps, False) - ours(*mirrored, False)).abs().max() > 1e-3
    assert torch.equal(ours(*maps, False), ours(*maps, False))
    assert not torch.equal(ours(*maps, True), ours(*maps, True))  # dropout only when it learns


def test_the_mbarc_head_step_by_step():
    head, x_mid, x_fin = MbarcHead(16, 8, 3, 4), torch.randn(2, 16, 2, 2), torch.randn(2, 8, 20, 16)
    x = head.final(x_fin)
    for fold in head.folds:
        x = F.instance_norm(torch.relu(fold(x)))
    expected = head.layers(torch.cat([head.middle(x_mid), x], 1).flatten(1))
    torch.testing.assert_close(head(x_mid, x_fin, False), expected, rtol=1e-4, atol=1e-5)


# --- what it is for


def play(steps, seed):
    """A dot walks on a board of 5 x 4 blocks; +1 when it touches the gem, whereupon it is put elsewhere."""
    rng = np.random.default_rng(seed)
    moves, gem = [(0, 0), (-1, 0), (1, 0), (0, -1), (0, 1)], np.array([1, 2])
    dot, frames, actions, rewards = np.array([4, 0]), [], [], []
    for _ in range(steps + 1):
        board = np.zeros((5, 4), np.uint8)
        board[tuple(gem)] = 2
        board[tuple(dot)] = 1
        frames.append(board.repeat(4, 0).repeat(4, 1))
        if (dot == gem).all():
            dot = np.array([rng.integers(2, 5), rng.integers(4)])
        action = rng.integers(5)
        dot = np.clip(dot + moves[action], 0, [4, 3])
        actions.append(action)
        rewards.append(int((dot == gem).all()))
    return torch.from_numpy(np.stack(frames)), torch.tensor(actions)[:-1], torch.tensor(rewards)[:-1]


def transitions(log, rows):
    frames, actions, rewards = log
    batch = {"frames": frames[rows[:, None] + torch.arange(-3, 1)], "next_frames": frames[rows + 1]}
    known = {"values": torch.zeros(len(rows)), "continues": torch.ones(len(rows))}
    return batch | known | {"actions": actions[rows], "rewards": rewards[rows]}


def reward_scores(world, log):
    batch = transitions(log, torch.arange(3, len(log[1]) - 1))
    return precision_recall(confusion(world.predict(batch["frames"], batch["actions"]).reward, batch["rewards"]))


def scores_by_strategy(seed, strategies):
    """One trunk. `online`: the head that was learnt along with it; otherwise a fresh one, learnt afterwards from draws
    by the strategy, or by none: `as they come`. Scores of the rewarded steps of a game that nobody has seen."""
    log, held_out = play(2000, 2 * seed), play(1000, 2 * seed + 1)
    shape = WorldShape(5, 20, 16, hidden=16, compress=2, double=1, bits=8, palette=4)
    torch.manual_seed(seed)
    world = World(shape, seed, COLOURS)
    head = {name: value.clone() for name, value in world.reward.state_dict().items()}
    trainer = WorldTrainer(world, online=True, decay=35, rollout=1)
    for _ in range(70):
        trainer.update_teacher(transitions(log, torch.randint(3, 1999, (16,))))
    found = {"online": reward_scores(world, held_out)}
    rewards, still = log[2][3:-1], torch.zeros(1996, dtype=torch.int64)
    for strategy in strategies:
        world.reward.load_state_dict(head)
        learner = RewardTrainer(world)
        draws = "online" if strategy == "as they come" else strategy
        for rows in draw_epoch(draws, rewards, still, still.bool(), updates=60):
            learner.update(transitions(log, rows + 3))
        found[strategy] = reward_scores(world, held_out)
    return found


def test_mbarc_finds_rewards_that_online_overlooks():
    found = scores_by_strategy(0, ["mbarc"])
    ours, online = found["mbarc"], found["online"]
    assert ours["positive"]["recall"] > online["positive"]["recall"] + 0.3
    assert ours["positive"]["precision"] > 2 * ours["positive"]["count"] / 1000  # and not by crying wolf


if __name__ == "__main__":  # the table in docs/mbarc.md
    for seed in range(5):
        for strategy, found in scores_by_strategy(seed, ["as they come", "class-balanced", "mbarc"]).items():
            told = ", ".join(f"{kind} {found[kind]}" for kind in ("zero", "positive"))
            print(f"seed {seed}, {strategy}: {told}", flush=True)
