from __future__ import annotations

import json
import time
from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch
from conftest import make_episodes

import replaylab
from replaylab.algos import Spaces, dt
from replaylab.cli import main
from replaylab.data.episodes import from_rows
from replaylab.data.sample import FrameStacks, Store, Windows
from replaylab.errors import UsageError
from replaylab.models.gpt import STYLES, DecisionTransformer, Shape
from replaylab.models.mlp import generators
from replaylab.models.pixels import NatureCNN
from replaylab.run import RunFolder
from replaylab.step import Stepper

CPU = torch.device("cpu")
TINY = {"context": 4, "width": 16, "layers": 2, "heads": 2, "batch_size": 8, "warmup_steps": 1, "steps": 20}
BREAKOUT = "tests/data/dqn_replay/Breakout"


def make_agent(log, seeds=(0,), **settings):
    agent = dt.Agent(dt.Config(**TINY | settings), Spaces.of(log), list(seeds), CPU)
    return agent, agent.phases(log)[0]


def count(model):
    return sum(p.numel() for p in model.parameters())


@pytest.fixture(scope="module")
def pixels():
    return replaylab.load(BREAKOUT)


# --- the model


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


# --- learning


def test_returns_and_timesteps_by_hand():
    ends = np.array([0, 0, 1, 0, 1], bool)
    rewards = np.array([1.0, 2, 4, 8, 16])
    log = from_rows(np.arange(5.0)[:, None], np.zeros((5, 1)), rewards, ends)
    agent, phase = make_agent(log, context=2, rtg_scale=2.0)
    batch = phase.sampler.gather(torch.tensor([[0, 1, 2, 3]]))
    assert batch["returns_to_go"][0].tolist() == [[7, 6], [6, 4], [4, 0], [24, 16]]
    assert batch["timesteps"][0].tolist() == [[0, 1], [1, 2], [2, 0], [0, 1]]
    assert batch["mask"][0].tolist() == [[1, 1], [1, 1], [1, 0], [1, 1]]
    seen = []
    agent.model.register_forward_hook(lambda module, inputs, output: seen.append(inputs[2]))
    agent.loss(batch)
    assert seen[0][0].tolist() == [[3.5, 3], [3, 2], [2, 0], [12, 8]]  # scaled
    late = make_agent(log, context=2, mode="delayed")[1].sampler.gather(torch.tensor([[0, 1, 3]]))
    assert late["returns_to_go"][0].tolist() == [[7, 7], [7, 7], [24, 24]]


def test_loss_by_hand():
    """Mean over the action dimensions of real steps only."""
    log = make_episodes(lengths=(5, 3))
    agent, phase = make_agent(log, dropout=0.0)
    batch = phase.sampler.gather(torch.tensor([[0, 6]]))  # four real steps, and two
    predicted = agent.predict(agent.hidden(batch)[..., -2, :])
    errors = [(predicted[0, 0, t] - batch["actions"][0, 0, t]).square().mean() for t in range(4)]
    errors += [(predicted[0, 1, t] - batch["actions"][0, 1, t]).square().mean() for t in (0, 1)]
    torch.testing.assert_close(agent.loss(batch)["loss"][0], sum(errors) / 6)
    discrete = make_episodes(lengths=(5, 3), discrete=True)
    agent, phase = make_agent(discrete, dropout=0.0)
    batch = phase.sampler.gather(torch.tensor([[6]]))
    logits = agent.predict(agent.hidden(batch)[..., -2, :])[0, 0].log_softmax(-1)
    expected = -(logits[0, batch["actions"][0, 0, 0]] + logits[1, batch["actions"][0, 0, 1]]) / 2
    torch.testing.assert_close(agent.loss(batch)["loss"][0], expected)


