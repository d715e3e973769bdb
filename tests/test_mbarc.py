"""MBARC: the budget of real games, the counts of the loop, and whole tiny runs."""

import json
import math
import re
import signal
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from dreaming import Stub

pytest.importorskip("ale_py")
import replaylab
from replaylab.algos import mbarc
from replaylab.config import resolve
from replaylab.data.frames import FrameReplay
from replaylab.envs.atari_rgb import Recorder
from replaylab.errors import DataError, UsageError
from replaylab.memory import memory
from replaylab.models import reward
from replaylab.run import RunFolder
from replaylab.step import Stepper
from replaylab.tensors import load_tensors
from replaylab.trainer import Options

CPU = torch.device("cpu")
TINY = {
    "epochs": 2, "random_steps": 24, "collect_steps": 16, "world_steps": 4, "world_first": 1, "reward_steps": 3,
    "rollout": 5, "ppo_updates": 2, "final_episodes": 0, "device": "cpu",
}  # fmt: skip


# --- the real games and their budget


def recorder(budget, strict, games=2):
    from replaylab import envs

    env = envs.make_vec("atari-rgb/pong", games)
    replay = FrameReplay(games, 200, (53, 40), CPU)
    return Recorder(env, replay, budget, strict=strict, shrink=2, seed=0), env, replay


