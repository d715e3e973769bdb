"""GORMPO and MOPO with a density or ensembles that were trained before, and a trained run that is loaded again."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil

import pytest
import torch
from imagining import CPU, TINY, make_agent, make_log, train

import replaylab
from replaylab import density
from replaylab.algos import mopo
from replaylab.cli import main
from replaylab.config import write_yaml
from replaylab.errors import DataError, UsageError
from replaylab.evaluate import load_agent
from replaylab.models import termination
from replaylab.run import RunFolder
from replaylab.tensors import under


def test_a_loaded_run_foretells_with_its_own_ends(tmp_path):
    log, settings = make_log(env_id="Pendulum-v1"), TINY | {"steps": 2, "device": "cpu"}
    run = replaylab.train("mopo", log, out=tmp_path / "r", **settings)
    agent, _, _ = load_agent(RunFolder(run), CPU)
    assert list(termination.KNOWN)[int(agent.ends)] == "pendulum"
    mean, disagreement = agent.predicted_return(torch.randn(5, agent.observation), 3)
    assert mean.shape == disagreement.shape == (1,) and disagreement > 0
    assert agent.imagined_states(torch.randn(5, agent.observation), 3).shape == (1, 5, agent.observation)


def test_a_density_of_other_columns_is_one_line(tmp_path):
    density.fit(make_log(), "kde", tmp_path / "d", device="cpu", centres=50)
    agent, phases = make_agent(make_log(), density_model=str(tmp_path / "d"))
    assert [p.name for p in phases] == ["dynamics", "policy"]
    train(agent, phases)
    assert agent.imagination.metrics()["penalty"][0] > 0
    with pytest.raises(DataError, match="2 observation and 1 action columns, the data has 2 and 2"):
        make_agent(make_log(action=2), density_model=str(tmp_path / "d"))
    make_agent(make_log(), module=mopo, density_model=str(tmp_path / "d"), penalty="tanh")  # MOPO's, and this one
    with pytest.raises(UsageError, match="has density kde: leave --density out"):
        make_agent(make_log(), density_model=str(tmp_path / "d"), density="vae")
    with pytest.raises(UsageError, match="has density_inputs nsa: leave --density-inputs out"):
        make_agent(make_log(), density_model=str(tmp_path / "d"), density_inputs="sas")


def test_steps_that_train_no_density_are_refused(tmp_path):
    density.fit(make_log(), "kde", tmp_path / "d", device="cpu", centres=50)
    for settings, what in (
        ({"density_model": str(tmp_path / "d")}, f"the density of {tmp_path}/d"),
        ({"density": "kde"}, "a kde"),
    ):
        with pytest.raises(UsageError, match=f"^density_steps changes nothing of {what}: leave it out"):
            make_agent(make_log(), density_steps=7, **settings)
        for usual in (None, 40):  # the default's, and a preset's
            make_agent(make_log(), density_steps=usual, **settings)


def test_a_density_of_another_robot_is_one_line(tmp_path):
    def of(env):
        return dataclasses.replace(make_log(), meta={"env_id": env})

    density.fit(of("d4rl/walker2d"), "kde", tmp_path / "d", device="cpu", centres=50)
    make_agent(of("Walker2d-v5"), density_model=str(tmp_path / "d"), termination="none")
    with pytest.raises(DataError, match="the density was trained on data of walker2d, this is of halfcheetah"):
        make_agent(of("HalfCheetah-v5"), density_model=str(tmp_path / "d"), termination="none")


def test_a_density_is_judged_at_the_threshold_that_is_used(tmp_path):
    density.fit(make_log(), "kde", tmp_path / "d", device="cpu", centres=50)
    rates = {}
    for percentile in (1.0, 50.0):
        agent, phases = make_agent(make_log(), density_model=str(tmp_path / "d"), percentile=percentile)
        train(agent, phases)
        found = agent._about_density()["density"]
        assert found["percentile"] == percentile
        rates[percentile] = found["tests"][0]["tnr"]
    assert rates[1.0] - rates[50.0] > 0.2  # half of the data lies below its median
    few = make_log().select(range(9))  # too few to hold some out, which only another threshold asks for
    make_agent(few, density_model=str(tmp_path / "d"))
    with pytest.raises(UsageError, match="10 episodes to hold some out"):
        make_agent(few, density_model=str(tmp_path / "d"), percentile=50.0)


def test_the_ensembles_of_another_run(tmp_path, capsys):
    """Each seed takes its own; what is imagined with them is penalised by another density."""
    replaylab.save(make_log(), tmp_path / "log.npz")
    words = f"train mopo --data {tmp_path}/log.npz --preset debug --steps 3 --rollout-every 3 --device cpu --seeds 3 1"
    assert main([*words.split(), "--out", str(tmp_path / "first")]) == 0
    words = f"train gormpo --data {tmp_path}/log.npz --preset debug --steps 6 --rollout-every 3 --device cpu --seeds 1"
    words += f" --dynamics-model {tmp_path}/first --density kde"
    assert main([*words.split(), "--out", str(tmp_path / "second")]) == 0
    first, second = (RunFolder(tmp_path / name) for name in ("first", "second"))
    mine, theirs = second.weights(), first.weights()
    assert torch.equal(mine["dynamics.elites"], theirs["dynamics.elites"][1:])
    weight = theirs["dynamics.net.layers.1.weight"]
    assert torch.equal(mine["dynamics.net.layers.1.weight"], weight[len(weight) // 2 :])
    assert torch.equal(mine["dynamics.input_mean"], theirs["dynamics.input_mean"])
    findings = second.info()["findings"]
    assert "dynamics" not in findings and findings["policy"]["density"]["kind"] == "kde"
    assert "Held-out rows" in (tmp_path / "second/report.html").read_text()
    capsys.readouterr()
    for change, complaint in (
        ("--seeds 2", "has no seed 2; it has 3, 1"),
        ("--dynamics-hidden 8 8", "another --members"),
        (f"--dynamics-model {tmp_path}/none", "none"),
        (f"--dynamics-model {tmp_path}/first", "is a run of diffusion-dice: only mopo and gormpo have ensembles"),
    ):
        if "dice" in complaint:  # Diffusion-DICE's models are others, of the same name
            write_yaml(first.path / "config.yaml", first.config() | {"system": "diffusion-dice"})
        assert main([*words.split(), *change.split(), "--out", str(tmp_path / "third"), "--overwrite"]) == 2
        assert complaint in capsys.readouterr().err


def test_ensembles_of_another_robot_or_of_an_unfinished_run_are_refused(tmp_path):
    def of(env):
        return dataclasses.replace(make_log(), meta={"env_id": env})

    settings = TINY | {"steps": 2, "device": "cpu", "termination": "none", "final_episodes": 0}
    first = RunFolder(replaylab.train("mopo", of("walker2d-made-up"), out=tmp_path / "first", **settings))
    make_agent(of("Walker2d-v5"), dynamics_model=str(first.path), termination="none")
    with pytest.raises(DataError, match="first was trained on data of walker2d, this is of halfcheetah"):
        make_agent(of("HalfCheetah-v5"), dynamics_model=str(first.path), termination="none")
    path = first.checkpoints()[-1] / "state.json"  # killed between the end of the phase and the next checkpoint:
    path.write_text(json.dumps(json.loads(path.read_text()) | {"findings": {}}))
    assert "dynamics" in first.info()["findings"]
    with pytest.raises(UsageError, match="has no ensemble that was trained to the end: go on there with --resume"):
        make_agent(make_log(), dynamics_model=str(first.path), termination="none")


def test_a_run_goes_on_without_the_run_that_its_ensembles_are_from(tmp_path):
    settings = TINY | {"device": "cpu", "steps": 2}
    first = replaylab.train("mopo", make_log(), out=tmp_path / "first", **settings)
    settings |= {"dynamics_model": str(first)}
    second = replaylab.train("mopo", make_log(), out=tmp_path / "second", **settings)
    third = replaylab.train("mopo", make_log(), out=tmp_path / "third", **settings)
    shutil.rmtree(third / "checkpoints")  # as if it had been killed before the first of them
    shutil.rmtree(first)
    ensembles = under("dynamics.", RunFolder(second).weights())
    replaylab.train("mopo", make_log(), out=second, resume=True, **settings | {"steps": 4})
    after = under("dynamics.", RunFolder(second).weights())
    assert all(torch.equal(ensembles[name], after[name]) for name in ensembles)
    for out, how in ((third, {"resume": True}), (tmp_path / "fourth", {})):
        with pytest.raises(UsageError, match="first does not exist"):
            replaylab.train("mopo", make_log(), out=out, **settings | how)


def test_settings_that_trained_a_loaded_ensemble_are_refused(tmp_path):
    """Unless nobody gave them, or they are the ones that it was trained with."""
    replaylab.save(make_log(), tmp_path / "log.npz")
    train_one = functools.partial(replaylab.train, data=tmp_path / "log.npz", device="cpu")
    first = str(train_one("mopo", out=tmp_path / "first", patience=3, **TINY))
    changes = {"dynamics_lr": 3e-4, "dynamics_batch": 32, "scale_targets": False, "patience": 4, "max_epochs": 50}
    for name, value in changes.items():
        with pytest.raises(UsageError, match=f"^{name} changes nothing of the ensembles of {first}"):
            make_agent(make_log(), dynamics_model=first, **{name: value})
    own, default, preset = {"patience": 3}, {"dynamics_batch": 256, "max_epochs": 200}, {"dynamics_batch": 1024}
    for settings in (own, default, preset):
        make_agent(make_log(), dynamics_model=first, **settings)
    settings = TINY | own | {"dynamics_model": first, "density": "kde"}
    second = train_one("gormpo", out=tmp_path / "second", **settings)
    train_one("gormpo", out=second, resume=True, **settings | {"steps": 14})
    train_one("gormpo", out=tmp_path / "third", config=second / "config.yaml")
    assert RunFolder(tmp_path / "third").info()["status"] == "finished"


def test_a_run_goes_on_without_the_folder_that_its_density_is_from(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    density.fit(make_log(), "kde", tmp_path / "d", device="cpu", centres=50)
    settings = TINY | {"device": "cpu", "density_model": "d", "percentile": 5.0, "actor_lr_decay": False}
    go = functools.partial(replaylab.train, "gormpo", make_log(), **settings)
    whole = go(out="whole", steps=8)
    first, second = go(out="first", steps=4), go(out="second", steps=4)
    shutil.rmtree(second / "checkpoints")  # as if it had been killed before the first of them
    shutil.rmtree("d")
    density.fit(make_log(), "vae", "d", device="cpu", steps=5)  # another one under its name changes nothing
    assert go(out=first, steps=8, resume=True) == first
    shutil.rmtree("d")
    go(out=second, steps=8, resume=True)
    wanted = RunFolder(whole).weights()
    for run in (first, second):
        assert all(torch.equal(value, wanted[name]) for name, value in RunFolder(run).weights().items())
        assert RunFolder(run).info()["findings"]["dynamics"]["density"]["tests"]
        assert RunFolder(run).config()["density_model"] == "d"
    assert replaylab.load_policy(first, seed=0).act([[0.0, 1.0]]).shape == (1, 1)
    replaylab.report([first], "report.html")
    with pytest.raises(UsageError, match="d is not a density folder"):
        go(out="third")
    given = settings | {"density_model": str(whole / "density_model")}
    with pytest.raises(UsageError, match="is in the folder that --overwrite would clear"):
        replaylab.train("gormpo", make_log(), out=whole, overwrite=True, **given)
    assert replaylab.train("gormpo", make_log(), out="third", **given)
