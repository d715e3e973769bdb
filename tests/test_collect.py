from __future__ import annotations

import contextlib
import json
import math
import shutil
from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch
from conftest import make_episodes

from replaylab.algos import Spaces
from replaylab.algos.sac import SAC, Config
from replaylab.collect import collect, rounded, save_what_fits
from replaylab.collect.levels import choose, make_level
from replaylab.collect.online import Config as OnlineConfig
from replaylab.collect.online import Online, Replay
from replaylab.data.read import load
from replaylab.errors import DataError, ReplaylabError, UsageError

SPACES = Spaces([3], "float32", 2, False, [-2.0, -1.0], [2.0, 1.0])


def batch(seeds=2, size=16):
    torch.manual_seed(0)
    return {
        "observations": torch.randn(seeds, size, 3),
        "actions": torch.rand(seeds, size, 2) * 2 - 1,
        "rewards": torch.randn(seeds, size),
        "terminated": (torch.rand(seeds, size) < 0.2).float(),
        "next_observations": torch.randn(seeds, size, 3),
    }


def test_log_probability_is_that_of_the_squashed_gaussian():
    sac = SAC(Config(hidden=[8]), SPACES, [0, 1], torch.device("cpu"))
    observations = torch.randn(2, 5, 3)
    torch.manual_seed(1)
    actions, log_prob = sac.sample(observations)
    mean, log_std = sac.distribution(observations)
    raw = torch.atanh(actions / sac.scale)
    expected = torch.distributions.Normal(mean, log_std.exp()).log_prob(raw)
    expected = (expected - torch.log(sac.scale * (1 - torch.tanh(raw) ** 2))).sum(-1)
    torch.testing.assert_close(log_prob, expected, rtol=1e-3, atol=1e-4)
    assert (actions.abs() <= sac.scale).all()
    assert torch.equal(sac.mode(observations), sac.sample(observations, torch.zeros(2, 5, 2))[0])


def test_an_action_that_is_always_the_same_does_no_harm():
    found = []
    for low, high in ((-1.0, 1.0), (2.0, 2.0)):
        spaces = replace(SPACES, action_low=[-1.0, low], action_high=[1.0, high])
        sac = SAC(Config(hidden=[8]), spaces, [0], torch.device("cpu"))
        torch.manual_seed(0)
        found.append(sac.sample(torch.ones(1, 50, 3)))
    (_, usual), (actions, log_prob) = found
    assert (actions[..., 1] == 2).all() and torch.equal(usual, log_prob)
    assert sac.values(sac.critics, torch.ones(1, 50, 3), actions).isfinite().all()


def test_one_update_is_the_textbook_gradient_step():
    """One seed by hand: separate losses, separate backward passes, same parameters before and after."""
    ours, theirs = (SAC(Config(hidden=[8]), SPACES, [5], torch.device("cpu")) for _ in range(2))
    assert ours.log_alpha.item() == 0
    for sac in (ours, theirs):  # at 0 a gradient of the temperature's loss in the actor would be 0, too
        sac.log_alpha.data.fill_(-1.5)
    data = batch(seeds=1)
    torch.manual_seed(9)
    metrics = ours.update(data)
    torch.manual_seed(9)
    both = torch.cat([data["observations"], data["next_observations"]], 1)
    actions, log_prob = theirs.sample(both)
    log_prob = log_prob + math.log(2)  # entropy in units of the box, whose first side is twice as wide
    alpha = theirs.log_alpha.exp().detach()
    with torch.no_grad():
        following = theirs.values(theirs.targets, data["next_observations"], actions[:, 16:]).min(1).values
        goal = data["rewards"] + 0.99 * (1 - data["terminated"]) * (following - alpha * log_prob[:, 16:])
    q1, q2 = theirs.values(theirs.critics, data["observations"], data["actions"])[0]
    critic_loss = ((q1 - goal[0]) ** 2).mean() + ((q2 - goal[0]) ** 2).mean()
    critic_gradients = torch.autograd.grad(critic_loss, list(theirs.critics.parameters()))
    value = theirs.values(theirs.critics, data["observations"], actions[:, :16]).min(1).values
    actor_loss = (alpha * log_prob[:, :16] - value).mean()
    actor_gradients = torch.autograd.grad(actor_loss, list(theirs.actor.parameters()))
    assert metrics["critic_loss"].item() == pytest.approx(critic_loss.item(), rel=1e-4)
    assert metrics["actor_loss"].item() == pytest.approx(actor_loss.item(), rel=1e-4)
    for parameter, gradient in zip(ours.critics.parameters(), critic_gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-6)
    for parameter, gradient in zip(ours.actor.parameters(), actor_gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-6)
    slope = -(log_prob[:, :16].mean() - 2.0)  # target entropy is minus two
    assert ours.log_alpha.grad.item() == pytest.approx(slope.item(), rel=1e-3)
    for target, old, new in zip(
        ours.targets.parameters(), theirs.targets.parameters(), ours.critics.parameters(), strict=True
    ):
        torch.testing.assert_close(target, 0.995 * old + 0.005 * new, rtol=1e-4, atol=1e-7)