def test_looking_ahead_by_hand():
    log = make_episodes(lengths=(5, 3))
    agent, phase = make_agent(log, dropout=0.0, ahead=0.5, rtg_scale=2.0)
    batch = phase.sampler.gather(torch.tensor([[5]]))  # steps 0, 1, 2 before one padded slot
    hidden, expected = agent.hidden(batch)[0, 0], []
    for slot, row in ((0, 6), (1, 7)):  # from the action of a step to the next step
        state = agent.model.next_state(hidden[None, slot, -1:])[0, 0]
        togo = agent.model.next_return(hidden[None, slot, -1:])[0, 0, 0]
        normal = agent.normalizer(torch.tensor(log.observations[row]))
        expected.append((state - normal).square().mean() + (togo - log.returns_to_go()[row] / 2).square())
    torch.testing.assert_close(agent.loss(batch)["ahead"][0], sum(expected) / 2, check_dtype=False)
    agent.update(batch)
    assert agent.model.next_state.weight.grad.abs().sum() > 0


def rate_after(agent, done):
    agent.done.fill_(done)
    return float(agent.rate())


def test_warm_up_and_cosine_as_published():
    log = make_episodes()
    agent, _ = make_agent(log, warmup_steps=10_000)
    for done, expected in ((0, 1e-4), (4_999, 0.5), (9_999, 1.0), (50_000, 1.0)):
        assert rate_after(agent, done) == pytest.approx(expected)
    epoch = 500_000 // 128
    atari = dt.PRESETS["atari"] | {"steps": 5 * epoch, "width": 16, "layers": 1, "heads": 2}
    agent = dt.Agent(dt.Config(**atari), Spaces.of(log), [0], CPU)
    rates = [rate_after(agent, epochs * epoch - 1) for epochs in range(1, 6)]
    np.testing.assert_allclose(rates, [0.93, 0.75, 0.50, 0.25, 0.10], atol=0.005)
    assert rate_after(agent, 0) == pytest.approx(128 * 30 / 10_240)  # part of the warm-up's predicted actions
    assert rate_after(agent, 4.76 * epoch) > 0.1 == pytest.approx(rate_after(agent, 4.78 * epoch))  # the floor


def test_the_rate_reaches_the_optimiser():
    log = make_episodes()
    agent, phase = make_agent(log, lr=0.5, warmup_steps=10, decay_on="weights", weight_decay=0.1)
    Stepper(phase, CPU).run(0, 3)
    groups = agent.optimizers["model"].param_groups
    assert [float(g["lr"]) for g in groups] == pytest.approx([0.15, 0.15])
    assert [g["weight_decay"] for g in groups] == [0.1, 0.0]
    weights = {id(p) for p in groups[0]["params"]}
    named = {name for name, p in agent.model.named_parameters() if id(p) in weights}
    assert "blocks.0.qkv.weight" in named and "head.weight" in named and len(named) == 3 + 1 + 2 * 4
    assert all(name.endswith("weight") and "norm" not in name and "timestep" not in name for name in named)


def test_top_fraction_keeps_the_statistics_of_all():
    log = make_episodes(lengths=(6, 6))
    agent, phase = make_agent(log, top_fraction=0.5)
    best = int(log.returns.argmax())
    np.testing.assert_array_equal(phase.sampler.store.episodes.observations, log.observations[best * 6 : best * 6 + 6])
    np.testing.assert_allclose(agent.normalizer.mean, log.observations.mean(0), rtol=1e-4, atol=1e-6)


def test_targets_and_scales():
    returns = np.array([-3.0, 2.0])
    for name in ("d4rl/hopper", "Hopper-v5", "mujoco/hopper/medium-v0", "hopper-medium-v2"):
        assert dt.scale_and_target(name, returns) == (1000, 3600)
    assert dt.scale_and_target("atari/Breakout", returns) == (1, 90)
    assert dt.scale_and_target("D4RL/pen/human-v2", returns) == dt.scale_and_target("AdroitHandPen-v1", returns)
    assert dt.scale_and_target("atari/alien", returns) == (1, 2)
    assert dt.scale_and_target(None, returns) == (3, 2)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_it_learns_and_a_seed_does_not_depend_on_its_neighbours(precision):
    log = make_episodes(lengths=(20, 30))
    settings = {"dropout": 0.0, "lr": 3e-3, "precision": precision, "clip": 1.0}
    found = {}
    for seeds in ([3, 4], [4]):
        agent, phase = make_agent(log, seeds, **settings)
        stepper = Stepper(phase, CPU)
        stepper.run(0, 1)
        first = stepper.read()["loss"][-1]
        stepper.run(1, 150)
        last = stepper.read()["loss"][-1]
        assert last < first / 2
        found[len(seeds)] = agent.model.blocks[0].qkv.weight[-1], agent.model.head.weight[0]
    if precision == "fp32":
        torch.testing.assert_close(found[1][0], found[2][0], rtol=0.02, atol=2e-3)
    assert not torch.equal(found[2][1], found[1][1])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("frames", [False, True])
