"""Training the world model: what is fed back, noise, exact resumption, and that it learns."""

from __future__ import annotations

import json

import pytest
import torch
from tiny_world import TINY, make_batch, tiny

from replaylab.models.world import World, WorldShape, snapshot
from replaylab.models.world_training import (
    AVERAGED,
    RewardTrainer,
    WorldTrainer,
    corrupted,
    counted_median,
    truth_share,
)
from replaylab.tensors import load_tensors, save_tensors


def test_epsilon():
    table = {0: 0.9999, 2_500: 0.990, 5_000: 0.854, 5_562: 0.743, 10_000: 0.545, 15_000: 0.323, 20_000: 0.100}
    for update, expected in table.items():
        assert abs(truth_share(torch.tensor(float(update)), 22_250) - expected) < 6e-4, update
    for update in (22_250, 45_000):
        assert truth_share(torch.tensor(float(update)), 22_250).abs() < 1e-6
    assert truth_share(torch.zeros(()), 0) == 0


@pytest.mark.parametrize("channels", [1, 3])
def test_noise_is_the_frame_s_median(channels):
    frames = torch.randint(100, (2, 4 * channels, 20, 16), dtype=torch.uint8)
    frames[:, channels:] += 100
    flat = frames.unflatten(1, (4, channels)).flatten(2)
    noisy = corrupted(frames, 1.0, channels).unflatten(1, (4, channels)).flatten(2)
    assert torch.equal(noisy, flat.median(2, keepdim=True).values.expand_as(flat))
    for odd in (flat, flat[..., 1:]):  # how a GPU finds it
        assert torch.equal(counted_median(odd, 256), odd.median(2, keepdim=True).values)
    assert torch.equal(corrupted(frames, 0.0, channels), frames)
    low = frames % 8
    low = low.flatten(2)
    assert torch.equal(counted_median(low, 8), counted_median(low, 256))
    plain = torch.zeros(8, channels, 100, 80, dtype=torch.uint8)
    plain[:, :, 60:] = 9
    assert abs((corrupted(plain, 0.05, channels) == plain).float().mean() - (1 - 0.05 * 0.4)) < 0.002


@pytest.mark.parametrize("pixels", ["palette", "rgb"])
def test_what_is_fed_back(pixels):
    world = tiny(pixels=pixels)
    batch, k = make_batch(world), 1 if pixels == "palette" else 3
    later = make_batch(world, seed=1) | {"first": torch.tensor([False, False, True, False])}
    truth = WorldTrainer(world, noise=0.0, decay=10**9)  # epsilon stays near 1
    truth.update(batch)
    following = batch["next_frames"].reshape(4, k, 20, 16)
    assert torch.equal(truth.context, torch.cat([batch["frames"][:, k:], following], 1))
    seen = truth.context.clone()
    truth.update(later)
    expected = torch.where(later["first"][:, None, None, None], later["frames"], seen)[:, k:]
    assert torch.equal(truth.context[:, :-k], expected)
    own = WorldTrainer(world, noise=0.0, decay=0)
    told = []
    own.loss = lambda *a: told.append(world.world_loss(*a)) or told[-1]
    own.update(batch)
    assert torch.equal(own.context[:, -k:], told[0]["next_frame"].reshape(4, k, 20, 16))
    assert not torch.equal(own.context[:, -k:], following)


def test_epsilon_is_that_of_the_sequence_s_start():
    world = tiny()
    for way in ("update", "update_teacher"):
        trainer = WorldTrainer(world, decay=6, rollout=2)
        told = [float(getattr(trainer, way)(make_batch(world))["epsilon"]) for _ in range(7)]
        assert told == pytest.approx([float(truth_share(torch.tensor(float(i)), 6)) for i in (0, 0, 2, 2, 4, 4, 6)])


@pytest.mark.parametrize("lr", [0.0, 1e-3])
@pytest.mark.parametrize("online", [False, True])
def test_training_with_a_twin_is_training_without(online, lr):
    found = []
    for twinned in (False, True):
        world = tiny()
        twin = snapshot(world) if twinned else None
        trainer = WorldTrainer(world, twin=twin, online=online, lr=lr)
        torch.manual_seed(0)
        told = [trainer.update(make_batch(world, seed=i)) for i in range(3)]
        found.append([p.detach() for p in world.parameters()] + [t[name] for t in told for name in t])
    assert all(map(torch.equal, *found))
    assert all(map(torch.equal, twin.parameters(), world.parameters()))


@pytest.mark.parametrize("lr", [0.0, 1e-3])
def test_a_twin_in_another_precision_stays_the_world_s_rounding(lr):
    told = []
    for twinned in (False, True):
        world = tiny(precision="bf16")
        twin, before = snapshot(world), [p.detach().clone() for p in world.parameters()]
        trainer = WorldTrainer(world, twin=twin if twinned else None, online=True, lr=lr)
        torch.manual_seed(0)
        told += [trainer.update(make_batch(world))]
        trainer.update(make_batch(world, seed=1))
    for name in ("loss", "grad_norm"):
        torch.testing.assert_close(told[0][name], told[1][name], rtol=1e-3, atol=0.0)
    for p, b, t in zip(world.parameters(), before, twin.parameters(), strict=True):
        assert p.dtype == torch.float32 and torch.equal(t, p.bfloat16())
        assert t.grad is None or not t.grad.any() or not torch.equal(p, b)


