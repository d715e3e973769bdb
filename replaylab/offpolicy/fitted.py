"""Fitted-Q evaluation: the discounted return of a policy, estimated from logged rows.

Q(s, a) is fitted to r + gamma Q(s', pi(s')); Q(s0, pi(s0)) at the logged first states is the estimate. Episodes are
dealt into folds, and the network that judges an episode's first state was never fitted on that episode. Two policies
whose answer is known go through the same machine: the log's own next actions ("behaviour"), whose value is the logged
return, and a clone of the log. Where the machine misses them, it is not to be believed about the policy either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from replaylab import stats
from replaylab.algos import Phase, Spaces, bc
from replaylab.data.episodes import Episodes
from replaylab.data.sample import draw, refuse_nonfinite
from replaylab.errors import DataError
from replaylab.models.adam import adam, anneal
from replaylab.models.mlp import MLP, generators, track
from replaylab.models.standard import divisors
from replaylab.progress import Progress
from replaylab.step import Stepper

ACTED = 512  # states that a policy answers at a time


@dataclass(frozen=True)
class Budget:
    rows: int  # of the log that are used, in whole episodes
    steps: int  # updates of the fitted Q
    hidden: tuple[int, ...]
    queries: int  # states whose neighbours are looked up
    batch: int = 256
    lr: float = 1e-3


FULL = Budget(1_000_000, 10_000, (256, 256), 10_000)
QUICK = Budget(100_000, 3_000, (64, 64), 2_000, lr=2e-3)


# --- the log on the device


def some_episodes(episodes: Episodes, rows: int) -> Episodes:
    """All episodes, or a random choice of whole ones with about so many rows."""
    if len(episodes) <= rows:
        return episodes
    order = np.random.default_rng(0).permutation(episodes.num_episodes)
    keep = max(1, int(np.searchsorted(np.cumsum(episodes.lengths[order]), rows)))
    return episodes.select(np.sort(order[:keep]))


class Log:
    """Columns on the device. `states` has each episode's final observation behind its last row; `place` says where a
    row's own observation is, and the one after it is what followed."""

    def __init__(self, episodes: Episodes, spaces: Spaces, device: torch.device, folds: int):
        refuse_nonfinite(episodes)
        e, self.episodes, self.folds, self.device = episodes, episodes, folds, device
        place = np.arange(len(e)) + e.episode_ids
        states = np.empty((len(e) + e.num_episodes, *e.observations.shape[1:]), np.float32)
        states[place] = e.observations
        states[e.offsets[1:] + np.arange(e.num_episodes)] = e.final_observations

        def column(values: np.ndarray) -> Tensor:
            return torch.as_tensor(values, device=device)

        self.states, self.place = column(states), column(place)
        self.rewards, self.terminated = column(e.rewards.astype(np.float32)), column(e.terminated.astype(np.float32))
        self.choices = spaces.action_dim if spaces.discrete else 0
        raw = e.actions.astype(np.int64 if spaces.discrete else np.float32)
        self.raw_actions, self.actions = column(raw), self.vectors(column(raw))
        self.first = self.place[column(e.offsets[:-1])]
        self.usable = np.flatnonzero(e.backup_known)
        self.fold = np.random.default_rng(0).permutation(e.num_episodes) % folds  # (episodes,)

    def vectors(self, actions: Tensor) -> Tensor:
        """Actions as numbers that distances and networks can take: discrete ones as one-hot."""
        return torch.nn.functional.one_hot(actions, self.choices).float() if self.choices else actions.float()

    def standard(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and deviation of the columns; a constant column stays as it is."""
        mean, std = values.double().mean(0), values.double().std(0, correction=0)
        return mean.float(), divisors(mean, std).float()


class Folds:
    """Draws for member f from all episodes but those of fold f. `tables` are the actions of several policies at every
    state, (folds or 1, states, action)."""

    resident = True

    def __init__(self, log: Log, batch: int, tables: Sequence[Tensor] = ()):
        self.log, self.batch, self.tables = log, batch, list(tables)
        outside = [log.fold[log.episodes.episode_ids[log.usable]] != f for f in range(log.folds)]
        self.rows = [log.usable[mask] for mask in outside]
        if min(map(len, self.rows)) == 0:
            raise DataError(
                "too few rows say what followed to estimate anything from: give next observations, or mark the rows "
                "that end an episode as terminated"
            )
        self.members = torch.arange(log.folds, device=log.device)[:, None]

    def draw(self, start: int, steps: int) -> np.ndarray:  # (steps, folds, batch)
        parts = [rows[draw(len(rows), (self.batch,), f, 77, start, steps)] for f, rows in enumerate(self.rows)]
        return np.stack(parts, axis=1)

    def gather(self, rows: Tensor) -> dict[str, Tensor]:
        log, after = self.log, self.log.place[rows] + 1
        batch = {"observations": log.states[log.place[rows]], "actions": log.raw_actions[rows]}
        if self.tables:
            batch |= {"rewards": log.rewards[rows], "terminated": log.terminated[rows], "vectors": log.actions[rows]}
            batch["next_observations"] = log.states[after]
            batch["next_vectors"] = torch.stack([t.expand(log.folds, -1, -1)[self.members, after] for t in self.tables])
        return batch


# --- fitted-Q evaluation


class FittedQ:
    """Q of several policies, a network for each policy and fold. All policies see the same rows from the same first
    weights, so that their difference is not noise of the fit."""

    def __init__(self, log: Log, policies: int, gamma: float, budget: Budget):
        self.policies, self.gamma, self.steps, self.lr = policies, gamma, budget.steps, budget.lr
        members = list(range(log.folds)) * policies
        inputs = log.states.shape[1] + log.actions.shape[1]
        self.network, self.target = (
            MLP(generators(members), inputs, budget.hidden, 1).to(log.device) for _ in range(2)
        )
        self.target.requires_grad_(False)
        self.state_scale, self.action_scale = log.standard(log.states), log.standard(log.actions)
        to_go = log.episodes.returns_to_go(gamma)
        self.mean, self.scale = float(to_go.mean()), max(float(to_go.std()), 1e-3 * abs(float(to_go.mean())), 1e-6)
        bounds = min(0.0, float(log.rewards.min())), max(0.0, float(log.rewards.max()))
        self.bounds = [b / (1 - gamma) for b in bounds]  # no policy can have a value beyond
        # an error common to all states shrinks by gamma whenever the target catches up: be done with it in time
        self.tau = min(1.0, max(0.005, 8 / ((1 - gamma) * self.steps)))
        self.done = torch.zeros((), device=log.device)
        self.optimizer = adam(self.network.parameters(), torch.tensor(self.lr, device=log.device))

    def values(self, network: MLP, states: Tensor, actions: Tensor) -> Tensor:
        """states (folds, batch, ...), actions (policies, folds, batch, ...) -> (policies, folds, batch)."""
        (state_mean, state_std), (action_mean, action_std) = self.state_scale, self.action_scale
        states = ((states - state_mean) / state_std).expand(self.policies, -1, -1, -1)
        inputs = torch.cat([states, (actions - action_mean) / action_std], -1)
        return self.mean + self.scale * network(inputs.flatten(0, 1)).view(inputs.shape[:3])

    def update(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        with torch.no_grad():
            following = self.values(self.target, batch["next_observations"], batch["next_vectors"])
            goal = batch["rewards"] + self.gamma * (1 - batch["terminated"]) * following.clamp(*self.bounds)
        values = self.values(self.network, batch["observations"], batch["vectors"].expand(self.policies, -1, -1, -1))
        loss = ((values - goal) / self.scale).square().mean(2)
        anneal(self.optimizer, self.lr, self.done, self.steps)
        self.done += 1
        self.optimizer.zero_grad(set_to_none=True)
        loss.sum().backward()
        self.optimizer.step()
        track(self.target, self.network, self.tau)
        return {"loss": loss.detach().mean(1)}

    @torch.no_grad()
    def at_start(self, log: Log, actions: Tensor) -> np.ndarray:  # (policies, folds, episodes)
        states = log.states[log.first].expand(log.folds, -1, -1)
        return self.values(self.target, states, actions).cpu().numpy().astype(np.float64)


def _run(phase: Phase, device: torch.device, bar: Progress, after: Callable[[], None] | None = None) -> None:
    """All updates of a phase; `after` is called ten times on the way, the last time at the end."""
    stepper, before, done = Stepper(phase, device), bar.done, 0
    marks = {math.ceil(phase.steps * i / 10) for i in range(1, 11)}
    while done < phase.steps:
        count = min([100, *(m - done for m in marks if m > done)])
        stepper.run(done, count)
        done += count
        bar.update(before + done)
        if after and done in marks:
            after()


def fitted_q(log: Log, tables: dict[Any, Tensor], gamma: float, budget: Budget) -> dict[str, Any]:
    """The estimated discounted return of each policy, given by its actions at every state of the log."""
    e, device = log.episodes, log.device
    bar = Progress("fitted Q", budget.steps + budget.steps // 2)
    clone = bc.Agent(
        bc.Config(steps=budget.steps // 2, hidden=list(budget.hidden), batch_size=budget.batch, lr=budget.lr),
        Spaces.of(e), range(log.folds), device,
    )  # fmt: skip
    clone.normalizer.fit(e)
    _run(Phase("clone", clone.config.steps, Folds(log, budget.batch), clone.update), device, bar)
    with torch.no_grad():
        parts = [clone.act(part.expand(log.folds, -1, -1))[0] for part in log.states.split(ACTED)]
        cloned = log.vectors(torch.cat(parts, 1))
    behaviour = cloned.clone()  # what was not logged, the action after a cut, is the clone's
    behaviour[:, log.place] = log.actions
    tables = tables | {"clone": cloned, "behaviour": behaviour}
    machine = FittedQ(log, len(tables), gamma, budget)
    first = torch.stack([t.expand(log.folds, -1, -1)[:, log.first] for t in tables.values()])
    own, curve = np.arange(e.num_episodes), []

    def look() -> None:
        curve.append(machine.at_start(log, first)[:, log.fold, own].mean(1).tolist())

    rows = Folds(log, budget.batch, list(tables.values()))
    _run(Phase("fitted-q", budget.steps, rows, machine.update), device, bar, look)
    bar.close()
    values = machine.at_start(log, first)  # (policies, folds, episodes)
    judged = values[:, log.fold, own]  # each first state by the network that did not see its episode
    logged = e.returns_to_go(gamma)[e.offsets[:-1]]
    cut = e.truncated[e.last_rows] & ~e.terminated[e.last_rows]
    weight = gamma ** e.lengths.astype(np.float64) * cut  # (episodes,) of what would have followed a cut
    completed = logged + weight * _after_the_cut(machine, log, behaviour)
    scale = float(np.std(completed)) or machine.scale
    found, beyond = {}, _beyond_goals(machine, log, list(tables.values()))
    for i, name in enumerate(tables):  # the behaviour is the last one
        path = [round(row[i], 6) for row in curve]
        still = abs(path[-1] - path[-3]) < 0.1 * scale  # so are values that only the bounds hold back
        fit = {"curve": path, "settled": bool(still and beyond[i] < 0.05 * scale)}
        found[name] = _estimate(values[i], judged[i], values[-1], judged[-1]) | fit
    data = _interval(completed)
    error = found["behaviour"]["mean"] - data["mean"]
    room = (data["high"] - data["low"]) / 2 + 0.05 * scale
    return {
        "gamma": gamma,
        "steps": budget.steps,
        "folds": log.folds,
        "data": data | {"logged": float(logged.mean()), "cut": float(cut.mean()), "cut_weight": float(weight.mean())},
        "policies": [{"seed": name} | found[name] for name in tables if name not in ("clone", "behaviour")],
        "clone": found["clone"],
        "behaviour": found["behaviour"],
        "calibration": {"error": error, "room": room, "good": bool(abs(error) <= room)},
        "bounds": machine.bounds,
    }


@torch.no_grad()
def _beyond_goals(machine: FittedQ, log: Log, tables: Sequence[Tensor]) -> list[float]:
    """By how much the values of each policy's actions exceed all that its networks were to fit: the mean over the log's
    states, in the worst fold. Values out there follow from no row."""
    parts = []
    for part in torch.arange(len(log.states), device=log.device).split(ACTED):
        actions = torch.stack([t.expand(log.folds, -1, -1)[:, part] for t in tables])
        parts.append(machine.values(machine.target, log.states[part].expand(log.folds, -1, -1), actions))
    values = torch.cat(parts, 2)
    usable = torch.as_tensor(log.usable, device=log.device)
    following = (1 - log.terminated[usable]) * values[..., log.place[usable] + 1].clamp(*machine.bounds)
    goals, own = log.rewards[usable] + machine.gamma * following, values[..., log.place]
    beyond = own - own.clamp(goals.amin(2, keepdim=True), goals.amax(2, keepdim=True))
    return beyond.abs().mean(2).amax(1).tolist()


@torch.no_grad()
def _after_the_cut(machine: FittedQ, log: Log, behaviour: Tensor) -> np.ndarray:
    """(episodes,) the behaviour's value at each final observation, by the fold that did not see the episode. A clone's
    value would be that of somebody who acts without the behaviour's noise."""
    e = log.episodes
    last = log.place[torch.as_tensor(e.last_rows, device=log.device)] + 1
    table = behaviour[:, last].expand(machine.policies, -1, -1, -1)
    values = machine.values(machine.target, log.states[last].expand(log.folds, -1, -1), table)
    return values[-1].cpu().numpy().astype(np.float64)[log.fold, np.arange(e.num_episodes)]  # it is the last policy


def _interval(values: np.ndarray) -> dict[str, float]:
    """Mean with its 95 % bootstrap interval over episodes."""
    low, high = stats.bootstrap_interval([values], stats.mean) if len(values) > 1 else (math.nan, math.nan)
    mean = float(values.mean())
    return {"mean": mean, "low": low if math.isfinite(low) else mean, "high": high if math.isfinite(high) else mean}


def _estimate(values: np.ndarray, judged: np.ndarray, behaviour: np.ndarray, baseline: np.ndarray) -> dict[str, Any]:
    """values (folds, episodes). `gain` is over the behaviour in the same machine, whose errors both share."""
    members, gains = values.mean(1), (values - behaviour).mean(1)
    spread = {"spread": float(gains.std(ddof=1))}
    return _interval(judged) | {
        "members": members.tolist(),
        "spread": float(members.std(ddof=1)),
        "gain": _interval(judged - baseline) | spread,
    }