def test_captured_equals_eager(frames, pixels):
    log, device, found = pixels if frames else make_episodes(lengths=(20, 30)), torch.device("cuda"), []
    for mode in ("off", "auto"):
        style = "tanh" if frames else "norm"
        config = dt.Config(**TINY | {"dropout": 0.0, "style": style})
        agent = dt.Agent(config, Spaces.of(log), [0, 1], device)
        stepper = Stepper(agent.phases(log)[0], device, compile=mode)
        losses = []
        for step in range(20):
            stepper.run(step, 1)
            losses.append(stepper.read()["loss"])
        found.append(losses)
    np.testing.assert_allclose(found[0], found[1], rtol=2e-3)


# --- acting


def histories(agent, environments, steps, seed=0):
    g = torch.Generator().manual_seed(seed)
    shape = (len(agent.seeds), environments)
    observations = torch.randn(steps, *shape, *agent.shape.observation, generator=g)
    return observations, torch.randn(steps, *shape, generator=g)


def play(agent, observations, rewards, targets=()):
    state, actions = agent.begin(observations.shape[2], targets), []
    for t in range(len(observations)):
        action, state = agent.act(observations[t], state)
        actions.append(action.clone())
        state.receive(rewards[t])
    return torch.stack(actions)


@pytest.mark.parametrize("settings", [{}, {"style": "tanh"}, {"condition": "none"}, {"mode": "delayed"}])
def test_acting_is_a_forward_pass_over_the_last_steps(settings):
    """Without any padding before the window is full, and over the last K steps after."""
    log = make_episodes()
    agent, _ = make_agent(log, (0, 1), rtg_scale=4.0, **settings)
    agent.eval()
    observations, rewards = histories(agent, 3, 9)
    targets = [] if settings.get("condition") == "none" else [5.0, 3.0, 1.0]
    actions = play(agent, observations, rewards, targets)
    start = torch.tensor(targets or [0.0] * 3).expand(2, 3)
    for t in range(9):
        window = slice(max(0, t - 3), t + 1)
        spent = [rewards[:s].sum(0) for s in range(t + 1)]
        asked = torch.stack([start - (0 if settings.get("mode") else s) for s in spent], 2)[:, :, window]
        states = agent.model.encode(agent.normalizer(observations[window].permute(1, 2, 0, 3)))
        steps = torch.arange(t + 1)[window].expand(2, 3, -1)
        past = torch.cat([actions[window][:-1], torch.full((1, 2, 3, 2), 9.0)]).permute(
            1, 2, 0, 3
        )  # the last is hidden
        hidden = agent.model(states, past, asked / 4, steps)
        torch.testing.assert_close(agent.predict(hidden[:, :, -1, -2]), actions[t], rtol=1e-3, atol=1e-5)


def test_a_batch_is_as_good_as_one_by_one():
    log = make_episodes(discrete=True)
    agent, _ = make_agent(log)
    agent.eval()
    observations, rewards = histories(agent, 4, 8)
    together = play(agent, observations, rewards, [2.0, -2.0])
    for i in range(4):
        alone = play(agent, observations[:, :, i : i + 1], rewards[:, :, i : i + 1], [2.0 if i < 2 else -2.0])
        assert torch.equal(alone, together[:, :, i : i + 1])


def test_clipped_rewards_are_clipped_when_acting():
    log = make_episodes()
    log.meta["reward_clipping"] = True
    agent, _ = make_agent(log, rtg_scale=2.0)
    state = agent.begin(3, [10.0])
    state.receive(torch.tensor([[7.0, -7.0, 0.5]]))
    assert state.asked[0].tolist() == [4.5, 5.5, 4.75]


