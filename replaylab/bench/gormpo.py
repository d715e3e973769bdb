"""GORMPO and MOPO: an epoch of the ensemble, a rollout, the density; shapes of hopper."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from replaylab import density
from replaylab.algos import Phase, Spaces, gormpo, mopo
from replaylab.bench.common import Rows, hopper_like, seconds_per_call
from replaylab.models.density import make
from replaylab.page import count
from replaylab.step import Graph, Stepper


def _agent(device: torch.device, module: Any, seeds: int, rows: int, **settings: Any) -> tuple[Any, list[Phase]]:
    episodes = hopper_like(rows, rows // 450)
    agent = module.Agent(module.Config(rollout_length=5, **settings), Spaces.of(episodes), range(seeds), device)
    return agent, agent.phases(episodes)


def _seeds(device: torch.device) -> tuple[int, ...]:
    return (1, 5) if device.type == "cuda" else (1,)


def _variants(device: torch.device) -> list[tuple[int, str, str]]:
    """(seeds, compile, label)"""
    if device.type != "cuda":
        return [(1, "off", "eager")]
    hows = {"auto": "captured", "on": "compiled + captured"}
    return [(seeds, how, name) for seeds in (1, 5) for how, name in hows.items()]


def dynamics_epoch(device: torch.device) -> Rows:
    for seeds, compile, how in _variants(device):
        agent, phases = _agent(device, mopo, seeds, 100_000 if device.type == "cuda" else 4_000)
        fit, stepper = agent.fit, Stepper(phases[0], device, compile)

        def epoch(fit: Any = fit, stepper: Stepper = stepper) -> None:
            fit.hook(0)
            stepper.run(0, fit.batches)

        spent = seconds_per_call(epoch, device, 1)
        what = f"dynamics epoch, 7 members of 4x200, {fit.batches} batches of 256, {count(seeds, 'seed')}, {how}"
        yield what, 1e3 * spent, "ms"
        yield f"one of its updates, {count(seeds, 'seed')}, {how}", 1e3 * spent / fit.batches, "ms"


def rollout(device: torch.device) -> Rows:
    small = {} if device.type == "cuda" else {"rollout_batch": 1_000}
    for seeds in _seeds(device):
        for module, what in ((gormpo, "RealNVP penalty"), (mopo, "MOPO's penalty"), (mopo, "no penalty")):
            settings = dict(small, uncertainty_coef=0.0) if what == "no penalty" else small
            agent, _ = _agent(device, module, seeds, 20_000, **settings)
            if agent.density is not None:
                agent.density.begin()
                agent.density.finish()
            spent = seconds_per_call(partial(agent.imagine, 0), device, 5 if device.type == "cuda" else 1)
            name = f"rollout of {agent.imagination.rows:,} x 5, {what}, {count(seeds, 'seed')}"
            yield name, 1e3 * spent, "ms"
            alone = seconds_per_call(agent.rollout, device, 5 if device.type == "cuda" else 1)
            yield f"of it, the graph alone, {what}, {count(seeds, 'seed')}", 1e3 * alone, "ms"


def policy_update(device: torch.device) -> Rows:
    """SAC's update as GORMPO runs it: 12 logged and 244 imagined rows."""
    small = {} if device.type == "cuda" else {"rollout_batch": 1_000}
    for seeds, compile, how in _variants(device):
        agent, phases = _agent(device, mopo, seeds, 20_000, **small)
        stepper, calls = Stepper(phases[-1], device, compile), 500 if device.type == "cuda" else 20
        agent.imagine(0)

        def updates(agent: Any = agent, stepper: Stepper = stepper, calls: int = calls) -> None:
            agent.cursor.zero_()
            stepper.run(0, calls)

        spent = seconds_per_call(updates, device, 1) / calls
        yield f"policy update, batch 12 + 244, 256x256, {count(seeds, 'seed')}, {how}", 1e3 * spent, "ms"


def realnvp_train(device: torch.device) -> Rows:
    x = torch.randn(20_000, 14, device=device)
    descent = density.Descent(make("realnvp", 14).to(device), 20_000, 1e-3)
    stepper = Stepper(Phase("density", 20_000, density.Rows(x, 128, 0), descent), device)
    calls = 500 if device.type == "cuda" else 5
    spent = seconds_per_call(partial(stepper.run, 0, calls), device, 1) / calls
    yield "RealNVP update, batch 128 x 14, 6 couplings of 256x256", 1e3 * spent, "ms"


def realnvp_score(device: torch.device) -> Rows:
    rows = 50_000 if device.type == "cuda" else 5_000
    model, x = make("realnvp", 14).to(device).requires_grad_(False), torch.randn(rows, 14, device=device)

    @torch.no_grad()
    def score() -> None:
        model.log_prob(x)

    spent = seconds_per_call(Graph(score, device), device, 20 if device.type == "cuda" else 1)
    yield f"RealNVP log-densities of {rows:,} x 14", 1e3 * spent, "ms"


CASES: dict[str, Callable[[torch.device], Rows]] = {
    "dynamics-epoch": dynamics_epoch,
    "rollout-50kx5": rollout,
    "policy-update": policy_update,
    "realnvp-train": realnvp_train,
    "realnvp-score-50k": realnvp_score,
}
