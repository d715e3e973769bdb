"""Data made on the spot, small enough to see what a method does with it.

`toy_bandit`: one state, actions in the plane, a reward that depends on the distance from the middle alone. The actions
are those of a normal distribution between two circles. The best reward, 1, is on the circle of radius 1. Towards the
hole in the middle the reward rises too, to 0.8 at its rim: whoever believes an estimate of the reward inside of the
hole, where there is no data, is drawn into it.
"""

from __future__ import annotations

import numpy as np

from replaylab.data.episodes import Episodes

INNER, OUTER = 0.25, 1.5  # radii between which there is data


def toy_reward(actions: np.ndarray) -> np.ndarray:  # (..., 2) -> (...)
    radius = np.linalg.norm(actions, axis=-1)
    return np.where(radius < 0.5, 0.8 - 7.2 * np.abs(radius - INNER), 1 - 4 * np.abs(radius - 1))


def toy_bandit(rows: int = 100_000, seed: int = 0) -> Episodes:
    """So many episodes of one step each."""
    rng = np.random.default_rng(seed)
    nearest, farthest = np.exp(-(INNER**2) / 2), np.exp(-(OUTER**2) / 2)  # chances of a normal pair to lie outside
    radius = np.sqrt(-2 * np.log(rng.uniform(farthest, nearest, rows)))
    angle = rng.uniform(0, 2 * np.pi, rows)
    actions = (radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], 1)).astype(np.float32)
    return Episodes(
        observations=np.zeros((rows, 1), np.float32),
        actions=actions,
        rewards=toy_reward(actions),
        terminated=np.ones(rows, bool),
        truncated=np.zeros(rows, bool),
        offsets=np.arange(rows + 1),
        final_observations=np.zeros((rows, 1), np.float32),
        final_known=np.ones(rows, bool),
        meta={
            "env_id": None,
            "dataset_id": "toy-bandit",
            "source": f"replaylab.data.toys.toy_bandit({rows}, {seed})",
            "action_low": [-OUTER, -OUTER],
            "action_high": [OUTER, OUTER],
        },
    )
