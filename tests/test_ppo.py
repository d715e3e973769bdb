"""PPO: numbers worked out by hand, the networks' shapes, a task it must solve."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from replaylab.algos.ppo import PPO, Config, PixelPolicy, Policy, VectorPolicy, advantages, losses, sample, train_vector

CPU = torch.device("cpu")


def column(*numbers):
    return torch.tensor(numbers)[:, None]


def test_advantages_by_hand():
    rewards, values, ended = column(1.0, 0.0, -1.0), column(0.5, 1.0, 2.0, 4.0), column(0.0, 0.0, 0.0)
    # delta: 1 + .5 - .5 = 1; 0 + 1 - 1 = 0; -1 + 2 - 2 = -1; with gamma .5, lambda .5 the weights are 1, .25, .0625
    found = advantages(rewards, values, ended, 0.5, 0.5)[:, 0]
    assert found.tolist() == [1 + 0 - 0.0625, 0 - 0.25, -1.0]
    # a game that ends at the second step: nothing behind it counts, neither value nor later deltas
    found = advantages(rewards, values, column(0.0, 1.0, 0.0), 0.5, 0.5)[:, 0]
    assert found.tolist() == [1 + 0.25 * -1.0, -1.0, -1.0]


def test_advantages_are_those_of_the_loop():
    g = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(50, 16, generator=g), torch.randn(51, 16, generator=g)
    ended = (torch.rand(50, 16, generator=g) < 0.1).float()
    expected, running = torch.zeros(50, 16), torch.zeros(16)
    for t in reversed(range(50)):
        delta = rewards[t] + 0.99 * values[t + 1] * (1 - ended[t]) - values[t]
        running = delta + 0.99 * 0.95 * (1 - ended[t]) * running
        expected[t] = running
    assert torch.allclose(advantages(rewards, values, ended, 0.99, 0.95), expected, atol=1e-5)


def test_losses_by_hand():
    # two actions, probabilities 3/4 and 1/4; the old policy had 1/2 each, so ratios 1.5 and 0.5
    outputs = torch.tensor([[math.log(3.0), 0.0, 1.0], [math.log(3.0), 0.0, 1.0]])
    old = torch.full((2,), math.log(0.5))
    policy, value, entropy, _ = losses(
        outputs, torch.tensor([0, 1]), old, torch.tensor([0.0, 1.5]), torch.tensor([1.0, 1.0]),
        torch.tensor([2.0, 3.0]), 0.1,
    )  # fmt: skip
    assert policy.item() == pytest.approx(-(1.1 + 0.5) / 2)  # the gain is clipped, the loss is not
    # first: (1 - 2)^2 = 1 against (0.1 - 2)^2 = 3.61; second: (1 - 3)^2 = 4 against (1.4 - 3)^2 = 2.56
    assert value.item() == pytest.approx(0.5 * (3.61 + 4) / 2)
    assert entropy.item() == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))
    same = torch.tensor([math.log(0.75), math.log(0.25)])
    down, near, _, apart = losses(
        outputs, torch.tensor([0, 1]), same, torch.full((2,), 0.95), torch.tensor([-1.0, 3.0]), torch.ones(2), 0.1
    )
    assert near.item() == 0  # 1 is within 0.1 of 0.95
    assert down.item() == pytest.approx(-1.0) and apart.item() == pytest.approx(0, abs=1e-6)


def test_policy_has_the_originals_shape():
    palette = np.arange(128 * 3).reshape(128, 3) % 256
    for actions, parameters in ((3, 963_204), (18, 970_899)):
        policy = PixelPolicy(palette, 4, (105, 80), actions, 0)
        assert sum(p.numel() for p in policy.parameters()) == parameters
    with pytest.raises(ValueError, match="too small"):
        PixelPolicy(palette, 4, (105, 31), 3, 0)  # convolutions leave 6, 2 and 0 columns
    frames = torch.randint(128, (2, 4, 105, 80), dtype=torch.uint8)
    outputs = policy(frames)
    assert outputs.shape == (2, 19) and outputs[:, :-1].abs().max() < 0.1  # all but random at first
    rgb = torch.tensor(palette / 255, dtype=torch.float32)[frames.long()]  # (2, 4, 105, 80, 3)
    x = rgb.permute(0, 1, 4, 2, 3).reshape(2, 12, 105, 80)  # oldest frame first, its red, green and blue together
    for layer in policy.convolutions:
        x = torch.relu(layer(x))
    assert x.shape == (2, 32, 9, 6)
    assert torch.allclose(policy.heads(torch.relu(policy.dense(x.flatten(1)))), outputs, atol=1e-5)


@pytest.mark.parametrize("shape", [(105, 80), (53, 40)])
@pytest.mark.parametrize("coloured", [False, True])
def test_blocks_give_the_sums_of_plain_convolutions(shape, coloured):
    g = torch.Generator().manual_seed(0)
    palette = np.random.default_rng(0).integers(0, 256, (128, 3))
    policy = PixelPolicy(palette, 4, shape, 18, 0)
    for p in policy.parameters():  # biases too, and heads that say something
        p.data += 0.02 * torch.randn(p.shape, generator=g)
    frames = torch.randint(128, (5, 12 if coloured else 4, *shape), dtype=torch.uint8, generator=g)
    if coloured:
        x = frames / 255
    else:
        x = (torch.tensor(palette)[frames.long()] / 255).permute(0, 1, 4, 2, 3).flatten(1, 2)
    for layer in policy.convolutions:
        x = torch.relu(nn.functional.conv2d(x, layer.weight, layer.bias, layer.stride))
    x = torch.relu(policy.dense(x.flatten(1)))
    expected = torch.cat([policy.heads.policy(x), policy.heads.value(x)], -1)
    outputs, direction = policy(frames), torch.randn(expected.shape, generator=g)
    assert torch.allclose(outputs, expected, rtol=1e-4, atol=1e-5)
    parameters = dict(policy.named_parameters())
    found, plain = (torch.autograd.grad((y * direction).sum(), parameters.values()) for y in (outputs, expected))
    for name, a, b in zip(parameters, found, plain, strict=True):
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-5 * b.abs().max().item()), name


@pytest.mark.parametrize("coloured", [False, True])
def test_playing_and_learning_compile_whole(coloured):
    stack = 12 if coloured else 4
    policy = PixelPolicy(np.zeros((128, 3)), 4, (53, 40), 3, 0)
    ppo = PPO(policy, Config(ppo_minibatch=4), 2, 4, (stack, 53, 40), torch.uint8, CPU)
    choose, objective = (torch.compile(f, backend="aot_eager", fullgraph=True) for f in (ppo._choose, ppo._objective))
    with torch.no_grad():
        assert choose(ppo.observations[0])[0].shape == (4,)
    played = tuple(x[:2].flatten() for x in (ppo.actions, ppo.log_probs, ppo.values, ppo.rewards, ppo.rewards))
    loss, _ = objective(policy.look(ppo.observations[:-1].flatten(0, 1)), played, torch.arange(4))
    loss.backward()
    assert all(p.grad is not None for p in policy.parameters())


def test_sampling_follows_the_softmax_at_a_temperature():
    torch.manual_seed(0)
    outputs = torch.tensor([math.log(4.0), 0.0, 99.0]).expand(20_000, 3)
    assert (sample(outputs) == 0).float().mean().item() == pytest.approx(0.8, abs=0.01)
    assert (sample(outputs, 0.5) == 0).float().mean().item() == pytest.approx(16 / 17, abs=0.01)


class Fixed(Policy):
    """Says the observation's first number as its value, and likes all actions alike."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def answer(self, x):
        return torch.cat([0 * x[:, :1], 0 * x[:, :1], x[:, :1] + self.bias], -1)


