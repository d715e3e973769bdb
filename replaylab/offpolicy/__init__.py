"""Without a simulator: what can be said about a policy from logs alone.

`assess` estimates a run's return by fitted-Q evaluation (fitted.py), measures how far its actions leave the log
(support.py), asks its world model where it has one, and writes it all, with what remains unknown in plain sentences, to
RUN/offpolicy.json. The report shows that file.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from replaylab.algos import Spaces, system
from replaylab.config import write_whole
from replaylab.data.episodes import Episodes
from replaylab.data.read import as_paths, load
from replaylab.errors import ReplaylabError, UsageError
from replaylab.evaluate import load_agent, pick_device
from replaylab.offpolicy.fitted import ACTED, FULL, QUICK, Budget, Log, fitted_q, some_episodes
from replaylab.offpolicy.support import support
from replaylab.progress import Progress
from replaylab.run import RunFolder

__all__ = ["FILE", "FULL", "QUICK", "Budget", "assess", "assess_agent", "summary"]

FILE = "offpolicy.json"
HORIZONS = (5, 20, 100)  # steps that a world model is asked to predict
FOLDS, NEIGHBOURS = 4, 10


def assess(
    run: str | Path,
    data: Episodes | str | Path | Sequence[str | Path] | None = None,
    *,
    train: Episodes | None = None,
    quick: bool = False,
    gamma: float | None = None,
    device: str = "auto",
    budget: Budget | None = None,
) -> dict[str, Any]:
    """What the logs say about a run's policies; the result is also written to RUN/offpolicy.json.

    data: episodes that the run was not trained on; without them its own data is used, which flatters it.
    train: what the run was trained on, where it is at hand; otherwise it is read from where the run read it.
    quick: a smaller network and fewer updates, about a minute on a CPU.
    gamma: the discount; default: the system's own, or 0.99.
    """
    folder = RunFolder(run).require()
    config, where = folder.config(), pick_device(device)
    if getattr(system(folder.system()), "ONLINE", False):
        raise UsageError(f"{folder.system()} learns by playing: `replaylab eval {run}` says what it scores in its game")
    agent, spaces, seeds = load_agent(folder, where)
    if not isinstance(train, Episodes | None):
        raise UsageError(f"train must be the Episodes that the run was trained on, not {type(train).__name__}")
    if not isinstance(budget, Budget | None):
        raise UsageError(f"budget must be a replaylab.offpolicy.Budget, such as QUICK or FULL, not {budget!r}")
    train = train if train is not None else _own_data(folder, needed=data is None)
    if data is None:
        episodes, sources = train, config.get("data")
    elif isinstance(data, Episodes):
        episodes, sources = data, [str(data.meta.get("source") or "arrays")]
    else:
        paths = [str(p) for p in as_paths(data)]
        episodes, sources = load(paths, **(config.get("data_options") or {})), paths
    assert episodes is not None
    found = assess_agent(
        agent, spaces, seeds, episodes,
        train=train, gamma=gamma, device=where, budget=budget or (QUICK if quick else FULL),
    )  # fmt: skip
    found = {"system": config.get("system"), "step": folder.step, "data": sources, "quick": quick} | found
    write_whole(folder.path / FILE, json.dumps(found))
    return found


def _own_data(folder: RunFolder, needed: bool) -> Episodes | None:
    config = folder.config()
    try:
        found = load(config["data"], **(config.get("data_options") or {}))
    except (ReplaylabError, OSError, KeyError, TypeError) as error:
        if needed:
            raise UsageError(f"the run's own data cannot be read ({error}): name a log with --data") from error
        return None
    if _is_of(found, folder.info().get("data")):
        return found
    if needed:
        raise UsageError(f"{folder.path} was trained on other episodes than its file holds now: name a log with --data")
    return None


def _is_of(found: Episodes, told: Any) -> bool:
    """Whether a summary in run.json is of these episodes: a run may have been given a part of its file, from Python."""
    try:
        same = (told["steps"], told["episodes"]) == (len(found), found.num_episodes)
        return same and math.isclose(told["return"]["mean"], found.returns.mean(), rel_tol=1e-4, abs_tol=1e-6)
    except (KeyError, TypeError):
        return True  # an old or edited run.json: nothing speaks against them


def seen(episodes: Episodes, train: Episodes) -> float:
    """Share of the episodes that are in the training data too, whatever the files are called."""

    def marks(log: Episodes) -> list[bytes]:
        columns = [np.ascontiguousarray(c) for c in (log.observations, log.actions, log.rewards)]
        parts = [[c[a:b].tobytes() for c in columns] for a, b in pairwise(log.offsets)]
        return [hashlib.blake2b(b"".join(p), digest_size=16).digest() for p in parts]

    if episodes is train:
        return 1.0
    known = set(marks(train))
    return float(np.mean([mark in known for mark in marks(episodes)]))


def assess_agent(
    agent: Any,
    spaces: Spaces,
    seeds: Sequence[int],
    episodes: Episodes,
    *,
    train: Episodes | None = None,
    gamma: float | None = None,
    device: torch.device | None = None,
    budget: Budget = FULL,
) -> dict[str, Any]:
    """The same for an agent in memory. `train`: what it was trained on; without it, whether the policy has seen
    `episodes` and how far their states lie from those it learnt from is not known."""
    began, device = time.monotonic(), device or torch.device("cpu")
    gamma = gamma if gamma is not None else float(getattr(agent.config, "gamma", 0.99))
    if not isinstance(gamma, Real) or not 0 <= gamma < 1:
        raise UsageError(f"gamma must be at least 0 and below 1, not {gamma!r}")
    gamma = float(gamma)  # JSON has no NumPy numbers
    if episodes.discrete and not spaces.discrete and spaces.action_dim == 1:  # amounts that all happen to be whole
        kind = np.float32 if train is None else train.actions.dtype
        episodes = replace(episodes, actions=episodes.actions[:, None].astype(kind))
    _check(spaces, episodes)
    rows = budget.rows // getattr(agent, "effort", 1)
    used = some_episodes(episodes, rows)
    found: dict[str, Any] = {
        "seeds": list(seeds),
        "episodes": used.num_episodes,
        "rows": len(used),
        "rows_of": len(episodes),
        "seen": None if train is None else seen(used, train),
        "fqe": None,
        "support": None,
        "predicted": [],
    }
    why = _not_assessable(agent, spaces, used)
    if why:
        return found | {"limits": [why, *ALWAYS], "seconds": round(time.monotonic() - began, 1)}
    log = Log(used, spaces, device, min(FOLDS, used.num_episodes))
    other = log if train is None or found["seen"] else Log(some_episodes(train, rows), spaces, device, 1)
    chosen = _act(agent, spaces, log.states, len(seeds))
    tables: dict[Any, Tensor] = {seed: log.vectors(chosen[i : i + 1]) for i, seed in enumerate(seeds)}
    imagined = None
    with torch.no_grad():
        if hasattr(agent, "predicted_return"):
            found["predicted"] = _predictions(agent, seeds, log)
        if hasattr(agent, "imagined_states"):
            imagined = agent.imagined_states(log.states[log.first], HORIZONS[0])  # (seeds, rows, observation)
        found["support"] = support(log, other, tables, spaces, budget.queries, NEIGHBOURS, imagined)
    found["fqe"] = fitted_q(log, tables, gamma, budget)
    for policy, near in zip(found["fqe"]["policies"], found["support"]["policies"], strict=True):
        policy["verdict"] = verdict(policy, near, found["fqe"])
    found["limits"] = limits(found)
    return found | {"seconds": round(time.monotonic() - began, 1)}


def _check(spaces: Spaces, episodes: Episodes) -> None:
    sees = list(episodes.observations.shape[1:])
    if sees != spaces.observation_shape:
        raise UsageError(
            f"the policy takes observations of {tuple(spaces.observation_shape)}, the data has {tuple(sees)}"
        )
    if spaces.discrete and not episodes.discrete:
        raise UsageError("the policy makes choices, the data's actions are real numbers: write choices as 1, not 1.0")
    if spaces.discrete and episodes.action_dim > spaces.action_dim:
        raise UsageError(f"the policy knows {spaces.action_dim} choices, the data has {episodes.action_dim}")
    if not spaces.discrete and (episodes.discrete or episodes.action_dim != spaces.action_dim):
        width = 1 if episodes.discrete else episodes.action_dim
        raise UsageError(f"the policy takes {spaces.action_dim} actions, the data has {width}")


def _not_assessable(agent: Any, spaces: Spaces, episodes: Episodes) -> str | None:
    if hasattr(agent, "begin"):
        return (
            "This policy has a memory. What it would do in a logged state depends on what it did before: no estimate."
        )
    if len(spaces.observation_shape) != 1:
        return "Observations are images. Distances and a fitted Q over single frames would mean little: no estimate."
    if episodes.num_episodes < 2:
        return "One episode is not enough to fit on some episodes and judge by others: no estimate."
    return None


@torch.no_grad()
def _act(agent: Any, spaces: Spaces, states: Tensor, seeds: int) -> Tensor:  # (seeds, states, action)
    """What the policies do in every state: the same answer at each call, within the action box."""
    devices = [states.device] if states.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(0)
        bar, parts = Progress("policy", len(states), unit="states"), []
        for part in states.split(ACTED):
            parts.append(agent.act(part.expand(seeds, -1, -1), None)[0])
            bar.update(bar.done + len(part))
        bar.close()
    actions = torch.cat(parts, 1)
    if spaces.discrete:
        return actions
    low, high = (torch.tensor(b, device=states.device) for b in (spaces.action_low, spaces.action_high))
    return actions.clamp(low, high)


def _predictions(agent: Any, seeds: Sequence[int], log: Log) -> list[dict[str, Any]]:
    """The ensemble's own forecast from the logged first states over a few horizons, the data beside it."""
    e, found = log.episodes, []
    starts = log.states[log.first]
    for horizon in (h for h in HORIZONS if h <= e.lengths.max()):
        means, spreads = (torch.as_tensor(x).tolist() for x in agent.predicted_return(starts, horizon))
        early = e.timesteps < horizon
        logged = np.bincount(e.episode_ids[early], e.rewards[early], e.num_episodes)
        rows = [{"seed": s, "mean": m, "disagreement": d} for s, m, d in zip(seeds, means, spreads, strict=True)]
        found.append({"horizon": horizon, "data": float(logged.mean()), "policies": rows})
    return found


