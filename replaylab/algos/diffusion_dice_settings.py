"""Diffusion-DICE's settings and presets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from replaylab.config import COUNT, FROM_0, RATE, SHARE, Settings, Within, knob, without_effect
from replaylab.data.rewards import RULES
from replaylab.errors import UsageError
from replaylab.models.sdice import AGGREGATES

BACKUPS = ("values", "data", "model")


@dataclass
class Config(Settings):
    """Diffusion-DICE."""

    stage: str = knob("both", "which part to train", ("both", "behavior", "critic"))
    behavior: str | None = knob(None, "with `--stage critic`: run folder that has the behaviour model")
    schedule: str = knob("in-turn", "train behaviour before values, or both in one update", ("in-turn", "together"))
    behavior_steps: int = knob(100_000, "behaviour model updates", COUNT)
    critic_steps: int = knob(300_000, "updates of values and guidance", COUNT)
    fidelity: str = knob("improved", "original: its reward scaling and initial weights", ("improved", "original"))
    rewards: str = knob("auto", "range: divide by the range of returns; maze: 0 or -1; raw: keep; auto: by name", RULES)
    normalize: bool = knob(True, "standardise observations with the data's mean and deviation; the original does not")
    returns_steps: int = knob(
        5000, "updates of b(s), the data's return, which shapes the rewards; 0: no shaping", FROM_0
    )
    returns_exact: bool = knob(False, "fit b(s) accurately, not roughly; always so with `--backup data`")
    backup: str = knob("values", "target of Q: r + gamma V(s'), logged returns, or V after a model's step", BACKUPS)
    trace: float = knob(
        0.9, "with `--backup data`: lambda of its returns; 1: logged rewards only, 0: one step and b(s')", SHARE
    )
    # behaviour
    behavior_batch: int = knob(4096, "rows per batch of the behaviour model", COUNT)
    behavior_lr: float = knob(1e-4, "Adam's learning rate of the behaviour model", RATE)
    behavior_lr_decay: bool = knob(True, "let that learning rate fall to zero along a cosine")
    behavior_ema: float = knob(
        0.0, "act with a running mean of its weights with this decay, e.g. 0.9999; 0: no mean", Within(0, 0.99999)
    )
    behavior_width: int = knob(512, "width of its widest layers", Within(4))
    # values and guidance
    alpha: float = knob(0.5, "weight of staying near the data: small is greedy, large is cautious", RATE)
    gamma: float = knob(0.99, "discount factor", SHARE)
    tau: float = knob(0.005, "share by which target networks move towards the networks per update", SHARE)
    batch_size: int = knob(512, "rows per batch of values and guidance", COUNT)
    noise_copies: int = knob(16, "noisy copies of each action that the guidance learns from", COUNT)
    least_weight: float = knob(
        1e-40, "lower limit of the weights w; the guidance W stays above its logarithm", Within(0, 1, above=True)
    )
    time_power: float = knob(1.0, "times of that noise are u^power: above 1, more copies have little noise", RATE)
    ensemble: int = knob(10, "extra Q networks that select actions; 0: the target Qs select", FROM_0)
    advantage: bool = knob(True, "the ensemble learns Q - V and also guides; off, as the original: Q, only selects")
    hidden: list[int] = knob([256, 256], "widths of the hidden layers of V and of each Q", COUNT)
    values: int = knob(4, "with `--backup model`: number of V networks, whose mean is used", COUNT)
    models: int = knob(4, "with `--backup model`: number of models of a step", COUNT)
    model_hidden: list[int] = knob([200, 200, 200, 200], "widths of their hidden layers", COUNT)
    model_epochs: int = knob(100, "most epochs of these models; they stop early when nothing improves", COUNT)
    twins: str = knob("min", "V learns from the smaller of the two target Qs, or from their mean", ("min", "mean"))
    critic_norm: bool = knob(False, "LayerNorm in each Q too; the original has it in V only")
    guide_hidden: list[int] = knob([256, 256, 256, 256], "widths of the hidden layers of the guidance", COUNT)
    value_lr: float = knob(3e-4, "AdamW's learning rate of the values", RATE)
    guide_lr: float = knob(3e-4, "AdamW's learning rate of the guidance", RATE)
    precision: str = knob("fp32", "in guidance and Qs when training; fp32 is TF32 on CUDA", ("fp32", "bf16"))
    lr_decay: bool = knob(True, "let both learning rates fall to min_lr along a cosine")
    min_lr: float = knob(0.0, "learning rate at the end of that cosine", FROM_0)
    weight_decay: float = knob(1e-4, "decoupled weight decay of values and guidance", FROM_0)
    # acting
    guidance: float | None = knob(None, "weight of the guidance; 0: none; default: 1 to 4, by the data's name")
    candidates: int = knob(16, "actions drawn for each state, of which one is selected", COUNT)
    filter: str = knob("max", "select the candidate with the highest Q, or sample by softmax of Q", ("max", "softmax"))
    temperature: float = knob(1.0, "temperature of that softmax", RATE)
    aggregate: str = knob("mean", "how the Qs that select are combined; lcb: mean - deviation", AGGREGATES)
    solver_steps: int = knob(15, "network evaluations per action", COUNT)
    solver_order: int = knob(2, "order of the solver, 1 or 2", Within(1, 2))
    solver_power: float = knob(
        1.0, "its times are u^power: above 1, steps near the data are finer and actions spread more", RATE
    )
    clip_actions: str = knob(
        "none", "before: select among clipped candidates; an answer always is clipped", ("none", "before")
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.backup == "data" and not self.returns_steps:
            raise UsageError("--backup data builds on an estimate of the data's return: returns_steps must be above 0")
        if (self.stage == "critic") != (self.behavior is not None):
            raise UsageError("--stage critic and --behavior RUN belong together")


def returns_steps(config: Config) -> int:
    """0 with `--backup model`, which predicts unshaped rewards."""
    return 0 if config.backup == "model" else config.returns_steps


def usual_guidance(name: str) -> float:
    """The default guidance weight, from the original's table, by the name of the data."""
    if "maze" in name:
        return 4.0 if "large" in name else 2.0 if "medium" in name else 1.0
    return 1.0 if "toy-bandit" in name else 2.0 if "expert" in name else 4.0


