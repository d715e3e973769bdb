"""Diffusion-DICE: formulas with the spec's numbers, learning with known answers, acting, resuming."""

from __future__ import annotations

import math
from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch
from conftest import make_episodes

import replaylab
from replaylab import results
from replaylab.algos import Spaces
from replaylab.algos import diffusion_dice as dice
from replaylab.cli import main
from replaylab.data.episodes import from_rows
from replaylab.data.rewards import drifting_returns, name_of, tuned_rewards
from replaylab.data.toys import toy_bandit, toy_reward
from replaylab.errors import DataError, UsageError
from replaylab.models.mlp import generators
from replaylab.models.score import GuideNet
from replaylab.models.sdice import Critics, Value, aggregated, conjugate, guide_loss, value_loss, weights
from replaylab.models.solver import blend, plan, solve
from replaylab.run import RunFolder
from replaylab.step import Stepper
from replaylab.train import Interrupted, Trainer

CPU = torch.device("cpu")
TINY = {
    "behavior_steps": 6, "critic_steps": 8, "behavior_batch": 16, "behavior_width": 16, "batch_size": 8,
    "noise_copies": 3, "hidden": [16, 16], "guide_hidden": [16, 16], "ensemble": 3, "candidates": 4, "solver_steps": 5,
    "lr_decay": True, "min_lr": 1e-5, "normalize": False, "returns_steps": 0, "advantage": False,
}  # fmt: skip


def make_agent(log=None, seeds=(0,), **settings):
    log = make_episodes() if log is None else log
    agent = dice.Agent(dice.Config(**TINY | settings), Spaces.of(log), list(seeds), CPU)
    return agent, agent.phases(log)


def train(phases, upto=None):
    """All phases, or so many updates."""
    left = sum(p.steps for p in phases) if upto is None else upto
    for phase in phases:
        steps = min(left, phase.steps)
        Stepper(phase, CPU).run(0, steps) if steps else None
        left -= steps


def count(net):
    return sum(p.numel() for p in net.parameters())


# --- formulas


def test_conjugate_and_weights():
    y = torch.tensor([-3, -1, 0.5, 2, 10], dtype=torch.float64)
    np.testing.assert_allclose(conjugate(y), [-0.950213, -0.632121, 0.5625, 3, 35], atol=1e-6)
    np.testing.assert_allclose(weights(y), [0.049787, 0.367879, 1.25, 2, 6], atol=1e-6)
    y = torch.tensor([-9.0, -2.0, 0.3, 60.0], requires_grad=True)
    torch.testing.assert_close(torch.autograd.grad(conjugate(y).sum(), y)[0], weights(y.detach()))  # its derivative
    assert weights(torch.tensor(500.0)) == 100 and 0 < weights(torch.tensor(-500.0)) < 1e-39


def test_guide_loss():
    energy = torch.tensor([[[0.1, -0.2], [0.3, 1.5]]], dtype=torch.float64)
    weight = torch.tensor([[2, 0.5]], dtype=torch.float64)
    np.testing.assert_allclose(guide_loss(energy, weight)[0], [1.31702145], atol=1e-6)
    larger = torch.tensor([[[3.0, 4.0]]], dtype=torch.float64)
    np.testing.assert_allclose(guide_loss(larger, weight[:, :1])[0], [9.69910875], atol=1e-6)
    scale = math.exp(-0.2)  # a constant to autograd: the slope is that of the loss without it, times it
    plain = torch.autograd.functional.jacobian(lambda e: (weight[..., None] * (-e).exp() + e).mean(), energy)
    torch.testing.assert_close(guide_loss(energy, weight)[1], plain * scale)
    loss, slope = guide_loss(torch.tensor([[[-1e4, 5.0]]]), torch.tensor([[2.0]]))
    assert loss.isfinite().all() and slope.isfinite().all() and slope[0, 0, 0] < 0


def test_slopes_are_autograd():
    value, target = torch.randn(2, 30, requires_grad=True), torch.randn(2, 30)
    expected = torch.autograd.grad(value_loss(value, target, 0.3)[0].sum(), value)[0]
    torch.testing.assert_close(value_loss(value.detach(), target, 0.3)[1], expected)
    far = torch.tensor([[-500.0, 500.0]])
    assert all(part.isfinite().all() for part in value_loss(far, -far, 0.1))
    critics = Critics(generators([0, 1], 5), 2, 3, [8], original=False)
    values, goal = torch.randn(2, 5, 30, requires_grad=True), torch.randn(2, 30)
    errors = (values - goal[:, None]).square().mean(2)
    loss = errors[:, 0] + errors[:, 1] + errors[:, 2:].mean(1)
    torch.testing.assert_close(critics.loss(values.detach(), goal)[1], torch.autograd.grad(loss.sum(), values)[0])


