"""MBARC's settings and presets, and what they come to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from replaylab.algos import ppo
from replaylab.config import COUNT, FROM_0, RATE, SHARE, Within, changed, knob, without_effect
from replaylab.errors import UsageError
from replaylab.models import reward
from replaylab.models.dream import MOST_HELD

PAID = ("expected", "likeliest")


@dataclass
class Config(ppo.Config):
    """Model-based aware reward classification."""

    strategy: str = knob("mbarc", "how transitions for the reward model are drawn", tuple(reward.UPDATES))
    epochs: int = knob(15, "rounds of: collect, train world model, reward model, policy", Within(1, 10_000))
    random_steps: int = knob(6400, "real steps played at random before the first epoch", COUNT)
    collect_steps: int = knob(6400, "real steps played by the policy at the start of each epoch", COUNT)
    budget: int = knob(102_400, "most real steps of the whole run", COUNT)
    strict_budget: bool = knob(True, "count the steps of resets too, so that the last epochs collect less")
    games: int = knob(8, "real games played in parallel; each continues in the next epoch", Within(1, 1024))
    held_out: float = knob(
        0.05,
        "share of real steps, in whole episodes, that only measure the models; 0: none",
        Within(0, MOST_HELD),
    )
    temperature: float = knob(1.0, "sampling temperature of the policy when it collects", RATE)
    eval_temperature: float = knob(
        1.0, "sampling temperature of the policy in evaluations; 0: the most likely action", FROM_0
    )
    # the world model
    fidelity: str = knob("improved", "original: keep the known defects of the original", ("improved", "original"))
    pixels: str = knob("palette", "a pixel is a colour of the console, or three intensities", ("palette", "rgb"))
    hidden: int = knob(96, "channels of the world model at full resolution, a multiple of 4", COUNT)
    compress: int = knob(5, "how many times the world model halves the frame", COUNT)
    double: int = knob(3, "how many times it doubles its channels on the way", FROM_0)
    bits: int = knob(128, "latent bits that tell possible next frames apart, a multiple of 8", COUNT)
    continue_head: bool = knob(True, "predict when a game ends, so that dreams end too")
    world_steps: int = knob(2500, "world model updates per epoch", COUNT)
    world_first: int = knob(3, "factor on world_steps in the first epoch", COUNT)
    world_lr: float = knob(3e-4, "Adam's learning rate of the world model; 0: Adafactor, as the original", SHARE)
    world_batch: int = knob(16, "sequences per batch of the world model", COUNT)
    world_rollout: int = knob(
        1, "steps of a sequence along which its own predictions are fed back; 1: only real frames", COUNT
    )
    average: float = knob(
        0.998,
        "decay of the running mean of both models' weights, kept at the end of a phase; 0: no mean",
        Within(0, 0.9999),
    )
    input_noise: float = knob(0.05, "share of input pixels replaced by their frame's median", SHARE)
    sampling_decay: int = knob(3700, "updates over which its own bits and frames replace the true ones", Within(0, 1e9))
    world_grad_clip: float = knob(1.0, "clip the gradients of world and reward model to this norm", RATE)
    # the reward model
    reward_head: str = knob(
        "frames", "frames: reads frames and the predicted next one; mbarc, simple: feature maps", reward.HEADS
    )
    reward_shift: int = knob(
        4, "random shift of its training frames, in pixels at most; 0: none, as the original", Within(0, 20)
    )
    reward_steps: int = knob(0, "reward model updates per epoch; 0: the strategy's number", Within(0, 1e6))
    reward_batch: int = knob(32, "transitions per batch of the reward model", COUNT)
    masses: list[float] = knob(list(reward.MASSES), "share of each class in mbarc's draws; a fourth: negative rewards")
    classes: str = knob(
        "near", "what masses weigh. near: far zero, near zero, reward; lead-up: before, reward, other", reward.CLASSES
    )
    near: int = knob(1, "most steps from a reward that count as near, or as before it", COUNT)
    focal: bool = knob(False, "class-balanced focal loss instead of cross-entropy")
    dream_rewards: str = knob(
        "expected", "reward of a dreamed step: its mean, corrected for the draws, or the likeliest of -1, 0, 1", PAID
    )
    # the policy
    agents: int = knob(64, "dreams in parallel", COUNT)
    from_start: int = knob(4, "how many of them start at the start of a game; the others start anywhere")
    rollout: int = knob(50, "steps per dream", COUNT)
    ppo_updates: int = knob(130, "dream-and-learn rounds per epoch; 0: train no policy", FROM_0)
    doubled: list[int] = knob([7, 11], "epochs (from 0) with twice as many rounds", FROM_0)
    tripled: list[int] = knob([14], "epochs (from 0) with three times as many rounds", FROM_0)
    ppo_lr: float = knob(2e-4, "Adam's learning rate of the policy", RATE)
    policy_average: float = knob(
        0.99, "decay per round of the running mean of its weights, kept at the end; 0: no mean", Within(0, 0.9999)
    )
    ppo_minibatch: int = knob(320, "dreamed steps per gradient", COUNT)
    shrink: int = knob(1, "keep every n-th pixel only, for tests; 1: all", Within(1, 2))


PRESETS: dict[str, dict[str, Any]] = {
    "fast": {"eval_every": -1, "final_episodes": 30},
    "paper": {
        "games": 1, "world_steps": 15_000, "world_batch": 4, "world_lr": 0.0, "world_rollout": 50, "average": 0.0,
        "sampling_decay": 22_250, "agents": 16, "from_start": 1, "ppo_updates": 1000, "ppo_lr": 1e-4,
        "ppo_minibatch": 160, "eval_every": -1, "final_episodes": 100, "reward_head": "mbarc", "strict_budget": False,
        "eval_temperature": 0.5, "policy_average": 0.0,
    },
    "small": {
        "epochs": 5, "random_steps": 3200, "collect_steps": 3200, "hidden": 32, "world_steps": 1000, "world_first": 2,
        "world_lr": 1e-3, "sampling_decay": 1000, "reward_steps": 300, "agents": 32, "from_start": 2, "ppo_updates": 60,
        "doubled": [], "tripled": [4], "eval_every": -1, "final_episodes": 30,
    },
    "debug": {
        "epochs": 2, "random_steps": 128, "collect_steps": 64, "games": 2, "hidden": 8, "compress": 3, "double": 1,
        "bits": 8, "world_steps": 12, "world_first": 2, "world_lr": 2e-3, "world_batch": 4, "rollout": 8,
        "sampling_decay": 12, "reward_steps": 6, "reward_batch": 8, "agents": 4, "from_start": 1, "ppo_updates": 3,
        "doubled": [], "tripled": [], "ppo_minibatch": 16, "ppo_epochs": 2, "shrink": 2, "eval_every": -1,
        "final_episodes": 2,
    },
}  # fmt: skip
SMALLER = {None: "small", "fast": "small", "paper": "small"}  # suggested on a CPU, where these take days


def plan(config: Config) -> list[dict[str, int]]:
    """The number of updates of each model in each epoch."""
    each = config.reward_steps or reward.UPDATES[config.strategy]
    return [
        {
            "world": config.world_steps * (config.world_first if epoch == 0 else 1),
            "reward": 0 if config.strategy == "online" else each,
            "policy": config.ppo_updates * (3 if epoch in config.tripled else 2 if epoch in config.doubled else 1),
        }
        for epoch in range(config.epochs)
    ]


def counters(config: Config) -> dict[str, int]:
    """Totals of a whole run: updates, dreamed steps, policy gradients and real steps."""
    total = {name: sum(epoch[name] for epoch in plan(config)) for name in ("world", "reward", "policy")}
    played = config.rollout * config.agents
    minibatches = played // min(config.ppo_minibatch, played)
    return total | {
        "dream_calls": total["policy"] * config.rollout,
        "gradients": total["policy"] * config.ppo_epochs * minibatches,
        "real_steps": config.random_steps + config.epochs * config.collect_steps,
    }


def check(config: Config) -> None:
    """Reject settings that would otherwise fail hours into the run."""
    wanted = counters(config)["real_steps"]
    if wanted > config.budget:
        raise UsageError(
            f"{wanted:,} real steps are planned, the budget is {config.budget:,}: lower --collect-steps or --epochs, "
            "or raise --budget"
        )
    for name in ("random_steps", "collect_steps"):
        if getattr(config, name) % config.games or getattr(config, name) < config.games:
            option, games = f"--{name.replace('_', '-')}", f"--games ({config.games})"
            raise UsageError(f"{option} must be {games} or a multiple of it, not {getattr(config, name)}")
    if not 0 <= config.from_start <= config.agents:
        raise UsageError(f"from_start must be from 0 to agents ({config.agents}), not {config.from_start}")
    if config.agents * config.rollout < 2:
        raise UsageError("one dreamed step is too little for an update of the policy: raise --agents or --rollout")
    reward.masses_of(torch.ones(4, dtype=torch.bool), config.masses, config.classes)
    for name in changed(config, ("doubled", "tripled"), PRESETS.values()):
        if max(epochs := getattr(config, name), default=0) >= config.epochs:
            raise UsageError(f"{name} names epoch {max(epochs)}; they are 0 to {config.epochs - 1}")


def idle(config: Config) -> list[str]:
    """Notes on settings that the strategy does not use; a comparison of strategies may well give them to all."""
    strategy = f"with --strategy {config.strategy}"
    rules = [
        (config.strategy != "mbarc", strategy, ("masses", "classes", "near")),
        (config.strategy == "online", strategy, ("reward_steps", "reward_batch", "reward_shift")),
    ]
    return without_effect(config, PRESETS.values(), rules)