def test_replay_draws_what_was_put_in():
    replay = Replay(2, 100, 3, 2, torch.device("cpu"))
    rows = torch.arange(2 * 10 * 10, dtype=torch.float32).view(2, 10, 10)
    replay.add(rows)
    drawn = replay.sample(2000)
    assert set(drawn["rewards"][0].int().tolist()) == {10 * i + 5 for i in range(10)}
    assert set(drawn["next_observations"][1, :, 0].int().tolist()) == {100 + 10 * i + 7 for i in range(10)}


TINY = {"train_steps": 600, "environments": 2, "warm_up": 200, "chapter": 200, "eval_episodes": 1, "hidden": [16]}


def test_levels_hold_what_they_say(tmp_path, capsys):
    out = collect("Pendulum-v1", tmp_path / "p", level="full-replay", device="cpu", **TINY)
    log = load(out)
    assert len(log) == 600 and log.env_id == "Pendulum-v1" and log.truncated.sum() == 6 and log.terminated.sum() == 0
    recipe = log.meta["recipe"]
    assert recipe["seed"] == 0 and recipe["settings"]["train_steps"] == 600 and len(recipe["curve"]) == 3
    assert not (tmp_path / "p.training").exists()
    assert log.meta["notes"] == ["6 of 6 episodes end with a chapter of the training: their returns are not whole"]
    uniform = log.extras["infos/action_log_probs"][log.offsets[0] : log.offsets[0] + 100]
    np.testing.assert_allclose(uniform, -math.log(4.0), rtol=1e-5)  # random actions in [-2, 2]
    collect("Pendulum-v1", tmp_path / "r", level="random", steps=600, device="cpu", **TINY)
    random = load(tmp_path / "r")
    assert len(random) == 600 and random.attachments["metadata/policy/fc0/weight"].shape == (16, 3)
    assert random.attachments["metadata/policy/last_fc_log_std/bias"].shape == (1,)
    whole = TINY | {"chapter": 400, "train_steps": 400, "warm_up": 400}  # as many steps as an episode has
    assert load(collect("Pendulum-v1", tmp_path / "w", level="full-replay", device="cpu", **whole)).meta["notes"] == []


def test_the_policy_in_the_file_gives_the_logged_probabilities(tmp_path, capsys):
    """The weights under D4RL's names and the log-probabilities belong together."""
    collect("Pendulum-v1", tmp_path / "r", level="random", steps=200, device="cpu", **TINY)
    log = load(tmp_path / "r")
    w = {k.removeprefix("metadata/policy/"): v for k, v in log.attachments.items()}
    hidden = np.maximum(log.observations @ w["fc0/weight"].T + w["fc0/bias"], 0)
    mean = hidden @ w["last_fc/weight"].T + w["last_fc/bias"]
    log_std = np.clip(hidden @ w["last_fc_log_std/weight"].T + w["last_fc_log_std/bias"], -5, 2)
    raw = np.arctanh(np.clip(log.actions / 2, -0.999999, 0.999999))
    density = -0.5 * ((raw - mean) / np.exp(log_std)) ** 2 - log_std - 0.5 * np.log(2 * np.pi)
    density -= np.log(2 * (1 - np.tanh(raw) ** 2))
    typical = np.abs(raw[:, 0]) < 3
    np.testing.assert_allclose(density[typical, 0], log.extras["infos/action_log_probs"][typical], atol=1e-3)