def test_guidance_learns_the_log_of_the_mean_weight():
    """Two actions, -1 with weight 2 and 1 with weight 0.4: what noise makes of them is known in closed form."""
    torch.manual_seed(0)
    net = GuideNet(generators([0]), 1, 1, [32, 32], balanced=True)
    optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], 5e-3)
    time, state = torch.full((1, 1, 1), 0.2), torch.zeros(1, 1, 1)
    alpha, sigma = (float(x) for x in blend(time))
    for _ in range(400):
        sign = torch.randint(0, 2, (1, 512)) * 2.0 - 1
        noisy = alpha * sign + sigma * torch.randn(1, 512)
        energy = net.body(noisy.view(1, -1, 1), net.condition(time, state))
        _, slope = guide_loss(energy[..., None].detach(), torch.where(sign < 0, 2.0, 0.4))
        optimizer.zero_grad()
        energy.backward(slope[..., 0])
        optimizer.step()
    x = torch.linspace(-1, 1, 9)
    share = torch.sigmoid(-2 * alpha * x / sigma**2)  # chance that the action was -1
    found = net.body(x.view(1, -1, 1), net.condition(time, state))[0].detach()
    torch.testing.assert_close(found, (2 * share + 0.4 * (1 - share)).log(), rtol=0, atol=0.12)


def test_v_weighs_the_data_by_one():
    """At the optimum of the value loss the mean weight of a state is 1."""
    target, value = torch.randn(1, 500), torch.zeros(1, 1)
    for _ in range(500):
        _, slope, y = value_loss(value.expand(1, 500), target, 0.3)
        value -= 0.1 * slope.sum(1, keepdim=True)
    assert abs(float(weights(y).mean()) - 1) < 1e-3


def test_as_many_parameters_as_the_original():
    for state, action, twins, value, ten in (
        (11, 3, 139_778, 70_145, 698_890), (17, 6, 144_386, 71_681, 721_930), (29, 8, 151_554, 74_753, 757_770),
    ):  # fmt: skip
        critics = Critics(generators([0], 12), 1, state + action, [256, 256], original=True)
        assert count(critics.targets) == twins and count(critics.nets) == twins + ten
        assert count(Value(generators([0]), state, [256, 256])) == value
    first, _, last = critics.nets.layers
    assert 1 / 17 < first.weight[2:].abs().max() <= 1 / 16 < 0.15 < first.weight[:2].abs().max()
    assert 0.99 < last.weight[2:].abs().max() <= 1 and last.weight[:2].abs().max() <= 1 / 16


# --- rewards


def test_rewards():
    log = make_episodes((5, 3, 8))  # terminated, truncated, terminated
    span = log.returns.max() - log.returns.min()
    np.testing.assert_allclose(tuned_rewards(log, "auto"), log.rewards * 8 / span)
    assert tuned_rewards(log, "raw") is log.rewards
    for name in ("antmaze-large-diverse", "pointmaze-medium"):
        named = replace(log, meta=log.meta | {"env_id": name})
        np.testing.assert_array_equal(tuned_rewards(named, "auto"), np.where(log.rewards > 0, 0, -1))
    for file, name in {"u-maze": "umaze", "big-maze": "medium", "hardest-maze": "large"}.items():  # D4RL's own files
        source = f"/data/Ant_maze_{file}_noisy_multistart_True_multigoal_False_sparse_fixed.hdf5"
        named = replace(log, meta={"source": source})
        assert f"antmaze-{name}_noisy" in name_of(named)
        np.testing.assert_array_equal(tuned_rewards(named, "auto"), np.where(log.rewards > 0, 0, -1))
    same = replace(log, rewards=np.zeros(16))
    with pytest.raises(DataError, match="--rewards raw"):
        tuned_rewards(same, "auto")


def test_the_original_cuts_where_it_should_not():
    """Rows 5 to 7 end by a time limit: the last of them is dropped, and the piece goes on into the next episode. With
    a limit of 4 rows cuts fall inside of episodes. The last row is never read."""
    log = replace(make_episodes((5, 3, 8)), rewards=np.arange(16.0))
    np.testing.assert_array_equal(drifting_returns(log), [0 + 1 + 2 + 3 + 4])
    np.testing.assert_array_equal(drifting_returns(log, 4), [6, 4, 5 + 6 + 8 + 9, 10 + 11 + 12 + 13])
    long = replace(make_episodes((5, 3, 8, 2)), rewards=np.arange(18.0))
    found = tuned_rewards(long, "range", drifting=True)
    np.testing.assert_allclose(found, long.rewards * 1000 / (5 + 6 + sum(range(8, 16)) - 10))