def summary(found: dict[str, Any]) -> list[str]:
    """What a terminal shows: a line for the data, one for each seed, then what cannot be known."""
    said = []
    if found["fqe"] and found["support"]:
        data = found["fqe"]["data"]
        said.append(f"data: discounted return {data['mean']:.4g} [{data['low']:.4g}, {data['high']:.4g}]")
        for policy, near in zip(found["fqe"]["policies"], found["support"]["policies"], strict=True):
            gain = policy["gain"]
            far = "beyond the log's 99 %" if any(found["support"]["thresholds"]) else "not taken in similar states"
            said.append(
                f"seed {policy['seed']}: {gain['mean']:+.3g} [{gain['low']:+.3g}, {gain['high']:+.3g}] over the data's "
                f"own actions, estimated: {policy['verdict']}; {near['beyond_99']:.0%} of actions {far}"
            )
    return [*said, *(f"- {line}" for line in found["limits"])]


# --- what cannot be known

ALWAYS = (
    "Nothing here was measured by trying the policy. These are estimates from what others did.",
    "If those who acted saw something that the columns do not hold and acted on it, actions look better or worse than "
    "they are, and no number on this page shows it.",
    "All of it holds for the system that made the log, as it was then: other patients, machines or markets may differ.",
)


def limits(found: dict[str, Any]) -> list[str]:
    """Plain sentences, the most serious first, chosen by the numbers."""
    fqe, near = found["fqe"], found["support"]
    worst = max(p["beyond_99"] for p in near["policies"])
    said = []
    if worst > 0.5:
        said.append(
            f"No overlap: in {worst:.0%} of the states the policy does what almost nobody did in similar states. "
            "The estimated return is then a guess of the network, not evidence."
        )
    elif worst > 0.05:
        said.append(
            f"In {worst:.0%} of the states the policy's action is further from the log than 99 % of logged actions "
            "are. There the estimate extrapolates and may be wrong in either direction."
        )
    calibration = fqe["calibration"]
    if not calibration["good"]:
        said.append(
            f"The estimator misses the one answer that is known, the data's own return, by {calibration['error']:.3g}, "
            f"where {calibration['room']:.3g} would be chance: do not rely on its estimates of the policy. Either "
            "there is too little data, or what happens next depends on more than the columns of one row tell."
        )
    if not all(p["settled"] for p in [*fqe["policies"], fqe["behaviour"]]):
        said.append(
            "The fit did not settle: estimates were still moving when it ended, or ran beyond all that the rewards and "
            "values they were fitted to allow. They are not final."
        )
    unclear = [str(p["seed"]) for p in fqe["policies"] if p["verdict"] == "unclear"]
    if unclear:
        said.append(
            f"Whether the policy is better than what was done cannot be told (seed {', '.join(unclear)}): the "
            "estimated difference is within the errors of the estimate, or the estimate itself is in doubt."
        )
    if fqe["data"]["cut_weight"] > 0.05:
        said.append(
            f"{fqe['data']['cut']:.0%} of the episodes were cut off rather than ended, and what would have followed "
            f"carries {fqe['data']['cut_weight']:.0%} of the weight: that part of the data's return is an estimate too."
        )
    if found["seen"] is None:
        said.append(
            "What the policy was trained on is not at hand here. If these episodes are among it, that flatters it."
        )
    elif found["seen"]:
        said.append(
            f"{found['seen']:.0%} of these episodes are those that the policy was trained on: it has fitted their "
            "accidents too, which flatters it. Assess it on episodes that it has not seen."
        )
    for row in found["predicted"]:
        torn = [p for p in row["policies"] if p["disagreement"] > 0.2 * abs(p["mean"])]
        if torn:
            said.append(f"Over {row['horizon']} steps the members of the world model disagree by more than a fifth.")
            break
    count = found["episodes"]
    said.append(
        f"{count} episodes show nothing about rare harm: what never happened in them may still happen in up to "
        f"{100 * min(1.0, 3 / count):.2g}% of the episodes."
    )
    return [*said, *ALWAYS]


def verdict(policy: dict[str, Any], near: dict[str, Any], fqe: dict[str, Any]) -> str:
    """better, worse or unclear than what was done: a claim only where it is beyond every error that can be seen."""
    gain = policy["gain"]  # its folds share two thirds of their rows, so they differ less than fits of new logs would
    doubt = 2 * gain["spread"] + abs(fqe["calibration"]["error"])
    settled = policy["settled"] and fqe["behaviour"]["settled"]
    if not fqe["calibration"]["good"] or not settled or near["beyond_99"] > 0.5:
        return "unclear"
    return "better" if gain["low"] > doubt else "worse" if gain["high"] < -doubt else "unclear"
