"""MBARC's hot paths at the paper's sizes: one dreamt step, one PPO update, one dream-and-learn round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from replaylab.algos import Spaces, mbarc
from replaylab.bench.common import Rows, seconds_per_call
from replaylab.config import resolve
from replaylab.data.frames import FrameReplay
from replaylab.models.dream import Dream
from replaylab.step import Graph

ACTIONS = 18


def agent_of(device: torch.device) -> tuple[mbarc.Agent, str]:
    """An agent with noise in its replay, small on a CPU, and its description."""
    cuda = device.type == "cuda"
    preset = mbarc.PRESETS["paper" if cuda else "debug"]
    keys = mbarc.Config.__dataclass_fields__
    layers: list[tuple[str, dict[str, Any]]] = [("bench", {k: v for k, v in preset.items() if k in keys})]
    (config,) = resolve([mbarc.Config], layers)
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


CASES: dict[str, Callable[[torch.device], Rows]] = {
    "mbarc-sim-step": sim_step,
    "mbarc-ppo-update": ppo_update,
    "mbarc-ppo-iteration": ppo_iteration,
}
