"""Settings of GORMPO and MOPO, their presets, and coefficients by environment."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from replaylab.algos.sac import Config as SACConfig
from replaylab.config import COUNT, FROM_0, RATE, SHARE, knob
from replaylab.data.episodes import Episodes
from replaylab.models import termination
from replaylab.models.density import INPUTS, KINDS
from replaylab.models.penalty import DENSITY, ENSEMBLE


@dataclass
class Config(SACConfig):
    """Density-penalised model-based policy optimisation."""

    steps: int = knob(500_000, "updates of the policy", COUNT)
    actor_lr: float = knob(1e-4, "Adam's learning rate of the actor", RATE)
    alpha_lr: float = knob(1e-4, "Adam's learning rate of the temperature", RATE)
    actor_lr_decay: bool = knob(True, "let the actor's rate fall to zero along a cosine")
    alpha_max: float | None = knob(1.0, "the temperature used is never above; none: no such limit")
    goal_min: float | None = knob(
        None, "no critic is asked for less than this; GORMPO: 0, wrong where returns are negative"
    )
    normalize: bool = knob(True, "standardise what actor and critics see with the data's mean and deviation")
    density: str = knob("realnvp", "kind of density model", [*KINDS, "none"])
    density_model: str | None = knob(None, "folder of `replaylab density fit`, instead of fitting one in the run")
    density_inputs: str = knob("nsa", "what a fitted density looks at: (s, a), (s', a) or (s, a, s')", INPUTS)
    density_steps: int | None = knob(None, "updates of the density; default: as `replaylab density fit`", COUNT)
    percentile: float = knob(1.0, "the threshold: this percentage of held-out rows is less likely")
    penalty: str = knob("tanh", "penalty from the density", [*DENSITY, "none"])
    penalty_coef: float | None = knob(
        None, "its coefficient; default: by environment and level, see the docs; 0: none", FROM_0
    )
    uncertainty: str = knob("none", "penalty from the ensemble", [*ENSEMBLE, "none"])
    uncertainty_coef: float | None = knob(None, "its coefficient; default: by environment and level; 0: none", FROM_0)
    termination: str = knob("auto", "auto, a known environment, none, or your own FILE.py:FUNCTION")
    dynamics_model: str | None = knob(None, "run folder whose ensembles are taken, seed by seed, instead of training")
    members: int = knob(7, "networks of the ensemble", COUNT)
    elites: int = knob(5, "of them, how many imagine", COUNT)
    dynamics_hidden: list[int] = knob([200, 200, 200, 200], "widths of their hidden layers", COUNT)
    dynamics_lr: float = knob(1e-3, "Adam's learning rate of the ensemble", RATE)
    dynamics_batch: int = knob(256, "rows a batch of each member", COUNT)
    scale_targets: bool = knob(True, "standardise what the ensemble predicts, not only what it sees")
    patience: int = knob(5, "epochs without an improvement of 1 % on held-out rows until the ensemble is done", COUNT)
    max_epochs: int = knob(200, "at most so many", COUNT)
    rollout_batch: int = knob(50_000, "states from which is imagined", COUNT)
    rollout_length: int | None = knob(
        None, "imagined steps from each; default: by environment and level, else 5", COUNT
    )
    rollout_every: int = knob(1000, "updates of the policy between rollouts", COUNT)
    retain: int = knob(5, "rollouts that are kept", COUNT)
    real_ratio: float = knob(0.05, "share of logged rows in a batch", SHARE)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.termination = termination.absolute(self.termination)


PRESETS: dict[str, dict[str, Any]] = {
    "debug": {
        "steps": 60,
        "batch_size": 32,
        "hidden": [32, 32],
        "density_steps": 40,
        "dynamics_hidden": [16, 16],
        "dynamics_batch": 1024,
        "max_epochs": 2,
        "rollout_batch": 100,
        "rollout_every": 20,
        "eval_episodes": 2,
        "final_episodes": 4,
    },
    "mbpo": {"penalty_coef": 0.0, "uncertainty_coef": 0.0},
}

# (environment, level): coefficients of the density's and of the ensemble's penalty, rollout length. The ensemble's and
# the lengths are OfflineRL-Kit's; a level that is not listed takes the environment's "medium".
TUNED: dict[tuple[str, str], tuple[float, float, int]] = {
    ("halfcheetah", "medium"): (2.0, 0.5, 5),
    ("halfcheetah", "medium-replay"): (2.0, 0.5, 5),
    ("halfcheetah", "medium-expert"): (2.0, 2.5, 5),
    ("hopper", "medium"): (5.0, 5.0, 5),
    ("hopper", "medium-replay"): (2.5, 2.5, 5),
    ("hopper", "medium-expert"): (5.0, 5.0, 5),
    ("walker2d", "medium"): (1.0, 0.5, 5),
    ("walker2d", "medium-replay"): (2.5, 2.5, 1),
    ("walker2d", "medium-expert"): (2.5, 2.5, 1),
}


def tuned(episodes: Episodes) -> tuple[tuple[float, float, int], str]:
    """The table's row for this data, and its origin. Elsewhere the unit of a penalty is the rewards' deviation."""
    name = termination.family(episodes.env_id)
    told = " ".join(str(episodes.meta.get(key) or "") for key in ("level", "dataset_id", "source")).lower()
    found = re.search(r"medium[-_](replay|expert)", told)
    level = found[0].replace("_", "-") if found else "medium"
    if not found and "medium" in told and "expert" in told:  # two sets, joined
        level = "medium-expert"
    if name and (name, level) in TUNED:
        return TUNED[name, level], f"from the table for {name} {level}"
    spread = float(np.std(episodes.rewards)) or 1.0
    origin = "by the rule for environments that no table has: the deviation of the rewards for a density's penalty, 1 "
    return (float(f"{spread:.2g}"), 1.0, 5), origin + "for the ensemble's, 5 steps"
