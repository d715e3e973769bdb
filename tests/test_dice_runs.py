"""Whole runs of Diffusion-DICE: cut and resumed, stages apart, sweeps, settings that do not fit."""

from __future__ import annotations

from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch
from conftest import make_episodes
from tiny_dice import TINY, make_agent

import replaylab
from replaylab import results
from replaylab.algos import Spaces
from replaylab.algos import diffusion_dice as dice
from replaylab.cli import main
from replaylab.errors import DataError, ReplaylabError, UsageError
from replaylab.run import RunFolder
from replaylab.step import Stepper
from replaylab.trainer import Interrupted, Trainer


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


def test_rates_change_only_while_updates_are_left(tmp_path):
    log, other = make_episodes(), {"value_lr": 1e-5}
    run = replaylab.train("diffusion-dice", log, out=tmp_path / "r", **FRONT)
    with pytest.raises(UsageError, match=r"value_lr was 0\.0003, now 1e-05"):
        replaylab.train("diffusion-dice", log, out=run, resume=True, **FRONT | other)
    replaylab.train("diffusion-dice", log, out=run, resume=True, **FRONT | other | {"critic_steps": 12})
    assert RunFolder(run).config()["value_lr"] == 1e-5


def test_stages_in_separate_runs(tmp_path):
    log = make_episodes()
    both = replaylab.train("diffusion-dice", log, out=tmp_path / "both", **FRONT | {"seeds": [0, 1]})
    behavior = replaylab.train(
        "diffusion-dice", log, out=tmp_path / "b", **FRONT | {"stage": "behavior", "seeds": [1, 0]}
    )
    assert RunFolder(behavior).lines("eval.jsonl")
    with pytest.raises(UsageError, match="candidates changes nothing"):
        replaylab.evaluate(behavior, episodes=1, acting={"candidates": [4]}, device="cpu")
    assert replaylab.evaluate(behavior, episodes=1, acting={"solver_steps": [4]}, device="cpu")
    settings = FRONT | {"stage": "critic", "behavior": str(behavior), "seeds": [0, 1]}
    critic = replaylab.train("diffusion-dice", log, out=tmp_path / "c", **settings)
    one, two = weights_of(both)[0], weights_of(critic)[0]
    assert all(torch.equal(one[k], two[k]) for k in one if k != "behavior_done")
    behavior.rename(tmp_path / "gone")  # a trained run needs it no more
    assert replaylab.load_policy(critic, seed=1).act(np.zeros(4)).shape == (2,)
    settings["behavior"] = str(tmp_path / "gone")
    with pytest.raises(UsageError, match="has no seed 4; it has 1, 0"):
        replaylab.train("diffusion-dice", log, out=tmp_path / "d", **settings | {"seeds": [0, 4]})
    with pytest.raises(UsageError, match="another width: pass --behavior-width 16"):
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
    agent, _ = make_agent(log, (0, 1), stage="critic", behavior=str(run))
    trained = weights_of(run)[0]["score.out.weight"]
    assert torch.equal(agent.score.out.weight, torch.cat([trained, trained]))


def test_a_behaviour_model_that_is_not_finished(tmp_path, monkeypatch):
    log, settings = make_episodes(), FRONT | {"env": None}
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        stop_after(patch, 3)
        replaylab.train("diffusion-dice", log, out=tmp_path / "b", **settings | {"stage": "behavior"})
    settings |= {"stage": "critic", "behavior": str(tmp_path / "b")}
    run = replaylab.train("diffusion-dice", log, out=tmp_path / "c", **settings)
    assert f"the behaviour model of {tmp_path / 'b'} was stopped at update 3 of 6" in RunFolder(run).info()["notes"]
    RunFolder(tmp_path / "b").write_info(status="failed", error="score_loss became NaN")
    with pytest.raises(UsageError, match="b failed: score_loss became NaN"):
        replaylab.train("diffusion-dice", log, out=tmp_path / "d", **settings)


