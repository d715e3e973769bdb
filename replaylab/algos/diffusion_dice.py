"""Diffusion-DICE (Mao et al., 2024): a diffusion policy that never asks about actions it has not seen.

    behaviour   a diffusion model of the logged actions, by its score
    values      V(s) and Q(s, a) from logged actions alone; how much better than usual an action is: y = (Q - V) / alpha
    weights     w = f*'(y) says how much likelier the better policy takes a logged action than the data does
    guidance    W(a_t, t, s) = log E[w | a_t, s]: what the score lacks to be that of the better policy
    acting      draw `candidates` actions with score + guidance * grad W, keep the one that Q likes best

Guidance keeps the candidates where data is, so the choice by Q is one among actions that Q knows. The behaviour and the
values know nothing of each other: they are trained in turn, side by side, or in separate runs. Everything about acting
is chosen afterwards (`diffusion_dice_acting.py`). Networks are in `models/score.py`, the sampler in `models/solver.py`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from replaylab.algos import Normalizer, Phase, Spaces
from replaylab.algos.diffusion_dice_acting import Sampling
from replaylab.algos.diffusion_dice_returns import UsualReturn
from replaylab.config import knob
from replaylab.data.episodes import Episodes
from replaylab.data.rewards import RULES, name_of, tuned_rewards
from replaylab.data.sample import Later, Numbered, Pair, Store, Transitions
from replaylab.errors import UsageError
from replaylab.models.adam import adam
from replaylab.models.draws import keys, normal, uniforms
from replaylab.models.mlp import MLP, generators
from replaylab.models.score import GuideNet, ScoreNet
from replaylab.models.sdice import AGGREGATES, TWINS, Critics, Value, guide_loss, value_loss, weights
from replaylab.models.solver import LAST, ORDERS, blend
from replaylab.run import RunFolder
from replaylab.tensors import under

SHAPES_KEPT = 4  # batch shapes whose captured samplers are kept
RETURNS_LR = 1e-3  # of the estimate of the data's return
BACKUPS = ("values", "data")
LOOKED_AT = 600  # actions of each kind in the picture of a bandit


@dataclass
class Config:
    """Diffusion-DICE."""

    stage: str = knob("both", "what to train", ("both", "behavior", "critic"))
    behavior: str | None = knob(None, "run folder of `--stage behavior`, for `--stage critic`")
    schedule: str = knob("in-turn", "behaviour before values, or both in one update", ("in-turn", "together"))
    behavior_steps: int = knob(100_000, "updates of the behaviour model")
    critic_steps: int = knob(300_000, "updates of values and guidance")
    fidelity: str = knob("improved", "original: its range of returns and first weights", ("improved", "original"))
    rewards: str = knob("auto", "range: divided by the range of returns; maze: 0 or -1", RULES)
    normalize: bool = knob(True, "standardise observations with the data's mean and deviation; the original does not")
    returns_steps: int = knob(5000, "updates of an estimate of the data's return, on which values build; 0: none")
    returns_exact: bool = knob(False, "learn that as well as can be, not roughly; always so with `--backup data`")
    backup: str = knob("values", "Q of the better policy, over V; or of the data, over its returns", BACKUPS)
    trace: float = knob(0.9, "of `--backup data`: how far a return is logged rewards, not an estimate; 0: one step")
    # behaviour
    behavior_batch: int = knob(4096, "rows a batch of the behaviour model")
    behavior_lr: float = knob(1e-4, "Adam's learning rate of the behaviour model")
    behavior_lr_decay: bool = knob(True, "let it fall to zero along a cosine")
    behavior_ema: float = knob(0.0, "act with a running mean of its weights, of this decay (0.9999, say); 0: without")
    behavior_width: int = knob(512, "of its widest layers")
    # values and guidance
    alpha: float = knob(0.5, "how far from the data: small is greedy, large stays with the behaviour")
    gamma: float = knob(0.99, "discount")
    tau: float = knob(0.005, "how far the target values move to the values at each update")
    batch_size: int = knob(512, "rows a batch of values and guidance")
    noise_copies: int = knob(16, "noisy copies of each action for the guidance")
    least_weight: float = knob(1e-40, "of an action: how deep the guidance may think of it, the log of this")
    time_power: float = knob(1.0, "times of that noise are drawn as u^power: above 1 more of them are early")
    ensemble: int = knob(10, "further Qs to choose actions with; 0: the target values choose")
    advantage: bool = knob(True, "the ensemble learns Q - V, and guides too; the original's learns Q and only chooses")
    hidden: list[int] = knob([256, 256], "hidden layers of V and of each Q")
    twins: str = knob("min", "what V learns from: the lesser of the two target Qs, or their mean", ("min", "mean"))
    critic_norm: bool = knob(False, "LayerNorm in each Q too; the original has it in V alone")
    guide_hidden: list[int] = knob([256, 256, 256, 256], "hidden layers of the guidance")
    value_lr: float = knob(3e-4, "AdamW's learning rate of the values")
    guide_lr: float = knob(3e-4, "AdamW's learning rate of the guidance")
    precision: str = knob("fp32", "of the guidance in training (fp32 is TF32 on CUDA)", ("fp32", "bf16"))
    lr_decay: bool = knob(True, "let both fall to min_lr along a cosine")
    min_lr: float = knob(0.0, "where that cosine ends")
    weight_decay: float = knob(1e-4, "decoupled weight decay of values and guidance")
    # acting
    guidance: float | None = knob(None, "weight of the guidance; default: by the data's name, 1 to 4")
    candidates: int = knob(16, "actions drawn for each state, of which one is chosen")
    filter: str = knob("max", "take the best candidate, or draw by softmax", ("max", "softmax"))
    temperature: float = knob(1.0, "of that softmax")
    aggregate: str = knob("mean", "of the Qs that choose; lcb: mean - deviation", AGGREGATES)
    solver_steps: int = knob(15, "network evaluations for an action")
    solver_order: int = knob(2, "of the solver, 1 or 2")
    clip_actions: str = knob("none", "to the action box: before or after the choice", ("none", "before", "after"))

    def __post_init__(self) -> None:
        for name in ("alpha", "temperature", "value_lr", "guide_lr", "behavior_lr", "least_weight", "time_power"):
            if not 0 < getattr(self, name) < math.inf:
                raise UsageError(f"{name} must be above 0, not {getattr(self, name):g}")
        for name in ("candidates", "solver_steps", "behavior_steps", "critic_steps", "noise_copies", "batch_size",
                     "behavior_batch"):  # fmt: skip
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name, least in (("ensemble", 0), ("returns_steps", 0), ("min_lr", 0), ("behavior_width", 4)):
            if not getattr(self, name) >= least:
                raise UsageError(f"{name} must be at least {least}, not {getattr(self, name)}")
        for name in ("gamma", "tau", "trace", "behavior_ema"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"{name} must be from 0 to 1, not {getattr(self, name):g}")
        if min([*self.hidden, *self.guide_hidden], default=1) < 1:
            raise UsageError("hidden layers must have at least 1 number")
        if self.guidance is not None and not math.isfinite(self.guidance):
            raise UsageError(f"guidance must be a number, not {self.guidance:g}")
        if self.solver_order not in ORDERS:
            raise UsageError(f"solver_order must be 1 or 2, not {self.solver_order}")
        if self.backup == "data" and not self.returns_steps:
            raise UsageError("--backup data builds on an estimate of the data's return: returns_steps must be above 0")
        if (self.stage == "critic") != (self.behavior is not None):
            raise UsageError("--stage critic and --behavior RUN belong together")


ACTING = (
    "guidance", "candidates", "filter", "temperature", "aggregate", "solver_steps", "solver_order", "clip_actions",
)  # fmt: skip

_MAZE = {"noise_copies": 32, "ensemble": 0, "filter": "softmax", "aggregate": "first", "candidates": 1}
_PAPER = {
    "behavior_steps": 600_000, "critic_steps": 1_000_000, "behavior_lr_decay": False, "lr_decay": False,
    "min_lr": 1e-4, "fidelity": "original", "normalize": False, "returns_steps": 0, "advantage": False,
}  # fmt: skip
_ROBOT = {  # far-sighted: with 0.99 a hopper sees its fall too late; for the rest see docs/diffusion-dice.md
    "gamma": 0.997, "backup": "data", "returns_steps": 7000, "alpha": 0.2, "critic_norm": True, "value_lr": 1e-3,
    "guidance": 1.0, "clip_actions": "before",
}  # fmt: skip
PRESETS: dict[str, dict[str, Any]] = {
    "paper": _PAPER,
    # where data is of one mind the Qs of candidates differ by noise alone: softmax leaves that alone, max does not
    "locomotion": _ROBOT | {"critic_steps": 50_000, "behavior_lr": 3e-4, "filter": "softmax", "temperature": 0.02},
    "quick": _ROBOT | {  # ten minutes on a CPU core
        "behavior_steps": 25_000, "behavior_batch": 512, "behavior_lr": 1e-3, "behavior_width": 128,
        "critic_steps": 4000, "batch_size": 256, "noise_copies": 2, "ensemble": 4, "guide_hidden": [128, 128, 128],
        "guide_lr": 1e-3, "tau": 0.02,
    },
    "antmaze": _PAPER | _MAZE | {"eval_episodes": 50},
    # a shorter schedule. With the lesser twin V falls below -100; without a floor under the weights guidance shatters
    "maze": _MAZE | {"twins": "mean", "ensemble": 10, "least_weight": 0.02, "guidance": 4.0},
    "toy": {  # a minute on a CPU
        "behavior_steps": 2000, "critic_steps": 2000, "behavior_batch": 256, "behavior_width": 64, "behavior_lr": 2e-3,
        "batch_size": 256, "noise_copies": 2, "hidden": [64, 64], "guide_hidden": [64, 64, 64], "value_lr": 2e-3,
        "guide_lr": 3e-3, "time_power": 2.0, "least_weight": 0.02, "ensemble": 2, "alpha": 0.02, "candidates": 64,
        "returns_steps": 0, "advantage": False,
    },
    "debug": {
        "behavior_steps": 200, "critic_steps": 200, "behavior_batch": 128, "behavior_width": 32, "behavior_lr": 1e-3,
        "batch_size": 64, "noise_copies": 4, "hidden": [32, 32], "guide_hidden": [32, 32], "ensemble": 2,
        "candidates": 4, "returns_steps": 20, "eval_every": -1, "final_episodes": 2,
    },
}  # fmt: skip


def usual_preset(episodes: Episodes) -> str | None:
    """The one to take when none is named."""
    return "toy" if "toy-bandit" in name_of(episodes) else None


def needs(config: Config) -> list[str]:
    """Run folders that a run cannot begin without; one that is resumed can."""
    return [] if config.behavior is None else [config.behavior]


def counters(config: Config) -> dict[str, int]:
    """Updates of a whole run."""
    first, second = config.stage != "critic", config.stage != "behavior"
    return {
        "behavior_steps": first * config.behavior_steps,
        "returns_steps": second * config.returns_steps,
        "critic_steps": second * config.critic_steps,
    }


def usual_guidance(name: str) -> float:
    """The original's table; 4 for what it does not list."""
    if "maze" in name:
        return 4.0 if "large" in name else 2.0 if "medium" in name else 1.0
    return 1.0 if "toy-bandit" in name else 2.0 if "expert" in name else 4.0


