"""On a GPU a phase is captured once and replayed. Every system must learn the same as when it runs eagerly, resume
there, and act there."""

from __future__ import annotations

import signal

import pytest
import torch

import replaylab
from replaylab.algos import SYSTEMS, system
from replaylab.evaluate import load_agent
from replaylab.models.adafactor import Adafactor
from replaylab.models.adam import adam
from replaylab.models.world_training import descend
from replaylab.run import RunFolder
from replaylab.step import WARM_UP, Graph, Stepper
from replaylab.trainer import Interrupted

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
LOGGED = [name for name in SYSTEMS if not getattr(system(name), "ONLINE", False)]
SHORT = {
    "bc": {"steps": 60},
    "dt": {"steps": 40, "dropout": 0.0},
    "mopo": {"steps": 40, "max_epochs": 1},
    "gormpo": {"steps": 40, "max_epochs": 1, "density_steps": 20, "rollout_every": 5, "carried": 0.3},
    "bcq": {"steps": 40},
    "diffusion-dice": {"behavior_steps": 30, "critic_steps": 30},
}


@pytest.fixture(scope="module")
def log():
    return replaylab.load("sample").select(range(60))


def train(name, log, out, **settings):
    settings = {"seeds": [0, 1], "device": "cuda", "eval_every": -1, "final_episodes": 1} | SHORT[name] | settings
    return replaylab.train(name, log, preset="debug", out=out, env="d4rl/hopper", **settings)


@pytest.mark.parametrize("name", LOGGED)
def test_captured_is_eager(name, log, tmp_path):
    weights = []
    for compile in ("off", "auto"):
        run = train(name, log, tmp_path / compile, compile=compile)
        weights.append(RunFolder(run).weights())
        assert len(RunFolder(run).lines("eval.jsonl")) == 2
    for key, value in weights[0].items():
        torch.testing.assert_close(
            weights[1][key], value, rtol=2e-2, atol=2e-3, msg=lambda text, key=key: f"{key}: {text}"
        )


@pytest.mark.parametrize("name", LOGGED)
def test_a_checkpoint_of_the_gpu_acts_on_the_cpu(name, log, tmp_path):
    run = train(name, log, tmp_path / "r")
    seen = log.observations[:4]
    actions = [replaylab.load_policy(run, device=device).act(seen) for device in ("cpu", "cuda")]
    assert actions[0].shape == actions[1].shape == (4, 3)
    if name != "diffusion-dice":  # it draws
        torch.testing.assert_close(torch.tensor(actions[0]), torch.tensor(actions[1]), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", LOGGED)
def test_a_finished_run_goes_on(name, log, tmp_path):
    longest = max((k for k in SHORT[name] if k.endswith("steps")), key=lambda k: k == "steps" or k == "critic_steps")
    run = train(name, log, tmp_path / "r")
    before = RunFolder(run).load()[2]["step"]
    train(name, log, tmp_path / "r", resume=True, **{longest: SHORT[name][longest] + 20})
    assert RunFolder(run).load()[2]["step"] == before + 20


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", LOGGED)
def test_deterministic_and_stopped_it_ends_the_same(name, log, tmp_path, monkeypatch):
    whole, run = train(name, log, tmp_path / "whole", deterministic=True), Stepper.run

    def stopped(self, start, steps):
        run(self, start, steps)
        monkeypatch.setattr(Stepper, "run", run)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Stepper, "run", stopped)
    with pytest.raises(Interrupted):
        train(name, log, tmp_path / "parts", deterministic=True)
    parts = train(name, log, tmp_path / "parts", deterministic=True, resume=True)
    weights = [RunFolder(path).weights() for path in (whole, parts)]
    assert [key for key in weights[0] if not torch.equal(weights[0][key], weights[1][key])] == []


@pytest.mark.parametrize("lr", [0.0, 1e-3])
def test_optimisers_with_twins_are_captured_as_they_run(lr):
    """Their kernels run on two streams."""
    found, shapes = [], [(7,), (300, 400), (96, 64, 4, 4), (64, 96, 8, 8), (96, 96, 3, 3), (96, 96, 1, 1)]
    for capture in (False, True):
        torch.manual_seed(0)
        weights = [torch.nn.Parameter(torch.randn(shape, device="cuda")) for shape in shapes]
        for w in weights[2:]:
            w.data = w.data.contiguous(memory_format=torch.channels_last)
        twins = [w.detach().bfloat16().requires_grad_() for w in weights]
        some = {"max_norm": 1.0, "compile": True, "twins": twins}
        optimizer = adam(weights, lr, flat=False, twins=twins) if lr else Adafactor(weights, **some)

        def body(twins=twins, optimizer=optimizer):
            for twin in twins:
                twin.grad = (9 * twin.detach()).sin()
            descend(optimizer, 1.0)

        step = Graph(body, torch.device("cuda"), capture)
        for _ in range(8):
            step()
        found.append([*weights, *twins])
        assert all(torch.equal(t, w.bfloat16()) for t, w in zip(twins, weights, strict=True))
    assert all(map(torch.equal, *found))


def test_an_old_graph_does_not_break_a_capture():
    """Python's collector would come upon it just then."""
    x = torch.zeros(1, device="cuda")

    def body():
        x.add_(1)
        if torch.cuda.is_current_stream_capturing():
            _litter()

    old, step = Graph(lambda: x.add_(1), x.device), Graph(body, x.device)
    for _ in range(WARM_UP + 1):
        old()
    for _ in range(WARM_UP):
        step()
    held = [old.graph]
    held.append(held)  # only the collector frees it
    old.graph = None
    del held
    step()
    step()
    assert x.item() == 2 * WARM_UP + 3