def test_a_policy_acts_as_it_is_told(tmp_path):
    settings = FRONT | {"env": None, "guidance": 3.0}
    run = replaylab.train("diffusion-dice", make_episodes(), out=tmp_path / "r", **settings)
    assert RunFolder(run).info()["findings"]["critic"]["guidance"] == 3
    assert replaylab.load_policy(run).agent.config.candidates == 4
    assert replaylab.load_policy(run, candidates=2, guidance=0).agent.config.candidates == 2
    with pytest.raises(UsageError, match="does not act by 'candidate'; did you mean 'candidates'"):
        replaylab.load_policy(run, candidate=2)
    with pytest.raises(UsageError, match="candidates must be at least 1"):
        replaylab.load_policy(run, candidates=0)


def test_nothing_is_drawn_where_there_is_nothing_to_choose(tmp_path):
    run = replaylab.train("diffusion-dice", make_episodes(), out=tmp_path / "r", **FRONT)
    acting = {"candidates": [1], "filter": ["max", "softmax"]}
    told = []
    both = replaylab.evaluate(run, episodes=3, acting=acting, device="cpu", told=told.append)
    assert both[0]["returns"] == both[1]["returns"] and told == [both[:1], both[1:]]  # as they are played


def test_the_behaviour_model_sees_states_as_it_learnt_them(tmp_path):
    log = make_episodes()
    shifted = replace(log, observations=3 * log.observations + 1)
    settings = FRONT | {"normalize": True}
    run = replaylab.train("diffusion-dice", log, out=tmp_path / "b", **settings | {"stage": "behavior"})
    settings |= {"stage": "critic", "behavior": str(run)}
    critic = replaylab.train("diffusion-dice", shifted, out=tmp_path / "c", **settings)
    theirs, ours = weights_of(run)[0], weights_of(critic)[0]
    assert all(torch.equal(theirs[k], ours[k]) for k in theirs if k.startswith("normalizer."))


def test_a_behaviour_model_of_another_robot_is_refused(tmp_path):
    log, settings = make_episodes(), FRONT | {"env": None, "preset": "plain"}
    walker, cheetah = (replace(log, meta={"env_id": name}) for name in ("walker2d-made-up", "halfcheetah-made-up"))
    run = replaylab.train("diffusion-dice", walker, out=tmp_path / "b", **settings | {"stage": "behavior"})
    with pytest.raises(DataError, match="b was trained on data of walker2d, this is of halfcheetah"):
        replaylab.train("diffusion-dice", cheetah, out=tmp_path / "c", stage="critic", behavior=str(run), **settings)


def test_actions_are_scaled_as_the_behaviour_model_learnt_them(tmp_path):
    log, settings = make_episodes(), FRONT | {"env": None}
    wide = replace(log, actions=8 * log.actions)
    run = replaylab.train("diffusion-dice", wide, out=tmp_path / "b", **settings | {"stage": "behavior"})
    agent, _ = make_agent(log, stage="critic", behavior=str(run))
    theirs, loaded = make_agent(wide)[0], type(agent)(agent.config, Spaces.of(log), agent.seeds, agent.device)
    loaded.load_state_dict(agent.state_dict())
    assert theirs.unit.tolist() == [4, 4]
    for ours in (agent, loaded):
        assert torch.equal(ours.unit, theirs.unit) and torch.equal(ours.center, theirs.center)


def test_what_is_refused_costs_no_run(tmp_path):
    log = make_episodes()
    run = replaylab.train("diffusion-dice", log, out=tmp_path / "b", **FRONT | {"stage": "behavior"})
    before = {path: path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}
    settings = FRONT | {"stage": "critic", "behavior": str(run), "behavior_width": 32, "overwrite": True}
    with pytest.raises(UsageError, match="another width"):
        replaylab.train("diffusion-dice", log, out=run, **settings)
    with pytest.raises(ReplaylabError, match="nowhere"):
        replaylab.train("diffusion-dice", log, out=run, **settings | {"behavior": str(tmp_path / "nowhere")})
    assert {path: path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()} == before
    with pytest.raises(UsageError, match="another width"):
        replaylab.train("diffusion-dice", log, out=tmp_path / "new", **settings)
    assert not RunFolder(tmp_path / "new").exists()


