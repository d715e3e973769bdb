"""Rewards of a size that a method's usual settings suit, as the literature scales D4RL's.

maze    0 at the goal and -1 elsewhere: every step costs
range   divided by the range of the returns, times the length of an episode
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from replaylab.data.episodes import Episodes
from replaylab.errors import DataError

LIMIT = 1000  # steps of an episode in Gym
RULES = ("auto", "range", "maze", "raw")
D4RL_FILES = {
    "ant_maze_u-maze": "antmaze-umaze",
    "ant_maze_big-maze": "antmaze-medium",
    "ant_maze_hardest-maze": "antmaze-large",
}  # what its AntMaze files begin with


def name_of(episodes: Episodes) -> str:
    """All that the data calls itself, in small letters."""
    sources = episodes.meta.get("source") or []
    files = [Path(str(s)).name for s in (sources if isinstance(sources, list) else [sources])]
    found = " ".join([str(episodes.meta.get("dataset_id") or ""), episodes.env_id or "", *files]).lower()
    for theirs, name in D4RL_FILES.items():
        found = found.replace(theirs, name)
    return found


def tuned_rewards(episodes: Episodes, rule: str, drifting: bool = False) -> np.ndarray:
    """(rows,) by a rule; `auto` goes by the data's name. The longest episode's length stands for that of all."""
    if rule == "auto":
        rule = "maze" if any(word in name_of(episodes) for word in ("antmaze", "pointmaze")) else "range"
    if rule == "raw":
        return episodes.rewards
    if rule == "maze":
        return np.where(episodes.rewards > 0, 0.0, -1.0)
    returns = drifting_returns(episodes) if drifting else episodes.returns
    length = LIMIT if drifting else int(episodes.lengths.max())
    span = float(returns.max() - returns.min()) if len(returns) else 0.0
    if not span > 0:
        raise DataError("all episodes return the same, so their range cannot scale the rewards: pass --rewards raw")
    return episodes.rewards * (length / span)


def drifting_returns(episodes: Episodes, limit: int = LIMIT) -> np.ndarray:
    """Returns as IQL and its heirs cut them: rows whose time ran out are dropped, then a piece ends at a terminal or
    after `limit` rows, wherever that is; what is left over at the end does not count."""
    kept = ~episodes.truncated
    kept[-1] = False
    rewards, terminated = episodes.rewards[kept].astype(np.float64), episodes.terminated[kept]
    returns, total, length = [], 0.0, 0
    for reward, ended in zip(rewards.tolist(), terminated.tolist(), strict=True):
        total, length = total + reward, length + 1
        if ended or length == limit:
            returns.append(total)
            total, length = 0.0, 0
    return np.array(returns)