def test_guidance_by_name():
    known = {
        "hopper-medium-v2": 4, "walker2d-medium-replay-v2": 4, "halfcheetah-medium-expert-v2": 2, "mine": 4,
        "antmaze-umaze-diverse-v2": 1, "antmaze-medium-play-v2": 2, "antmaze-large-diverse-v2": 4, "toy-bandit": 1,
        "  hopper-medium.npz hopper-expert.npz": 2,
    }  # fmt: skip
    assert {name: dice.usual_guidance(name) for name in known} == known
    log = make_episodes()
    log.meta["env_id"] = "antmaze-medium"
    assert float(make_agent(log)[0].usual_guidance) == 2


# --- training


@pytest.mark.parametrize("advantage", [False, True])
def test_order_of_an_update(advantage):
    """One update by hand, with plain autograd and plain AdamW: V, Q towards the new V, targets, guidance."""
    agent, phases = make_agent(ensemble=2, lr_decay=False, tau=0.1, advantage=advantage)
    other, _ = make_agent(ensemble=2, lr_decay=False, tau=0.1, advantage=advantage)
    batch = phases[1].sampler.gather(torch.from_numpy(phases[1].sampler.draw(0, 1)[0]))
    s, a, following = batch["observations"], batch["actions"], batch["next_observations"]
    trained = {n: [p for p in getattr(other, n).parameters() if p.requires_grad] for n in ("value", "critics", "guide")}
    adam = {name: torch.optim.AdamW(parameters, 3e-4, weight_decay=1e-4) for name, parameters in trained.items()}

    def step(name, loss):
        loss.sum().backward()
        adam[name].step()

    def target():
        return other.critics._values(other.critics.targets, 2, s, a).detach().amin(1)

    v = other.value(s)
    y = (target() - v) / 0.5
    step("value", (torch.where(y >= 0, y**2 / 4 + y, y.exp() - 1) + v / 0.5).mean(1))
    goal = (batch["rewards"] + 0.99 * (1 - batch["terminated"]) * other.value(following)).detach()
    q = other.critics(s, a)
    error = (q - goal[:, None]) ** 2
    if advantage:
        error = torch.cat([error[:, :2], (q[:, 2:] - (goal - other.value(s).detach())[:, None]) ** 2], 1)
    step("critics", error[:, :2].sum(1).mean(1) + error[:, 2:].mean((1, 2)))
    with torch.no_grad():
        for slow, fast in zip(other.critics.targets.parameters(), other.critics.nets.parameters(), strict=True):
            slow.copy_(0.9 * slow + 0.1 * fast[:2])
    better = q[:, 2:].mean(1) if advantage else target() - other.value(s)
    w = weights(better / 0.5).detach()
    e = other.energies(s, a)
    m = max(-1.0, -e.min().item())
    step("guide", (w[..., None] * (-e - m).exp() + math.exp(-m) * e).mean((1, 2)))
    found = agent.critic_update(batch)
    for (name, mine), expected in zip(agent.state_dict().items(), other.state_dict().values(), strict=True):
        if name != "critic_done":
            torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-6, msg=name)
    assert set(found) == {
        "value_loss", "critic_loss", "ensemble_loss", "guide_loss", "value", "y", "y_min", "y_max", "energy",
        "energy_min", "energy_max",
    }  # fmt: skip
    assert all(value.shape == (1,) for value in found.values())


def test_bf16_touches_the_guidance_alone_and_hardly():
    losses = {}
    for precision in ("fp32", "bf16"):
        agent, phases = make_agent(precision=precision)
        draw = phases[1].sampler.draw(0, 2)
        losses[precision] = [agent.critic_update(phases[1].sampler.gather(torch.from_numpy(rows))) for rows in draw]
    for full, half in zip(*losses.values(), strict=True):
        assert full["value_loss"] == half["value_loss"] and full["critic_loss"] == half["critic_loss"]
        assert full["guide_loss"] != half["guide_loss"]
        torch.testing.assert_close(full["guide_loss"], half["guide_loss"], rtol=0.02, atol=0.01)


def test_errors_of_twins_and_ensemble_by_hand():
    agent, _ = make_agent(ensemble=2)
    values, goal, base = torch.tensor([[[1.0, 2.0]] * 4]), torch.tensor([[3.0, 5.0]]), torch.tensor([[2.0, 4.5]])
    loss, slope = agent.critics.loss(values, goal)
    torch.testing.assert_close(loss, torch.tensor([[6.5, 6.5, 6.5, 6.5]]))  # (4 + 9) / 2
    torch.testing.assert_close(slope[0, :, 0], torch.tensor([-2.0, -2.0, -1.0, -1.0]))  # the ensemble counts half each
    loss, slope = agent.critics.loss(values, goal, base)
    torch.testing.assert_close(loss, torch.tensor([[6.5, 6.5, 1.125, 1.125]]))  # 1 - (3 - 2) = 0, 2 - (5 - 4.5) = 1.5
    torch.testing.assert_close(slope[0, :, 1], torch.tensor([-3.0, -3.0, 0.75, 0.75]))