def test_the_end_of_a_stretch_is_bootstrapped_once():
    ppo = PPO(Fixed(), Config(gamma=0.5, gae_lambda=0.5, ppo_epochs=1, ppo_lr=1e-30), 2, 1, (1,), torch.float32, CPU)
    for seen in (1.0, 3.0):
        ppo.act(torch.tensor([[seen]]))
        ppo.receive(torch.tensor([1.0]), torch.tensor([False]))
    ppo.stop(torch.tensor([[16.0]]))
    objective, learned = ppo.objective, []
    ppo.objective = lambda seen, played, rows: learned.append(played) or objective(seen, played, rows)
    ppo.learn()
    assert ppo.values[:, 0].tolist() == [1.0, 3.0, 16.0]
    found = advantages(ppo.rewards, ppo.values, ppo.ended, 0.5, 0.5)[:, 0]
    assert found.tolist() == [1 + 1.5 - 1 + 0.25 * 6, 1 + 0.5 * 16 - 3]  # 3 and 6: r + gamma V once
    *_, advantage, returns = learned[0]
    assert returns.tolist() == [3 + 1, 6 + 3]
    assert advantage.tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5], abs=1e-4)  # 4.5 is the mean, 1.5 sqrt 2 s
    assert ppo.cursor.item() == 0


class Counting:
    """Two games that show how many steps they are old. The first is cut off after two, the second ends after two."""

    def reset(self, seed=None, options=None):
        self.age = np.zeros(2) if options is None else np.where(options["reset_mask"], 0, self.age)
        return self.age[:, None], {}

    def step(self, actions):
        self.age = self.age + 1
        over = self.age == 2
        return self.age[:, None], np.ones(2), over & [False, True], over & [True, False], {}


def test_a_game_that_is_cut_off_is_bootstrapped_where_it_stands():
    config = Config(gamma=0.5, ppo_epochs=1, ppo_lr=1e-30)
    ppo = PPO(Fixed(), config, 3, 2, (1,), torch.float32, CPU)
    assert train_vector(ppo, Counting(), 1, CPU) == [2.0, 2.0]
    assert ppo.rewards.tolist() == [[1, 1], [1 + 0.5 * 2, 1], [1, 1]]  # its last state is worth 2; what ended, nothing
    assert ppo.ended.tolist() == [[0, 0], [1, 1], [0, 0]]  # a new game's value counts for neither
    assert ppo.observations[:, :, 0].tolist() == [[0, 0], [1, 1], [0, 0], [1, 1]]


def test_solves_cartpole():
    envs = pytest.importorskip("replaylab.envs")
    torch.manual_seed(0)
    env = envs.make_vec("CartPole-v1", 8)
    config = Config(ppo_lr=1e-3, ppo_clip=0.2, ppo_epochs=6, ppo_minibatch=256)
    ppo = PPO(VectorPolicy(4, 2, 0), config, 128, 8, (4,), torch.float32, CPU)
    returns = train_vector(ppo, env, 250, CPU, until=475)  # half of all seeds are there after a hundred
    assert np.mean(returns[:20]) < 60 and np.mean(returns[-20:]) >= 475, np.mean(returns[-20:])