def test_drawn_actions():
    agent, _ = make_agent(make_episodes(discrete=True))
    logits = torch.log(torch.tensor([0.1, 0.6, 0.3])).expand(20_000, 3)
    agent.config.temperature = 1.0
    torch.manual_seed(0)
    shares = torch.bincount(agent._choose(logits), minlength=3) / 20_000
    np.testing.assert_allclose(shares, [0.1, 0.6, 0.3], atol=0.015)
    agent.config.top_k = 2
    shares = torch.bincount(agent._choose(logits), minlength=3) / 20_000
    np.testing.assert_allclose(shares, [0, 2 / 3, 1 / 3], atol=0.015)
    agent.config.temperature = 0.0
    assert (agent._choose(logits) == 1).all()


class Levers(gymnasium.Env):
    """Ten steps; the reward is the action's sign. Nothing in the observation says which one pays."""

    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 10
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.left -= 1
        return np.zeros(1, np.float32), float(np.sign(action[0])), self.left == 0, False, {}


if "DTLevers-v0" not in gymnasium.registry:
    gymnasium.register("DTLevers-v0", Levers)


@pytest.fixture(scope="module")
def levers():
    """Half of the episodes always pull +0.8 and return 10, half -0.8 and return -10."""
    sign = np.repeat(np.tile([1.0, -1.0], 10), 10)
    ends = np.arange(200) % 10 == 9
    meta = {"env_id": "DTLevers-v0", "action_low": [-1.0], "action_high": [1.0]}
    return from_rows(np.zeros((200, 1)), 0.8 * sign[:, None], sign, ends, meta=meta)


@pytest.fixture(scope="module")
def levers_run(levers, tmp_path_factory):
    out = tmp_path_factory.mktemp("dt") / "levers"
    settings = {"steps": 150, "eval_every": -1, "final_episodes": 2, "seeds": [0, 1], "device": "cpu"}
    return replaylab.train("dt", levers, out=out, preset="debug", **settings)


def test_what_is_asked_for_is_what_is_done(levers_run):
    """The first action has nothing but the asked return to go by."""
    for target, sign in ((10.0, 1), (-10.0, -1)):
        policy = replaylab.load_policy(levers_run, seed=1, target=target)
        assert sign * policy.act(np.zeros(1)) > 0.4
    last = RunFolder(levers_run).lines("eval.jsonl")[-1]
    assert last["settings"] == {"target": 10.0} and last["returns"] == [10.0, 10.0]


def test_rewards_are_taken_off_in_evaluation(levers_run, monkeypatch):
    contexts = []

    def begin(agent, batch, targets):
        contexts.append(dt.Context(agent, batch, torch.full((batch,), targets[0])))
        return contexts[-1]

    monkeypatch.setattr(dt.Agent, "begin", begin)
    replaylab.evaluate(levers_run, episodes=2, targets=[10.0], device="cpu")  # of which 10 are received
    torch.testing.assert_close(contexts[0].asked, torch.zeros(2, 2), rtol=0, atol=1e-5)


def test_all_targets_in_one_evaluation(levers_run, capsys):
    records = replaylab.evaluate(levers_run, episodes=3, targets=[10.0, -10.0], device="cpu")
    assert [(r["seed"], r["settings"]["target"], r["returns"]) for r in records] == [
        (0, 10.0, [10.0] * 3), (0, -10.0, [-10.0] * 3), (1, 10.0, [10.0] * 3), (1, -10.0, [-10.0] * 3),
    ]  # fmt: skip
    capsys.readouterr()
    assert main(["eval", str(levers_run), "--target", "10", "-10", "30", "--episodes", "2", "--device", "cpu"]) == 0
    out, errors = capsys.readouterr()
    assert "(target 10): DTLevers-v0 return 10.0" in out and "(target -10): DTLevers-v0 return -10.0" in out
    assert "target 30 is outside the data's returns, -10 to 10" in errors
    assert main(["eval", str(levers_run), "--target", "10", "-10", "--episodes", "2", "--json", "--device", "cpu"]) == 0
    assert [row["settings"]["target"] for row in json.loads(capsys.readouterr().out)] == [10, -10]


