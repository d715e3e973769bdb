"""The decision transformer: learning with answers worked out by hand, acting, frames."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import make_episodes
from tiny_dt import TINY, make_agent

import replaylab
from replaylab.algos import Spaces, dt
from replaylab.cli import main
from replaylab.data.episodes import from_rows
from replaylab.data.sample import FrameStacks, Store, Windows
from replaylab.errors import UsageError
from replaylab.models.pixels import NatureCNN
from replaylab.run import RunFolder
from replaylab.step import Stepper

CPU = torch.device("cpu")
BREAKOUT = "tests/data/dqn_replay/Breakout"


@pytest.fixture(scope="module")
def pixels():
    return replaylab.load(BREAKOUT)


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


def test_a_share_of_windows_begins_where_episodes_do():
    log = make_episodes(lengths=(5, 3, 8))
    usual, drawn = (make_agent(log, (0, 1), batch_size=10, starts=share)[1].sampler.draw(7, 50) for share in (0, 0.3))
    assert set(drawn[..., :3].flat) == {0, 5, 8} and np.array_equal(drawn[..., 3:], usual[..., 3:])
    assert not np.array_equal(drawn[:, 0, :3], drawn[:, 1, :3])


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
    state.time += 1
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
    for settings, told in (
        ({"betas": [0.9, 1.0]}, "betas takes two numbers below 1, not 0.9 1.0"),
        ({"ahead": 1.0, "context": 1}, "context must be at least 2"),
        ({"condition": "none", "target": 5.0}, "no return is asked for: leave target out"),
        ({"starts": 0.01, "batch_size": 16}, "starts 0.01 of 16 windows is none"),
    ):
        with pytest.raises(UsageError, match=told):
            make_agent(make_episodes(), **settings)
    with pytest.raises(UsageError, match=r"betas takes two numbers below 1, not 0\.9"):
        make_agent(make_episodes(), betas=[0.9])
    assert make_agent(make_episodes())[0].idle == ("temperature", "top_k")
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


def test_episodes_that_were_cut_can_be_left_out():
    """Three steps and an end, two steps cut, four steps and the time limit, four steps and an end."""
    ends, cuts = np.zeros(13, bool), np.zeros(13, bool)
    ends[[2, 12]], cuts[[4, 8]] = True, True
    log = from_rows(np.arange(13.0)[:, None], np.zeros((13, 1)), np.ones(13), ends, cuts)
    assert dt.whole(log).lengths.tolist() == [3, 4, 4]
    for choice, rows in (("keep", 13), ("drop", 11)):
        _, phase = make_agent(log, context=2, cut_episodes=choice)
        assert len(phase.sampler.store.rewards) == rows


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf")])
def test_returns_are_divided_by_something(scale):
    with pytest.raises(UsageError, match="rtg_scale must be above 0"):
        make_agent(make_episodes(), rtg_scale=scale)


def test_a_target_outside_the_data_is_noted():
    log = make_episodes()
    agent, _ = make_agent(log, target=1e6)
    assert agent.notes == [f"asks for a return of 1e+06; the data has {log.returns.min():g} to {log.returns.max():g}"]
    assert make_agent(log, target=float(log.returns.mean()))[0].notes == []
    log = replace(log, rewards=np.full(len(log), 0.1))  # the best return is 0.8, in float32 a little more
    assert make_agent(log)[0].notes == [] and float(make_agent(log)[0].target) > log.returns.max()
