"""MBARC's hot paths at the paper's sizes: one dreamt step, one PPO update, one dream-and-learn round. And its updates
as a run makes them, after a little of Boxing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from replaylab.algos import Phase, Spaces, mbarc
from replaylab.bench.common import Rows, seconds_per_call
from replaylab.config import resolve
from replaylab.data.frames import FrameReplay
from replaylab.models.dream import Dream
from replaylab.step import Graph, Stepper

ACTIONS = 18


def config_of(preset: str, **settings: Any) -> mbarc.Config:
    keys = mbarc.Config.__dataclass_fields__
    layers = [("bench", {k: v for k, v in (mbarc.PRESETS[preset] | settings).items() if k in keys})]
    return resolve([mbarc.Config], layers)[0]


def agent_of(device: torch.device) -> tuple[mbarc.Agent, str]:
    """An agent with noise in its replay, small on a CPU, and its description."""
    config = config_of("paper" if device.type == "cuda" else "debug")
    agent = mbarc.Agent(config, Spaces([4, 105, 80], "uint8", ACTIONS, True), [0], device)
    agent.replay = replay = FrameReplay(1, 2048, agent.size, device)
    rng = np.random.default_rng(0)
    replay.begin(0, rng.integers(0, 128, (4, *agent.size), dtype=np.uint8))
    for _ in range(1000):
        frame = rng.integers(0, 128, agent.size, dtype=np.uint8)
        replay.add(0, int(rng.integers(ACTIONS)), float(rng.integers(-1, 2)), frame, False, False)
    replay.commit()
    agent.dream = Dream(agent.copy, replay, config.agents, config.rollout, config.from_start, expected=True)
    agent.dreaming = Graph(agent._dream_on, device)
    size = "x".join(map(str, agent.size))
    return agent, f"{config.agents} agents, {size}, {config.hidden} channels"


def sim_step(device: torch.device) -> Rows:
    agent, what = agent_of(device)
    actions = torch.zeros(agent.config.agents, dtype=torch.int64, device=device)
    agent.dream.reset()
    body: Callable[[], Any] = lambda: agent.dream.step(actions)  # noqa: E731
    step = Graph(body, device)
    spent = seconds_per_call(step, device, 200 if device.type == "cuda" else 3)
    yield f"one dreamt step, {what}", 1e3 * spent, "ms"
    yield f"dreamt steps, {what}", agent.config.agents / spent, "steps/s"


def ppo_update(device: torch.device) -> Rows:
    agent, _ = agent_of(device)
    agent.play(0)
    config = agent.config
    body: Callable[[], Any] = lambda: agent.ppo.learn()  # noqa: E731
    spent = seconds_per_call(Graph(body, device), device, 50 if device.type == "cuda" else 2)
    played = config.rollout * config.agents
    what = f"{config.rollout} steps x {config.agents} agents, {config.ppo_epochs} epochs of {agent.ppo.minibatch}"
    yield f"one PPO update, {what} of {played}", 1e3 * spent, "ms"


def ppo_iteration(device: torch.device) -> Rows:
    agent, what = agent_of(device)
    body: Callable[[], Any] = lambda: agent.ppo.learn()  # noqa: E731
    learn = Graph(body, device)

    def both() -> None:
        agent.play(0)
        learn()

    spent = seconds_per_call(both, device, 10 if device.type == "cuda" else 1, 3)
    yield f"{agent.config.rollout} dreamt steps and one PPO update, {what}", 1e3 * spent, "ms"


def in_a_run(device: torch.device) -> Rows:
    env_id, cuda = "atari-rgb/boxing", device.type == "cuda"
    for preset in ("paper", "fast") if cuda else ("debug",):
        config = config_of(preset, random_steps=1600, collect_steps=8)
        agent = mbarc.Agent(config, mbarc.spaces(env_id), [0], device)
        for phase in agent.phases(env_id)[:3]:
            plays = phase.name == "policy"  # a round: dreams, then one update
            what = "a round of the policy" if plays else f"an update of the {phase.name} model"
            count = min(phase.every, phase.steps)  # updates that a run makes at once
            yield f"{preset}: {what}", 1e3 * seconds_per_call(_piece(phase, device, count), device, 10) / count, "ms"


def _piece(phase: Phase, device: torch.device, count: int) -> Callable[[], None]:
    stepper = Stepper(phase, device)
    assert phase.begin is not None and phase.hook is not None
    phase.begin()

    def run() -> None:
        phase.hook(1)  # type: ignore[misc]
        stepper.run(0, count)

    return run


CASES: dict[str, Callable[[torch.device], Rows]] = {
    "mbarc-sim-step": sim_step,
    "mbarc-ppo-update": ppo_update,
    "mbarc-ppo-iteration": ppo_iteration,
    "mbarc-run": in_a_run,
}
