"""Diffusion-DICE: rewards, updates against plain autograd, values that build on the data's return, acting."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import make_episodes
from tiny_dice import TINY, make_agent

from replaylab.algos import diffusion_dice as dice
from replaylab.algos.diffusion_dice_acting import SHAPES_KEPT
from replaylab.data.episodes import from_rows
from replaylab.data.rewards import drifting_returns, name_of, tuned_rewards
from replaylab.errors import DataError
from replaylab.models.sdice import aggregated, weights
from replaylab.models.solver import blend
from replaylab.step import Stepper

CPU = torch.device("cpu")


def train(phases, upto=None):
    """All phases, or so many updates."""
    left = sum(p.steps for p in phases) if upto is None else upto
    for phase in phases:
        steps = min(left, phase.steps)
        Stepper(phase, CPU).run(0, steps) if steps else None
        left -= steps


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
    both = replace(log, truncated=log.truncated | log.terminated)  # a time limit drops a row that is terminal too
    np.testing.assert_array_equal(drifting_returns(both), [])
    long = replace(make_episodes((5, 3, 8, 2)), rewards=np.arange(18.0))
    found = tuned_rewards(long, "range", drifting=True)
    np.testing.assert_allclose(found, long.rewards * 1000 / (5 + 6 + sum(range(8, 16)) - 10))


@pytest.mark.parametrize(
    ("env", "files", "preset"),
    [
        ("d4rl/hopper", ["hopper-medium.npz"], "locomotion"),
        ("Walker2d-v5", ["x.npz"], "locomotion"),
        ("d4rl/halfcheetah", ["halfcheetah-medium.npz"], "runner"),
        ("d4rl/halfcheetah", ["halfcheetah-medium.npz", "halfcheetah-expert.npz"], "locomotion"),
        ("pointmaze-medium", ["x.npz"], "maze"),
        ("antmaze-large", ["x.npz"], "antmaze"),
        ("Pendulum-v1", ["x.npz"], None),
        (None, ["pump.csv"], None),
    ],
)
def test_the_usual_preset_is_that_of_the_data(env, files, preset):
    ending = replace(make_episodes(), meta={"env_id": env, "source": files})
    cut = ending.terminated | ending.truncated
    endless = replace(ending, terminated=np.zeros_like(cut), truncated=cut)
    assert dice.usual_preset(endless) == preset
    assert dice.usual_preset(ending) == ("locomotion" if preset == "runner" else preset)  # models foresee no end
    assert not dice.PRESETS["plain"]


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


def test_bf16_hardly_changes_guidance_and_qs():
    losses = {}
    for precision in ("fp32", "bf16"):
        agent, phases = make_agent(precision=precision)
        draw = phases[1].sampler.draw(0, 2)
        losses[precision] = [agent.critic_update(phases[1].sampler.gather(torch.from_numpy(rows))) for rows in draw]
    for full, half in zip(*losses.values(), strict=True):
        for name in ("critic_loss", "ensemble_loss", "guide_loss"):
            assert full[name] != half[name]
            torch.testing.assert_close(full[name], half[name], rtol=0.02, atol=0.01)


def test_bf16_does_not_round_what_a_q_answers():
    agent, _ = make_agent(precision="bf16")
    states, actions = torch.randn(1, 50, 4), torch.randn(1, 50, 2)
    with agent._precision():
        told = agent.critics(states, actions)
    exact = agent.critics(states, actions)
    assert told.dtype == torch.float32 and (told != told.bfloat16()).any()
    assert not torch.equal(told, exact)
    torch.testing.assert_close(told, exact, rtol=0.02, atol=0.01)


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


# --- the data's return


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


def test_that_return_can_be_learnt_exactly_under_bootstrapped_values():
    """With LayerNorm and targets of deviation 1, as `--backup data` has it; V goes on from it all the same."""
    log = make_episodes(lengths=(30, 20, 40))
    log = replace(log, rewards=1000 + log.rewards)
    settings = {"returns_steps": 300, "gamma": 0.9, "rewards": "raw", "batch_size": 64, "hidden": [32, 32]}
    errors = []
    for exact in (True, False):
        agent, phases = make_agent(log, returns_exact=exact, **settings)
        assert agent.config.backup == "values" and agent.exact == exact
        Stepper(phases[0], CPU).run(0, 300)
        b = agent.usual(torch.tensor(log.observations)[None])[0].detach()
        errors.append(float((b - torch.tensor(log.returns_to_go(0.9))).square().mean()))
        phases[0].finish()
    assert errors[0] < 0.3 * errors[1]


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
    agent.low, agent.high = agent.low * 1e3, agent.high * 1e3  # nothing is clipped
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
    assert torch.equal(act(), first) and len(agent.samplings) <= SHAPES_KEPT
    assert agent.act(torch.randn(2, 7, 4))[0].shape == (2, 7, 2)  # another number of environments


def test_no_answer_is_outside_the_action_box():
    agent, _ = make_agent()
    agent.low, agent.high = agent.low / 10, agent.high / 10
    found = {}
    for when in ("none", "before"):
        agent.config = dice.Config(**TINY, guidance=0.0, clip_actions=when)
        torch.manual_seed(0)
        found[when] = agent.act(torch.randn(1, 50, 4))[0]
        assert found[when].abs().max() == agent.high[0]
    assert not torch.equal(found["none"], found["before"])  # selected among other candidates


def test_a_behavior_model_acts_alone():
    agent, phases = make_agent(stage="behavior")
    assert [p.name for p in phases] == ["behavior"] and phases[0].evaluates and set(agent.optimizers) == {"score"}
    agent.eval()
    assert agent.act(torch.randn(1, 5, 4))[0].shape == (1, 5, 2)
