"""MOPO (Yu et al., 2020): GORMPO's agent with the ensemble's own uncertainty as the penalty, and no density."""

from __future__ import annotations

from dataclasses import dataclass

from replaylab.algos import gormpo
from replaylab.algos.gormpo import PRESETS, Agent
from replaylab.config import knob
from replaylab.models.density import KINDS
from replaylab.models.penalty import DENSITY, ENSEMBLE

__all__ = ["PRESETS", "Agent", "Config"]


@dataclass
class Config(gormpo.Config):
    """Model-based offline policy optimisation."""

    density: str = knob("none", "kind of density model", [*KINDS, "none"])
    penalty: str = knob("none", "penalty from the density", [*DENSITY, "none"])
    uncertainty: str = knob("aleatoric", "penalty from the ensemble", [*ENSEMBLE, "none"])