@pytest.mark.parametrize("lr", [0.0, 1e-3])
@pytest.mark.parametrize("twinned", [False, True])
def test_the_reward_head_is_left_alone_unless_online(twinned, lr):
    for online in (False, True):
        world = tiny()
        trainer = WorldTrainer(world, twin=snapshot(world) if twinned else None, online=online, lr=lr)
        RewardTrainer(world).update(make_batch(world))  # leaves gradients behind
        before = [p.clone() for p in world.reward.parameters()]
        trainer.update(make_batch(world))
        assert online != all(torch.equal(a, b) for a, b in zip(before, world.reward.parameters(), strict=True))
    before = {name: p.clone() for name, p in world.named_parameters()}
    RewardTrainer(world).update(make_batch(world))
    moved = {name for name, p in world.named_parameters() if not torch.equal(before[name], p)}
    assert moved and all(name.startswith("reward.") for name in moved)


def test_a_phase_ends_with_the_mean_of_its_weights():
    world = tiny()
    trainer, before = WorldTrainer(world, average=0.998), {k: v.clone() for k, v in world.named_parameters()}
    expected = {name: p.detach().double().clone() for name, p in world.named_parameters()}
    for n in range(4):
        trainer.mean.follow(AVERAGED * n)
        for name, p in world.named_parameters():
            expected[name] += max(1 - 0.998**AVERAGED, 4 / (n + 4)) * (p.detach() - expected[name])
            p.data = p.data + (n + 1.0)  # as an optimiser that keeps its weights elsewhere
    moved = {name: p.detach().clone() for name, p in world.named_parameters()}
    trainer.mean.settle()
    for name, p in world.named_parameters():  # the reward head learns elsewhere
        torch.testing.assert_close(p.detach(), moved[name] if name.startswith("reward.") else expected[name].float())
    assert not trainer.mean.means and "means.0" not in trainer.training_state()
    trainer = WorldTrainer(world)  # without a mean nothing is changed
    trainer.mean.follow(0)
    trainer.mean.settle()
    assert all(torch.equal(p, moved[k]) for k, p in world.named_parameters() if k.startswith("reward."))
    assert all(not torch.equal(p, before[k]) for k, p in world.named_parameters())


def test_resume_is_exact(tmp_path):
    def build():
        world = tiny()
        return (
            world,
            WorldTrainer(world, decay=6, rollout=2, average=0.9),
            RewardTrainer(world, focal=True, average=0.9),
        )

    def train(trainers, updates):
        for i in updates:
            trainers[1].mean.follow(AVERAGED * i)
            trainers[2].mean.follow(AVERAGED * i)
            batch = make_batch(tiny(), seed=i) | {"first": torch.tensor([i % 2 == 0] * 4)}
            trainers[1].update(batch)
            trainers[2].update(batch)

    torch.manual_seed(0)
    whole = build()
    train(whole, range(5))
    torch.manual_seed(0)
    half = build()
    train(half, range(3))
    saved = {f"w.{k}": v for k, v in half[0].state_dict().items()} | {"rng": torch.get_rng_state()}
    groups = []
    for i, trainer in enumerate(half[1:]):
        saved |= {f"t{i}.{k}": v for k, v in trainer.training_state().items()}
        (optimizer,) = trainer.optimizers.values()
        state = optimizer.state_dict()
        groups.append(json.dumps([{k: v for k, v in g.items() if k != "params"} for g in state["param_groups"]]))
        saved |= {f"o{i}.{n}.{k}": v for n, entries in state["state"].items() for k, v in entries.items()}
    save_tensors(tmp_path / "x", saved)
    found, again = load_tensors(tmp_path / "x"), build()

    def under(prefix):
        return {k.removeprefix(prefix): v for k, v in found.items() if k.startswith(prefix)}

    again[0].load_state_dict(under("w."))
    for i, trainer in enumerate(again[1:]):
        trainer.load_training_state(under(f"t{i}."))
        (optimizer,) = trainer.optimizers.values()
        entries = {}
        for key, value in under(f"o{i}.").items():
            entries.setdefault(int(key.split(".")[0]), {})[key.split(".")[1]] = value
        current = optimizer.state_dict()["param_groups"]
        merged = [now | old for now, old in zip(current, json.loads(groups[i]), strict=True)]
        optimizer.load_state_dict({"state": entries, "param_groups": merged})
    torch.set_rng_state(found["rng"])
    train(again, range(3, 5))
    for _, *trainers in (whole, again):
        for trainer in trainers:
            trainer.mean.settle()
    for a, b in zip(whole[0].parameters(), again[0].parameters(), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(whole[1].context, again[1].context)


def test_it_learns_to_predict():
    """A bar moves right or left, as the action says."""
    torch.manual_seed(0)
    world = World(WorldShape(2, **TINY | {"palette": 4, "hidden": 16, "compress": 2, "double": 1, "bits": 8}))
    trainer = WorldTrainer(world, noise=0.0, decay=1)

    def draw(size):
        place, actions = torch.randint(2, 14, (size,)), torch.randint(2, (size,))
        columns = torch.arange(16)
        painted = [((columns == p[:, None]) * 3)[:, None].expand(-1, 20, -1) for p in (place, place + 2 * actions - 1)]
        frames, following = (x.to(torch.uint8) for x in painted)
        size = {"values": place / 16, "continues": torch.ones(size), "rewards": torch.zeros(size)}
        return {"frames": frames[:, None].repeat(1, 4, 1, 1), "actions": actions, "next_frames": following} | size

    for _ in range(120):
        trainer.update_teacher(draw(16))
    batch = draw(64)
    told = world.predict(batch["frames"], batch["actions"])
    assert (told.next_frame == batch["next_frames"]).float().mean() > 0.97  # a frame that stands still: 0.875
    assert (told.value - batch["values"]).square().mean() < batch["values"].var()
    assert (told.continues > 0.9).all()
