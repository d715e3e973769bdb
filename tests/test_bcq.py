"""BCQ: its formulas by hand, a bandit whose answer is known, exact resumption, seeds that do not mix."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from conftest import make_episodes

import replaylab
from replaylab.algos import Spaces, bcq
from replaylab.data.episodes import from_rows
from replaylab.errors import UsageError
from replaylab.results import read_runs
from replaylab.sections.bcq import sections
from replaylab.step import Stepper

CPU = torch.device("cpu")
TINY = {"batch_size": 16, "hidden": [16, 16], "vae_hidden": [16, 16], "samples": 3, "act_samples": 7}


def make_agent(log, seeds=(0,), **settings):
    agent = bcq.Agent(bcq.Config(**TINY | settings), Spaces.of(log), list(seeds), CPU)
    return agent, agent.phases(log)[0]


def some(log, phase, start=0):
    return phase.sampler.gather(torch.from_numpy(phase.sampler.draw(start, 1)[0]))


# --- formulas


def test_kl_by_hand():
    mean = torch.tensor([[[0.0, 1.0]], [[2.0, -1.0]]])  # (seeds, batch, dims)
    log_std = torch.tensor([[[0.0, 0.0]], [[math.log(2), 0.0]]])
    # 1/2 (mean^2 + std^2 - 1 - log std^2): 0 and 1/2; 1/2 (4 + 4 - 1 - 2 log 2) and 1/2
    expected = [0.25, (3.5 - math.log(2) + 0.5) / 2]
    torch.testing.assert_close(bcq.kl_to_normal(mean, log_std), torch.tensor(expected))


def test_soft_minimum_by_hand():
    values = torch.tensor([[[1.0, 4.0], [3.0, -4.0]]])  # two critics, two rows
    torch.testing.assert_close(bcq.soft_min(values, 0.75), torch.tensor([[1.5, -2.0]]))


def test_target_by_hand(monkeypatch):
    agent, phase = make_agent(make_episodes())
    batch = {k: v[:, :2] for k, v in some(None, phase).items()}
    batch |= {"rewards": torch.tensor([[10.0, 20.0]]), "terminated": torch.tensor([[0.0, 1.0]])}
    # per row 3 candidates; soft minima 0.75 min + 0.25 max: row 0: 1, 2.5, -1
    said = torch.tensor([[[1.0, 2.0, -2.0, 9.0, 9.0, 9.0], [1.0, 4.0, 2.0, 9.0, 9.0, 9.0]]])
    monkeypatch.setattr(agent, "values", lambda critics, *_: said if critics is agent.target_critics else None)
    goal = agent.goal(batch, torch.zeros(1, 6, 4))
    torch.testing.assert_close(goal, torch.tensor([[10 + 0.99 * 2.5, 20.0]]))


def test_candidates_of_a_row_belong_to_that_row(monkeypatch):
    """The best is taken over the samples of one next state, not over one sample of several states."""
    agent, phase = make_agent(make_episodes())
    batch = some(None, phase)
    seen = {}
    monkeypatch.setattr(agent, "values", lambda _, o, a: seen.setdefault("o", o)[..., 0][:, None].repeat(1, 2, 1))
    goal = agent.goal(batch, torch.zeros(1, 48, 4))
    first = agent.normalizer(batch["next_observations"])[..., 0]
    torch.testing.assert_close(goal, batch["rewards"] + 0.99 * (1 - batch["terminated"]) * first)


def test_a_perturbed_action_stays_near_and_in_the_box():
    log = make_episodes()
    agent, _ = make_agent(log, seeds=(0, 1))
    with torch.no_grad():
        for layer in agent.actor.layers:
            layer.weight.mul_(50)  # an actor that always pushes as far as it may
    observations, actions = torch.randn(2, 500, 4), torch.rand(2, 500, 2) * 2 - 1
    moved = agent.perturb(agent.actor, observations, actions)
    assert moved.abs().max() <= 1 and (moved - actions).abs().max() <= 0.05 + 1e-6
    assert (moved - actions).abs().max() > 0.049 and (moved.abs() == 1).any()


def test_actions_are_those_of_the_box():
    log = make_episodes()
    log.actions[:] = 100 + 5 * log.actions  # a box far from [-1, 1]
    agent, phase = make_agent(log, seeds=(0, 1))
    Stepper(phase, CPU).run(0, 30)
    low, high = log.action_bounds
    with torch.no_grad():
        actions = agent.act(torch.randn(2, 64, 4) * 3)[0].numpy()
    assert actions.shape == (2, 64, 2) and (actions >= low - 1e-4).all() and (actions <= high + 1e-4).all()


# --- the update


def gradients_of(agent, loss):
    names = {"encoder": agent.encoder, "decoder": agent.decoder, "actor": agent.actor, "critics": agent.critics}
    agent.zero_grad(set_to_none=True)
    loss.sum().backward()
    return {n for n, m in names.items() if any(p.grad is not None and p.grad.abs().max() > 0 for p in m.parameters())}


def test_one_backward_pass_gives_every_network_its_own_gradient():
    """The joint gradient equals those of three separate losses: nothing leaks between the networks."""
    log = make_episodes()
    log.actions[:] = 3 + 2 * log.actions  # a box that is not [-1, 1]
    agent, phase = make_agent(log, clip=0.0)
    batch, (low, high) = some(None, phase), map(torch.tensor, log.action_bounds)
    unit = (batch["actions"] - low) / (high - low) * 2 - 1
    observations = agent.normalizer(batch["observations"])
    proposal = torch.randn(1, 16, 4).clamp(-0.5, 0.5)
    likely = agent.decode(observations, proposal).detach()
    actor = -agent.first_value(observations, agent.perturb(agent.actor, observations, likely)).mean(1)
    assert gradients_of(agent, actor) == {"actor"}
    separate = torch.cat([p.grad.flatten() for p in agent.actor.parameters()])
    joint = copy.deepcopy(agent)
    joint.optimizers["all"] = torch.optim.SGD(
        [p for m in (joint.encoder, joint.decoder, joint.actor, joint.critics) for p in m.parameters()], lr=0.0
    )
    noise = torch.zeros(1, 16 * 5, 4)
    noise[:, 16:32] = proposal
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bcq.draws, "normals", lambda *_: noise.flatten(1))
        joint.update(batch)
    torch.testing.assert_close(torch.cat([p.grad.flatten() for p in joint.actor.parameters()]), separate)
    goal = agent.goal(batch, noise[:, 32:])
    critic = (agent.values(agent.critics, observations, unit) - goal[:, None]).square().mean(2).sum(1)
    assert gradients_of(agent, critic) == {"critics"}
    for ours, alone in zip(joint.critics.parameters(), agent.critics.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, alone.grad)
    mean, log_std = agent.encode(observations, unit)
    vae = (agent.decode(observations, mean) - unit).square().mean((1, 2))
    assert gradients_of(agent, vae + 0.5 * bcq.kl_to_normal(mean, log_std)) == {"encoder", "decoder"}
    for ours, alone in zip(joint.decoder.parameters(), agent.decoder.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, alone.grad)
    for ours, alone in zip(joint.encoder.parameters(), agent.encoder.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, alone.grad)


def test_the_actor_follows_the_first_critic_only():
    agent, _ = make_agent(make_episodes(), seeds=(3, 4))
    observations, actions = torch.randn(2, 5, 4), torch.rand(2, 5, 2)
    torch.testing.assert_close(
        agent.first_value(observations, actions), agent.values(agent.critics, observations, actions)[:, 0]
    )


def test_targets_follow_slowly():
    agent, phase = make_agent(make_episodes(), tau=0.25)
    before = [p.clone() for p in agent.target_critics.parameters()]
    for ours, theirs in zip(before, agent.critics.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)  # they start alike
    Stepper(phase, CPU).run(0, 1)
    for old, now, new in zip(before, agent.target_critics.parameters(), agent.critics.parameters(), strict=True):
        torch.testing.assert_close(now, 0.75 * old + 0.25 * new)
    assert not torch.equal(before[0], next(iter(agent.target_critics.parameters())))


def test_gradients_are_clipped_for_each_seed_by_itself():
    agent, _ = make_agent(make_episodes(), seeds=(0, 1))
    for p in agent.critics.parameters():
        p.grad = torch.zeros_like(p)
    weight = agent.critics.layers[0].weight  # (seeds * 2, ...)
    weight.grad[0, 0, 0], weight.grad[1, 0, 0], weight.grad[2, 0, 0] = 30.0, 40.0, 3.0
    bcq.clip_gradients(agent.critics.parameters(), 2, 10.0)
    torch.testing.assert_close(weight.grad[:, 0, 0], torch.tensor([6.0, 8.0, 3.0, 0.0]), rtol=1e-4, atol=1e-4)


# --- runs


def test_a_run_from_logs_to_report(tmp_path):
    log = make_episodes((40, 30, 50))
    run = replaylab.train(
        "bcq", log, preset="debug", steps=40, act_samples=5, seeds=[0, 1], device="cpu", out=tmp_path / "run"
    )
    policy = replaylab.load_policy(run, seed=1)
    assert policy.act(np.zeros((3, 4), np.float32)).shape == (3, 2)
    shown = read_runs([run])[0]
    ((title, body),) = sections(shown)
    assert title == "BCQ" and body.count("<tr>") == 3
    shown.metrics[-1] |= {"reconstruction": "<script>", "moved": None, "value": [1]}
    shown.config["phi"] = "x"
    assert "<script>" not in sections(shown)[0][1]
    shown.metrics.clear()
    assert sections(shown) == []


# --- what it learns


def test_the_better_of_the_likely_actions():
    """One step, two habits: around -0.9 and around 0.4, and the reward is the action. The critic extrapolates that 1
    would be better still; nobody ever did that, and BCQ must not."""
    rng = np.random.default_rng(0)
    rows = 1000
    actions = np.where(rng.random(rows) < 0.5, -0.9, 0.4)[:, None] + rng.uniform(-0.05, 0.05, (rows, 1))
    ends = np.ones(rows, bool)
    observations = rng.standard_normal((rows, 2)).astype(np.float32)
    log = from_rows(observations, actions.astype(np.float32), actions[:, 0].astype(np.float32), ends)
    log.final_known[:] = True  # nothing follows a terminated row
    settings = {"hidden": [24, 24], "vae_hidden": [32, 32], "batch_size": 64, "act_samples": 50}
    settings |= {"kl_weight": 0.1, "lr": 3e-3, "samples": 1}
    agent, phase = make_agent(log, seeds=(0, 1), **settings)
    stepper = Stepper(phase, CPU)
    stepper.run(0, 800)
    test = torch.randn(2, 100, 2)
    with torch.no_grad():
        chosen = agent.act(test)[0]
        tempting = torch.ones_like(chosen)
        extrapolated = agent.first_value(agent.normalizer(test), tempting)
        known = agent.first_value(agent.normalizer(test), chosen)
    assert (extrapolated > known + 0.2).float().mean() > 0.9  # the temptation is there
    assert ((chosen > 0.3) & (chosen < 0.6)).float().mean() > 0.97, chosen.flatten().tolist()


def test_more_samples_only_add_candidates():
    agent, _ = make_agent(make_episodes())
    observations = torch.randn(1, 40, 4)
    best = []
    with torch.no_grad():
        for tries in (1, 5, 50):
            agent.config.act_samples = tries
            best.append(agent.first_value(agent.normalizer(observations), agent.act(observations)[0]))
        torch.testing.assert_close(agent.act(observations)[0], agent.act(observations)[0], rtol=0, atol=0)
        torch.testing.assert_close(agent.act(observations[:, 3:4])[0], agent.act(observations)[0][:, 3:4])
    assert (best[0] <= best[1] + 1e-6).all() and (best[1] <= best[2] + 1e-6).all() and (best[2] > best[0]).any()


def test_candidates_come_from_the_middle_of_the_latent(monkeypatch):
    agent, phase = make_agent(make_episodes())
    seen, decode = [], agent.decode
    monkeypatch.setattr(agent, "decode", lambda o, z: seen.append(z.detach().abs().max()) or decode(o, z))
    agent.update(some(None, phase))
    with torch.no_grad():
        agent.act(torch.randn(1, 5, 4))
    posterior, *candidates = seen  # in the order VAE, target, proposal, acting
    assert len(candidates) == 3 and max(candidates) == 0.5 and posterior > 0.5


def test_a_seed_does_not_depend_on_its_neighbours():
    log = make_episodes((40, 30))
    together, phase = make_agent(log, seeds=(0, 7))
    alone, phase_alone = make_agent(log, seeds=(7,))
    Stepper(phase, CPU).run(0, 40)
    Stepper(phase_alone, CPU).run(0, 40)
    observations = torch.randn(1, 20, 4)
    with torch.no_grad():
        torch.testing.assert_close(
            alone.act(observations)[0], together.act(observations.repeat(2, 1, 1))[0][1:], rtol=1e-3, atol=1e-4
        )
    for name, value in alone.decoder.state_dict().items():
        torch.testing.assert_close(value, together.decoder.state_dict()[name][1:], rtol=1e-3, atol=1e-4)


def test_half_and_resume_is_the_whole():
    log = make_episodes((40, 30))
    whole, phase = make_agent(log, seeds=(0, 1))
    Stepper(phase, CPU).run(0, 30)
    half, phase = make_agent(log, seeds=(0, 1))
    Stepper(phase, CPU).run(0, 13)
    resumed, phase = make_agent(log, seeds=(0, 1))
    resumed.load_state_dict(half.state_dict())
    resumed.optimizers["all"].load_state_dict(half.optimizers["all"].state_dict())
    torch.manual_seed(99)  # no generator has a say
    Stepper(phase, CPU).run(13, 17)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def test_a_latent_that_says_nothing_is_noted():
    log = make_episodes((40, 30))
    log.actions[:] = 0.01 * log.actions  # far smaller than the box: the KL outweighs any error
    log.meta.update(action_low=-1, action_high=1)
    agent, phase = make_agent(log)
    phase.finish()
    assert agent.notes == []
    Stepper(phase, CPU).run(0, 300)
    phase.finish()
    assert "in one state actions hardly vary; try --kl-weight" in agent.notes[0]


def test_what_does_not_fit_is_said():
    with pytest.raises(UsageError, match="continuous"):
        make_agent(make_episodes(discrete=True))
    with pytest.raises(UsageError, match="at least 1"):
        make_agent(make_episodes(), act_samples=0)
    frames = Spaces([84, 84], "uint8", 3, False, [-1.0] * 3, [1.0] * 3)
    with pytest.raises(UsageError, match="vectors"):
        bcq.Agent(bcq.Config(), frames, [0], CPU)