def test_a_resumed_collection_is_the_uninterrupted_one(tmp_path, monkeypatch, capsys):
    config = OnlineConfig(**TINY)
    whole = Online("Pendulum-v1", config, 3, torch.device("cpu"), tmp_path / "whole")
    whole.train()
    first = Online("Pendulum-v1", config, 3, torch.device("cpu"), tmp_path / "cut")
    monkeypatch.setattr(Online, "_reached", lambda self: len(self.curve) == 2)  # as if killed after two chapters
    first.train()
    monkeypatch.undo()
    second = Online("Pendulum-v1", config, 3, torch.device("cpu"), tmp_path / "cut")
    second.train()
    assert [c["returns"] for c in whole.curve] == [c["returns"] for c in second.curve]
    for name, value in whole.sac.state_dict().items():
        assert torch.equal(value, second.sac.state_dict()[name]), name
    assert torch.equal(whole.replay.table, second.replay.table)


def test_medium_is_a_third_of_the_way(tmp_path):
    online = Online("d4rl/hopper", OnlineConfig(**TINY | {"candidates": 2}), 0, torch.device("cpu"), tmp_path / "x")
    online.curve = [{"step": i, "returns": [10.0 * i, value]} for i, value in enumerate([20, 900, 1100, 3000, 3300])]
    assert choose(online)[:3] == (1, 2, 4)  # (3234.3 + 20.3) / 3 - 20.3 = 1064.6
    online.curve = online.curve[:2]
    assert choose(online)[:3] == (1, None, 1)
    with pytest.raises(DataError, match=r"hopper reached 900, under the 1065 .* train longer"):
        make_level(online, "medium", 100, 0)


def test_without_references_medium_is_measured_from_the_untrained_policy(tmp_path):
    online = Online("Pendulum-v1", OnlineConfig(**TINY), 0, torch.device("cpu"), tmp_path / "x")
    assert -2000 < online.untrained_return < -600
    online.untrained_return = -1200.0
    for curve, medium in (
        ([-1100, -850, -750, -300], 1),  # a third of the way to -300 is -900
        ([-1100, -1150, -1300], None),  # nothing was learnt: no policy is better than another
    ):
        online.curve = [{"step": i, "returns": [float(value)]} for i, value in enumerate(curve)]
        assert choose(online)[1] == medium
    with pytest.raises(DataError, match="ended at -1300, no better than the -1200 of the untrained policy: train"):
        make_level(online, "medium", 100, 0)


def test_a_medium_that_is_nearly_an_expert_is_told(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Online, "untrained_return", -5000.0)
    settings = TINY | {"train_steps": 200}  # one chapter: the first policy is the last
    out = collect("Pendulum-v1", tmp_path / "p", level="medium", steps=200, device="cpu", **settings)
    assert "`medium` is 100% of the way to the expert" in load(out).meta["notes"][0]
    assert "a --chapter under 200" in capsys.readouterr().err


def test_an_expert_needs_no_medium(tmp_path, capsys):
    collect("d4rl/hopper", tmp_path / "h", level="full-replay", device="cpu", **TINY)
    assert "medium" not in load(tmp_path / "h").meta["recipe"]


def test_existing_output_is_kept(tmp_path):
    (tmp_path / "x").mkdir()
    with pytest.raises(UsageError, match="--overwrite"):
        collect("Pendulum-v1", tmp_path / "x", level="random", device="cpu", **TINY)


@pytest.mark.parametrize(("room", "kept"), [(0.0, 0), (0.35, 3), (0.75, 7), (0.99, 9)])
def test_a_full_disk_keeps_whole_episodes(tmp_path, monkeypatch, room, kept):
    from replaylab import collect as module
    from replaylab.data.write import save

    log = make_episodes(lengths=(10,) * 10)
    free = int(room * log.nbytes)

    def tight(part, path, **options):
        if part.nbytes > free:
            raise DataError("No space left on device")
        return save(part, path, **options)

    monkeypatch.setattr(module, "save", tight)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda p: type("u", (), {"free": free})())
    found = f"kept the first {kept} of 10 episodes" if kept else "No space left"
    with pytest.raises(DataError, match=found):
        save_what_fits(log, tmp_path / "new" / "x", overwrite=False)
    assert not kept or load(tmp_path / "new" / "x").num_episodes == kept


