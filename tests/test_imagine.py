"""Imagined rows: the ring that keeps them, and rollouts against slow ones of one row at a time."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from imagining import make_log

from replaylab.data.episodes import from_rows
from replaylab.models import termination
from replaylab.models.dynamics import Dynamics
from replaylab.models.imagine import Imagination, Logged, Penalties, Ring, foretell, pack, unpack, widen
from replaylab.models.penalty import linear

CPU = torch.device("cpu")


# --- the ring


def test_the_ring_keeps_the_newest_valid_rows_of_each_seed():
    ring, kept = Ring(2, 7, 1, CPU), [[], []]
    rng = np.random.default_rng(0)
    for turn in range(6):
        rows = torch.arange(10.0).view(2, 5, 1) + 100 * turn
        valid = torch.as_tensor(rng.random((2, 5)) < (0.6 if turn else 0.2))
        ring.add(rows, valid)
        for seed in range(2):
            kept[seed] += rows[seed, valid[seed], 0].tolist()
            here = kept[seed][-7:]
            assert ring.filled[seed] == len(here)
            assert sorted(ring.table[seed, : len(here), 0].tolist()) == here
            if here:  # never an empty place, never an invalid row
                assert set(ring.sample(torch.rand(2, 500))[seed, :, 0].tolist()) == set(here)
    assert ring.sample(torch.tensor([[0.0, 0.99999994]] * 2)).shape == (2, 2, 1)  # the last float below one


def test_a_ring_comes_back_from_its_state():
    ring, again = Ring(1, 6, 2, CPU), Ring(1, 6, 2, CPU)
    ring.add(torch.randn(1, 4, 2), torch.tensor([[True, False, True, True]]))
    state = {k: v.clone() for k, v in ring.state().items()}
    assert state["rows"].shape == (1, 3, 2)
    again.load(state)
    for r in (ring, again):
        r.add(torch.ones(1, 2, 2), torch.ones(1, 2, dtype=torch.bool))
    assert torch.equal(ring.table[:, :6], again.table[:, :6]) and torch.equal(ring.next, again.next)


# --- rollouts


class Normal(torch.nn.Module):
    """A density whose log_prob is known: minus the squared length."""

    def log_prob(self, x):
        return -x.square().sum(-1)


def make_world(seeds=(0, 1), rows=12, length=4, penalties=None, done=termination.never, members=3, noise=True, **carry):
    """An ensemble of two linear layers' worth of numbers, a policy that is a formula, a start table."""
    torch.manual_seed(0)
    dynamics = Dynamics(seeds, 2, 1, [5], members, 2)
    dynamics.input_mean.copy_(torch.tensor([0.1, -0.2, 0.0]))
    dynamics.input_std.copy_(torch.tensor([1.5, 0.5, 1.0]))
    dynamics.target_mean.copy_(torch.tensor([0.0, 0.3, -0.1]))
    dynamics.target_std.copy_(torch.tensor([0.5, 0.7, 2.0]))
    dynamics.elites.copy_(torch.tensor([[0, 2], [1, 2]])[: len(seeds)])
    dynamics.bounds[:, :, 1] += torch.rand(dynamics.bounds[:, :, 1].shape)
    dynamics.requires_grad_(False)
    starts = torch.randn(40, 2)
    ring = Ring(len(seeds), rows * length * 2, 2 * 2 + 1 + 2, CPU)
    limits = (torch.full((3,), -50.0), torch.full((3,), 50.0))
    world = Imagination(
        seeds,
        dynamics,
        lambda s, n: torch.tanh(s[..., :1] + n),
        lambda s: 2 * s,  # "normalised"
        done,
        penalties or Penalties(),
        ring,
        starts,
        limits,
        rows,
        length,
        1,
        begins=torch.randn(5, 2),
        **carry,
    )
    world.prepare(7)
    if not noise:
        world.model_noise.zero_()
    return world


def answer(dynamics, seed, member, s, a):
    """Mean and deviation of (s' - s, r) from one member, layer by layer."""
    x = (torch.cat([s, a]) - dynamics.input_mean) / dynamics.input_std
    index = seed * dynamics.members + member
    for i, layer in enumerate(dynamics.net.layers):
        x = x @ layer.weight[index] + layer.bias[index, 0]
        x = x * torch.sigmoid(x) if i == 0 else x
    low, high = dynamics.bounds[seed, member, :, 0]
    between = high - torch.log1p(torch.exp(high - x[3:]))
    logvar = low + torch.log1p(torch.exp(between - low))
    return x[:3] * dynamics.target_std + dynamics.target_mean, (logvar / 2).exp() * dynamics.target_std