def test_v_learns_from_the_lesser_twin_or_from_their_mean():
    states, actions = torch.randn(1, 6, 4), torch.randn(1, 6, 2)
    found = {}
    for twins in ("min", "mean"):
        agent, _ = make_agent(twins=twins)
        found[twins] = agent.critics.target(states, actions)
        both = agent.critics._values(agent.critics.targets, 2, states, actions)
        torch.testing.assert_close(found[twins], both.amin(1) if twins == "min" else both.mean(1))
    assert (found["min"] < found["mean"]).all()


def test_behavior_loss():
    agent, phases = make_agent()
    batch = phases[0].sampler.gather(torch.from_numpy(phases[0].sampler.draw(0, 1)[0]))
    time, noise = agent._noise(agent.behavior_keys, agent.behavior_done, batch["actions"])
    assert time.min() >= 1e-3 and time.max() <= 1 and time.shape == (1, 16, 1)
    alpha, sigma = blend(time)
    score = agent.score(alpha * batch["actions"] + sigma * noise, time, batch["observations"])
    expected = ((score * sigma + noise) ** 2).sum(2).mean(1)
    torch.testing.assert_close(agent.behavior_update(batch)["score_loss"], expected.detach())


@pytest.mark.parametrize("schedule", ["in-turn", "together"])
def test_seeds_do_not_know_their_company(schedule):
    settings = {"schedule": schedule, "behavior_ema": 0.9, "fidelity": "original", "rewards": "raw"}
    together, phases = make_agent(seeds=(3, 0, 5), **settings)
    train(phases)
    alone, phases = make_agent(seeds=(5,), **settings)
    train(phases)
    for name, value in alone.state_dict().items():
        whole = together.state_dict()[name]
        part = whole if whole.shape == value.shape else whole[2 * len(value) :]
        torch.testing.assert_close(part, value, rtol=1e-4, atol=1e-6, msg=name)


def test_together_is_in_turn():
    """Each part draws its own rows and noise, so the order of the parts does not matter."""
    for steps in ({"behavior_steps": 4, "critic_steps": 7}, {"behavior_steps": 7, "critic_steps": 4}):
        (one, phases), (two, others) = (make_agent(schedule=s, **steps) for s in ("in-turn", "together"))
        assert [p.evaluates for p in phases] == [False, True] and [p.steps for p in others] == [4, 3]
        train(phases)
        train(others)
        mine, theirs = one.state_dict(), two.state_dict()
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)
    assert len(make_agent(schedule="together", behavior_steps=8)[1]) == 1


def test_rates_fall_along_a_cosine():
    agent, phases = make_agent(behavior_steps=4, critic_steps=4, min_lr=1e-4)
    train(phases[:1], 3)
    assert abs(agent.optimizers["score"].param_groups[0]["lr"] / 1e-4 - 0.5) < 1e-6  # in the third of four
    train(phases[1:], 3)
    for name in ("value", "critics", "guide"):
        assert abs(agent.optimizers[name].param_groups[0]["lr"] - 2e-4) < 1e-9
    agent, phases = make_agent(lr_decay=False, behavior_lr_decay=False)
    train(phases)
    assert [float(o.param_groups[0]["lr"]) for o in agent.optimizers.values()] == pytest.approx([1e-4] + [3e-4] * 3)


def test_running_mean_of_the_weights():
    agent, phases = make_agent(behavior_ema=0.75, behavior_lr=1e-2)
    start = agent.score.out.weight.clone()
    train(phases[:1], 1)
    torch.testing.assert_close(agent.average.out.weight, 0.75 * start + 0.25 * agent.score.out.weight)
    assert agent.acting_score is agent.average and make_agent()[0].acting_score is not None


# --- acting


def test_selection_rules():
    agent, _ = make_agent(candidates=3)
    sampling = dice.Sampling(agent, 2)
    values = torch.tensor([[[1.0, 5, 3, 0, 2, 1], [3, 1, 3, 0, 9, 1]]])  # (seeds, judges, rows * candidates)
    states, actions = torch.randn(1, 2, 4), torch.arange(12.0).view(1, 6, 2)

    def judge(seen, judged):
        assert torch.equal(seen[0], states[0][[0, 0, 0, 1, 1, 1]]) and torch.equal(judged, actions)
        return values

    agent.critics.judge = judge

    def chosen(**settings):
        agent.config = replace(agent.config, **settings)
        return (sampling.choose(states, actions)[0, :, 0] / 2).tolist()

    assert chosen(aggregate="mean") == [1, 4]  # the first of equal means, 3 and 3
    assert chosen(aggregate="min") == [2, 4]
    assert chosen(aggregate="lcb") == [2, 4]
    assert chosen(aggregate="first") == [1, 4]
    torch.testing.assert_close(aggregated(values, "lcb")[0, :3], torch.tensor([1.0, 1, 3]))
    torch.manual_seed(0)
    drawn = []
    for _ in range(4000):
        sampling.races.exponential_()
        drawn.append(chosen(aggregate="min", filter="softmax", temperature=2.0)[0])
    shares = np.bincount(np.array(drawn, int), minlength=3) / 4000
    expected = np.exp(np.array([1, 1, 3]) / 2)
    np.testing.assert_allclose(shares, expected / expected.sum(), atol=0.03)