SMALLER = {
    None: "quick",
    "plain": "quick",
    "paper": "quick",
    "locomotion": "quick",
    "runner": "quick-runner",
}  # suggested on a CPU
ACTING = (
    "guidance", "candidates", "filter", "temperature", "aggregate", "solver_steps", "solver_order", "solver_power",
    "clip_actions",
)  # fmt: skip

_MAZE = {"noise_copies": 32, "ensemble": 0, "filter": "softmax", "aggregate": "first", "candidates": 1}
_PAPER = {
    "behavior_steps": 600_000, "critic_steps": 1_000_000, "behavior_lr_decay": False, "lr_decay": False,
    "min_lr": 1e-4, "fidelity": "original", "normalize": False, "returns_steps": 0, "advantage": False,
}  # fmt: skip
_ROBOT = {  # with gamma 0.99 a hopper sees its fall too late; for the rest see docs/diffusion-dice.md
    "gamma": 0.997, "backup": "data", "returns_steps": 7000, "alpha": 0.2, "critic_norm": True, "value_lr": 1e-3,
    "guidance": 1.0, "clip_actions": "before",
}  # fmt: skip
_RUNNER = {  # robots that cannot fall
    "backup": "model", "gamma": 0.97, "alpha": 0.1, "tau": 0.02, "value_lr": 1e-3, "least_weight": 0.02,
    "time_power": 2.0, "guidance": 1.0, "candidates": 64, "solver_power": 2.0, "clip_actions": "before",
}  # fmt: skip
_SMALL = {  # for a CPU core
    "behavior_steps": 25_000, "behavior_batch": 512, "behavior_lr": 1e-3, "behavior_width": 128, "batch_size": 256,
    "noise_copies": 2, "guide_hidden": [128, 128, 128], "guide_lr": 1e-3,
}  # fmt: skip
PRESETS: dict[str, dict[str, Any]] = {
    "plain": {},  # the defaults, whatever the data
    "paper": _PAPER,
    # where the logged actions agree, the Qs of candidates differ only by noise: max would chase it, softmax does not
    "locomotion": _ROBOT | {"critic_steps": 50_000, "behavior_lr": 3e-4, "filter": "softmax", "temperature": 0.02},
    "runner": _RUNNER | {"critic_steps": 50_000, "behavior_lr": 3e-4},
    "quick": _ROBOT | _SMALL | {"critic_steps": 4000, "ensemble": 4, "tau": 0.02},  # ten minutes
    "quick-runner": _RUNNER | _SMALL | {"critic_steps": 16_000, "models": 2, "model_epochs": 15},
    "antmaze": _PAPER | _MAZE | {"eval_episodes": 50},
    # a shorter schedule. With the smaller twin V falls below -100; without a floor under w the guidance breaks down
    "maze": _MAZE | {"twins": "mean", "ensemble": 10, "least_weight": 0.02, "guidance": 4.0},
    "toy": {  # a minute on a CPU
        "behavior_steps": 2000, "critic_steps": 2000, "behavior_batch": 256, "behavior_width": 64, "behavior_lr": 2e-3,
        "batch_size": 256, "noise_copies": 4, "hidden": [64, 64], "guide_hidden": [64, 64, 64], "value_lr": 2e-3,
        "guide_lr": 3e-3, "least_weight": 0.02, "ensemble": 2, "alpha": 0.02, "candidates": 64,
        "returns_steps": 0, "advantage": False,
    },
    "debug": {
        "behavior_steps": 200, "critic_steps": 200, "behavior_batch": 128, "behavior_width": 32, "behavior_lr": 1e-3,
        "batch_size": 64, "noise_copies": 4, "hidden": [32, 32], "guide_hidden": [32, 32], "ensemble": 2,
        "candidates": 4, "returns_steps": 20, "eval_every": -1, "final_episodes": 2,
    },
}  # fmt: skip


def idle_settings(config: Config) -> list[str]:
    """Notes on settings that do nothing beside the others."""
    model, stage = config.backup == "model", f"with --stage {config.stage}"
    rules = [
        (config.backup != "data", "without --backup data", ("trace",)),
        (not model, "without --backup model", ("values", "models", "model_hidden", "model_epochs")),
        (model, "with --backup model", ("ensemble", "advantage", "twins", "critic_norm", "returns_steps")),
        (config.filter != "softmax", "without --filter softmax", ("temperature",)),
        (not config.lr_decay, "with --no-lr-decay", ("min_lr",)),
        (config.stage != "both", stage, ("schedule",)),
        (config.stage == "behavior", stage, ("alpha", "critic_steps", "batch_size", "hidden", "guide_hidden")),
        (config.stage == "critic", stage, ("behavior_steps", "behavior_batch", "behavior_lr")),
    ]
    return without_effect(config, PRESETS.values(), rules)