def _litter():
    """Enough for the collector to come by."""
    for _ in range(10_000):
        cycle = []
        cycle.append(cycle)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("world_lr", [2e-3, 0.0])
def test_mbarc_deterministic_and_stopped_it_ends_the_same(world_lr, tmp_path, monkeypatch):
    """Stopped in the first policy phase, in the second world phase and in the second policy phase."""
    run, done = Stepper.run, 0

    def train(out, resume=False):
        settings = {"epochs": 2, "world_steps": 8, "world_first": 1, "reward_steps": 6, "ppo_updates": 6}
        settings |= {"world_lr": world_lr}
        everywhere = {"device": "cuda", "deterministic": True, "final_episodes": 0, "out": tmp_path / out}
        return replaylab.train("mbarc", env="atari/boxing", preset="debug", resume=resume, **settings | everywhere)

    def stopped(self, start, steps):
        nonlocal done
        run(self, start, steps)
        done += steps
        if done in (19, 26, 39):
            signal.raise_signal(signal.SIGINT)

    train("whole")
    monkeypatch.setattr(Stepper, "run", stopped)
    for resume in (False, True, True):
        with pytest.raises(Interrupted):
            train("parts", resume)
    train("parts", resume=True)
    (weights, training, _), parts = (RunFolder(tmp_path / name).load() for name in ("whole", "parts"))
    training.pop("agent.log")  # holds seconds
    differ = [key for key, value in weights.items() if not torch.equal(value, parts[0][key])]
    assert differ + [key for key, value in training.items() if not torch.equal(value, parts[1][key])] == []


def test_mbarc_dreams_on_the_gpu(tmp_path):
    run = replaylab.train("mbarc", env="atari/freeway", preset="debug", device="cuda", out=tmp_path / "r")
    assert RunFolder(run).info()["status"] == "finished" and RunFolder(run).lines("eval.jsonl")


@pytest.mark.timeout(600)
def test_mbarc_draws_what_its_policy_says(tmp_path):
    """After a run, whose graphs drew random numbers too: the logits of each row are those of the CPU, and what is drawn
    follows them. (Evaluations of two whole runs scored lower on the GPU than the same policies on a CPU.)"""
    run = RunFolder(replaylab.train("mbarc", env="atari/freeway", preset="debug", device="cuda", out=tmp_path / "r"))
    agents = [load_agent(run, torch.device(device))[0] for device in ("cpu", "cuda")]
    seen = torch.randint(0, 128, (1, 50, 4, 105, 80), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    logits = []
    for agent in agents:
        with torch.no_grad():
            agent.policy.heads.policy.weight *= 100  # opinions: at first it has none
            logits.append(agent.policy(agent._shrunk(seen[0].to(agent.device)))[:, :-1].cpu())
    torch.testing.assert_close(logits[1], logits[0], rtol=0.05, atol=0.1)
    with torch.no_grad():
        drawn = torch.stack([agents[1].act(seen.cuda())[0][0] for _ in range(2000)]).cpu()  # (draws, rows)
    shares = torch.nn.functional.one_hot(drawn, logits[0].shape[1]).float().mean(0)
    torch.testing.assert_close(shares, logits[0].softmax(-1), rtol=0, atol=0.08)


def test_mbarc_collects_with_the_weights_of_the_moment():
    """Choosing is captured once, in the first epoch."""
    from replaylab.algos import mbarc

    config = mbarc.Config(games=2, hidden=8, compress=3, double=1, bits=8, agents=4, from_start=1, shrink=2)
    agent = mbarc.Agent(config, mbarc.spaces("atari-rgb/freeway"), [0], torch.device("cuda"))
    agent.phases("atari-rgb/freeway")
    seen = torch.randint(0, 128, (config.games, 4, 105, 80), dtype=torch.uint8).numpy()
    uniform = torch.stack([torch.from_numpy(agent._by_policy(seen)) for _ in range(200)])
    assert uniform.unique().tolist() == [0, 1, 2]
    for action in (2, 0):
        with torch.no_grad():
            agent.policy.heads.policy.bias.fill_(-1e3)[action] = 1e3
        assert (agent._by_policy(seen) == action).all()


def test_score_and_guidance_side_by_side():
    """Two streams inside of a captured graph: the same actions as on the CPU, whatever the noise."""
    torch.set_float32_matmul_precision("highest")  # networks that have learnt nothing blow TF32's rounding up
    from replaylab.models.mlp import generators
    from replaylab.models.score import GuideNet, ScoreNet, guided_sample
    from replaylab.models.solver import plan
    from replaylab.step import Graph

    nets = [ScoreNet(generators([0]), 4, 2, 64), GuideNet(generators([1]), 4, 2, [64, 64], balanced=True)]
    states, scale = torch.randn(1, 5, 4), torch.tensor(2.0)
    noises = torch.randn(6, 1, 5 * 8, 2)
    with torch.no_grad():
        expected = [guided_sample(*nets, scale, states, noise, plan(15, 2)) for noise in noises]
        nets, states, scale = [net.cuda() for net in nets], states.cuda(), scale.cuda()
        noise, found = noises[0].cuda(), torch.zeros(1, 5 * 8, 2, device="cuda")
        graph = Graph(
            lambda: found.copy_(guided_sample(*nets, scale, states, noise, plan(15, 2))), torch.device("cuda")
        )
        for drawn, actions in zip(noises, expected, strict=True):
            noise.copy_(drawn)
            graph()
            torch.testing.assert_close(found.cpu(), actions, rtol=1e-3, atol=1e-2)
