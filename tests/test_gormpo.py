"""GORMPO and MOPO: the agent and its phases, exact resumption, what goes wrong, a run from command to report."""

from __future__ import annotations

import dataclasses
import functools
import json
import math

import numpy as np
import pytest
import torch
from imagining import CPU, TINY, make_agent, make_log, train

import replaylab
from replaylab.algos import Spaces, gormpo, mopo
from replaylab.cli import main
from replaylab.errors import DataError, UsageError
from replaylab.models.imagine import pack, unpack
from replaylab.run import RunFolder

# --- the agent


FEW = {"kde": None}  # it is not trained in steps


def test_phases_in_their_order():
    log = make_log()
    assert [p.name for p in make_agent(log)[1]] == ["density", "dynamics", "policy"]
    assert [p.name for p in make_agent(log, density="kde")[1]] == ["dynamics", "policy"]
    assert [p.name for p in make_agent(log, module=mopo)[1]] == ["dynamics", "policy"]
    agent, phases = make_agent(log, **gormpo.PRESETS["mbpo"])
    assert [p.name for p in phases] == ["dynamics", "policy"] and agent.density is None
    assert [p.evaluates for p in make_agent(log)[1]] == [False, False, True]
    assert "no penalty: MBPO" in agent.notes[1]


@pytest.mark.parametrize("kind", ["realnvp", "vae", "kde", "diffusion", "neuralode"])
def test_every_density_penalises(kind):
    agent, phases = make_agent(
        make_log(), density=kind, penalty_coef=2.0, density_steps=FEW.get(kind, 3), percentile=20.0
    )
    train(agent, phases, stop=(len(phases) - 1, 1))
    assert agent.penalties.threshold.item() == pytest.approx(agent.density.model.threshold(20.0))
    metrics = agent.imagination.metrics()
    assert 0 < metrics["penalised"][0] <= 1 and 0 < metrics["penalty"][0] <= 2
    assert agent.density.model.dim == 3


@pytest.mark.parametrize(
    "penalty", ["tanh", "signed-tanh", "linear", "inverse", "exponential", "softplus", "indicator"]
)
def test_every_penalty_runs(penalty):
    settings = {"density": "kde", "penalty": penalty, "penalty_coef": 0.1, "percentile": 20.0}
    agent, phases = make_agent(make_log(), **settings, uncertainty="pairwise")
    train(agent, phases)
    assert agent.ring.table.isfinite().all() and agent.imagination.metrics()["penalty"].isfinite().all()


def test_a_batch_is_logged_and_imagined_rows_in_their_shares():
    agent, phases = make_agent(make_log(), batch_size=256, real_ratio=0.05)
    assert agent.real == 12 and phases[-1].sampler.draw(0, 2).shape == (2, 1, 12)
    assert agent.uniform.shape[-1] == 244
    agent, phases = make_agent(make_log(), density="kde")
    train(agent, phases, stop=(1, 1))
    agent.sac.update = lambda batch, noise: {"seen": batch, "noise": noise}
    index = torch.tensor([[5, 9]])
    seen = agent.update(phases[1].sampler.gather(index))
    logged = agent.normalizer(agent.data.observations[[5, 9]])
    torch.testing.assert_close(seen["seen"]["observations"][0, :2], logged)
    imagined = agent.ring.table[0, : int(agent.ring.filled), :2]
    assert all((row == imagined).all(1).any() for row in seen["seen"]["observations"][0, 2:])
    assert torch.equal(seen["noise"], agent.noise[:, 1]) and agent.cursor.item() == 2  # the second update's own


def test_a_sweep_of_the_coefficient_changes_the_policy():
    log, weights = make_log(), []
    for coefficient in (0.0, 0.5, 5.0):
        agent, phases = make_agent(log, density="kde", penalty_coef=coefficient, percentile=30.0)
        train(agent, phases)
        weights.append(torch.cat([p.detach().flatten() for p in agent.sac.actor.parameters()]))
    assert not torch.equal(weights[0], weights[1]) and not torch.equal(weights[1], weights[2])