def slow_rollout(world, seed, penalise, done, carried=()):
    """One row at a time in plain Python; the ring's rows in order. `carried`: where the first rows begin, and, when
    done, where they end (None: nowhere)."""
    kept, rows = [], world.rows
    states = [(world.starts[i], True, n) for n, i in enumerate(world.first[seed])]
    states[: len(carried)] = [(s, True, n) for n, s in enumerate(carried)]
    for t in range(world.length):
        states = [states[i] for i in world.order[seed, t]]
        following = []
        for i, (s, live, n) in enumerate(states):
            a = torch.tanh(2 * s[:1] + world.action_noise[seed, t, i])
            member = int(world.dynamics.elites[seed, i * 2 // rows])
            mean, deviation = answer(world.dynamics, seed, member, s, a)
            drawn = mean + deviation * world.model_noise[seed, t, i]
            s2, r = s + drawn[:2], drawn[2]
            everyone = [answer(world.dynamics, seed, m, s, a) for m in range(world.dynamics.members)]
            over = bool(done(s[None], a[None], s2[None])[0])
            if live:
                kept.append(torch.cat([2 * s, a, (r - penalise(s2, a, everyone))[None], torch.tensor([over]), 2 * s2]))
            following.append((s2, live and not over, n))
        states = following
    for s, live, n in states:
        if n < len(carried):
            carried[n] = s if live else None
    return torch.stack(kept)


def falls(s, a, following):
    return following[..., 0] > 0.6


@pytest.mark.parametrize("kind", ["none", "density", "aleatoric", "pairwise", "ensemble-std", "sum"])
def test_a_rollout_is_the_slow_one(kind):
    penalties = Penalties(
        "tanh" if kind in ("density", "sum") else "none",
        0.7,
        "aleatoric" if kind == "sum" else "none" if kind in ("none", "density") else kind,
        0.3,
    )
    penalties.density, penalties.threshold = Normal(), torch.tensor(-1.0)

    def penalise(s2, a, everyone):
        means, deviations = torch.stack([m for m, _ in everyone]), torch.stack([d for _, d in everyone])
        away = (means - means.mean(0))[:, :2]
        total = {
            "aleatoric": max(d.norm() for d in deviations),
            "pairwise": max(x.norm() for x in away),
            "ensemble-std": away.square().mean(0).mean().sqrt(),
        }
        of_ensemble = 0.3 * total["aleatoric" if kind == "sum" else kind] if kind in ("sum", *total) else 0.0
        gap = -1.0 + torch.cat([s2, a]).square().sum()
        return of_ensemble + (0.7 * max(0.0, torch.tanh(gap / 10)) if kind in ("density", "sum") else 0.0)

    world = make_world(penalties=penalties, done=falls)
    world.roll()
    for seed in range(2):
        expected = slow_rollout(world, seed, penalise, falls)
        count = int(world.ring.filled[seed])
        assert count == len(expected) and world.rows < count < world.rows * world.length
        torch.testing.assert_close(world.ring.table[seed, :count], expected, rtol=1e-4, atol=1e-5)
    metrics = world.metrics()
    assert metrics["imagined_rows"].tolist() == world.ring.filled[:, 0].tolist()
    assert ("penalised" in metrics) == (kind in ("density", "sum")) and ("penalty" in metrics) == (kind != "none")
    batch = unpack(world.ring.table[1, :count], 2)  # of the last seed
    assert metrics["imagined_ends"][1].item() == pytest.approx(batch["terminated"].mean().item())
    first = unpack(world.ring.table[1, : world.rows], 2)["terminated"].sum().item()
    assert world.survivors[1].item() == world.rows - first


def test_carried_rows_play_on_from_the_first_states():
    world = make_world(length=3, carried=5, most=7, done=falls)
    begun, states, ages = 0, [[None] * 5 for _ in range(2)], [[0] * 5 for _ in range(2)]
    for number in range(6):
        world.prepare(number)
        for seed in range(2):
            for n in range(5):
                if states[seed][n] is None or ages[seed][n] >= 7:
                    states[seed][n], ages[seed][n], begun = world.begins[world.begin[seed, n]], 0, begun + 1
        world.ring = Ring(2, 12 * 3, 7, CPU)
        world.roll()
        for seed in range(2):
            kept = slow_rollout(world, seed, lambda *_: 0.0, falls, states[seed])
            assert world.ring.filled[seed] == len(kept)
            torch.testing.assert_close(world.ring.table[seed, : len(kept)], kept)
            ages[seed] = [7 if s is None else age + 3 for s, age in zip(states[seed], ages[seed], strict=True)]
            assert world.ages[seed].tolist() == ages[seed]
            going = [age if age < 7 else 0 for age in ages[seed]]
            torch.testing.assert_close(float(world.metrics()["carried_steps"][seed]), np.mean(going))
    assert 10 < begun < 60  # some played on, some fell or were old enough


def test_what_each_elite_expects_is_the_slow_sum():
    dynamics, starts = make_world().dynamics, torch.randn(6, 2)
    states, totals = foretell(dynamics, lambda s: torch.tanh(2 * s[..., :1]), falls, starts, 4)
    assert states.shape == (2, 2, 6, 2) and totals.shape == (2, 2, 6)
    ended = 0
    for seed, elite, row in itertools.product(range(2), range(2), range(6)):
        s, total = starts[row], 0.0
        for _ in range(4):
            a = torch.tanh(2 * s[:1])
            mean, _ = answer(dynamics, seed, int(dynamics.elites[seed, elite]), s, a)
            total += float(mean[2])
            if falls(s, a, s + mean[:2]):
                ended += 1
                break
            s = s + mean[:2]
        torch.testing.assert_close(totals[seed, elite, row], torch.tensor(total), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(states[seed, elite, row], s, rtol=1e-4, atol=1e-4)
    assert 0 < ended < 24


def test_every_elite_answers_an_equal_part_and_rows_change_hands():
    world = make_world(rows=12)
    assert sorted(world.order[0, 1].tolist()) == list(range(12))
    assert not torch.equal(world.order[0, 1], world.order[0, 2])
    first = world.first.clone()
    world.prepare(8)
    assert not torch.equal(first, world.first)
    world.prepare(7)
    assert torch.equal(first, world.first)  # a function of (seed, number)
    alone = make_world(seeds=(0,))
    assert torch.equal(alone.model_noise[0], world.model_noise[0]) and torch.equal(alone.order[0], world.order[0])


def test_penalties_lower_the_reward_and_scale_with_the_coefficient():
    found = []
    for coefficient in (0.0, 1.0, 2.0):
        penalties = Penalties("indicator", coefficient)
        penalties.density, penalties.threshold = Normal(), torch.tensor(-1.0)
        world = make_world(penalties=penalties)
        world.roll()
        found.append(unpack(world.ring.table[0, : int(world.ring.filled[0])], 2)["rewards"])
    taken = found[0] - found[1]
    assert set(taken.round(decimals=3).tolist()) == {0.0, 1.0}
    torch.testing.assert_close(found[0] - found[2], 2 * taken, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["tanh", "linear", "softplus"])
def test_penalised_rows_are_those_that_pay(kind):
    """A linear penalty whose cap is below 0, as most rows are far inside the data, penalises nobody: so it is told."""
    penalties = Penalties(kind, 1.0)
    penalties.density, penalties.threshold = Normal(), torch.tensor(-6.0)
    rows = torch.zeros(1, 40, 2)
    rows[0, 0] = 4.0  # of log-density far below
    actions, live = torch.zeros(1, 40, 1), torch.ones(1, 40, dtype=torch.bool)
    found, pays = penalties.by_density(rows, actions, rows, live)
    assert int(pays.sum()) == {"tanh": 1, "linear": 0, "softplus": 1}[kind]
    assert kind == "softplus" or torch.equal(pays, found > 0)


def test_the_linear_penalty_of_live_rows():
    gap = torch.randn(2, 50, generator=torch.Generator().manual_seed(0)) + 1
    gap[:, 3], gap[1, 40:] = 30.0, 1000.0  # one row above the cap; rows that have ended
    live = torch.ones(2, 50, dtype=torch.bool)
    live[1, 30:] = False
    found = linear(-gap, 0.0, live)
    assert (found[:, 3] < 30).all()
    torch.testing.assert_close(found[0], linear(-gap[0], 0.0))
    torch.testing.assert_close(found[1, :30], linear(-gap[1, :30], 0.0))
    alone = torch.tensor([True, False])  # its gap, 3, is both quartiles
    assert linear(torch.tensor([-3.0, -5.0]), 0.0, alone).tolist() == [3, 3]


def test_predictions_that_explode_are_cut_off_and_end_the_rollout():
    world = make_world(seeds=(0,), length=3)
    world.dynamics.target_mean[0] = 30.0  # the first column runs away
    world.roll()
    count = int(world.ring.filled[0])
    rows = unpack(world.ring.table[0, :count], 2)
    assert count == 2 * world.rows and rows["next_observations"].max() == 2 * 50.0 and rows["terminated"].sum() == 0
    assert world.metrics()["imagined_wild"][0] == pytest.approx(0.5, abs=0.1)
    world = make_world(seeds=(0,))
    world.dynamics.target_mean[1] = torch.nan
    world.roll()
    assert world.ring.filled[0] == 0 and world.ring.table[0, :-1].abs().sum() == 0
    assert world.metrics()["imagined_reward"][0] == 0  # of no row
    low, high = widen(torch.tensor([0.0, 3.0]), torch.tensor([2.0, 3.0]))
    assert low.tolist() == pytest.approx([-10, -2]) and high.tolist() == pytest.approx([12, 8])


def test_packing_round_trip():
    parts = [torch.randn(3, 2), torch.randn(3, 1), torch.randn(3), torch.tensor([1.0, 0, 1]), torch.randn(3, 2)]
    batch = unpack(pack(*parts), 2)
    for part, name in zip(
        parts, ("observations", "actions", "rewards", "terminated", "next_observations"), strict=True
    ):
        assert torch.equal(batch[name], part)


def test_next_observations_at_episode_ends_are_exact():
    log = make_log()
    data = Logged(log, CPU)
    np.testing.assert_array_equal(data.following, log.next_observations(np.arange(len(log))))
    unknown = from_rows(log.observations, log.actions, log.rewards, np.zeros(400, bool), log.truncated)
    assert len(Logged(unknown, CPU).rewards) < 400  # rows whose successor nobody knows are left out
