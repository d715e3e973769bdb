"""GORMPO's density model log p: loaded from a folder, or fitted as the first phase of the run."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from replaylab import density as library
from replaylab.algos import Phase
from replaylab.algos.gormpo_settings import check_steps
from replaylab.data.episodes import Episodes
from replaylab.errors import DataError, UsageError
from replaylab.models.density import Density, make
from replaylab.models.termination import same_family
from replaylab.tensors import under


class DensityFit:
    """One density model, shared by all seeds: it depends on the data alone."""

    def __init__(self, config: Any, episodes: Episodes, seeds: int, device: torch.device):
        self.config, self.seeds = config, seeds
        self.model: Density
        self.report: dict[str, Any]
        self.descent: library.Descent | None = None
        check_steps(config)
        if config.density_model is not None:
            self.model = library.load(config.density_model, str(device))
            self.report, self.fitted = self.model.report, True
            self._check(episodes)
            if config.percentile != self.report["percentile"]:  # else `density fit` has tested it
                self.test = episodes.select(library.split(episodes, self.report.get("seed", 0))[2])
            self.model.threshold(config.percentile)
            return
        parts = [episodes.select(ids) for ids in library.split(episodes)]
        order = np.random.default_rng(81)  # shuffled, so that any leading rows are a fair sample
        x, validation = (
            torch.tensor(order.permutation(library.columns(p, config.density_inputs)[0])) for p in parts[:2]
        )
        self.x, self.validation, self.test = x.to(device), validation.to(device), parts[2]
        self.model = make(config.density, x.shape[1]).to(device)
        self.fitted = False
        self.steps = 0 if not self.model.needs_steps else config.density_steps or library.STEPS[config.density]
        self.report = {"kind": config.density, "inputs": config.density_inputs, "steps": self.steps}
        self.report |= {"observation_dim": episodes.observations.shape[1], "action_dim": episodes.actions.shape[1]}
        self.report |= {"percentile": config.percentile, "env_id": episodes.env_id}
        self.best = torch.full((), -torch.inf, device=device)
        self.kept: dict[str, Tensor] = {}
        self.descent = library.Descent(self.model, self.steps, library.LR) if self.steps else None

    def _check(self, episodes: Episodes) -> None:
        where, usual = self.config.density_model, type(self.config)()
        for name, known in (("density", self.report["kind"]), ("density_inputs", self.report["inputs"])):
            if getattr(self.config, name) not in (getattr(usual, name), known):  # the user chose another one
                raise UsageError(f"{where} has {name} {known}: leave --{name.replace('_', '-')} out")
        same_family(f"{where}: the density", self.report.get("env_id"), episodes.env_id)
        wanted = self.report["observation_dim"], self.report["action_dim"]
        given = episodes.observations.shape[1], episodes.actions.shape[1]
        if wanted != given:
            raise DataError(
                f"{self.config.density_model}: the density was fitted on {wanted[0]} observation and {wanted[1]} "
                f"action columns, the data has {given[0]} and {given[1]}"
            )

    def phase(self) -> Phase:
        rows = library.Rows(self.x, library.BATCH, 0)
        every = max(1, self.steps // library.CHECKS)
        return Phase(
            "density", self.steps, rows, self.update, self.begin, every, self.hook, finish=self.finish, evaluates=False
        )

    @torch.no_grad()
    def begin(self) -> None:
        torch.manual_seed(0)  # the same density whichever seeds are trained with it
        self.model.standardise(self.x)
        self.model.fit(self.x, self.validation)
        if not self.steps:
            self.finish()

    def update(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        assert self.descent is not None
        return {"loss": self.descent(batch)["loss"].repeat(self.seeds)}

    @torch.no_grad()
    def hook(self, step: int) -> dict[str, Tensor]:
        """Keep the weights with the highest likelihood of the held-out rows so far."""
        likelihood = self.model.log_prob(self.validation[: library.JUDGES]).clamp(min=-1e3).mean()
        better = bool(likelihood > self.best)
        if better:
            self.best.copy_(likelihood)
            self.kept = {name: value.clone() for name, value in self.model.state_dict().items()}
        return {"validation": likelihood.repeat(self.seeds)}

    def finish(self) -> None:
        if self.steps:
            self.hook(self.steps)
            self.model.load_state_dict(self.kept or self.model.state_dict())
        self.model.requires_grad_(False).calibrate(self.validation)
        self.fitted = True

    def findings(self) -> dict[str, Any]:
        """For the report: how many held-out rows, and rows shifted away from the data, lie below the threshold."""
        threshold = self.model.threshold(self.config.percentile)
        report = self.report | {"threshold": threshold, "percentile": self.config.percentile}
        if self.config.density_model is None or self.config.percentile != self.report["percentile"]:
            self.model.report = report
            report["tests"] = library.shifted_tests(self.model, self.test, library.default_distances(self.test))
        return {k: report.get(k) for k in ("kind", "inputs", "steps", "threshold", "percentile", "tests")}

    # --- checkpoints

    def state(self) -> dict[str, Tensor]:
        state = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        state["fitted"] = torch.tensor(self.fitted)
        if not self.fitted and self.descent is not None:
            state |= {f"kept.{name}": value for name, value in self.kept.items()}
            state |= {"best": self.best, "done": self.descent.done}
        return state

    def load(self, state: dict[str, Tensor]) -> None:
        self.model.load_state_dict(under("model.", state))
        self.fitted = bool(state["fitted"])
        if self.fitted:
            self.model.requires_grad_(False)
        elif self.descent is not None:
            self.kept = {k: v.to(self.x.device) for k, v in under("kept.", state).items()}
            self.best.copy_(state["best"])
            self.descent.done.copy_(state["done"])