def test_a_seed_does_not_depend_on_its_neighbours():
    """Noise, starts and indices are a function of the seed; what is left is rounding."""
    log, found = make_log(), {}
    for seeds in ((3, 4), (4,)):
        agent, phases = make_agent(log, seeds, uncertainty="aleatoric", steps=20, actor_lr=3e-3, density="vae")
        train(agent, phases)
        found[len(seeds)] = agent.sac.actor.layers[0].weight[-1].detach(), agent.ring.table[-1, :50]
    torch.testing.assert_close(found[1], found[2], rtol=0.01, atol=1e-3)


@functools.cache
def uninterrupted(kind):
    torch.manual_seed(0)
    agent, phases = make_agent(
        make_log(), (0, 1), density=kind, uncertainty="aleatoric", density_steps=FEW.get(kind, 6), carried=0.3
    )
    train(agent, phases)
    return agent


@pytest.mark.parametrize(
    ("kind", "stop"), [("realnvp", (0, 3)), ("realnvp", (1, 3)), ("realnvp", (2, 6)), ("kde", (0, 5)), ("kde", (1, 4))]
)
def test_resume_is_exact(kind, stop):
    """Cut inside the density, inside and between epochs of the ensemble, between and inside rollouts."""
    log, settings = make_log(), {"density": kind, "uncertainty": "aleatoric", "density_steps": FEW.get(kind, 6)}
    settings["carried"] = 0.3
    torch.manual_seed(0)
    first, phases = make_agent(log, (0, 1), **settings)
    train(first, phases, stop=stop)
    state = {k: v.clone() for k, v in first.training_state().items()}
    weights = {k: v.clone() for k, v in first.state_dict().items()}
    optimizers = {k: o.state_dict() for k, o in first.optimizers.items()}
    rng = torch.get_rng_state()
    rest, phases = make_agent(log, (0, 1), **settings)
    rest.load_state_dict(weights)
    for name, optimizer in rest.optimizers.items():
        optimizer.load_state_dict(optimizers[name])
    rest.load_training_state(state)
    if stop[0] == 0 and kind == "realnvp":
        assert (
            rest.density.best == first.density.best > -torch.inf
            and rest.density.kept.keys() == first.density.kept.keys()
        )
    torch.set_rng_state(rng)
    train(rest, phases, at=stop)
    whole = uninterrupted(kind)
    for (name, a), b in zip(whole.state_dict().items(), rest.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert torch.equal(whole.ring.table[:, :-1], rest.ring.table[:, :-1])


def test_a_density_depends_on_the_data_alone():
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        agent, phases = make_agent(make_log(), (seed,))
        train(agent, phases, stop=(1, 0))
        found.append(agent.density.model.state_dict())
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_the_rate_of_the_actor_falls_along_a_cosine():
    agent, phases = make_agent(make_log(), density="kde", actor_lr=1e-3, critic_lr=1e-3, alpha_lr=1e-3)
    rates = [float(g["lr"]) for g in agent.optimizers["policy"].param_groups]
    assert rates == pytest.approx([1e-3] * 3)
    train(agent, phases)
    rates = [float(g["lr"]) for g in agent.optimizers["policy"].param_groups]
    assert rates == pytest.approx([1e-3 * (1 + np.cos(np.pi * 11 / 12)) / 2, 1e-3, 1e-3], rel=1e-4)


def test_limits_on_temperature_and_goals():
    def metrics(**settings):
        agent, _ = make_agent(make_log(), density="kde", **settings)
        torch.nn.init.constant_(agent.sac.log_alpha, 2.0)
        rows = pack(
            torch.randn(1, 20, 2),
            torch.rand(1, 20, 1),
            torch.full((1, 20), -9.0),
            torch.ones(1, 20),
            torch.randn(1, 20, 2),
        )
        return agent.sac.update(unpack(rows, 2))

    assert metrics()["alpha"].item() == 1.0 and metrics(alpha_max=None)["alpha"].item() == pytest.approx(np.exp(2))
    assert metrics(goal_min=0.0)["critic_loss"] < 5 < metrics()["critic_loss"]


def test_tables_by_environment_and_level():
    def found(env_id, level=None, source=None):
        log = make_log(env_id=env_id)
        meta = {"level": level, "source": source}
        return gormpo.tuned(dataclasses.replace(log, meta=log.meta | meta))[0]

    assert found("d4rl/hopper", "medium")[1:] == (5.0, 5) and found("d4rl/halfcheetah", "medium")[1:] == (0.5, 5)
    assert found("d4rl/walker2d", None, "x/walker2d_medium_replay-v2.hdf5")[1:] == (2.5, 1)
    assert found("d4rl/hopper", "mixed") == found("d4rl/hopper", "medium")
    joined = ["minari/halfcheetah/medium-v0", "minari/halfcheetah/expert-v0"]
    assert found("d4rl/halfcheetah", None, joined) == found("d4rl/halfcheetah", "medium-expert") == (2.0, 2.5, 5)
    log = make_log()
    assert gormpo.tuned(log)[0] == (float(f"{np.std(log.rewards):.2g}"), 1.0, 5)
    agent, _ = make_agent(make_log(env_id="d4rl/pendulum"), penalty_coef=3.0)
    assert agent.notes[1] == "imagines 3 steps, tanh penalty x 3" and "pendulum (for d4rl/pendulum)" in agent.notes[0]


def test_constant_columns_stay_harmless():
    log = make_log()
    observations = np.concatenate([log.observations, np.full((400, 1), 7.0, np.float32)], 1)
    finals = np.concatenate([log.final_observations, np.full((20, 1), 7.0, np.float32)], 1)
    log = dataclasses.replace(log, observations=observations, final_observations=finals)
    agent, phases = make_agent(log, density="kde")
    train(agent, phases)
    batch = unpack(agent.ring.table[:, :-1][:, : int(agent.ring.filled)], 3)
    assert batch["next_observations"][..., 2].abs().max() < 1e-3  # imagined as it was logged, and seen as zero
    assert agent.ring.table.abs().max() < 100 and agent.imagination.survivors[0] > 20


# --- what goes wrong


def test_nothing_or_everything_penalised_is_told_once():
    log = make_log()
    for percentile, penalty, said in ((0.1, "tanh", "0 %"), (99.9, "tanh", "100 %")):
        agent, phases = make_agent(log, density="kde", penalty=penalty, percentile=percentile)
        train(agent, phases, stop=(1, 0))
        agent._use_density()
        agent.penalties.threshold.fill_(-1e8 if said == "0 %" else 1e8)
        train(agent, phases, at=(1, 0))
        told = [note for note in agent.notes if "are penalised" in note]
        assert len(told) == 1 and said in told[0] and "--percentile" in told[0]


def test_rollouts_that_end_at_once_are_told_and_training_goes_on(tmp_path):
    file = tmp_path / "ends.py"
    file.write_text("import torch\ndef all(s, a, n):\n    return torch.ones(len(n), dtype=torch.bool)\n")
    agent, phases = make_agent(make_log(), density="kde", termination=f"{file}:all")
    train(agent, phases)
    assert any("seed 0: every imagined episode ended in its first step" in note for note in agent.notes)
    assert any("does not fit the log: is it the right one?" in note for note in agent.notes)
    assert agent.ring.filled[0] > 0 and agent.done == 12
    agent, phases = make_agent(make_log(), density="kde", termination=f"{file}:all", rollout_length=1)
    train(agent, phases)
    assert any("ended in its first step" in note for note in agent.notes)


def test_an_ensemble_that_predicts_nothing_is_one_line():
    agent, phases = make_agent(make_log(), density="kde")
    train(agent, phases, stop=(1, 0))
    agent.dynamics.target_mean.fill_(torch.nan)
    with pytest.raises(DataError, match="nothing was imagined"):
        train(agent, phases, at=(1, 0))


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"density": "none"}, "penalty tanh needs a density"),
        ({"penalty": "none", "density_model": "somewhere"}, "without a penalty"),
        ({"density_model": "nowhere"}, "not a density folder"),
        ({"termination": "hoper"}, "did you mean 'hopper'"),
        ({"elites": 4}, "elites must be"),
        ({"real_ratio": 1.5}, "real_ratio"),
        ({"real_ratio": 1.0}, "leaves no imagined rows"),
        ({"uncertainty_coef": 3.0}, "--uncertainty-coef without a penalty"),
        ({"penalty": "none", "penalty_coef": 3.0}, "--penalty-coef without a penalty"),
        ({"penalty": "none", "density": "kde"}, "leave out --density$"),
        ({"penalty": "linear"}, "penalty linear has no usual size: pass --penalty-coef"),
        ({"uncertainty": "pairwise", "members": 1, "elites": 1}, "compares members, and 1 has none beside it"),
        ({"penalty": "none", "percentile": 5.0}, "percentile without a density's penalty does nothing"),
        ({"alpha_max": -1.0}, "alpha_max must be at least 0"),
        ({"rollout_length": 0}, "rollout_length"),
        ({"retain": 0}, "retain"),
        ({"carried": 1.5}, "carried"),
        ({"carried_steps": 50}, "--carried-steps without carried rows"),
        ({"percentile": 0.0}, "percentile"),
        ({"penalty_coef": math.nan}, "penalty_coef must be at least 0, not nan"),
        ({"uncertainty_coef": -1.0}, "uncertainty_coef must be"),
        ({"density_steps": 0}, "density_steps must be at least 1"),
        ({"dynamics_hidden": [16, 0]}, "dynamics_hidden must be at least 1"),
        ({"dynamics_lr": math.nan}, "dynamics_lr must be above 0"),
        ({"gamma": math.nan}, "gamma must be from 0 to 1"),
        ({"goal_min": math.nan}, "goal_min must be a number"),
    ],
)
def test_bad_settings(settings, complaint):
    with pytest.raises(UsageError, match=complaint):
        make_agent(make_log(), **settings)