def test_a_policy_keeps_its_own_context(levers_run):
    policy = replaylab.load_policy(levers_run)
    rng = np.random.default_rng(0)
    observations = rng.standard_normal((7, 2, 1)).astype(np.float32)
    rewards = rng.standard_normal((7, 2))
    played = [policy.act(o, None if t == 0 else rewards[t - 1]) for t, o in enumerate(observations)]
    assert not np.allclose(policy.act(observations[0], rewards[-1]), played[0])
    policy.reset()
    np.testing.assert_allclose(policy.act(observations[0]), played[0], rtol=1e-4)
    with pytest.raises(UsageError, match="1 observations, but 2 before: reset first"):
        policy.act(observations[0, 0])
    again = policy.act(observations[1], rewards[0])
    np.testing.assert_allclose(again, played[1], rtol=1e-4)
    policy.reset(np.array([True, False]))  # the first environment begins anew, the second goes on
    mixed = policy.act(np.stack([observations[0, 0], observations[2, 1]]), np.array([0.0, rewards[1, 1]]))
    np.testing.assert_allclose(mixed, [played[0][0], played[2][1]], rtol=1e-4)


def test_the_debug_preset_is_quick(tmp_path):
    pytest.importorskip("mujoco")
    began = time.monotonic()
    run = replaylab.train("dt", "sample", out=tmp_path / "r", preset="debug", device="cpu")
    assert time.monotonic() - began < 60 and RunFolder(run).lines("eval.jsonl")[-1]["settings"] == {"target": 3600.0}
    losses = [line["loss"] for line in RunFolder(run).lines("metrics.jsonl")]
    assert np.mean(losses[-10:]) < 0.8 * np.mean(losses[:10])


def test_without_returns_there_is_no_target(levers, tmp_path):
    settings = {"steps": 5, "condition": "none", "final_episodes": 1, "device": "cpu"}
    run = replaylab.train("dt", levers, out=tmp_path / "r", preset="debug", **settings)
    assert RunFolder(run).lines("eval.jsonl")[-1]["settings"] == {}
    with pytest.raises(UsageError, match="not asked for a return"):
        replaylab.evaluate(run, episodes=1, targets=[1.0])


@pytest.mark.parametrize("discrete", [False, True])
def test_half_and_resume_is_the_whole(discrete, tmp_path):
    """Dropout included."""
    log = make_episodes(lengths=(20, 15), discrete=discrete)
    same_for_all = TINY | {"seeds": [0, 1], "device": "cpu", "steps": 30}
    replaylab.train("dt", log, out=tmp_path / "whole", **same_for_all)
    replaylab.train("dt", log, out=tmp_path / "half", **same_for_all | {"steps": 13})
    replaylab.train("dt", log, out=tmp_path / "half", resume=True, **same_for_all)
    for a, b in zip(*(RunFolder(tmp_path / name).load()[:2] for name in ("whole", "half")), strict=True):
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# --- frames


@pytest.mark.parametrize("resident", [True, False])
def test_windows_of_frame_stacks(pixels, resident):
    store = Store(pixels, "cpu", resident)
    second = int(pixels.offsets[1])
    index = torch.tensor([[0, 1, second, second - 2]])
    batch = Windows(store, [0], 4, length=5, stack=4).gather(index)
    assert batch["observations"].shape == (1, 4, 5, 4, 84, 84) and batch["observations"].dtype == torch.uint8
    stacks = FrameStacks(store)
    for i, start in enumerate((0, 1, second)):
        torch.testing.assert_close(batch["observations"][0, i], stacks(start + torch.arange(5)))
    assert (batch["observations"][0, 2, 0, :3] == 0).all() and (batch["observations"][0, 2, 0, 3] > 0).any()
    last = batch["observations"][0, 3, 1, -1]
    assert (batch["observations"][0, 3, 2:, -1] == last).all()  # padded slots: nothing of the next episode
    torch.testing.assert_close(batch["observations"][0, 3, :2], stacks(second - 2 + torch.arange(2)))


