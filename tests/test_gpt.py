"""The decision transformer's network: its size, its start, what depends on what."""

from __future__ import annotations

import pytest
import torch
from conftest import make_episodes
from tiny_dt import make_agent

from replaylab.models.gpt import STYLES, DecisionTransformer, Shape
from replaylab.models.mlp import generators


def count(model):
    return sum(p.numel() for p in model.parameters())


def test_as_many_parameters_as_the_original():
    hopper = Shape((11,), 3, False)
    assert count(DecisionTransformer(generators([0]), hopper)) == 726_019
    both = count(DecisionTransformer(generators([0]), Shape((11,), 3, False, ahead=True)))
    assert both + 1 * 128 == 727_695  # the original keeps a token table of one row that nothing reads
    cheetah = count(DecisionTransformer(generators([0]), Shape((17,), 6, False, ahead=True)))
    assert cheetah + 128 == 730_008
    assert count(DecisionTransformer(generators([0, 1, 2]), hopper)) == 3 * 726_019
    breakout = Shape((4, 84, 84), 4, True, 30, 128, 6, 8, "gelu", style="tanh", max_timestep=2655)
    unused_table, spare_place, our_bias = 4 * 128, 128, 4
    assert count(DecisionTransformer(generators([0]), breakout)) == 2_022_688 - unused_table - spare_place + our_bias


def test_initial_weights():
    gym = DecisionTransformer(generators([0]), Shape((11,), 3, False))
    for layer in (gym.blocks[0].qkv, gym.blocks[2].down):
        assert abs(layer.weight.std() - 0.02) < 0.001 and (layer.bias == 0).all()
    assert abs(gym.embed_timestep.weight.std() - 0.02) < 0.001
    original, _ = make_agent(make_episodes(), timestep_std=1.0, max_timestep=1000)
    assert abs(original.model.embed_timestep.weight.std() - 1) < 0.02
    assert gym.embed_state.weight.abs().max() <= 11**-0.5 and (gym.head.bias != 0).all()
    atari = DecisionTransformer(generators([0]), Shape((4, 84, 84), 4, True, 30, style="tanh"))
    assert (atari.embed_timestep.weight == 0).all() and (atari.embed_place.weight == 0).all()
    assert abs(atari.head.weight.std() - 0.02) < 0.003 and abs(atari.embed_action.weight.std() - 0.02) < 0.003
    assert 0.5 < atari.embed_return.weight.abs().max() <= 1


def random_inputs(shape, batch=3, members=2):
    g = torch.Generator().manual_seed(1)
    k, lead = shape.context, (members, batch)
    states = torch.randn(*lead, k, shape.width, generator=g)
    actions = torch.randint(shape.actions, (*lead, k), generator=g)
    actions = actions if shape.discrete else torch.randn(*lead, k, shape.actions, generator=g)
    steps = torch.arange(k).expand(*lead, k)
    return [states, actions, torch.randn(*lead, k, generator=g), steps]


def make_model(**changes):
    shape = Shape(
        **{"observation": (5,), "actions": 3, "discrete": False, "context": 6, "width": 16, "heads": 2} | changes
    )
    model = DecisionTransformer(generators([0, 1]), shape).eval()
    for name, parameter in model.named_parameters():  # tables that start from zero would hide mistakes
        if "embed" in name:
            torch.nn.init.normal_(parameter, 0, 0.3, generator=torch.Generator().manual_seed(len(name)))
    return model, random_inputs(shape)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("discrete", [False, True])
def test_nothing_depends_on_the_future(style, discrete):
    model, inputs = make_model(style=style, discrete=discrete)
    before = model(*inputs)
    for part, token in ((2, 0), (0, 1), (1, 2)):  # return, state, action of step 3
        changed = [x.clone() for x in inputs]
        changed[part][:, :, 3] = (changed[part][:, :, 3] + 1) % 3
        moved = (model(*changed) - before).abs().amax((0, 1, 4)) > 1e-6  # (steps, tokens)
        expected = torch.arange(18).view(6, 3) >= 3 * 3 + token
        assert torch.equal(moved, expected)


def test_measured_numbers_are_not_rounded_to_bfloat16():
    """Returns of 3.600 and 3.604 are one number to bfloat16, which has 3.594 and 3.609."""
    layer = DecisionTransformer(generators([0]), Shape((11,), 3, False)).embed_return
    with torch.autocast("cpu", torch.bfloat16):
        told = layer(torch.tensor([[[3.600], [3.604]]]))
    assert told.dtype == torch.float32 and not torch.equal(told[0, 0], told[0, 1])


@pytest.mark.parametrize("style", STYLES)
def test_padding_changes_nothing(style):
    model, inputs = make_model(style=style)
    before = model(*inputs)
    changed = [x.clone() for x in inputs]
    for part in changed[:3]:
        part[:, :, 4:] += 7
    changed[3][:, :, 4:] = 5
    torch.testing.assert_close(model(*changed)[:, :, :4], before[:, :, :4])
    assert before.isfinite().all()
    alone = model(*[x[:, :, :4] for x in inputs])  # the same steps without any padding
    torch.testing.assert_close(alone, before[:, :, :4], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("returns", [True, False])
def test_only_what_is_read_is_computed(returns):
    model, inputs = make_model(returns=returns)
    whole = model(*inputs)
    torch.testing.assert_close(model(*inputs, model.states), whole[..., -2, :], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model(*inputs, slice(-2, -1)), whole[:, :, -1:, -2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [{}, {"style": "tanh", "discrete": True}])
def test_members_do_not_mix(shape):
    model, inputs = make_model(**shape)
    alone = DecisionTransformer(generators([1]), model.shape).eval()
    alone.load_state_dict({name: value[1:] for name, value in model.state_dict().items()})
    torch.testing.assert_close(alone(*[x[1:] for x in inputs]), model(*inputs)[1:], rtol=1e-4, atol=1e-5)
