"""GORMPO's and MOPO's settings, presets, tuned coefficients for known datasets, and what makes no sense."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from replaylab.algos.sac import Config as SACConfig
from replaylab.config import COUNT, FROM_0, RATE, SHARE, changed, knob
from replaylab.data.episodes import Episodes
from replaylab.errors import UsageError
from replaylab.models import termination
from replaylab.models.density import INPUTS, KINDS
from replaylab.models.density.base import check_percentile
from replaylab.models.penalty import BOUNDED, DENSITY, ENSEMBLE


@dataclass
class Config(SACConfig):
    """Density-penalised model-based policy optimisation."""

    steps: int = knob(500_000, "policy updates", COUNT)
    actor_lr: float = knob(1e-4, "Adam's learning rate of the actor", RATE)
    alpha_lr: float = knob(1e-4, "Adam's learning rate of the temperature", RATE)
    actor_lr_decay: bool = knob(True, "let the actor's learning rate fall to zero along a cosine")
    alpha_max: float | None = knob(1.0, "upper limit of the entropy temperature; none: no limit", FROM_0)
    goal_min: float | None = knob(
        None, "lower limit of the critics' targets; none: no limit; original: 0, wrong if returns are negative"
    )
    normalize: bool = knob(True, "standardise the observations of actor and critics")
    density: str = knob("realnvp", "density model to fit; none: no density penalty", [*KINDS, "none"])
    density_model: str | None = knob(None, "folder of `replaylab density fit`; default: fit one in this run")
    density_inputs: str = knob("nsa", "inputs of the density: sa (s, a), nsa (s', a) or sas (s, a, s')", INPUTS)
    density_steps: int | None = knob(None, "density updates; default: as `replaylab density fit`", COUNT)
    percentile: float = knob(1.0, "the threshold tau: this percentage of held-out rows lies below it")
    penalty: str = knob("tanh", "shape of the density penalty; none: no such penalty", [*DENSITY, "none"])
    penalty_coef: float | None = knob(
        None, "coefficient of the density penalty; default: by dataset, see the docs; 0: no penalty", FROM_0
    )
    uncertainty: str = knob("none", "MOPO's penalty from the ensemble's uncertainty", [*ENSEMBLE, "none"])
    uncertainty_coef: float | None = knob(None, "coefficient of that penalty; default: by dataset; 0: none", FROM_0)
    termination: str = knob("auto", "when imagined episodes end: auto, an environment, none, or FILE.py:FUNCTION")
    dynamics_model: str | None = knob(None, "run folder to take the ensembles from, seed by seed; default: train them")
    members: int = knob(7, "networks in the ensemble", COUNT)
    elites: int = knob(5, "best members, by held-out error, that imagine", COUNT)
    dynamics_hidden: list[int] = knob([200, 200, 200, 200], "widths of the ensemble's hidden layers", COUNT)
    dynamics_lr: float = knob(1e-3, "Adam's learning rate of the ensemble", RATE)
    dynamics_batch: int = knob(256, "rows per batch of each member", COUNT)
    scale_targets: bool = knob(True, "standardise the targets of the ensemble, not only its inputs")
    patience: int = knob(5, "stop after so many epochs in which no member's held-out error fell by 1 %", COUNT)
    max_epochs: int = knob(200, "most epochs of the ensemble", COUNT)
    rollout_batch: int = knob(50_000, "logged states that each rollout starts from", COUNT)
    rollout_length: int | None = knob(None, "imagined steps from each of them; default: by dataset, else 5", COUNT)
    carried: float = knob(
        0.0,
        "share of the imagined rows that play on where their last rollout ended, from the log's first states at first; "
        "the others start anywhere in the log",
        SHARE,
    )
    carried_steps: int = knob(200, "imagined steps after which those begin anew", COUNT)
    rollout_every: int = knob(1000, "policy updates between rollouts", COUNT)
    retain: int = knob(5, "newest rollouts that are kept as training data", COUNT)
    real_ratio: float = knob(0.05, "share of logged rows in a policy batch; the others are imagined", SHARE)

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

# (environment, level): coefficient of the density's penalty, of the ensemble's penalty, and rollout length. The latter
# two are OfflineRL-Kit's. A level that is not listed takes the row "medium" of its environment.
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
    """Coefficients and length for this data, and where they come from (for a note): the table, or a rule of thumb."""
    name = termination.family(episodes.env_id)
    words = " ".join(str(episodes.meta.get(key) or "") for key in ("level", "dataset_id", "source")).lower()
    found = re.search(r"medium[-_](replay|expert)", words)
    level = found[0].replace("_", "-") if found else "medium"
    if not found and "medium" in words and "expert" in words:  # two datasets joined
        level = "medium-expert"
    if name and (name, level) in TUNED:
        return TUNED[name, level], f"from the table for {name} {level}"
    spread = float(np.std(episodes.rewards)) or 1.0
    origin = "by the rule for environments that no table has: the deviation of the rewards for a density's penalty, 1 "
    return (float(f"{spread:.2g}"), 1.0, 5), origin + "for the ensemble's, 5 steps"


def check(config: Config) -> None:
    """Refuse settings for training; a run that was trained with them is still loaded."""
    wanted = config.penalty != "none" and config.penalty_coef != 0
    if wanted and config.density == "none" and config.density_model is None:
        raise UsageError(
            f"penalty {config.penalty} needs a density: pass --density or --density-model, or --penalty none"
        )
    chosen = config.density not in ("none", type(config)().density)
    if config.penalty == "none" and (config.density_model is not None or chosen):
        what = "--density" if config.density_model is None else "--density-model"
        raise UsageError(f"a density without a penalty does nothing: pass --penalty tanh, or leave out {what}")
    if config.penalty == "none" and config.penalty_coef:
        raise UsageError("--penalty-coef without a penalty does nothing: pass --penalty and --density too")
    if config.uncertainty == "none" and config.uncertainty_coef:
        raise UsageError("--uncertainty-coef without a penalty does nothing: pass --uncertainty too")
    if config.penalty not in (*BOUNDED, "none") and config.penalty_coef is None:
        raise UsageError(f"penalty {config.penalty} has no usual size: pass --penalty-coef")
    if int(config.batch_size * config.real_ratio) == config.batch_size:
        raise UsageError(f"--real-ratio {config.real_ratio:g} leaves no imagined rows: it must be smaller")
    if config.elites > config.members:
        raise UsageError(f"elites must be from 1 to members ({config.members}), not {config.elites}")
    if config.members == 1 and config.uncertainty in ("pairwise", "ensemble-std") and config.uncertainty_coef != 0:
        raise UsageError(
            f"uncertainty {config.uncertainty} compares members, and 1 has none beside it: raise --members"
        )
    if config.penalty == "none" and (idle := changed(config, ("percentile", "density_inputs"), PRESETS.values())):
        raise UsageError(f"{idle[0]} without a density's penalty does nothing: leave it out, or pass --penalty")
    if not config.carried and changed(config, ("carried_steps",), PRESETS.values()):
        raise UsageError("--carried-steps without carried rows does nothing: pass --carried too")
    check_percentile(config.percentile)


def check_loaded(config: Config, theirs: dict[str, Any]) -> None:
    """Refuse settings that train an ensemble where one is loaded, from a run whose settings are `theirs`: those pass,
    as they are true."""
    names = ("dynamics_lr", "dynamics_batch", "scale_targets", "patience", "max_epochs")
    for name in changed(config, names, [*PRESETS.values(), theirs]):
        raise UsageError(f"{name} changes nothing of the ensembles of {config.dynamics_model}: leave it out")


def check_steps(config: Config) -> None:
    """Refuse density_steps where the density is loaded or is not trained in steps."""
    loaded = config.density_model is not None
    if (loaded or not KINDS[config.density].needs_steps) and changed(config, ["density_steps"], PRESETS.values()):
        what = f"the density of {config.density_model}" if loaded else f"a {config.density}"
        raise UsageError(f"density_steps changes nothing of {what}: leave it out")
