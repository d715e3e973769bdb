"""MOPO (Yu et al., 2020): GORMPO's agent without a density; the penalty is the ensemble's own uncertainty u(s, a)."""

from __future__ import annotations

from dataclasses import dataclass

from replaylab.algos import gormpo
from replaylab.algos.gormpo import COPIES, PRESETS, Agent, needs
from replaylab.config import knob
from replaylab.models.density import KINDS
from replaylab.models.penalty import DENSITY, ENSEMBLE

__all__ = ["COPIES", "PRESETS", "Agent", "Config", "needs"]


@dataclass
class Config(gormpo.Config):
    """Model-based offline policy optimisation."""

    density: str = knob("none", "density model to fit; none: no density penalty", [*KINDS, "none"])
    penalty: str = knob("none", "shape of the density penalty; none: no such penalty", [*DENSITY, "none"])
    uncertainty: str = knob("aleatoric", "MOPO's penalty from the ensemble's uncertainty", [*ENSEMBLE, "none"])