def test_acting_follows_its_settings():
    agent, _ = make_agent(seeds=(0, 1))
    observations = torch.randn(2, 3, 4)

    def act(**settings):
        agent.config = replace(dice.Config(**TINY), **settings)
        torch.manual_seed(0)
        found = agent.act(observations)[0]
        assert found.shape == (2, 3, 2)
        return found

    first = act()
    assert torch.equal(act(), first) and torch.equal(act(guidance=4.0), first)  # the usual one
    for change in ({"guidance": 0.0}, {"candidates": 1}, {"solver_steps": 3}, {"solver_order": 1}):
        assert not torch.allclose(act(**change), first), change
    wild = act(guidance=400.0)
    assert wild.abs().max() > 1.5
    for when in ("before", "after"):
        clipped = act(guidance=400.0, clip_actions=when)
        assert clipped.abs().max() <= 1
    torch.testing.assert_close(clipped, wild.clamp(-1, 1))
    assert torch.equal(act(), first) and len(agent.samplings) <= dice.SHAPES_KEPT
    assert agent.act(torch.randn(2, 7, 4))[0].shape == (2, 7, 2)  # another number of environments


def test_a_behavior_model_acts_alone():
    agent, phases = make_agent(stage="behavior")
    assert [p.name for p in phases] == ["behavior"] and phases[0].evaluates and set(agent.optimizers) == {"score"}
    agent.eval()
    assert agent.act(torch.randn(1, 5, 4))[0].shape == (1, 5, 2)


# --- through the front door