def test_the_budget_is_never_exceeded(monkeypatch):
    from replaylab.envs import atari_rgb

    monkeypatch.setattr(atari_rgb, "MAX_STEPS", 7)  # many resets
    for strict in (False, True):
        played, env, replay = recorder(100, strict)
        found = played.collect(400, lambda seen: np.array([1, 2]))
        replay.commit()
        ledger = played.ledger
        spent = ledger["recorded"] + (-(-ledger["reset_frames"] // 4) if strict else 0)
        assert spent <= 100 and found["steps"] == len(replay) == ledger["recorded"]
        assert spent > 100 - 2 * (env.reset_cost + 1)  # and it is used
        assert ledger["frames"] == 4 * ledger["recorded"] + ledger["reset_frames"]
        assert replay.truncated.sum() == found["episodes"] == 2 * (ledger["recorded"] // 14)
    # to start both games may take 7 steps' worth of frames each: (8 idle + FIRE and the next + three idle steps) / 4
    assert [recorder(n, True)[0].collect(2, lambda seen: np.array([1, 2]))["steps"] for n in (15, 16)] == [0, 2]
    stack = replay.stacks(replay.starts.rows[:1])[0].numpy()
    env.reset(seed=[10_000, 10_001])
    assert (stack == env.showing[0, :, ::2, ::2]).all()


# --- the loop's counts


def config_of(preset, **settings):
    options = {k: v for k, v in mbarc.PRESETS[preset].items() if k in mbarc.Config.__dataclass_fields__}
    return resolve([mbarc.Config], [(preset, options), ("test", settings)])[0]


def test_paper_counts():
    assert (config_of("paper").eval_temperature, config_of("fast").eval_temperature) == (0.5, 1.0)
    counts = mbarc.counters(config_of("paper"))
    assert counts == {
        "world": 255_000, "reward": 22_500, "policy": 19_000, "dream_calls": 950_000, "gradients": 380_000,
        "real_steps": 102_400,
    }  # fmt: skip
    policy = [epoch["policy"] for epoch in mbarc.plan(config_of("paper"))]
    assert policy == [1000] * 7 + [2000] + [1000] * 3 + [2000] + [1000] * 2 + [3000]
    assert [e["world"] for e in mbarc.plan(config_of("paper"))] == [45_000] + [15_000] * 14
    for strategy, updates in (("online", 0), ("class-balanced", 450), ("square-root", 475), ("progressive", 1000)):
        assert mbarc.plan(config_of("paper", strategy=strategy))[3]["reward"] == updates
    assert mbarc.counters(config_of("fast"))["real_steps"] == 102_400


def make_agent(seeds=(0,), **settings):
    known = mbarc.Config.__dataclass_fields__
    config = config_of("debug", **{k: v for k, v in (TINY | settings).items() if k in known})
    env_id = mbarc.environment("atari/boxing")
    return mbarc.Agent(config, mbarc.spaces(env_id), list(seeds), CPU), env_id


def refused(match, **settings):
    with pytest.raises(UsageError, match=match):
        agent, env_id = make_agent(**settings)
        agent.phases(env_id)


def test_settings_without_effect_are_noted():
    given = {"masses": [0.2, 0.3, 0.5], "reward_batch": 7}
    found = {name: make_agent(strategy=name, **given)[0].notes for name in ("mbarc", "square-root", "online")}
    idle = [f"{name} has no effect with --strategy online" for name in ("masses", "reward_steps", "reward_batch")]
    assert found == {"mbarc": [], "square-root": ["masses has no effect with --strategy square-root"], "online": idle}


def test_wrong_settings_are_told_in_one_line():
    refused("one seed a run", seeds=(0, 1))
    refused("56 real steps are planned, the budget is 50", budget=50)
    refused("13 real steps do not pay for the start", budget=13, random_steps=2, collect_steps=2, strict_budget=True)
    refused("one dreamed step", agents=1, rollout=1, from_start=0)
    refused(r"doubled names epoch 50; they are 0 to \d", doubled=[50])
    refused("double must be at most compress", double=99)
    for name in ("epochs", "games", "world_steps", "world_batch", "world_rollout", "rollout", "near", "compress"):
        refused(f"{name} must be (at least|from) 1.*, not 0", **{name: 0})
    refused(r"held_out must be from 0 to 0\.25", held_out=0.3)
    refused(r"--collect-steps must be --games \(\d\) or a multiple of it, not 15", collect_steps=15)
    refused("of at least 0, not all 0, but are", masses=[0.0, 0.0, 0.0])
    with pytest.raises(UsageError, match="did you mean 'freeway'"):
        mbarc.environment("atari/freewya")
    with pytest.raises(UsageError, match="atari/GAME"):
        mbarc.environment("d4rl/hopper")
    assert mbarc.environment("atari/BankHeist,pool=max") == "atari-rgb/bank_heist,pool=max"


def test_the_originals_44_flags_have_an_equivalent():
    """The table of docs/mbarc.md: complete, and what it names here is an option."""
    page = (Path(__file__).parent.parent / "docs" / "mbarc.md").read_text().partition("## Coming from")[2]
    table, _, named = page.partition("What was written into the code")
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| `--")]
    theirs = [re.findall(r"`(--[\w-]+)", left)[0] for left, _ in rows]
    assert len(theirs) == len(set(theirs)) == 44
    known = {f.name for cls in (Options, mbarc.Config) for f in fields(cls)} | {"out", "resume", "env"}
    ours = re.findall(r"`--([\w-]+)", " ".join(right for _, right in rows) + named)
    assert {name.replace("-", "_") for name in ours} - known == {"stack_internal_states"}  # the original's own


def test_out_of_memory_names_the_setting(monkeypatch):
    agent, env_id = make_agent()
    world, _, policy, *_ = agent.phases(env_id)

    def burst(*args, **settings):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(agent.world_trainer, "update_teacher", burst)
    world.begin()
    with pytest.raises(UsageError, match="world model: lower --world-batch or --hidden"):
        world.update({"step": torch.tensor([0])})
    monkeypatch.setattr(agent.dream, "look", burst)
    with pytest.raises(UsageError, match="lower --agents"):
        policy.hook(0)
    with pytest.raises(UsageError, match="there is too little memory for what the policy learns from: lower --agents"):
        make_agent(agents=10**9)  # what a CPU's allocator says
    for name in ("world_batch", "reward_batch"):
        refused("memory for the batches: lower --world-batch or --reward-batch", **{name: 10**12})
    monkeypatch.setattr(mbarc, "FrameReplay", burst)
    with pytest.raises(UsageError, match="the GPU has too little memory for the replay: lower --collect-steps or --ep"):
        agent.phases(env_id)
    with pytest.raises(RuntimeError, match="shapes"), memory("x", "y"):  # other mistakes are not hidden
        raise RuntimeError("shapes do not fit")


def test_sequences_are_walked_along_and_redrawn_at_their_end(monkeypatch):
    agent, env_id = make_agent(random_steps=100, world_rollout=5)
    phase = agent.phases(env_id)[0]
    phase.begin()
    batches = []
    monkeypatch.setattr(agent.world_trainer, "update", lambda batch: batches.append(batch) or {})
    rows = []
    for _ in range(12):
        phase.update({})
        rows.append(agent.walk["rows"].clone() - 1)
    assert batches[0]["first"].all()
    lengths = [[] for _ in range(4)]
    for t in range(1, 12):
        first = batches[t]["first"]
        assert (rows[t][~first] == rows[t - 1][~first] + 1).all()
        for i in range(4):
            lengths[i].append(bool(first[i]))
    for i in range(4):  # a staggered start, then whole sequences unless a game was cut off before
        where = [t + 1 for t, first in enumerate(lengths[i]) if first]
        assert where[0] <= 5 and all(b - a <= 5 for a, b in pairwise(where))
    assert agent.replay.valid[torch.stack(rows)].all()
    assert torch.equal(batches[3]["frames"], agent.replay.stacks(rows[3]))
    assert torch.equal(batches[3]["next_frames"], agent.replay.next_frames(rows[3]))


def test_the_world_model_learns_from_true_frames(monkeypatch):
    agent, env_id = make_agent(random_steps=100)
    phase, batches = agent.phases(env_id)[0], []
    phase.begin()
    monkeypatch.setattr(agent.world_trainer, "update_teacher", lambda batch: batches.append(batch) or {})
    for _ in range(6):
        phase.update({})
    assert len(batches) == 6 and all(batch["first"].all() for batch in batches)
    assert phase.hook is not None and config_of("paper").world_rollout == 50 and not config_of("paper").average


def test_too_short_games_are_explained_not_waited_for():
    agent, env_id = make_agent(world_rollout=30, games=2, fidelity="original")
    agent.phases(env_id)[0].begin()  # 20 steps of each game
    assert "no game went on for 30 steps" in agent.notes[0] and "have 20 at most" in agent.notes[0]
    assert agent.longest == 20


def test_policy_learns_from_the_dream_with_its_own_value_added_once():
    agent, env_id = make_agent(agents=3, from_start=1, rollout=4, fidelity="improved", dream_rewards="likeliest")
    phases = agent.phases(env_id)
    phases[0].begin()
    stub = agent.dream.world = Stub()
    imagine = stub.imagine
    stub.imagine = lambda frames, actions: imagine(frames, actions * 0 + 1)
    phases[2].hook(0)
    assert agent.ppo.rewards.tolist() == [[1.0] * 3] * 4 and not agent.ppo.ended.any()
    assert torch.equal(agent.ppo.observations[-1], agent.dream.stacks)
    agent.original = True
    phases[2].hook(1)
    assert agent.ppo.rewards.tolist() == [[1.0] * 3] * 3 + [[11.0] * 3]  # the original adds the world's value too


def test_how_rare_rewards_are_is_kept_with_the_world():
    for settings in ({}, {"focal": True}, {"dream_rewards": "likeliest"}):
        agent, env_id = make_agent(**settings)
        world, reward_model, *_ = agent.phases(env_id)
        world.begin()
        reward_model.begin()
        replay, shown = agent.replay, agent.replay.rewards[agent.shown].flatten()
        wanted = reward.correction(replay.rewards[torch.as_tensor(agent._steps())], shown)
        if "focal" in settings:
            wanted -= reward.focal_weights(torch.bincount(replay.rewards[agent._steps()].long() + 1, minlength=3)).log()
        found = agent.world.rarity
        torch.testing.assert_close(found, torch.zeros(3) if "dream_rewards" in settings else wanted)
        assert torch.equal(agent.state_dict()["world.rarity"], agent.world.rarity)  # for whoever plays the dream
    agent, env_id = make_agent(strategy="online", focal=True)
    agent.phases(env_id)[0].begin()
    counts = torch.bincount(agent.replay.rewards[agent._steps()].long() + 1, minlength=3)
    torch.testing.assert_close(agent.world.rarity, -reward.focal_weights(counts).log())


@pytest.mark.parametrize("settings", [{}, {"fidelity": "original", "strategy": "progressive"}, {"strategy": "online"}])
def test_held_out_episodes_never_train(monkeypatch, settings):
    from replaylab.envs import atari_rgb

    monkeypatch.setattr(atari_rgb, "MAX_STEPS", 9)  # many episodes
    sizes = {"games": 8, "random_steps": 160, "collect_steps": 160, "epochs": 4, "world_batch": 32, "reward_batch": 64}
    agent, env_id = make_agent(**sizes | {"world_steps": 60, "reward_steps": 30, "focal": True} | settings)
    trained, judged, filmed, real, judge = set(), [], [], mbarc.real, mbarc.judge

    def training(world, replay, rows):
        trained.update(replay.segments[rows].tolist())
        return real(world, replay, rows)

    def judging(world, replay, rows, pay):
        assert all(map(torch.equal, world.parameters(), agent.world.parameters()))  # as trained so far
        judged.append(rows)
        return judge(world, replay, rows, pay)

    def update(batch):  # of either
        next(agent.world.reward.parameters()).data.mul_(0.99)
        return {}

    monkeypatch.setattr(mbarc, "real", training)
    monkeypatch.setattr(mbarc, "judge", judging)
    monkeypatch.setattr(mbarc, "exciting_scene", lambda world, replay, rows: filmed.append(rows))
    for trainer in (agent.world_trainer, agent.reward_trainer):
        monkeypatch.setattr(trainer, "update", update)
    monkeypatch.setattr(agent.world_trainer, "update_teacher", update)
    before = []
    for phase in agent.phases(env_id):
        if phase.name == "policy":
            phase.finish()
            assert set(agent.replay.host["segments"].reshape(-1)[filmed[-1]]) == set(agent.held)
            continue
        phase.begin()
        for step in range(phase.steps):
            phase.update({"step": torch.tensor([step])})
        found = phase.finish()["epochs"][-1]["held_out"]
        within = agent.replay.host["segments"].reshape(-1)[judged[-1]]
        assert found["episodes"] == agent.held.tolist() == sorted(set(within.tolist()))
        whole = agent.replay.host["valid"] & np.isin(agent.replay.host["segments"], agent.held)
        assert found["steps"] == whole.sum() == sum(map(sum, found["confusion"]))
        assert set(before) <= set(agent.held)  # what is held stays so
        before = agent.held
        assert not trained & set(agent.held.tolist())  # whenever it was drawn
        assert 0.05 <= whole.sum() / len(agent.replay) < 0.12
    assert len(trained) > 0.8 * (agent.replay.next_segment - len(agent.held))  # all others are
    counts = np.bincount(agent.replay.host["rewards"].reshape(-1)[agent._steps()] + 1, minlength=3)
    assert counts.sum() == len(agent.replay) - whole.sum()


# --- whole runs


def run_tiny(path, resume=False, **settings):
    return replaylab.train("mbarc", env="atari/boxing", preset="debug", out=path, resume=resume, **TINY | settings)


def weights(path):
    last = RunFolder(path).checkpoints()[-1]
    training = load_tensors(last / "training.safetensors")
    training.pop("agent.log")  # holds seconds
    return load_tensors(last / "weights.safetensors") | training


@pytest.mark.parametrize("strategy", ["mbarc", "online"])
def test_without_a_policy_there_is_a_film_too(tmp_path, strategy):
    run_tiny(tmp_path / "run", ppo_updates=0, strategy=strategy)
    assert (tmp_path / "run/media/dream.gif").read_bytes()[:4] == b"GIF8"


def test_interrupted_anywhere_it_ends_the_same(tmp_path, monkeypatch, capsys):
    run_tiny(tmp_path / "whole", games=8)
    assert "world 2/2: collected 16 real steps, no game ended\n" in capsys.readouterr().err
    info = json.loads((tmp_path / "whole/run.json").read_text())
    assert (tmp_path / "whole/media/dream.gif").read_bytes()[:4] == b"GIF8"
    world = info["findings"]["world"]["epochs"]
    assert [w["ledger"]["recorded"] for w in world] == [40, 56] and world[1]["fresh"]["steps"] == 16
    judged = [e["held_out"] for phase in ("world", "reward") for e in info["findings"][phase]["epochs"]]
    assert [j["steps"] for j in judged] == [5, 7, 5, 7] and len(judged[0]["episodes"]) == 1
    assert len(info["findings"]["policy"]["epochs"]) == 2 and info["findings"]["policy"]["filmed"] == "held out"
    policy = replaylab.load_policy(tmp_path / "whole")
    assert policy.act(np.full((2, 4, 105, 80), 127)).shape == (2,)
    with pytest.raises(UsageError, match="indices of colours, 0 to 127"):
        policy.act(np.full((4, 105, 80), 128, np.uint8))
    run = Stepper.run
    done = 0

    def stopped_now_and_then(self, start, steps):
        nonlocal done
        run(self, start, steps)
        done += steps
        if done in (2, 6, 8, 12, 15):  # in world, reward, policy, world, reward
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Stepper, "run", stopped_now_and_then)
    stops = 0
    for _ in range(10):
        try:
            run_tiny(tmp_path / "parts", resume=stops > 0, games=8)
            break
        except replaylab.errors.ReplaylabError as error:
            assert "resume" in str(error)
            stops += 1
    assert stops >= 4
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert whole.keys() == parts.keys()
    for name in whole:
        assert torch.equal(whole[name], parts[name]), name


@pytest.mark.parametrize(
    "settings",
    [
        {"strategy": "online", "pixels": "rgb", "focal": True},
        {"strategy": "progressive", "fidelity": "original", "reward_head": "simple"},
        {"strategy": "mbarc", "classes": "lead-up", "focal": True, "continue_head": False},
    ],
)
def test_every_way_of_training_runs(tmp_path, settings):
    run_tiny(tmp_path / "run", **settings, epochs=1)
    found = json.loads((tmp_path / "run/run.json").read_text())["findings"]
    assert ("reward" in found) == (settings["strategy"] != "online")


def test_seeds_differ_and_repeat():
    first, again, other = (make_agent(seeds=(s,))[0] for s in (0, 0, 1))
    a, b, c = (torch.cat([p.flatten() for p in x.parameters()]) for x in (first, again, other))
    assert torch.equal(a, b) and not torch.equal(a, c)


def test_acting_follows_the_temperature():
    from dataclasses import replace

    agent, _ = make_agent()
    seen = torch.randint(128, (1, 5, 4, 105, 80), dtype=torch.uint8)
    with torch.no_grad():
        agent.policy.heads.policy.bias[3] = 2.0
        torch.manual_seed(0)
        for heat in (1.0, 0.5):
            agent.config = replace(agent.config, eval_temperature=heat)
            drawn = torch.cat([agent.act(seen)[0] for _ in range(100)])
            others = (agent.actions - 1) / (agent.actions - 1 + math.exp(2 / heat))
            assert abs((drawn != 3).float().mean() - others) < 0.08
        agent.config = replace(agent.config, eval_temperature=0.0)
        best = agent.act(seen)[0]
    assert best.shape == (1, 5) and (best == 3).all()


def test_what_was_collected_is_told():
    found = {"steps": 6400, "episodes": 8, "mean_return": 1234.56}
    assert mbarc._told(found) == "collected 6,400 real steps, 8 games ended with 1,234.6 points on average"


def test_nothing_collected_is_an_error():
    agent, env_id = make_agent()
    agent.phases(env_id)
    with pytest.raises(DataError, match="nothing was collected"):
        agent._lay_out()


def test_a_policy_phase_ends_with_the_mean_of_its_weights():
    agent, _ = make_agent()
    for k in range(4):  # weights of 0, 1, 2, 3: means of 0, 2/3, 4/3, 2
        for weight in agent.policy.parameters():
            weight.data.fill_(k)
        agent.policy_mean.follow(k)
    agent._finished("policy")
    assert all(torch.allclose(weight, torch.tensor(2.0)) for weight in agent.policy.parameters())
    agent.policy_mean.follow(7)  # goes on with a run that had no mean yet
    assert len(agent.policy_mean.means) == len(list(agent.policy.parameters()))
    last, _ = make_agent(policy_average=0.0)
    before = [weight.clone() for weight in last.policy.parameters()]
    last.policy_mean.follow(0)
    last._finished("policy")
    assert all(map(torch.equal, before, last.policy.parameters()))