@pytest.mark.parametrize("normalize", [False, True])
def test_frames_are_seen_as_by_the_nature_network(pixels, normalize):
    """Divided by 255, or without what is in all of them and divided by how far they differ from that."""
    agent, phase = make_agent(pixels, (0, 1), style="tanh", normalize=normalize)
    frames, nature = phase.sampler.gather(torch.tensor([[0], [40]]))["observations"], NatureCNN()
    mine, backdrop, spread = agent.model.embed_state, 0.0, 255.0
    if normalize:
        backdrop = pixels.observations.mean(0).round()
        spread = np.square(pixels.observations - backdrop).mean() ** 0.5
    shown = (frames - torch.tensor(backdrop)).float() * (255 / spread)  # the network divides by 255 again
    for i in (0, 1):
        for conv, reference in zip(mine.convs, nature.layers[::2], strict=False):
            reference.load_state_dict({"weight": conv.weight[i], "bias": conv.bias[i]})
        expected = torch.tanh(nature(shown[i, 0]) @ mine.dense.weight[i] + mine.dense.bias[i])
        torch.testing.assert_close(agent.model.encode(frames)[i, 0], expected, rtol=1e-4, atol=1e-5)


def test_cached_frames_are_exact(pixels):
    agent, phase = make_agent(pixels, style="tanh")
    agent.eval()
    torch.nn.init.normal_(agent.model.embed_timestep.weight, 0, 0.3)
    batch = phase.sampler.gather(torch.tensor([[10]]))
    state = agent.begin(1, [3.0])
    for t in range(4):
        _, state = agent.act(batch["observations"][:, :, t], state)
    states = agent.model.encode(batch["observations"])
    torch.testing.assert_close(state.states, states, rtol=1e-4, atol=1e-5)


def test_atari_from_logs_to_scores(tmp_path, capsys):
    pytest.importorskip("ale_py")
    small = "--context 3 --batch-size 2 --width 16 --heads 2 --layers 1 --steps 3 --eval-episodes 1 --final-episodes 1"
    words = ["train", "dt", "--data", BREAKOUT, "--out", str(tmp_path / "r"), "--preset", "atari", "--device", "cpu"]
    assert main([*words, *small.split(), "--eval-every", "-1"]) == 0
    record = RunFolder(tmp_path / "r").lines("eval.jsonl")[-1]
    assert record["env"] == "atari/breakout" and record["settings"] == {"target": 90.0} and record["normalized"]
    policy = replaylab.load_policy(tmp_path / "r")
    assert policy.act(np.zeros((4, 84, 84), np.uint8)) in range(4)


def test_a_part_of_a_log(pixels, capsys):
    assert main(["data", "info", BREAKOUT, "--num-buffers", "1", "--trajectories-per-buffer", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["episodes"] == 3
    assert len(replaylab.load(BREAKOUT, max_steps=500)) < 1000 < len(pixels)
    with pytest.raises(UsageError, match="did you mean 'max_steps'"):
        replaylab.load(BREAKOUT, max_step=500)
    assert main(["data", "info", "sample", "--num-buffers", "1"]) == 2
    assert "only a DQN-replay log can be read in part" in capsys.readouterr().err


def test_what_does_not_fit_is_said(pixels):
    with pytest.raises(UsageError, match="multiple of heads"):
        make_agent(make_episodes(), heads=3)
    with pytest.raises(UsageError, match="not frames"):
        make_agent(pixels, ahead=1.0)
    pixels.meta.pop("frame_stack")
    try:
        with pytest.raises(UsageError, match="stacks of 84 x 84"):
            make_agent(pixels)
    finally:
        pixels.meta["frame_stack"] = 4


def test_frames_take_the_preset_for_frames(pixels, tmp_path, capsys):
    small = {"steps": 1, "batch_size": 2, "context": 2, "width": 16, "final_episodes": 0, "eval_every": -1}
    run = replaylab.train("dt", pixels, out=tmp_path / "r", env="atari/breakout", **small)
    config = RunFolder(run).config()
    assert "--preset atari" in capsys.readouterr().err and config["preset"] == "atari"
    assert (config["layers"], config["style"], config["width"]) == (6, "tanh", 16)
    assert dt.usual_preset(replace(pixels, meta=pixels.meta | {"env_id": "atari/pong"})) == "pong"
    assert dt.usual_preset(make_episodes()) is None


def test_a_target_outside_the_data_is_noted():
    log = make_episodes()
    agent, _ = make_agent(log, target=1e6)
    assert agent.notes == [f"asks for a return of 1e+06; the data has {log.returns.min():g} to {log.returns.max():g}"]
    assert make_agent(log, target=float(log.returns.mean()))[0].notes == []