def test_what_is_over_keeps_its_steps(tmp_path):
    """More steps of a phase that is over would never be done: said, and nothing is changed."""
    log, settings = make_episodes(), FRONT | {"behavior_steps": 6, "critic_steps": 8}
    run = replaylab.train("diffusion-dice", log, out=tmp_path / "r", **settings)
    before = [(run / name).read_text() for name in ("config.yaml", "run.json")]
    with pytest.raises(UsageError, match="finished phases keep their steps, which were behavior 6, critic 8"):
        replaylab.train("diffusion-dice", log, out=run, resume=True, **settings | {"behavior_steps": 9})
    assert [(run / name).read_text() for name in ("config.yaml", "run.json")] == before
    replaylab.train("diffusion-dice", log, out=run, resume=True, **settings | {"critic_steps": 12, "guide_lr": 1e-4})
    assert RunFolder(run).load()[2]["step"] == 18


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
    assert "Guidance and candidates" in page and "1.5" in page and "evaluations with other settings" not in page
    assert main(["eval", str(run), "--guidance", "0", "1", "2", "3", "4", "--episodes", "1", "--device", "cpu"]) == 0
    page = replaylab.report([run], tmp_path / "page.html").read_text()
    assert "13 evaluations with other settings" in page and "Guidance and candidates" in page
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
        ({"solver_order": 3}, "solver_order must be from 1 to 2"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"backup": "data", "returns_steps": 0}, "returns_steps must be above 0"),
        ({"trace": 1.5}, "trace must be from 0 to 1"),
        ({"gamma": 1.5}, "gamma must be from 0 to 1"),
        ({"alpha": float("inf")}, "alpha must be above 0, not inf"),
        ({"value_lr": float("nan")}, "value_lr must be above 0"),
        ({"ensemble": -1}, "ensemble must be at least 0"),
        ({"guidance": float("nan")}, "guidance must be a number"),
        ({"hidden": [0]}, "hidden must be at least 1"),
        ({"guide_hidden": []}, "guide_hidden needs at least one number"),
        ({"behavior_ema": 1.0}, "behavior_ema must be from 0 to 0.99999"),
        ({"least_weight": 2.0}, "least_weight must be above 0 and at most 1"),
        ({"stage": "critic"}, "belong together"),
        ({"behavior": "x"}, "belong together"),
        ({"stage": "critic", "behavior": "/nowhere"}, "/nowhere does not exist"),
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
    with pytest.raises(DataError, match=r"became NaN or infinite at step \d+ \(update \d of critic\)"):
        replaylab.train("diffusion-dice", log, out=tmp_path / "r", **FRONT | {"rewards": "raw"})


def test_every_preset_is_of_known_settings():
    known = set(dice.Config.__dataclass_fields__) | {"eval_every", "eval_episodes", "final_episodes"}
    for preset in dice.PRESETS.values():
        assert set(preset) <= known
        dice.Config(**{k: v for k, v in preset.items() if k in dice.Config.__dataclass_fields__})
    assert set(dice.ACTING) <= known
    paper, maze = dice.PRESETS["paper"], dice.PRESETS["antmaze"]
    assert (paper["behavior_steps"], paper["critic_steps"], maze["noise_copies"]) == (600_000, 1_000_000, 32)


def test_the_sample_with_the_debug_preset(tmp_path):
    pytest.importorskip("mujoco")
    run = replaylab.train("diffusion-dice", "sample", out=tmp_path / "r", preset="debug", device="cpu", critic_steps=20)
    lines = RunFolder(run).lines("metrics.jsonl")
    loss = [line["score_loss"] for line in lines if line["phase"] == "behavior"]
    assert np.mean(loss[-20:]) < 0.8 * np.mean(loss[:20]) and RunFolder(run).lines("eval.jsonl")


def test_settings_without_effect_are_noted():
    """Those of a preset are nobody's, and with the right company a setting is not idle."""
    given = {"trace": 0.5, "models": 3, "temperature": 0.3, "twins": "mean", "min_lr": 1e-5}
    told = [f"{name} has no effect" for name in ("trace", "models", "temperature")]
    assert [note.partition(" with")[0] for note in dice.idle_settings(dice.Config(**given))] == told
    right = {"backup": "data", "filter": "softmax", "lr_decay": False}
    found = dice.idle_settings(dice.Config(**given | right))
    assert found == ["models has no effect without --backup model", "min_lr has no effect with --no-lr-decay"]
    for name, preset in dice.PRESETS.items():
        ours = {key: value for key, value in preset.items() if key in vars(dice.Config())}
        assert dice.idle_settings(dice.Config(**ours)) == [], name