class Still(gymnasium.Env):
    """Two steps; the reward is the first number of the action."""

    observation_space = gymnasium.spaces.Box(-9, 9, (4,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 2
        return np.zeros(4, np.float32), {}

    def step(self, action):
        self.left -= 1
        return np.zeros(4, np.float32), float(action[0]), self.left == 0, False, {}


if "DiceStill-v0" not in gymnasium.registry:
    gymnasium.register("DiceStill-v0", Still)

FRONT = TINY | {"device": "cpu", "env": "DiceStill-v0", "eval_every": 4, "eval_episodes": 2, "final_episodes": 2}


def weights_of(path):
    return RunFolder(path).load()[:2]


def stop_after(monkeypatch, updates):
    """Ctrl-C after so many updates."""
    seen = []

    def run(self, start, steps, original=Stepper.run):
        original(self, start, steps)
        seen.append(steps)

    def stopped(self):
        return sum(seen) >= updates

    monkeypatch.setattr(Stepper, "run", run)
    monkeypatch.setattr(Trainer, "stopped", property(stopped, lambda self, value: None), raising=False)


def cut_and_resumed(log, tmp_path, monkeypatch, cut, settings):
    """A run that is stopped and resumed must end with the weights and optimisers of one that was not."""
    replaylab.train("diffusion-dice", log, out=tmp_path / "whole", **settings)
    with monkeypatch.context() as patch:
        stop_after(patch, cut)
        with pytest.raises(Interrupted):
            replaylab.train("diffusion-dice", log, out=tmp_path / "cut", **settings)
    replaylab.train("diffusion-dice", log, out=tmp_path / "cut", resume=True, **settings)
    for a, b in zip(weights_of(tmp_path / "whole"), weights_of(tmp_path / "cut"), strict=True):
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("schedule", ["in-turn", "together"])
@pytest.mark.parametrize("cut", [3, 6, 9])
def test_a_cut_run_ends_like_a_whole_one(schedule, cut, tmp_path, monkeypatch):
    """Cut within the first phase, at the boundary, and in the second one."""
    settings = FRONT | {"schedule": schedule, "behavior_steps": 6, "critic_steps": 11, "seeds": [0, 1]}
    cut_and_resumed(make_episodes(), tmp_path, monkeypatch, cut, settings)
    steps = {line["step"] for line in RunFolder(tmp_path / "cut").lines("eval.jsonl")}
    assert min(steps) == (10 if schedule == "in-turn" else 4)  # nothing to evaluate while there is no critic


@pytest.mark.parametrize("cut", [3, 8, 13])
def test_a_cut_run_with_an_estimate_of_the_return(cut, tmp_path, monkeypatch):
    settings = FRONT | {"returns_steps": 5, "behavior_steps": 6, "critic_steps": 7, "normalize": True}
    cut_and_resumed(make_episodes(), tmp_path, monkeypatch, cut, settings)


def test_values_build_on_the_data_s_return():
    """r + gamma b(s') - b(s) by hand, b near the discounted return, and the same b whoever trains."""
    log = make_episodes(lengths=(30, 20, 40))
    settings = {"returns_steps": 800, "gamma": 0.9, "rewards": "raw", "batch_size": 64, "hidden": [32, 32]}
    agent, phases = make_agent(log, (0, 5), normalize=True, **settings)
    assert [p.name for p in phases] == ["returns", "behavior", "critic"] and not phases[0].evaluates
    Stepper(phases[0], CPU).run(0, 800)
    b = agent.usual(torch.tensor(log.observations)[None])[0].detach()
    to_go = torch.tensor(log.returns_to_go(0.9)).float()
    assert (b - to_go).square().mean() < 0.6 * to_go.var()  # rewards are noise here; it has found most of what there is
    phases[0].finish()
    index = torch.tensor([[3, 29, 60]])  # inside, the last row of an episode that ends, inside
    got = phases[2].sampler.gather(index.expand(2, -1))
    after = agent.usual(got["next_observations"][:1])[0]
    left = 0.9 * (1 - got["terminated"][0])
    assert got["terminated"][0].tolist() == [0, 1, 0]
    expected = torch.tensor(log.rewards[index[0]]).float() + left * after - b[index[0]]
    torch.testing.assert_close(got["rewards"][0], expected, rtol=1e-4, atol=1e-4)
    alone, others = make_agent(log, (5,), normalize=True, **settings)
    Stepper(others[0], CPU).run(0, 800)
    torch.testing.assert_close(alone.returns.layers[0].weight, agent.returns.layers[0].weight)


@pytest.mark.parametrize("trace", [0.0, 0.7])
def test_a_backup_over_the_data_s_returns(trace):
    """Rewards become what followed beyond b, faded by the trace, of deviation 1. Q learns just that, nothing of V."""
    log = make_episodes(lengths=(30, 20, 40))
    settings = {"returns_steps": 50, "gamma": 0.9, "rewards": "raw", "ensemble": 2, "lr_decay": False}
    agent, phases = make_agent(log, backup="data", trace=trace, **settings)
    Stepper(phases[0], CPU).run(0, 50)
    phases[0].finish()
    b = agent.usual(torch.tensor(log.observations)[None])[0].detach().numpy()
    after = agent.usual(torch.tensor(log.next_observations())[None])[0].detach().numpy()
    expected, gain = np.zeros(len(log)), 0.0
    for row in range(len(log) - 1, -1, -1):
        surprise = log.rewards[row] + 0.9 * (1 - log.terminated[row]) * after[row] - b[row]
        ends = row in log.last_rows
        surprise = 0.0 if ends and not log.terminated[row] and not log.final_known[log.episode_ids[row]] else surprise
        gain = surprise + (0.0 if ends else 0.9 * trace * gain)
        expected[row] = gain
    np.testing.assert_allclose(agent.usual.store.rewards.numpy(), expected / expected.std(), rtol=1e-4, atol=1e-4)
    batch = phases[2].sampler.gather(torch.from_numpy(phases[2].sampler.draw(0, 1)[0]))
    with torch.no_grad():
        q = agent.critics(batch["observations"], batch["actions"])[:, :2]
        loss = (q - batch["rewards"][:, None]).square().mean(2).sum(1)
    torch.testing.assert_close(agent.critic_update(batch)["critic_loss"], loss)


def test_stages_in_separate_runs(tmp_path):
    log = make_episodes()
    both = replaylab.train("diffusion-dice", log, out=tmp_path / "both", **FRONT | {"seeds": [0, 1]})
    behavior = replaylab.train(
        "diffusion-dice", log, out=tmp_path / "b", **FRONT | {"stage": "behavior", "seeds": [1, 0]}
    )
    assert RunFolder(behavior).lines("eval.jsonl")
    settings = FRONT | {"stage": "critic", "behavior": str(behavior), "seeds": [0, 1]}
    critic = replaylab.train("diffusion-dice", log, out=tmp_path / "c", **settings)
    one, two = weights_of(both)[0], weights_of(critic)[0]
    assert all(torch.equal(one[k], two[k]) for k in one if k != "behavior_done")
    behavior.rename(tmp_path / "gone")  # a trained run needs it no more
    assert replaylab.load_policy(critic, seed=1).act(np.zeros(4)).shape == (2,)
    settings["behavior"] = str(tmp_path / "gone")
    with pytest.raises(UsageError, match="has no seed 4; it has 1, 0"):
        replaylab.train("diffusion-dice", log, out=tmp_path / "d", **settings | {"seeds": [0, 4]})
    with pytest.raises(UsageError, match="another width"):
        replaylab.train("diffusion-dice", log, out=tmp_path / "e", **settings | {"behavior_width": 32})
    with pytest.raises(UsageError, match="another setting of normalize"):
        replaylab.train("diffusion-dice", log, out=tmp_path / "h", **settings | {"normalize": True})
    wider = make_episodes(observation=5, action=3)
    with pytest.raises(UsageError, match="states of 4 numbers and actions of 2, this data has 5 and 3"):
        replaylab.train("diffusion-dice", wider, out=tmp_path / "f", **settings | {"env": None})
    bc = replaylab.train("bc", log, out=tmp_path / "bc", steps=1, device="cpu")
    with pytest.raises(UsageError, match="no behaviour model"):
        replaylab.train("diffusion-dice", log, out=tmp_path / "g", **settings | {"behavior": str(bc)})


def test_a_single_behavior_model_serves_all_seeds(tmp_path):
    log = make_episodes()
    run = replaylab.train("diffusion-dice", log, out=tmp_path / "b", **FRONT | {"stage": "behavior", "seeds": [4]})
    agent, phases = make_agent(log, (0, 1), stage="critic", behavior=str(run))
    phases[0].begin()
    trained = weights_of(run)[0]["score.out.weight"]
    assert torch.equal(agent.score.out.weight, torch.cat([trained, trained]))


def test_a_sweep_without_training(tmp_path, capsys):
    log = make_episodes()
    run = replaylab.train("diffusion-dice", log, out=tmp_path / "r", **FRONT | {"seeds": [0, 1]})
    words = "--guidance 0 1.5 --candidates 1 3 --filter max softmax --solver-steps 4 --episodes 2 --device cpu"
    assert main(["eval", str(run), *words.split()]) == 0
    swept = [line for line in RunFolder(run).lines("eval.jsonl") if line["settings"]]
    assert len(swept) == 2 * 2 * 2 * 2 and {line["settings"]["guidance"] for line in swept} == {0.0, 1.5}
    capsys.readouterr()
    assert main(["eval", str(run), "--candidates", "0", "--device", "cpu"]) == 2
    assert "candidates must be at least 1" in capsys.readouterr().err
    page = replaylab.report([run], tmp_path / "page.html").read_text()
    assert "Guidance and candidates" in page and "1.5" in page
    read = results.read_runs([run])[0]
    read.info["findings"] = {"critic": {"guidance": "<b>", "data": [[1], "x"], "both": 3}}
    from replaylab.sections.diffusion_dice import sections

    assert "<b>" not in "".join(title + body for title, body in sections(read))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alpha": 0.0}, "alpha must be above 0"),
        ({"alpha": -1.0}, "alpha must be above 0, not -1"),
        ({"candidates": 0}, "candidates must be at least 1"),
        ({"solver_steps": 0}, "solver_steps must be at least 1"),
        ({"solver_order": 3}, "solver_order must be 1 or 2"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"backup": "data", "returns_steps": 0}, "returns_steps must be above 0"),
        ({"trace": 1.5}, "trace must be from 0 to 1"),
        ({"stage": "critic"}, "belong together"),
        ({"behavior": "x"}, "belong together"),
        ({"stage": "critic", "behavior": "/nowhere"}, "not a run folder"),
    ],
)
def test_what_does_not_fit_is_said(settings, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        replaylab.train("diffusion-dice", make_episodes(), out=tmp_path / "r", **FRONT | settings)


def test_discrete_actions_are_refused():
    with pytest.raises(UsageError, match="continuous actions"):
        make_agent(make_episodes(discrete=True))


def test_a_broken_critic_stops_and_is_named(tmp_path):
    log = replace(make_episodes(), rewards=np.full(16, 1e38))
    with pytest.raises(DataError, match=r"became NaN or infinite at step"):
        replaylab.train("diffusion-dice", log, out=tmp_path / "r", **FRONT | {"rewards": "raw"})


def test_every_preset_is_of_known_settings():
    known = set(dice.Config.__dataclass_fields__) | {"eval_every", "eval_episodes", "final_episodes"}
    for preset in dice.PRESETS.values():
        assert set(preset) <= known
        dice.Config(**{k: v for k, v in preset.items() if k in dice.Config.__dataclass_fields__})
    assert set(dice.ACTING) <= known
    paper, maze = dice.PRESETS["paper"], dice.PRESETS["antmaze"]
    assert (paper["behavior_steps"], paper["critic_steps"], maze["noise_copies"]) == (600_000, 1_000_000, 32)


# --- the bandit


def test_the_bandit_takes_its_own_preset():
    assert dice.usual_preset(toy_bandit(10, 0)) == "toy" and dice.usual_preset(make_episodes()) is None


def test_the_bandit():
    log = toy_bandit(20_000, 1)
    radius = np.linalg.norm(log.actions, axis=1)
    assert radius.min() >= 0.25 - 1e-6 and radius.max() <= 1.5 + 1e-6 and (log.lengths == 1).all()
    share = (math.exp(-0.5) - math.exp(-1.125)) / (math.exp(-0.03125) - math.exp(-1.125))
    assert abs((radius > 1).mean() - share) < 0.01  # of a normal pair between the circles
    at = np.array([[0, 0.25], [0.5, 0], [0, -1], [1.5, 0], [0.75, 0], [0, 0.0]])
    np.testing.assert_allclose(toy_reward(at), [0.8, -1, 1, -1, 0, -1], atol=1e-12)
    np.testing.assert_allclose(log.rewards, toy_reward(log.actions))
    assert log.env_id is None and np.array_equal(toy_bandit(50, 3).actions, toy_bandit(50, 3).actions)


def ring(actions):
    """Shares of actions within 0.1 of the best circle, and in the hole."""
    radius = np.linalg.norm(np.asarray(actions)[:, :2], axis=1)
    return (np.abs(radius - 1) < 0.1).mean(), (radius < 0.25).mean()


def exact_choice(guided, alpha=0.005, choices=40, candidates=16):
    """The bandit with nothing learnt: score and guidance of 800 logged actions in closed form, and an estimate of the
    reward that is right where there is data and has a false peak of 1.84 in the hole."""
    log, table = toy_bandit(800), plan(15, 2)
    actions, rewards = torch.tensor(log.actions), torch.tensor(log.rewards)
    low, high = -2.0, 1.0
    for _ in range(50):  # V, at which the mean weight is 1
        value = (low + high) / 2
        low, high = (value, high) if weights((rewards - value) / alpha).mean() > 1 else (low, value)
    log_weight = weights((rewards - value) / alpha).log().float() if guided else torch.zeros(800)

    def guess(x, i):
        squares = (x[:, None] - table.alphas[i] * actions).square().sum(-1)
        return (log_weight - squares / (2 * table.sigmas[i] ** 2)).softmax(-1) @ actions

    drawn = solve(guess, torch.randn(choices * candidates, 2), table).view(choices, candidates, 2)
    radius = drawn.norm(dim=-1)
    estimate = torch.where(radius < 0.25, 1.84 - 4.16 * radius, torch.from_numpy(toy_reward(drawn.numpy())))
    return drawn[torch.arange(choices), estimate.argmax(1)]


def test_guidance_keeps_selection_out_of_the_hole():
    torch.manual_seed(0)
    assert ring(exact_choice(guided=True))[0] >= 0.95
    assert ring(exact_choice(guided=False))[1] > 0.1


@pytest.mark.slow
def test_guidance_and_selection_find_the_ring(tmp_path):
    settings = {"final_episodes": 0, "device": "cpu", "preset": "toy"}
    run = replaylab.train("diffusion-dice", toy_bandit(), out=tmp_path / "r", **settings)
    found = RunFolder(run).info()["findings"]["critic"]
    assert ring(found["both"])[0] >= 0.95
    selected, guided = ring(found["selection alone"]), ring(found["guidance alone"])
    assert selected[0] < 0.6 and selected[1] > 0.4  # drawn into the hole
    assert guided[0] < 0.8 and guided[1] < 0.02  # out of the hole, but not at the best
    chosen = np.array(found["selection alone"])
    hole = np.linalg.norm(chosen[:, :2], axis=1) < 0.2
    assert chosen[hole, 2].min() > 0.5  # because Q believes in the hole; the best there is, is 0.5
    page = replaylab.report([run], tmp_path / "page.html").read_text()
    assert "selection alone" in page and "One state" in page


def test_the_sample_with_the_debug_preset(tmp_path):
    pytest.importorskip("mujoco")
    run = replaylab.train("diffusion-dice", "sample", out=tmp_path / "r", preset="debug", device="cpu", critic_steps=20)
    lines = RunFolder(run).lines("metrics.jsonl")
    loss = [line["score_loss"] for line in lines if line["phase"] == "behavior"]
    assert np.mean(loss[-20:]) < 0.8 * np.mean(loss[:20]) and RunFolder(run).lines("eval.jsonl")


@pytest.mark.parametrize("terminates", [False, True])
def test_an_episode_that_was_cut_goes_on_unseen(terminates):
    """One state, reward -1: episodes of five steps that end there are worth -3 on the mean, cut ones -10."""
    rows = 50
    ends = np.arange(rows) % 5 == 4
    log = from_rows(
        np.ones((rows, 2), np.float32), np.zeros((rows, 1), np.float32), np.full(rows, -1.0, np.float32),
        ends & terminates, ends & (not terminates), np.ones((rows, 2), np.float32),
    )  # fmt: skip
    settings = {"returns_steps": 2000, "gamma": 0.9, "rewards": "raw", "batch_size": 64, "hidden": [16]}
    agent, phases = make_agent(log, **settings)
    Stepper(phases[0], CPU).run(0, 1000)
    Stepper(phases[0], CPU).run(1000, 1000)
    found = agent.usual(torch.ones(1, 1, 2)).item()
    alone = np.mean([-(1 - 0.9**k) / 0.1 for k in range(1, 6)])
    assert found == pytest.approx(alone if terminates else -10, rel=0.05)