class Agent(nn.Module):
    low: Tensor
    high: Tensor
    usual_guidance: Tensor
    returns_done: Tensor
    behavior_done: Tensor
    critic_done: Tensor
    behavior_keys: Tensor
    critic_keys: Tensor

    def __init__(self, config: Config, spaces: Spaces, seeds: Sequence[int], device: torch.device):
        super().__init__()
        if len(spaces.observation_shape) != 1 or spaces.discrete:
            raise UsageError("diffusion-dice takes vectors as observations and continuous actions")
        self.config, self.seeds, self.device = config, list(seeds), device
        self.sizes = spaces.observation_shape[0], spaces.action_dim
        self.by_advantage = config.advantage and config.ensemble > 0
        self.exact = config.returns_exact or config.backup == "data"
        self.normalizer = Normalizer(spaces.observation_shape)
        self._networks()
        self.register_buffer("low", torch.tensor(spaces.action_low))
        self.register_buffer("high", torch.tensor(spaces.action_high))
        self.register_buffer("usual_guidance", torch.ones(()))
        self.register_buffer("returns_done", torch.zeros((), dtype=torch.int64))
        for part in ("behavior", "critic"):  # updates so far; where the random numbers begin
            self.register_buffer(f"{part}_done", torch.zeros((), dtype=torch.int64))
            self.register_buffer(f"{part}_keys", keys(seeds, part == "critic"), persistent=False)
        self.to(device)
        self.optimizers = self._optimizers()
        self.samplings: dict[tuple, Sampling] = {}
        self.data_actions: Tensor | None = None  # some, where the data has one state and can be drawn

    @property
    def idle(self) -> tuple[str, ...]:
        """Settings of acting that a behaviour model alone has no use for."""
        return ("guidance", "candidates", "filter", "temperature", "aggregate") if self.guide is None else ()

    def _networks(self) -> None:
        config, (state, action) = self.config, self.sizes
        qs = TWINS + config.ensemble
        gens = generators(self.seeds, 1 + qs)
        own, of_qs = gens[:: 1 + qs], [g for i, g in enumerate(gens) if i % (1 + qs)]
        self.score = ScoreNet(own, state, action, config.behavior_width)
        self.average = copy.deepcopy(self.score).requires_grad_(False) if config.behavior_ema else None
        self.guide: GuideNet | None = None
        if config.stage != "behavior":
            if config.returns_steps:
                one = generators([0])  # of the data, so one for all seeds
                hidden = config.hidden
                self.returns = Value(one, state, hidden) if self.exact else MLP(one, state, hidden, 1)
            self.value = Value(own, state, config.hidden)
            original = config.fidelity == "original"
            self.guide = GuideNet(own, state, action, config.guide_hidden, balanced=not original)
            shape = (len(self.seeds), state + action, config.hidden)
            self.critics = Critics(of_qs, *shape, original, config.critic_norm, config.twins == "min")

    def _optimizers(self) -> dict[str, torch.optim.Optimizer]:
        config = self.config

        def make(net: nn.Module, rate: float, decay: float) -> torch.optim.Optimizer:
            trained = [p for p in net.parameters() if p.requires_grad]
            return adam(trained, torch.tensor(rate, device=self.device), weight_decay=decay)

        found = {"score": make(self.score, config.behavior_lr, 0.0)}
        if self.guide is not None:
            if config.returns_steps:
                found["returns"] = make(self.returns, RETURNS_LR, 0.0)
            found["value"] = make(self.value, config.value_lr, config.weight_decay)
            found["critics"] = make(self.critics, config.value_lr, config.weight_decay)
            found["guide"] = make(self.guide, config.guide_lr, config.weight_decay)
        return found

    # --- the phases

    def phases(self, episodes: Episodes) -> list[Phase]:
        config = self.config
        if config.normalize:
            self.normalizer.fit(episodes)
        self.usual_guidance.fill_(usual_guidance(name_of(episodes)))
        if self.sizes[1] == 2 and (episodes.observations == episodes.observations[:1]).all():
            few = torch.tensor(episodes.actions[:LOOKED_AT], dtype=torch.float32, device=self.device)
            self.data_actions = few.expand(len(self.seeds), -1, -1)
            self.only_state = torch.tensor(episodes.observations[0], dtype=torch.float32, device=self.device)
        if config.stage != "behavior":
            episodes = replace(episodes, rewards=tuned_rewards(episodes, config.rewards, config.fidelity == "original"))
        store = Store(episodes, self.device)
        rows = Transitions(store, self.seeds, config.behavior_batch, next_observations=False)
        behavior = Phase("behavior", config.behavior_steps, rows, self.behavior_update)
        if config.stage == "behavior":
            return [behavior]
        rows = Transitions(store, self.seeds, config.batch_size, stream=1)
        critic = Phase("critic", config.critic_steps, rows, self.critic_update)
        if config.stage == "critic":
            found = [critic]
        elif config.schedule == "in-turn":
            behavior.evaluates = False
            found = [behavior, critic]
        else:
            found = self._together(behavior, critic)
        found[-1].finish = self.findings
        found = [*self._returns(episodes, store), *found]
        if config.stage == "critic":
            if RunFolder(str(config.behavior)).exists():
                self._load_behavior()  # at once: what does not fit is said before any folder is touched
            else:
                found[0].begin = self._load_behavior  # a run that is resumed has its own copy
        return found

    def _returns(self, episodes: Episodes, store: Store) -> list[Phase]:
        config = self.config
        if not config.returns_steps:
            return []
        told = lambda observations: self.returns(self.seen(observations)).view(1, -1)  # noqa: E731
        self.usual = UsualReturn(told, episodes, store, config, self.exact)
        rows = Numbered(store, [0], config.batch_size, stream=2, next_observations=False)
        phase = Phase("returns", config.returns_steps, rows, self.returns_update, evaluates=False)
        phase.finish = self.usual.shape
        return [phase]

    def returns_update(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        self._set_rates({"returns": RETURNS_LR}, 0.0, self.returns_done, self.config.returns_steps)
        told, error = self.usual.error(batch["observations"], batch["row"])
        self._descend("returns", told, error * (2 / error.shape[1]))
        self.returns_done += 1
        return {"returns_error": error.square().mean(1).expand(len(self.seeds))}

    def load_training_state(self, tensors: dict[str, Tensor]) -> None:
        """Rewards are no part of a checkpoint: they are shaped again."""
        if 0 < self.config.returns_steps <= self.returns_done:
            self.usual.shape()

    def _together(self, behavior: Phase, critic: Phase) -> list[Phase]:
        """Both in one update while both last, then the longer one alone. Each draws what it draws in turn."""
        shared = min(behavior.steps, critic.steps)
        both = Phase("both", shared, Pair(behavior.sampler, critic.sampler), self.both_update)
        longer = max(behavior, critic, key=lambda phase: phase.steps)
        rest = Phase(longer.name, longer.steps - shared, Later(longer.sampler, shared), longer.update)
        return [both, rest] if rest.steps else [both]

    def _load_behavior(self) -> None:
        """The behaviour model of another run: each seed takes the one of the same seed, or the only one."""
        run = RunFolder(str(self.config.behavior)).require()
        members, stored = run.places(self.seeds, alone=True), run.weights()
        found = under("average." if "average.out.bias" in stored else "score.", stored)
        if "out.bias" not in found:
            raise UsageError(f"{run.path} holds no behaviour model of diffusion-dice")
        theirs = found["state.weight"].shape[1], found["out.bias"].shape[-1]
        if theirs != self.sizes:
            raise UsageError(
                f"{run.path} was trained on states of {theirs[0]} numbers and actions of {theirs[1]}, "
                f"this data has {self.sizes[0]} and {self.sizes[1]}"
            )
        if run.config().get("normalize") != self.config.normalize:
            raise UsageError(f"{run.path} was trained with another setting of normalize")
        try:
            for net in (self.score, self.average):
                if net is not None:
                    net.load_state_dict({k: v[members] for k, v in found.items()})
        except RuntimeError as error:
            raise UsageError(f"{run.path} has a behaviour model of another width: see its behavior_width") from error
        self.normalizer.load_state_dict(under("normalizer.", stored))  # it must see states as it learnt them

    # --- learning

    def _descend(self, name: str, output: Tensor, slope: Tensor) -> None:
        """One optimiser step, from the slope of the loss in a network's output."""
        self.optimizers[name].zero_grad(set_to_none=True)
        output.backward(slope)
        self.optimizers[name].step()

    def _set_rates(self, rates: dict[str, float], least: float, done: Tensor, steps: int) -> None:
        """Learning rates along a cosine."""
        cosine = (1 + torch.cos(done * (math.pi / steps))) / 2
        now = {rate: min(rate, least) + max(rate - least, 0.0) * cosine for rate in set(rates.values())}
        for name, rate in rates.items():
            self.optimizers[name].param_groups[0]["lr"].copy_(now[rate])

    @staticmethod
    def _noise(
        key: Tensor, done: Tensor, actions: Tensor, copies: int = 1, power: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """A time for each row, (seeds, batch, 1), and noise for each of its copies, (seeds, batch * copies, action)."""
        members, batch, width = actions.shape
        drawn = uniforms(key, done, batch * (1 + copies * width))
        times, noise = drawn.split([batch, batch * copies * width], 1)
        time = LAST + (1 - LAST) * ((1 + times) / 2) ** power
        return time.view(members, batch, 1), normal(noise).view(members, -1, width)

    def seen(self, observations: Tensor) -> Tensor:
        return self.normalizer(observations) if self.config.normalize else observations

    def behavior_update(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        config, actions = self.config, batch["actions"]
        time, noise = self._noise(self.behavior_keys, self.behavior_done, actions)
        alpha, sigma = blend(time)
        condition = self.score.condition(time, self.seen(batch["observations"]))
        output = self.score.body(alpha * actions + sigma * noise, condition)
        error = output.detach() + noise
        if config.behavior_lr_decay:
            self._set_rates({"score": config.behavior_lr}, 0.0, self.behavior_done, config.behavior_steps)
        self._descend("score", output, error * (2 / error.shape[1]))
        if self.average is not None:
            with torch.no_grad():
                slow, fast = tuple(self.average.parameters()), tuple(self.score.parameters())
                torch._foreach_lerp_(slow, fast, 1 - config.behavior_ema)
        self.behavior_done += 1
        return {"score_loss": error.square().sum(-1).mean(1)}

    def critic_update(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """V, then Q towards the new V, then the targets, then the guidance: in the original's order."""
        config, actions, size = self.config, batch["actions"], batch["actions"].shape[1]
        states, following = self.seen(batch["observations"]), self.seen(batch["next_observations"])
        if config.lr_decay:
            rates = {"value": config.value_lr, "critics": config.value_lr, "guide": config.guide_lr}
            self._set_rates(rates, config.min_lr, self.critic_done, config.critic_steps)
        value = self.value(states)
        v_loss, slope, y = value_loss(value.detach(), self._target(states, actions), config.alpha)
        self._descend("value", value, slope)
        with torch.no_grad():
            values = self.value(torch.cat([following, states], 1))
            goal = batch["rewards"]
            if config.backup == "values":
                goal = goal + config.gamma * (1 - batch["terminated"]) * values[:, :size]
        q = self.critics(states, actions)
        q_loss, slope = self.critics.loss(q.detach(), goal, values[:, size:] if self.by_advantage else None)
        self._descend("critics", q, slope)
        self.critics.track(config.tau)
        if self.by_advantage:
            better = q.detach()[:, TWINS:].mean(1) / config.alpha
        else:
            better = (self._target(states, actions) - values[:, size:]) / config.alpha
        with torch.autocast(self.device.type, torch.bfloat16, enabled=config.precision == "bf16"):
            output = self.energies(states, actions).float()
        energy = output.detach()
        g_loss, slope = guide_loss(energy, weights(better, config.least_weight))
        self._descend("guide", output, slope)
        self.critic_done += 1
        found = {
            "value_loss": v_loss, "critic_loss": q_loss[:, :TWINS].sum(1), "guide_loss": g_loss,
            "value": values[:, size:].mean(1), "y": y.mean(1), "y_min": y.amin(1), "y_max": y.amax(1),
            "energy": energy.mean((1, 2)), "energy_min": energy.amin((1, 2)), "energy_max": energy.amax((1, 2)),
        }  # fmt: skip
        return found | ({"ensemble_loss": q_loss[:, TWINS:].mean(1)} if config.ensemble else {})

    @torch.no_grad()
    def _target(self, states: Tensor, actions: Tensor) -> Tensor:
        return self.critics.target(states, actions)

    def both_update(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        other = {k.removeprefix("second."): v for k, v in batch.items() if k.startswith("second.")}
        return self.behavior_update(batch) | self.critic_update(other)

    def energies(self, states: Tensor, actions: Tensor) -> Tensor:
        """W of noisy copies of the actions, (seeds, batch, copies); the copies of a row share a time."""
        assert self.guide is not None
        config = self.config
        time, noise = self._noise(self.critic_keys, self.critic_done, actions, config.noise_copies, config.time_power)
        alpha, sigma = blend(time)
        noise = noise.view(*actions.shape[:2], -1, actions.shape[-1])
        noisy = (alpha * actions)[:, :, None] + sigma[:, :, None] * noise
        return self.guide.body(noisy.flatten(1, 2), self.guide.condition(time, states)).view(noisy.shape[:3])

    # --- acting

    @property
    def acting_score(self) -> ScoreNet:
        return self.score if self.average is None else self.average

    @property
    def effort(self) -> int:
        """What an answer costs beside a network's one pass, about: whoever asks often asks less often."""
        return 2 * self.config.candidates

    @torch.no_grad()
    def act(self, observations: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        key = (observations.shape[1], *(getattr(self.config, name) for name in ACTING))
        if key not in self.samplings:
            if len(self.samplings) >= SHAPES_KEPT:
                del self.samplings[next(iter(self.samplings))]
            self.samplings[key] = Sampling(self, observations.shape[1])
        return self.samplings[key](observations), state

    @torch.no_grad()
    def findings(self) -> dict[str, Any]:
        """The guidance that was used; and for data of one state with actions in the plane, which can be looked at,
        what each way of acting does (the first seed's actions, and what Q thinks of each)."""
        found: dict[str, Any] = {"guidance": float(self.usual_guidance)}
        if self.data_actions is None:
            return found
        kept, usual = self.config, found["guidance"] if self.config.guidance is None else self.config.guidance
        many = kept.candidates
        ways = {"selection alone": (0.0, many), "guidance alone": (usual, 1), "both": (usual, many)}
        shown = {"data": self.data_actions}
        for name, (guidance, candidates) in ways.items():
            self.config = replace(kept, guidance=guidance, candidates=candidates)
            shown[name] = self.act(self.only_state.expand(len(self.seeds), LOOKED_AT, -1))[0]
        self.config = kept
        for name, actions in shown.items():
            states = self.seen(self.only_state.expand(len(self.seeds), len(actions[0]), -1))
            q = self.critics.judge(states, actions).mean(1)
            columns = torch.cat([actions, q[..., None]], -1)[0].cpu().double().numpy()
            found[name] = np.round(columns, 3).tolist()  # rows of (x, y, Q)
        return found
