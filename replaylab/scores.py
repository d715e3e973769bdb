"""D4RL's normalised score: 0 is a random policy, 100 an expert (in Atari games a human).

Only returns and their means can be normalised. A standard deviation has no zero point: it may only be scaled.
"""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import ArrayLike

from replaylab.errors import UsageError, nearest

# family -> mean return of a random policy and of an expert. The same for every version of a family.
REFERENCES: dict[str, tuple[float, float]] = {
    "halfcheetah": (-280.178953, 12135.0),
    "hopper": (-20.272305, 3234.3),
    "walker2d": (1.629008, 4592.3),
    "ant": (-325.6, 3879.7),
    "pen": (96.262799, 3076.8331017826877),
    "hammer": (-274.856578, 12794.134825156867),
    "relocate": (-6.425911, 4233.877797728884),
    "door": (-56.512833, 2880.5693087298737),
    "maze2d-open": (0.01, 20.66),
    "maze2d-umaze": (23.85, 161.86),
    "maze2d-medium": (13.13, 277.39),
    "maze2d-large": (6.7, 273.99),
    "maze2d-open-dense": (11.17817, 27.166538620695782),
    "maze2d-umaze-dense": (68.537689, 193.66285642381482),
    "maze2d-medium-dense": (44.264742, 297.4552547777125),
    "maze2d-large-dense": (30.569041, 303.4857382709002),
    "antmaze": (0.0, 1.0),
    "pointmaze": (0.0, 1.0),  # ours: the share of episodes that reach the goal
    "kitchen": (0.0, 4.0),
    "minigrid-fourrooms": (0.01442, 2.89685),
    "flow-ring": (-165.22, 24.42),
    "flow-merge": (118.67993, 330.03179),
    "carla-lane": (-0.8503839912088142, 1023.5784385429523),
    "carla-town": (-114.81579500772153, 2440.1772022247314),
}
# the 26 Atari-100k games -> mean score of a random player and of a human, as in every paper on them
ATARI: dict[str, tuple[float, float]] = {
    "atari/alien": (227.8, 7127.7),
    "atari/amidar": (5.8, 1719.5),
    "atari/assault": (222.4, 742.0),
    "atari/asterix": (210.0, 8503.3),
    "atari/bank_heist": (14.2, 753.1),
    "atari/battle_zone": (2360.0, 37187.5),
    "atari/boxing": (0.1, 12.1),
    "atari/breakout": (1.7, 30.5),
    "atari/chopper_command": (811.0, 7387.8),
    "atari/crazy_climber": (10780.5, 35829.4),
    "atari/demon_attack": (152.1, 1971.0),
    "atari/freeway": (0.0, 29.6),
    "atari/frostbite": (65.2, 4334.7),
    "atari/gopher": (257.6, 2412.5),
    "atari/hero": (1027.0, 30826.4),
    "atari/jamesbond": (29.0, 302.8),
    "atari/kangaroo": (52.0, 3035.0),
    "atari/krull": (1598.0, 2665.5),
    "atari/kung_fu_master": (258.5, 22736.3),
    "atari/ms_pacman": (307.3, 6951.6),
    "atari/pong": (-20.7, 14.6),
    "atari/private_eye": (24.9, 69571.3),
    "atari/qbert": (163.9, 13455.0),
    "atari/road_runner": (11.5, 7845.0),
    "atari/seaquest": (68.4, 42054.7),
    "atari/up_n_down": (533.4, 11693.2),
}
# Gymnasium-Robotics' names for the same tasks
_ALIASES = {
    "adroithandpen": "pen",
    "adroithandhammer": "hammer",
    "adroithandrelocate": "relocate",
    "adroithanddoor": "door",
    "frankakitchen": "kitchen",
}


def reference(env_id: str) -> tuple[float, float] | None:
    """(random, expert) for an environment or dataset, or None where they are not known.

    Understands `d4rl/hopper`, `hopper`, `Hopper-v5`, `hopper-medium-v2`, `hopper/medium-v0`, `maze2d-large-dense-v1`,
    `mujoco/hopper/medium-v0`, `D4RL/pen/human-v2`, `atari/BankHeist`, `atari/bank_heist` and the like.
    """
    if env_id.lower().startswith(("atari/", "atari-rgb/")):
        plain = {game.replace("_", ""): scores for game, scores in ATARI.items()}
        game = env_id.lower().partition("/")[2].partition(",")[0]
        return plain.get("atari/" + re.sub(r"[_-]", "", game))
    name = re.sub(r"[/_:]", "-", env_id.lower())
    name = re.sub(r"^(d4rl-|mujoco-)", "", re.sub(r"-v\d+$", "", name))
    words = name.split("-")
    words[0] = _ALIASES.get(words[0], words[0])
    if words[0].endswith("maze") and "dense" in name:
        return None  # 0 and 1 are returns of the sparse task
    if env_id.lower().startswith("antmaze_") or (words[0] == "pointmaze" and not env_id.startswith("pointmaze-")):
        return None  # Gymnasium-Robotics' own, in which an episode goes on after the goal
    for count in range(len(words), 0, -1):  # the longest family that the name begins with
        found = REFERENCES.get("-".join(words[:count]))
        if found:
            return found
    return None


def normalize(env_id: str, returns: ArrayLike) -> np.ndarray:
    """100 * (return - random) / (expert - random), element by element."""
    found = reference(env_id)
    if found is None:
        raise UsageError(f"no reference scores for '{env_id}'{nearest(env_id.lower(), REFERENCES | ATARI)}")
    low, high = found
    return 100.0 * (np.asarray(returns, np.float64) - low) / (high - low)
