"""The world model: the original's shapes, its parts, frames in and out."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from tiny_world import TINY, make_batch, tiny
from torch import nn
from torch.nn import functional as F

from replaylab.errors import UsageError
from replaylab.models import bits as module
from replaylab.models.bits import AttentionPool, cut_normal
from replaylab.models.layers import output_padding
from replaylab.models.world import Norm, World, WorldShape, refresh, snapshot, timing_signal
from replaylab.models.world_training import RewardTrainer, WorldTrainer


def count(module):
    return sum(p.numel() for p in module.parameters())


def losses(world, batch, epsilon, **more):
    names = ("frames", "actions", "next_frames", "values", "continues")
    return world.world_loss(*[batch[name] for name in names], torch.tensor(epsilon), **more)


# --- the shape


@pytest.mark.parametrize(("actions", "total"), [(3, 69_104_744), (18, 69_217_064)])
def test_as_many_parameters_as_the_original(actions, total):
    with torch.device("meta"):
        world = World(WorldShape(actions, pixels="rgb", fidelity="original"))
        assert count(world) == total and count(world.reward) == 968_867
        plain = World(WorldShape(actions, pixels="rgb", fidelity="original", reward_head="simple"))
        assert count(plain.reward) == 111_107
        ours = World(WorldShape(actions))
    assert count(ours) == total - 96 * 768 - 768 + 96 * 128 + 128 + 4609  # palette, and the continue head


def test_layers_have_the_original_s_shapes():
    shape = WorldShape(3)
    assert shape.channels == [96, 192, 384, 768, 768, 768]
    assert shape.sizes == [(105, 80), (52, 40), (26, 20), (13, 10), (6, 5), (3, 2)] and shape.bottom == 4608
    sizes = [torch.Size(s) for s in reversed(shape.sizes)]
    paddings = [output_padding(a, b) for a, b in pairwise(sizes)]
    assert paddings == [[0, 1], [1, 0], [0, 0], [0, 0], [1, 0]]
    with torch.device("meta"):
        world = World(shape)
    assert count(world.embed) == 1_248 and count(world.value) == 4_609 and count(world.pixels) == 96 * 128 + 128
    assert [count(c) for c in world.down] == [295_104, 1_180_032, 4_719_360, 9_437_952, 9_437_952]
    assert [count(c) for c in world.middle] == [5_309_184] * 2
    assert round(count(world.bits) / 1e6, 2) == 7.26


def test_an_update_reads_nothing_back_and_gives_the_right_shapes():
    """Tensors without data: whatever needs a value on the host fails. At full size."""
    with torch.device("meta"):
        world = World(WorldShape(3))
        batch = {k: v.to("meta") for k, v in make_batch(tiny(), 4).items()}
        batch["frames"] = torch.zeros((4, 4, 105, 80), dtype=torch.uint8)
        batch["next_frames"] = torch.zeros((4, 105, 80), dtype=torch.uint8)
        metrics = WorldTrainer(world, online=True).update(batch)
        assert all(value.shape == (1,) for value in metrics.values()) and "reward" in metrics
        RewardTrainer(world, focal=True).update(batch)
        told = world.predict(batch["frames"], batch["actions"])
        x_mid, x_fin = world.reward_features(batch["frames"], batch["actions"])
    assert told.next_frame.shape == (4, 105, 80) and told.next_frame.dtype == torch.uint8
    assert [x.shape for x in told[1:]] == [(4,), (4, 3), (4,), (4,)]
    assert x_mid.shape == (4, 768, 3, 2) and x_fin.shape == (4, 96, 105, 80)


def test_bad_shapes_are_named():
    for changes in ({"hidden": 10}, {"bits": 12}, {"compress": 5}, {"pixels": "cmyk"}, {"fidelity": "exact"}):
        with pytest.raises(UsageError):
            WorldShape(3, **TINY | changes)
    with pytest.raises(UsageError, match=r"\(8, 3\)"):
        World(WorldShape(3, **TINY), colours=torch.zeros(9, 3))


def test_a_seed_gives_the_same_weights_and_leaves_the_generator_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, two, other = tiny(1), tiny(1), tiny(2)
    assert torch.equal(before, torch.get_rng_state())
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(one.embed.weight, other.embed.weight)
    assert one.embed.bias.abs().max() < 0.05  # N(0, 0.01), not the default


# --- the parts


def test_timing_signal():
    signal = timing_signal(96, 105, 80)[0]
    origin = signal[:, 0, 0]
    assert (origin[:24] == 0).all() and (origin[24:48] == 1).all()
    assert (origin[48:72] == 0).all() and (origin[72:] == 1).all()
    assert math.isclose(signal[0, 3, 7], math.sin(3), rel_tol=1e-5)  # the fastest scale, rows
    assert math.isclose(signal[72, 3, 7], math.cos(7), rel_tol=1e-5)  # columns
    assert math.isclose(signal[23, 100, 0], math.sin(100 / 10_000), rel_tol=1e-4)  # the slowest
    assert math.isclose(signal[5, 10, 0], math.sin(10 * 10_000 ** (-5 / 23)), rel_tol=1e-4)


def test_norm_is_instance_normalisation():
    norm, x = Norm(6), torch.randn(3, 6, 5, 4) * 3 + 1
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    torch.testing.assert_close(norm(x), F.instance_norm(x, weight=norm.weight, bias=norm.bias, eps=1e-6))


@pytest.mark.parametrize("interleaved", [False, True])
def test_attention_pool(interleaved):
    pool, x = AttentionPool(6, 5, interleaved), torch.randn(2, 6, 3, 4)
    for i in range(2):
        flat = x[i].reshape(6, 12)
        scores = pool.heads.weight @ flat + pool.heads.bias[:, None]  # (4, positions)
        heads = scores.reshape(12, 4).t() if interleaved else scores
        parts = [flat.mean(1)] + [(flat * heads[h].softmax(0)).mean(1) for h in range(4)]
        torch.testing.assert_close(pool(x)[i], pool.out(torch.cat(parts)))


def test_cut_normal():
    noise = cut_normal(torch.zeros(100_000), 0.2)
    assert noise.abs().max() <= 0.4 + 1e-5 and abs(noise.mean()) < 0.003
    assert abs(noise.std() - 0.2 * 0.8796) < 0.002  # the deviation of a normal cut at two


def test_bytes_have_the_lowest_bit_first():
    bits = tiny().bits
    told = torch.zeros(1, 16, dtype=torch.bool)
    told[0, [0, 2, 15]] = True
    assert bits.pack(told).tolist() == [[5, 128]]
    assert torch.equal(bits.unpack(torch.tensor([[5, 128]])) > 0, told)
    assert set(bits.unpack(torch.tensor([[5, 128]])).flatten().tolist()) == {-1.0, 1.0}


@pytest.mark.parametrize("fidelity", ["improved", "original"])
def test_how_bits_are_mixed(fidelity, monkeypatch):
    bits = tiny(fidelity=fidelity).bits
    monkeypatch.setattr(bits, "put", lambda layer, found: found)
    layer, real, drawn = torch.full((20_000, 8), 9.0), torch.full((20_000, 8), 0.3), torch.full((20_000, 8), 7.0)

    def shares(epsilon):
        out = bits.mix(layer, real, drawn, torch.tensor(epsilon))
        hard = (out.abs() == 1).float().mean()
        return hard, (out == 7).float().mean(), (out == 9).float().mean(), (out.abs() < 1).float().mean(), out

    assert shares(1.0)[2] == 1  # nothing is put in while only true frames are fed
    hard, prior, layer_only, soft, out = shares(0.0)
    assert abs(layer_only - 0.2) < 0.02 and abs(prior - 0.4) < 0.02
    expected = (0.4, 0.0) if fidelity == "improved" else (0.0, 0.4)  # dreams have hard bits only
    assert abs(hard - expected[0]) < 0.02 and abs(soft - expected[1]) < 0.02
    whole = ((out == 9).all(1) | (out != 9).all(1)).float().mean()
    assert whole == 1 if fidelity == "improved" else whole < 0.5  # by sample, or by element
    hard, prior, layer_only, soft, _ = shares(0.25)
    assert abs(layer_only - 0.4) < 0.02 and abs(prior - 0.6 * 0.375) < 0.02
    rest = 0.6 * 0.625
    assert abs(hard - rest * (0.75 if fidelity == "improved" else 0.25)) < 0.02


def test_hard_bits_pass_the_gradient_and_some_are_flipped(monkeypatch):
    bits = tiny().bits
    monkeypatch.setattr(bits, "put", lambda layer, found: found)
    monkeypatch.setattr(module, "PREDICTED", 0.0)
    monkeypatch.setattr(module, "USED", 1.0)
    real = torch.full((10_000, 8), 2.0, requires_grad=True)
    out = bits.mix(torch.zeros(10_000, 8), real, torch.zeros(10_000, 8), torch.tensor(0.0))
    assert abs((out == -1).float().mean() - 0.1) < 0.01
    out.sum().backward()
    assert (real.grad != 0).all()


def reference_cell(bits):
    """The prior step by step through PyTorch's own cell: yields logits, takes bytes."""

    def run(layer, choose):
        first, hidden, memory = bits.start(layer.flatten(1)).chunk(3, 1)
        inputs, told = first, []
        for step in range(bits.read.out_features // 8):
            hidden, memory = bits.cell(inputs, (hidden, memory))
            logits = bits.byte_out(hidden)
            told.append(logits)
            inputs = bits.byte_in(F.one_hot(choose(step, logits), 256).float())
        return torch.stack(told, 1)

    return run


def test_the_prior_is_an_lstm_over_bytes(monkeypatch):
    bits, layer, real = tiny(3, bits=32).bits, torch.randn(5, 32, 2, 2), torch.randn(5, 32)
    monkeypatch.setattr(module, "PRIOR_DROPOUT", 0.0)
    wanted = bits.pack(real > 0)
    logits = reference_cell(bits)(layer, lambda step, _: wanted[:, step])
    expected = F.cross_entropy(logits.flatten(0, 1), wanted.flatten())
    torch.testing.assert_close(bits.prior_loss(layer, real), expected)
    bits.byte_out.weight.data *= 1e8  # so sure of itself that a draw is the most likely byte
    logits = reference_cell(bits)(layer, lambda step, logits: logits.argmax(1))
    assert torch.equal(bits.draw(layer), bits.unpack(logits.argmax(2)))


def test_bytes_are_drawn_by_their_probability():
    bits = tiny().bits
    bits.byte_out.weight.data.zero_()
    bits.byte_out.bias.data.fill_(-200.0)  # would overflow or vanish without the logarithm
    bits.byte_out.bias.data[[1, 6, 255]] = torch.tensor([0.2, 0.5, 0.3]).log() + 300
    drawn = bits.pack(bits.draw(torch.randn(5_000, 32, 2, 2)) > 0)
    for byte, share in ((1, 0.2), (6, 0.5), (255, 0.3)):
        assert abs((drawn == byte).float().mean() - share) < 0.02


# --- frames in and out


def test_frames_are_standardised_by_sample_and_channel():
    colours = torch.randint(256, (8, 3)).float()
    palette, rgb = World(WorldShape(3, **TINY), 0, colours), tiny(pixels="rgb")
    batch = make_batch(palette)
    batch["frames"][0, 2] = 4  # a frame of one colour
    seen = palette._standard(batch["frames"])  # (batch, h, w, 12)
    true = colours.to(torch.uint8)[batch["frames"].long()].permute(0, 1, 4, 2, 3).flatten(1, 2)
    torch.testing.assert_close(seen, rgb._standard(true))  # both ways in are one
    assert seen[0, :, :, 6:9].abs().max() < 1e-5
    channel = true[1, 5].float() / 255
    torch.testing.assert_close(seen[1, :, :, 5], (channel - channel.mean()) / channel.std())
    faint = torch.zeros(1, 12, 20, 16, dtype=torch.uint8)
    faint[0, 0, 0, 0] = 1  # deviation far below 1/sqrt(320)
    assert math.isclose(rgb._standard(faint)[0, 0, 0, 0], (1 - 1 / 320) / 255 * math.sqrt(320), rel_tol=1e-4)


def test_the_trunk_step_by_step(monkeypatch):
    """Against the same stages written down with PyTorch's own layers, in the order of the original."""
    world = tiny(4, height=21, width=18)  # 21x18, 10x9, 5x4, 2x2: paddings needed
    for norm in (*world.down_norm, *world.up_norm, world.middle_norm):
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    drawn = torch.randn(4, 16).sign()
    monkeypatch.setattr(world.bits, "draw", lambda layer: drawn)
    batch = make_batch(world)
    value, x_mid, x_fin, *_ = world.features(world.look(batch["frames"]), batch["actions"])

    def norm(layer, x):
        return F.instance_norm(x, weight=layer.weight, bias=layer.bias, eps=1e-6)

    def inject(x, first, last):  # columns of the table: gates, then shifts
        gate, shift = (world.action.weight.t()[batch["actions"]] + world.action.bias)[:, first:last].chunk(2, 1)
        return x * torch.sigmoid(gate)[..., None, None] + shift[..., None, None]

    signal = [timing_signal(c, *size) for c, size in zip((8, 16, 32), world.shape.sizes, strict=False)]
    x = F.conv2d(world._standard(batch["frames"]).permute(0, 3, 1, 2), world.embed.weight[..., None, None])
    x, skips = x + world.embed.bias[:, None, None] + signal[0], []
    for i in range(3):
        skips.append(x)
        x = norm(world.down_norm[i], torch.relu(world.down[i](x + signal[i])))
    torch.testing.assert_close(value, world.value(x.flatten(1))[:, 0], rtol=1e-3, atol=1e-3)
    x = inject(x, 0, 64)
    gate, shift = world.bits.write(drawn).chunk(2, 1)
    x = x * torch.sigmoid(gate)[..., None, None] + shift[..., None, None]
    torch.testing.assert_close(x_mid, x, rtol=1e-3, atol=1e-3)
    x = torch.relu(world.middle[0](x))
    x = norm(world.middle_norm, x + torch.relu(world.middle[1](x)))
    for i, (first, last) in zip((2, 1, 0), ((64, 128), (128, 192), (192, 224)), strict=True):
        up, size = world.up[2 - i], skips[i].shape[2:]
        x = torch.relu(up(inject(x, first, last), output_size=size))
        x = norm(world.up_norm[2 - i], x + skips[i]) + signal[i]
    torch.testing.assert_close(x_fin, x, rtol=1e-3, atol=1e-3)


def test_the_posterior_step_by_step():
    world = tiny(5)
    bits, batch = world.bits, make_batch(world)
    seen, target = world._standard(batch["frames"]), world._standard(batch["next_frames"])
    action = torch.randn(4, 16)
    x = bits.embed(torch.cat([seen, target], 3)).permute(0, 3, 1, 2) + timing_signal(8, 20, 16)
    x = bits.conv1(x * torch.sigmoid(action[:, :8, None, None]) + action[:, 8:, None, None])
    pooled = [bits.pool1(x), bits.pool2(bits.conv2(torch.relu(x)))]
    expected = bits.read(torch.cat(pooled, 1))
    torch.testing.assert_close(bits.posterior(seen, target, action, world.timing(0)), expected, rtol=1e-4, atol=1e-5)
    assert x.shape[2:] == (5, 4) and bits.conv1.in_channels == 8 and bits.read.in_features == 60


def test_rgb_logits_stand_as_in_the_original():
    world = tiny(pixels="rgb")
    world.pixels.weight.data.zero_()
    world.pixels.bias.data.zero_()
    world.pixels.bias.data[[3 * 200 + 0, 3 * 17 + 1, 3 * 255 + 2]] = 5.0  # channel 3 v + c
    batch = make_batch(world)
    told = world.predict(batch["frames"], batch["actions"]).next_frame
    assert told.shape == (4, 3, 20, 16)
    assert [told[:, c].unique().tolist() for c in range(3)] == [[200], [17], [255]]


@pytest.mark.parametrize("pixels", ["palette", "rgb"])
def test_the_pixel_loss_has_a_floor(pixels, monkeypatch):
    world = tiny(pixels=pixels)
    batch = make_batch(world)
    target = world._pixels_last(batch["next_frames"]).long()
    classes = 8 if pixels == "palette" else 256
    sure = 20 * F.one_hot(target, classes).float()
    monkeypatch.setattr(world, "_pixel_logits", lambda x: sure)
    found = losses(world, batch, 1.0)
    assert found["pixel"] == 0 and found["accuracy"] == 1
    assert torch.equal(found["next_frame"], batch["next_frames"])
    sure[0, 0, 0] = 0  # one pixel knows nothing
    expected = (math.log(classes) - 0.03) / (target.numel() / (1 if pixels == "palette" else 3))
    assert math.isclose(losses(world, batch, 1.0)["pixel"], expected, rel_tol=1e-3)


def test_rgb_weights_are_laid_out_as_the_original_s():
    """Output 3 v + c says how likely colour c has intensity v."""
    world = tiny(pixels="rgb")
    x = torch.randn(2, world.shape.hidden, 5, 4)
    plain = world.pixels(x.permute(0, 2, 3, 1))
    found = world._pixel_logits(x)
    for colour, intensity in ((0, 0), (1, 7), (2, 255)):
        torch.testing.assert_close(found[..., colour, intensity], plain[..., 3 * intensity + colour])


def test_the_parts_of_the_loss():
    world = tiny()
    batch = make_batch(world)
    torch.manual_seed(0)
    found = losses(world, batch, 0.3, reward_target=batch["rewards"])
    assert set(found) == {"loss", "pixel", "value", "prior", "continue", "reward", "accuracy", "next_frame"}
    parts = [found[name] for name in ("pixel", "value", "prior", "continue", "reward")]
    torch.testing.assert_close(found["loss"], sum(parts))
    torch.manual_seed(0)
    sight = world.look(batch["frames"], train=True)
    value = world.features(sight, batch["actions"], batch["next_frames"], torch.tensor(0.3)).value
    torch.testing.assert_close(found["value"], 0.01 * (value - batch["values"]).square().mean())
    found["loss"].backward()
    missing = {name for name, p in world.named_parameters() if p.grad is None}
    assert missing == set()
    assert "continue" not in losses(tiny(fidelity="original"), batch, 0.3)


def test_returns_shape_the_trunk_only_in_the_original():
    for fidelity, shaped in (("improved", False), ("original", True)):
        world = tiny(fidelity=fidelity)
        losses(world, make_batch(world), 0.3)["value"].backward()
        assert (world.embed.weight.grad is not None) == shaped and world.value.weight.grad is not None


def test_dropout_in_dreams_only_in_the_original():
    for fidelity, same in (("improved", True), ("original", False)):
        world = tiny(fidelity=fidelity)
        batch = make_batch(world)
        values = [world.predict(batch["frames"], batch["actions"]).value for _ in range(2)]
        assert torch.equal(*values) == same
    assert (world.predict(batch["frames"], batch["actions"]).continues == 1).all()  # it knows no end


def test_the_answer_depends_on_the_action_but_the_value_does_not():
    world = tiny()
    batch = make_batch(world)
    told = []
    for action in (0, 1):
        torch.manual_seed(0)
        told.append(world.predict(batch["frames"], torch.full((4,), action)))
    assert torch.equal(told[0].value, told[1].value)
    assert not torch.equal(told[0].reward_logits, told[1].reward_logits)
    assert torch.equal(told[0].reward, told[0].reward_logits.argmax(1).float() - 1)


def test_rare_rewards_are_told_as_rarely():
    world, rarity = tiny(), torch.tensor([-2.0, 0.5, -1.0])
    batch, told = make_batch(world), []
    for which in (torch.zeros(3), rarity):
        world.rarity.copy_(which)
        torch.manual_seed(0)
        told.append(world.predict(batch["frames"], batch["actions"]))
    torch.testing.assert_close(told[1].reward_logits, told[0].reward_logits + rarity)
    assert torch.equal(told[0].reward, told[1].reward)  # as the head was taught, for its confusion matrix
    dream = snapshot(tiny())
    refresh(dream, world)
    assert torch.equal(dream.rarity, rarity)


def test_a_snapshot_in_another_precision():
    world = tiny(precision="bf16")
    dream, batch = snapshot(world), make_batch(world)
    assert dream.embed.weight.dtype == torch.bfloat16 and world.embed.weight.dtype == torch.float32
    places = [p.data_ptr() for p in dream.parameters()]
    world.value.bias.data += 3
    refresh(dream, world)
    assert places == [p.data_ptr() for p in dream.parameters()]
    near = [w.predict(batch["frames"], batch["actions"]).value for w in (world, dream)]
    assert (near[0] - near[1]).abs().max() < 0.05
    exact = World(world.shape, 0, precision="fp32")
    exact.load_state_dict(world.state_dict())
    assert (exact.predict(batch["frames"], batch["actions"]).value - near[0]).abs().max() < 0.1


def test_a_compiler_sees_one_graph():
    world = tiny(bits=8, compress=2)
    batch = make_batch(world)
    whole = torch.compile(world.world_loss, fullgraph=True, dynamic=False, backend="eager")
    names = ("frames", "actions", "next_frames", "values", "continues")
    assert whole(*[batch[name] for name in names], torch.tensor(0.5))["loss"].isfinite()