def test_what_cannot_be_written_is_said_before_the_training(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    monkeypatch.setattr(Online, "train", lambda self: pytest.fail("trained"))
    for out, options, words in (
        ("x.xyz", {}, "does not tell the format"),
        ("x", {"format": "table"}, "cannot be written"),
        ("mine", {"overwrite": True}, "no dataset and is not replaced"),
        ("x", {"steps": 0}, "steps must be at least 1"),
        ("x", {"steps": -5}, "steps must be at least 1"),
        ("x", {"level": "medum"}, "known: random, medium, medium-replay, full-replay, expert, medium-expert, mixed"),
    ):
        with pytest.raises(ReplaylabError, match=words):
            collect("Pendulum-v1", tmp_path / out, device="cpu", **TINY | options)
    assert [p.name for p in tmp_path.iterdir()] == ["mine"] and (tmp_path / "mine" / "notes.txt").exists()
    with pytest.raises(UsageError, match="leave --to and --compact out"):
        collect("atari/pong", tmp_path / "x", format="npz")


@pytest.mark.parametrize("level", ["random", "full-replay"])
def test_a_disk_that_was_full_loses_no_training(tmp_path, monkeypatch, capsys, level):
    """With room again, and what was kept out of the way, the same command only writes."""
    from replaylab import collect as module

    def full(episodes, path, **options):
        module.save(episodes.select([0]), path)
        raise DataError("the disk is full")

    with monkeypatch.context() as patch, pytest.raises(DataError, match="full"):
        patch.setattr(module, "save_what_fits", full)
        collect("pendulum", tmp_path / "p", level=level, steps=600, device="cpu", **TINY)
    assert load(tmp_path / "p").num_episodes == 1
    shutil.rmtree(tmp_path / "p")
    monkeypatch.setattr(Online, "_chapter", lambda self, *args: pytest.fail("trained again"))
    assert len(load(collect("pendulum", tmp_path / "p", level=level, steps=600, device="cpu", **TINY))) == 600


def test_a_level_that_the_disk_cut_short_is_written_again(tmp_path, monkeypatch, capsys):
    from replaylab import collect as module
    from replaylab.data.write import save

    def tight(part, path, **options):
        if len(part) > 400:
            raise DataError("No space left on device")
        return save(part, path, **options)

    asked = {"level": "all", "steps": 600, "device": "cpu", **TINY}
    with monkeypatch.context() as patch, pytest.raises(DataError, match=r"kept the first [12] of 3 episodes"):
        patch.setattr(module, "save", tight)
        patch.setattr(module.shutil, "disk_usage", lambda p: type("u", (), {"free": 0.7 * 600 * 24})())
        collect("pendulum", tmp_path / "p", **asked)
    assert "the disk was full" in load(tmp_path / "p" / "random").meta["cut_short"]
    with contextlib.suppress(DataError):  # so little training need not reach `medium`
        collect("pendulum", tmp_path / "p", **asked)
    again = load(tmp_path / "p" / "random")
    assert len(again) == 600 and "cut_short" not in again.meta
    assert again.meta["recipe"]["asked"] == {"env": "Pendulum-v1", "level": "random", "steps": 600, "compact": False}


def test_unknown_environments_list_the_known_ones(tmp_path):
    for name, words in (
        ("hoper", "did you mean 'd4rl/hopper'"),
        ("zzzz", "known: d4rl/hopper, .*reacher2d.*atari/GAME"),
    ):
        with pytest.raises(UsageError, match=words):
            collect(name, tmp_path / "x", device="cpu", **TINY)
        with pytest.raises(UsageError, match="known: d4rl/hopper, d4rl/halfcheetah"):
            collect(name, tmp_path / "x", device="cpu", **TINY)
    for name, words in (
        ("atari/pongg", "did you mean 'pong'. known: .*breakout"),
        ("pointmaze-mediun", "did you mean 'pointmaze-medium'. known: pointmaze-large, pointmaze-medium"),
    ):
        with pytest.raises(UsageError, match=words):
            collect(name, tmp_path / "x")
    assert not any(tmp_path.iterdir())


class Endless(gymnasium.Env):
    """Nothing ever ends here, and actions have the bounds that it is given."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, low=-1.0, shape=(1,)):
        self.action_space = gymnasium.spaces.Box(low, 1, shape, np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 1.0, False, False, {}


def test_environments_that_sac_cannot_learn_in(tmp_path, monkeypatch, capsys):
    for name, given in (("Endless", {}), ("Unbounded", {"low": -np.inf}), ("Matrix", {"shape": (2, 2)})):
        gymnasium.register(f"{name}-v0", Endless, kwargs=given)
    monkeypatch.setattr("replaylab.collect.levels.MAX_STEPS", 30)
    log = load(collect("Endless-v0", tmp_path / "e", level="random", steps=50, device="cpu", **TINY))
    assert (
        log.lengths.tolist() == [30, 30] and log.truncated.sum() == 2 and "cut after 30 steps" in log.meta["notes"][0]
    )
    for name, words in (("Unbounded", "actions between bounds"), ("Matrix", "continuous action vectors")):
        with pytest.raises(UsageError, match=words):
            collect(f"{name}-v0", tmp_path / "x", level="random", device="cpu", **TINY)
    for given, words in (
        ({"train_steps": 700}, r"train_steps must be a multiple of chapter \(200\), not 700"),
        ({"chapter": 201}, r"chapter must be a multiple of environments \(2\), not 201"),
        ({"seed": -1}, "seed must be at least 0"),
    ):
        with pytest.raises(UsageError, match=words):
            collect("Pendulum-v1", tmp_path / "x", device="cpu", **TINY | given)
    assert [path.name for path in tmp_path.iterdir()] == ["e"]


def test_ctrl_c_says_how_to_go_on(tmp_path, monkeypatch, capsys):
    def stop(self, *args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(ReplaylabError, match="the same command goes on"):
        patch.setattr(Online, "_reached", lambda self: len(self.curve) == 2 and stop(self))
        collect("pendulum", tmp_path / "p", level="full-replay", device="cpu", **TINY)
    with pytest.raises(UsageError, match="trained for 400 steps already, more than the 200 of train_steps"):
        collect("pendulum", tmp_path / "p", level="full-replay", device="cpu", **TINY | {"train_steps": 200})
    assert len(load(collect("pendulum", tmp_path / "p", level="full-replay", device="cpu", **TINY))) == 600


def test_mazes_are_written_in_any_format(tmp_path, capsys):
    collect("pointmaze-umaze", tmp_path / "m", steps=50, format="npz", compact=True)
    log = load(tmp_path / "m", format="npz")
    assert len(log) >= 50 and log.meta["rounded_to_bits"] == 12


def test_rounding_is_small_and_compresses(episodes):
    short = rounded(episodes)
    np.testing.assert_allclose(short.observations, episodes.observations, rtol=2**-12)
    assert (short.observations.view(np.uint32) & 0x7FF == 0).all() and json.dumps(short.meta)


def test_going_on_with_what_was_cut_short(tmp_path, capsys):
    """The untrained SAC never reaches `medium` here: the other levels are written, and more training is going on."""

    def trained_for(level):
        return load(tmp_path / "h" / level).meta["recipe"]["settings"]["train_steps"]

    with pytest.raises(DataError, match="train longer"):
        collect("d4rl/hopper", tmp_path / "h", level="all", steps=100, device="cpu", **TINY)
    assert sorted(p.name for p in (tmp_path / "h").iterdir()) == ["expert", "full-replay", "random"]
    assert trained_for("expert") == TINY["train_steps"]
    written = (tmp_path / "h" / "random" / "meta.json").stat().st_mtime_ns
    with pytest.raises(UsageError, match="with another hidden: pass --overwrite"):
        collect("d4rl/hopper", tmp_path / "h", level="all", steps=100, device="cpu", **TINY | {"hidden": [8]})
    with pytest.raises(DataError, match="train longer"):
        collect("d4rl/hopper", tmp_path / "h", level="all", steps=100, device="cpu", **TINY | {"train_steps": 800})
    assert (tmp_path / "h" / "random" / "meta.json").stat().st_mtime_ns == written
    assert trained_for("expert") == trained_for("full-replay") == 800
    with pytest.raises(DataError, match="train longer"):  # other rows are asked for
        collect("d4rl/hopper", tmp_path / "h", level="all", steps=300, device="cpu", **TINY | {"train_steps": 800})
    assert len(load(tmp_path / "h" / "random")) >= 300
    assert len(json.loads((tmp_path / "h.training" / "curve.json").read_text())) == 4
