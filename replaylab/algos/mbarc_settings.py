"""Settings of MBARC and their presets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from replaylab.algos import ppo
from replaylab.config import COUNT, FROM_0, RATE, SHARE, Within, knob
from replaylab.models import reward
from replaylab.models.dream import MOST_HELD

PAID = ("expected", "likeliest")


@dataclass
class Config(ppo.Config):
    """Model-based aware reward classification."""

    strategy: str = knob("mbarc", "which transitions the reward model is shown", tuple(reward.UPDATES))
    epochs: int = knob(15, "rounds of collecting, world model, reward model, policy", COUNT)
    random_steps: int = knob(6400, "real steps played at random before the first epoch", COUNT)
    collect_steps: int = knob(6400, "real steps played by the policy at the start of each epoch", COUNT)
    budget: int = knob(102_400, "real steps there may be in all", COUNT)
    strict_budget: bool = knob(True, "count what resets cost too; the last epochs then collect less")
    games: int = knob(8, "real games played side by side; each goes on in the next epoch", COUNT)
    held_out: float = knob(
        0.05,
        "share of real steps, in whole episodes, that judge the models and never train them",
        Within(0, MOST_HELD),
    )
    temperature: float = knob(1.0, "of the policy's choices while it collects", RATE)
    eval_temperature: float = knob(
        1.0, "of the policy's choices while it is evaluated; 0: the likeliest action", FROM_0
    )
    # the world model
    fidelity: str = knob("improved", "original: keep what the original does wrong", ("improved", "original"))
    pixels: str = knob("palette", "a pixel is one of the console's colours, or three intensities", ("palette", "rgb"))
    hidden: int = knob(96, "channels of the world model at full size", COUNT)
    compress: int = knob(5, "times the world model halves the frame", COUNT)
    double: int = knob(3, "times it doubles its channels on the way", FROM_0)
    bits: int = knob(128, "random bits that tell one future from another", COUNT)
    continue_head: bool = knob(True, "learn when a game is over, so that dreams end too")
    world_steps: int = knob(2500, "updates of the world model an epoch", COUNT)
    world_first: int = knob(3, "times as many in the first epoch", COUNT)
    world_lr: float = knob(3e-4, "AdamW's learning rate of the world model; 0: Adafactor, as the original", SHARE)
    world_batch: int = knob(16, "sequences the world model is trained on side by side", COUNT)
    world_rollout: int = knob(
        1, "steps it goes along a sequence on its own frames; 1: it always learns from true ones", COUNT
    )
    average: float = knob(
        0.998,
        "decay of a mean of its and the reward model's weights, which a phase ends with; 0: none",
        Within(0, 0.9999),
    )
    input_noise: float = knob(0.05, "share of pixels replaced by the median", SHARE)
    sampling_decay: int = knob(3700, "updates until bits, and frames along a sequence, are its own", FROM_0)
    world_grad_clip: float = knob(1.0, "largest norm of the gradients of world and reward model", RATE)
    # the reward model
    reward_head: str = knob(
        "frames", "reads frames, the told next one too; or mbarc, simple: the world model's inner maps", reward.HEADS
    )
    reward_shift: int = knob(
        4, "pixels that frames are moved by, at random, when it learns; the original: 0", Within(0, 20)
    )
    reward_steps: int = knob(0, "updates of the reward model an epoch; 0: as many as the strategy takes", FROM_0)
    reward_batch: int = knob(32, "transitions a batch", COUNT)
    masses: list[float] = knob(list(reward.MASSES), "share of each class of transitions in mbarc's draws")
    classes: str = knob(
        "near", "near: far zero, near zero, rewarded; or lead-up: before, rewarded, other", reward.CLASSES
    )
    near: int = knob(1, "steps from a reward that count as near, or as leading up", COUNT)
    focal: bool = knob(False, "class-balanced focal loss instead of cross-entropy")
    dream_rewards: str = knob(
        "expected", "what dreams pay: expected, the draws allowed for; or the likeliest of -1, 0, 1", PAID
    )
    # the policy
    agents: int = knob(64, "dreams side by side", COUNT)
    from_start: int = knob(4, "of them from the start of a game, the others from anywhere")
    rollout: int = knob(50, "steps of a dream", COUNT)
    ppo_updates: int = knob(130, "dream-and-learn rounds an epoch; 0: world and reward model alone", FROM_0)
    doubled: list[int] = knob([7, 11], "epochs with twice as many")
    tripled: list[int] = knob([14], "epochs with three times as many")
    ppo_lr: float = knob(2e-4, "Adam's learning rate of the policy", RATE)
    policy_average: float = knob(
        0.99, "decay of a mean of its weights, a round, which a phase ends with; 0: none", Within(0, 0.9999)
    )
    ppo_minibatch: int = knob(320, "steps a gradient is taken from", COUNT)
    shrink: int = knob(1, "show every n-th pixel only, for tests; 1 or 2", Within(1, 2))


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
