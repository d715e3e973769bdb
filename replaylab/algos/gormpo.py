"""GORMPO (Tumay et al., 2026), built on MOPO (Yu et al., 2020): plan in a learned model, penalise leaving the data.

    density     log p(s', a) of the logged pairs; tau = the value that 1 % of held-out rows fall below
    dynamics    an ensemble of Gaussians N(mu(s, a), sigma(s, a)) for (s' - s, r)
    policy      SAC on 5 % logged and 95 % imagined rows; imagined reward  r - coefficient * w(tau - log p(s', a))

w grows as a step gets less likely (models/penalty.py). MOPO takes the penalty from the ensemble's own uncertainty
instead (`--uncertainty`), MBPO has no penalty, and both penalties can be added. All seeds of a run share one density;
each has its own ensemble and policy. The three parts are three training phases, in this order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from replaylab.algos import Normalizer, Phase, Spaces
from replaylab.algos.gormpo_density import DensityFit
from replaylab.algos.gormpo_settings import PRESETS as PRESETS
from replaylab.algos.gormpo_settings import Config, check, check_loaded, tuned
from replaylab.algos.sac import SAC
from replaylab.data.episodes import Episodes
from replaylab.data.sample import left_out
from replaylab.errors import DataError, UsageError
from replaylab.models import termination
from replaylab.models.adam import anneal
from replaylab.models.density.detect import doubts
from replaylab.models.dynamics import Dynamics, Fit
from replaylab.models.imagine import (
    Imagination,
    Logged,
    LoggedRows,
    Penalties,
    Ring,
    foretell,
    generator,
    unpack,
    widen,
)
from replaylab.models.termination import same_family
from replaylab.run import RunFolder
from replaylab.step import Graph
from replaylab.tensors import under

COPIES = ("density_model",)
SHOWN = 1500  # points of each kind in the support plot


def needs(config: Config) -> list[str]:
    """Run folders that a new run needs."""
    return [] if config.dynamics_model is None else [config.dynamics_model]


class Agent(nn.Module):
    done: Tensor
    ends: Tensor

    def __init__(self, config: Config, spaces: Spaces, seeds: Sequence[int], device: torch.device):
        super().__init__()
        spaces.require_vectors("the ensemble of gormpo and mopo")
        self.config, self.seeds, self.device, self.spaces = config, list(seeds), device, spaces
        self.observation = spaces.observation_shape[0]
        rate = torch.tensor(config.actor_lr, device=device)
        limits = {"alpha_max": config.alpha_max, "goal_min": config.goal_min}
        self.sac = SAC(config, spaces, seeds, device, **limits, actor_rate=rate if config.actor_lr_decay else None)
        shape = (config.dynamics_hidden, config.members, config.elites)
        self.dynamics = Dynamics(seeds, self.observation, spaces.action_dim, *shape)
        self.normalizer = Normalizer(spaces.observation_shape)
        self.register_buffer("done", torch.zeros(()))  # updates of the policy so far
        self.register_buffer("ends", torch.tensor(0))  # index into termination.KNOWN, saved with the weights
        self.to(device)
        self.optimizers = {"policy": self.sac.optimizers["all"]}
        self.notes: list[str] = []
        self.warned: set[str] = set()
        self.number = -1  # index of the last rollout
        self.density: DensityFit | None = None
        self.fit: Fit | None = None  # None once the ensemble is trained
        self.lacking: RunFolder | None = None  # the run to take the ensembles from, where it is gone

    # --- the method: SAC on logged and imagined rows; models/imagine.py makes the latter

    def update(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """SAC on logged rows and rows of the ring, with the random numbers that `imagine` drew for this update."""
        if self.config.actor_lr_decay:
            anneal(self.optimizers["policy"], self.config.actor_lr, self.done, self.config.steps)
        self.done += 1
        rows = torch.cat([batch["rows"], self.ring.sample(self.uniform.index_select(1, self.cursor)[:, 0])], 1)
        noise = self.noise.index_select(1, self.cursor)[:, 0]
        self.cursor += 1
        return self.sac.update(unpack(rows, self.observation), noise)

    def imagine(self, step: int) -> dict[str, Tensor]:
        """Runs every `rollout_every` updates: new rows for the ring, and the noise of the updates until the next."""
        if self.lacking:
            self.lacking.require()
        self._draw(step // self.config.rollout_every)
        self.cursor.zero_()
        if self.penalties.coefficient and self.penalties.density is None:
            self._use_density()
        self.rollout()
        metrics = self.imagination.metrics()
        self._warn(metrics)
        return metrics

    # --- the training phases

    def phases(self, episodes: Episodes) -> list[Phase]:
        """Density, dynamics, policy. What is loaded has no phase, nor has a density that is fitted at once."""
        config = self.config
        check(config)
        if config.normalize:
            self.normalizer.fit(episodes)
        data = Logged(episodes, self.device)
        # indices of the rows whose next observation is logged
        self.known = torch.as_tensor(np.flatnonzero(episodes.next_known[episodes.backup_known]), device=self.device)
        if not len(self.known):
            raise DataError("the log tells no next observation, so there is no step to learn a model from")
        self.termination = self._termination(episodes, data)
        coefficient, uncertainty_coefficient = self._coefficients(episodes)
        if coefficient:
            self.density = DensityFit(config, episodes, len(self.seeds), self.device)
            if config.density_model is None and config.density_inputs != "sa":
                self.notes += left_out(episodes, "density")
        inputs = self.density.report["inputs"] if self.density else config.density_inputs
        self.penalties = Penalties(config.penalty, coefficient, config.uncertainty, uncertainty_coefficient, inputs)
        self._make_imagination(data)
        found = [self._policy_phase(data)]
        if config.dynamics_model is None:
            self.fit = self._make_fit(data)
            found.insert(0, self._dynamics_phase(self.fit))
            self.notes += left_out(episodes, "dynamics")
        else:
            self._take_dynamics(RunFolder(config.dynamics_model), episodes.env_id)
        if self.density is not None and self.density.descent is not None:
            self.optimizers["density"] = self.density.descent.optimizer
            found.insert(0, self.density.phase())
        elif self.density is not None and not self.density.fitted:  # it needs no steps
            found[0].begin = self.density.begin
        return found

    def _take_dynamics(self, run: RunFolder, env_id: str | None) -> None:
        """Load the ensembles of another run, seed by seed. A resumed run has its own copy and does not need them."""
        path = str(run.path)
        self.lacking = None if run.exists() else run
        if self.lacking:
            return
        if run.system() not in ("mopo", "gormpo"):
            raise UsageError(f"{path} is a run of {run.system()}: only mopo and gormpo have ensembles to take")
        check_loaded(self.config, run.config())
        places, weights = run.places(self.seeds), run.weights()
        if "dynamics" not in run.state()["findings"] and not run.config().get("dynamics_model"):
            raise UsageError(f"{path} has no ensemble that was trained to the end: go on there with --resume")
        same_family(path, (run.info().get("data") or {}).get("env_id"), env_id)
        try:
            self.dynamics.take(under("dynamics.", weights), places)
        except UsageError as error:
            hint = "was it trained on other columns, or with another --members, --elites or --dynamics-hidden?"
            raise UsageError(f"{path}: {error}; {hint}") from error
        self.notes.append(f"ensembles of {path}")

    def _dynamics_phase(self, fit: Fit) -> Phase:
        return Phase(
            "dynamics", fit.steps, fit, fit.update, every=fit.batches, hook=fit.hook, stop=fit.stop,
            finish=self._finish_dynamics, evaluates=False,
        )  # fmt: skip

    def _policy_phase(self, data: Logged) -> Phase:
        rows = LoggedRows(data.table(self.normalizer), self.seeds, self.real)
        every = self.config.rollout_every
        return Phase(
            "policy", self.config.steps, rows, self.update, every=every, hook=self.imagine, finish=self._finish_policy
        )

    def _coefficients(self, episodes: Episodes) -> tuple[float, float]:
        """Of the density's and the ensemble's penalty. Where the user gave none, from the table, with a note."""
        config, described = self.config, []
        (*table, length), origin = tuned(episodes)
        self.length = config.rollout_length or length
        found = []
        kinds = (config.penalty, config.penalty_coef), (config.uncertainty, config.uncertainty_coef)
        for (kind, given), usual in zip(kinds, table, strict=True):
            found.append(0.0 if kind == "none" else usual if given is None else given)
            described += [f"{kind} penalty x {found[-1]:g}"] if found[-1] else []
        gaps = [given is None for (kind, given) in kinds if kind != "none"] + [config.rollout_length is None]
        where = f" (not given, so {origin})" if any(gaps) else ""
        steps = f"{self.length} step{'' if self.length == 1 else 's'}"
        on = f", {100 * config.carried:g} % of the rows playing on to {config.carried_steps}" if config.carried else ""
        self.notes.append(f"imagines {steps}{on}, {' and '.join(described) or 'no penalty: MBPO'}{where}")
        return found[0], found[1]

    def _termination(self, episodes: Episodes, data: Logged) -> termination.Termination:
        """The termination function, with a note on which one it is and how well it agrees with the log."""
        given, known = self.config.termination, termination.family(episodes.env_id)
        name = (known or "none") if given == "auto" else given
        function = termination.find(name)
        self.ends.fill_(list(termination.KNOWN).index(name) if name in termination.KNOWN else 0)
        done = function(*(x[self.known] for x in (data.observations, data.actions, data.following)))
        ends = data.terminated[self.known] > 0
        found, wrong = int((done & ends).sum()), int((done & ~ends).sum())
        unknown = f"{episodes.env_id} is not known" if episodes.env_id else "the data names no environment"
        why = "asked for" if given != "auto" else f"for {episodes.env_id}" if known else unknown
        ended = int(ends.sum())
        unjudged = int(episodes.terminated.sum()) - ended
        fit = f"it ends {wrong:,} of the {len(ends) - ended:,} logged rows that go on"
        if ended or not unjudged:
            fit += f", and {found:,} of the {ended:,} that end"
        if unjudged:
            fit += f"; {unjudged:,} rows that end cannot be checked, as the log does not tell what followed them"
        self.notes.append(f"termination: {name} ({why}); {fit}")
        if ended > found * 2 or wrong > 0.01 * len(done):
            advice = "pass --termination NAME or FILE.py:FUNCTION" if given == "auto" else "is it the right one?"
            self.notes.append(f"termination {name} does not fit the log: {advice}")
        return function

    def _make_fit(self, data: Logged) -> Fit:
        config = self.config
        fit = Fit(
            self.dynamics,
            self.seeds,
            torch.cat([data.observations, data.actions], 1)[self.known],
            torch.cat([data.following - data.observations, data.rewards[:, None]], 1)[self.known],
            batch_size=config.dynamics_batch,
            lr=config.dynamics_lr,
            patience=config.patience,
            max_epochs=config.max_epochs,
            scale_targets=config.scale_targets,
        )
        self.optimizers["dynamics"] = fit.optimizer
        return fit

    def _make_imagination(self, data: Logged) -> None:
        config, actions = self.config, self.spaces.action_dim
        self.real = int(config.batch_size * config.real_ratio)
        rows = math.ceil(config.rollout_batch / config.elites) * config.elites
        seeds, fake = len(self.seeds), config.batch_size - self.real
        self.ring = Ring(seeds, rows * self.length * config.retain, 2 * self.observation + actions + 2, self.device)
        seen = torch.cat([torch.cat([data.observations, data.following]), data.rewards.repeat(2)[:, None]], 1)
        self.imagination = Imagination(
            self.seeds,
            self.dynamics,
            policy=lambda normal, noise: self.sac.sample(normal, noise)[0],
            normalize=self.normalizer,
            termination=self.termination,
            penalties=self.penalties,
            ring=self.ring,
            starts=data.observations,
            limits=widen(seen.amin(0), seen.amax(0)),
            rows=rows,
            length=self.length,
            actions=actions,
            begins=data.first,
            carried=int(rows * config.carried),
            most=config.carried_steps,
        )
        ours = self.termination in termination.KNOWN.values()  # a user's function may not fit a CUDA graph
        self.rollout = Graph(self.imagination.roll, self.device, capture=ours)
        self.data = data
        self.noise = torch.zeros(seeds, config.rollout_every, 2 * config.batch_size, actions, device=self.device)
        self.uniform = torch.zeros(seeds, config.rollout_every, fake, device=self.device)
        self.cursor = torch.zeros(1, dtype=torch.int64, device=self.device)  # updates since the last rollout

    def _finish_dynamics(self) -> dict[str, Any]:
        assert self.fit is not None
        findings = self.fit.finish()
        self.fit = None
        return findings | self._about_density()

    def _finish_policy(self) -> dict[str, Any]:
        return self._support() | (self._about_density() if self.config.dynamics_model else {})

    def _about_density(self) -> dict[str, Any]:
        if self.density is None:
            return {}
        found = self.density.findings()
        if self.config.density_model is None:  # for a loaded density, `density fit` has said so already
            self.notes += doubts(found["kind"], found["tests"], found["percentile"])
        return {"density": found}

    # --- around a rollout

    def _use_density(self) -> None:
        assert self.density is not None
        self.penalties.use(self.density.model, self.config.percentile)

    def _draw(self, number: int) -> None:
        self.number = number
        self.imagination.prepare(number)
        for i, seed in enumerate(self.seeds):
            g = generator(self.device, seed, 2, number)
            self.noise[i].normal_(generator=g)
            self.uniform[i].uniform_(generator=g)

    def _warn(self, metrics: dict[str, Tensor]) -> None:
        """Notes on rollouts that cannot teach anything; waits for the device once per rollout."""
        penalised = [metrics["penalised"]] if "penalised" in metrics else []
        counts = [self.ring.filled[:, 0], self.imagination.survivors]
        filled, survivors, *shares = torch.stack([*counts, *penalised]).tolist()
        if min(filled) == 0:
            raise DataError(
                "nothing was imagined: every prediction of the ensemble was not a number; lower --dynamics-lr"
            )
        for seed, left in zip(self.seeds, survivors, strict=True):
            if left == 0:
                text = f"seed {seed}: every imagined episode ended in its first step"
                self._say(f"ends {seed}", f"{text}: see --termination and imagined_wild")
        gated = self.config.penalty not in ("softplus", "signed-tanh")  # these two also vary above tau
        for seed, share in zip(self.seeds, shares[0] if shares else (), strict=bool(shares)):
            if share in (0.0, 1.0) and gated:
                text = f"seed {seed}: {100 * share:.0f} % of the rows imagined at update {int(self.done)} are penalised"
                change = "raise" if share == 0 else "lower"
                self._say(f"penalised {seed} {share}", f"{text}: the penalty tells nothing; {change} --percentile")

    def _say(self, kind: str, text: str) -> None:
        if kind not in self.warned:
            self.warned.add(kind)
            self.notes.append(text)

    @torch.no_grad()
    def _support(self) -> dict[str, Any]:
        """Imagined and logged (s', a) on the first two principal axes of the logged ones, for the report."""
        g = torch.Generator().manual_seed(0)
        logged = self.known[torch.randint(len(self.known), (SHOWN,), generator=g).to(self.device)]
        uniform = torch.rand(len(self.seeds), SHOWN // len(self.seeds), generator=g).to(self.device)
        batch = unpack(self.ring.sample(uniform).flatten(0, 1), self.observation)
        following = self.normalizer(self.data.following[logged])
        rows = [torch.cat([following, self.data.actions[logged]], 1)]
        rows.append(torch.cat([batch["next_observations"], batch["actions"]], 1))
        mean, std = rows[0].mean(0), rows[0].std(0).clamp(min=1e-6)
        rows = [((x - mean) / std).double().cpu() for x in rows]
        _, values, axes = torch.linalg.svd(rows[0], full_matrices=False)
        shown = [(x @ axes[:2].T).numpy().round(2).tolist() for x in rows]
        explained = (values.square() / values.square().sum())[:2].tolist()
        return {"support": {"logged": shown[0], "imagined": shown[1], "explained": explained}}

    # --- evaluation in the ensemble, where there is no simulator

    def predicted_return(self, observations: Tensor, horizon: int) -> tuple[Tensor, Tensor]:
        """Return from these (rows, observation) states: mean and deviation over the elites, (seeds,) each."""
        means = self._foretell(observations, horizon)[1].mean(-1)  # (seeds, elites)
        return means.mean(1), means.std(1, correction=0)

    def imagined_states(self, observations: Tensor, horizon: int) -> Tensor:  # (seeds, rows, observation)
        return self._foretell(observations, horizon)[0][:, 0]

    def _foretell(self, observations: Tensor, horizon: int) -> tuple[Tensor, Tensor]:
        given = self.config.termination
        known = list(termination.KNOWN)[int(self.ends)]
        ends = termination.find(given if given != "auto" else known)
        return foretell(self.dynamics, lambda x: self.act(x)[0], ends, observations, horizon)

    # --- checkpoints

    def training_state(self) -> dict[str, Tensor]:
        state = {f"ring.{k}": v for k, v in self.ring.state().items()}
        state |= {"cursor": self.cursor, "number": torch.tensor(self.number)}
        if self.imagination.carried:
            state |= {"carried.states": self.imagination.states, "carried.ages": self.imagination.ages}
        if self.density is not None:
            state |= {f"density.{k}": v for k, v in self.density.state().items()}
        if self.fit is not None:
            state |= {f"fit.{k}": v for k, v in self.fit.state().items()}
        return state

    def load_training_state(self, state: dict[str, Tensor]) -> None:
        self.lacking = None
        self.ring.load(under("ring.", state))
        self.cursor.copy_(state["cursor"])
        if self.imagination.carried:
            self.imagination.states.copy_(state["carried.states"])
            self.imagination.ages.copy_(state["carried.ages"])
        if int(state["number"]) >= 0:
            self._draw(int(state["number"]))
        if self.density is not None:
            self.density.load(under("density.", state))
            if self.density.fitted and self.penalties.coefficient:
                self._use_density()
        if self.fit is not None and "fit.best" in state:
            self.fit.load(under("fit.", state))
        else:
            self.fit = None  # the ensemble is trained

    def act(self, observations: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        return self.sac.mode(self.normalizer(observations)), state
