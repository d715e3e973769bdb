"""Support: does the policy do what was done?

The distance from the policy's action to the nearest action that was logged in the k most similar states, beside the
same number for logged actions. States of the same episode do not count as similar: they are near by birth.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from replaylab.algos import Spaces
from replaylab.offpolicy.fitted import Log

DISTANCES = 2**24  # held at a time
BINS, SHOWN_DIMS = 40, 16  # of action histograms
EDGE = 0.01  # of the action box: closer than this is at its edge


class Neighbours:
    """Exact nearest logged states, in standardised columns, on the device."""

    def __init__(self, log: Log, k: int):
        lengths = log.episodes.lengths
        others = int(lengths.sum() - lengths.max())  # every row has so many in other episodes
        self.log, self.k = log, min(k, others or len(log.place))
        self.mean, self.std = log.standard(log.states)
        self.points = (log.states[log.place] - self.mean) / self.std
        self.squares = self.points.square().sum(-1)
        self.owner = torch.as_tensor(log.episodes.episode_ids, device=log.device)

    def find(self, states: Tensor, owners: Tensor) -> tuple[Tensor, Tensor]:
        """Mean distance to the k nearest (queries,) and which they are (queries, k); never of the same episode."""
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")  # small distances matter
        step, found = max(1, DISTANCES // len(self.points)), []
        for part, owner in zip(((states - self.mean) / self.std).split(step), owners.split(step), strict=True):
            distances = torch.addmm(self.squares, part, self.points.T, alpha=-2)
            distances += part.square().sum(-1, keepdim=True)
            distances.masked_fill_(owner[:, None] == self.owner, torch.inf)
            found.append(distances.topk(self.k, largest=False))
        torch.set_float32_matmul_precision(precision)
        near = torch.cat([f.values for f in found]).clamp(min=0).sqrt()
        return near.mean(1), torch.cat([f.indices for f in found])


def support(
    log: Log, train: Log, tables: dict[Any, Tensor], spaces: Spaces, queries: int, k: int, imagined: Tensor | None
) -> dict[str, Any]:
    """How far the actions of each policy are from those logged in similar states, beside logged actions. Similar states
    are those of `log`, which a fitted Q learns from: where it has no such action, that Q guesses, whatever `train` has.
    How far states lie apart is told of `train`, which a policy and its world model learnt from."""
    device, same = log.device, log is train
    rows = torch.as_tensor(np.random.default_rng(1).permutation(len(log.place))[:queries], device=device)
    neighbours = Neighbours(log, k)
    _, near = neighbours.find(log.states[log.place[rows]], neighbours.owner[rows])
    _, scale = log.standard(log.actions)

    def away(actions: Tensor) -> np.ndarray:  # (queries, action) -> (queries,)
        return ((actions[:, None] - log.actions[near]) / scale).norm(dim=-1).amin(1).cpu().numpy()

    usual = away(log.actions[rows])
    thresholds = np.zeros(2) if log.choices else np.quantile(usual, [0.95, 0.99])
    taken = {name: table[0, log.place[rows]] for name, table in tables.items()}
    found: dict[str, Any] = {
        "k": neighbours.k,
        "queries": len(rows),
        "data": _away(usual, thresholds) | {"at_edge": _at_edge(log.actions[rows], spaces)},
        "policies": [
            {"seed": name} | _away(away(a), thresholds) | {"at_edge": _at_edge(a, spaces)} for name, a in taken.items()
        ],
        "thresholds": thresholds.tolist(),
        "actions": _histograms(log.actions[rows], list(taken.values()), bool(log.choices)),
        "states": None,
    }
    # what is usual is how far the states of one episode are from those of others
    if (not same or imagined is not None) and train.episodes.num_episodes > 1:
        neighbours = neighbours if same else Neighbours(train, k)
        own = torch.as_tensor(np.random.default_rng(2).permutation(len(train.place))[:queries], device=device)
        usual_states, _ = neighbours.find(train.states[train.place[own]], neighbours.owner[own])
        limit = float(usual_states.quantile(0.95))

        def beyond(states: Tensor) -> float:
            distance, _ = neighbours.find(states, torch.full((len(states),), -1, device=device))
            return float((distance > limit).float().mean())

        outside = None if same else beyond(log.states[log.place[rows]])
        found["states"] = {"threshold": limit, "held_out_beyond": outside}
        if imagined is not None:
            found["states"]["imagined_beyond"] = [beyond(s) for s in imagined]
    return found


def _away(distances: np.ndarray, thresholds: np.ndarray) -> dict[str, float]:
    beyond = [float((distances > t + 1e-6).mean()) for t in thresholds]
    return {"median": float(np.median(distances)), "beyond_95": beyond[0], "beyond_99": beyond[1]}


def _at_edge(actions: Tensor, spaces: Spaces) -> float | None:
    """Share of actions with a dimension at the edge of its box."""
    if spaces.discrete:
        return None
    low, high = (torch.tensor(b, device=actions.device) for b in (spaces.action_low, spaces.action_high))
    room = EDGE * (high - low)
    return float(((actions < low + room) | (actions > high - room)).any(-1).float().mean())


def _histograms(data: Tensor, policies: list[Tensor], discrete: bool) -> list[dict[str, Any]]:
    """Shares of the actions in bins: one histogram a dimension, or one for all discrete actions."""
    columns = [x.argmax(-1, keepdim=True) if discrete else x for x in (data, *policies)]
    arrays = [c.cpu().numpy().astype(np.float64) for c in columns]
    found = []
    for d in range(min(arrays[0].shape[1], SHOWN_DIMS)):
        values = [a[:, d] for a in arrays]
        low, high = np.quantile(np.concatenate(values), [0.005, 0.995])
        edges = np.linspace(low, high if high > low else low + 1e-6, BINS + 1)
        if discrete:
            edges = np.arange(data.shape[1] + 1) - 0.5
        shares = [np.histogram(np.clip(v, edges[0], edges[-1]), edges)[0] / len(v) for v in values]
        rounded = [np.round(s, 5).tolist() for s in shares]
        found.append({"edges": edges.tolist(), "data": rounded[0], "policies": rounded[1:]})
    return found