def test_a_run_with_settings_that_are_refused_now_is_still_loaded():
    log, config = make_log(), gormpo.Config(**TINY | {"penalty": "none", "percentile": 5.0})
    agent = gormpo.Agent(config, Spaces.of(log), [0], CPU)
    assert agent.act(torch.zeros(1, 3, 2))[0].shape == (1, 3, 1)
    with pytest.raises(UsageError, match="percentile without"):
        agent.phases(log)


def test_no_penalty_and_no_density_is_mbpo():
    agent, phases = make_agent(make_log(), density="none", penalty="none")
    assert [p.name for p in phases] == ["dynamics", "policy"] and "no penalty: MBPO" in " ".join(agent.notes)


def test_frames_and_discrete_actions_are_refused():
    numbers = r"continuous actions, and the data's are whole numbers: amounts must be stored as real numbers"
    for shape, told in (([84, 84], "vectors, not"), ([2], numbers)):
        with pytest.raises(UsageError, match=told):
            gormpo.Agent(gormpo.Config(), Spaces(shape, "float32", 3, True), [0], CPU)


# --- from the command line


def test_a_run_from_command_to_report(tmp_path, capsys):
    log = make_log()
    replaylab.save(log, tmp_path / "log.npz")
    (tmp_path / "c.yaml").write_text("penalty: tanh\npenalty_coef: 0.25\n")
    words = f"train gormpo --data {tmp_path}/log.npz --preset debug --config {tmp_path}/c.yaml --seeds 1 2"
    words += f" --density-steps 5 --steps 6 --rollout-every 3 --penalty-coef 0.75 --out {tmp_path}/run --device cpu"
    assert main(words.split()) == 0
    said = capsys.readouterr().err
    assert "tanh penalty x 0.75" in said and "termination: none" in said
    run = RunFolder(tmp_path / "run")
    assert run.config()["penalty_coef"] == 0.75
    findings = run.info()["findings"]
    assert len(findings["dynamics"]["error"]) == 2 and findings["dynamics"]["density"]["tests"]
    assert {"logged", "imagined"} <= set(findings["policy"]["support"])
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert {"penalised", "penalty"} <= set(lines[-1]) and lines[-1]["phase"] == "policy"
    page = (tmp_path / "run/report.html").read_text()
    assert "Dynamics ensemble" in page and "Held-out rows" in page
    policy = replaylab.load_policy(tmp_path / "run", seed=2)
    assert policy.act(np.zeros(2)).shape == (1,)


def test_sections_survive_anything(tmp_path):
    from replaylab.results import Run
    from replaylab.sections import gormpo as sections
    from replaylab.sections import mopo as others

    for findings in (
        None,
        {},
        [],
        {"dynamics": 3},
        {"dynamics": {"error": "x", "density": {"tests": [{}, 1]}}, "policy": {"support": 1}},
        {"dynamics": {"seeds": [0], "error": [[None]], "elites": [[9]], "epochs": [], "coverage": {"50": ["<b>"]}}},
    ):
        run = Run(tmp_path, "x", {}, {"findings": findings}, [], [])
        for title, body in sections.sections(run) + others.sections(run):
            assert isinstance(title, str) and "<b>" not in body
