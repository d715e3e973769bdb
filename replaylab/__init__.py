"""replaylab: learn decisions from logged data.

episodes = replaylab.load("my-logs.npz")
run = replaylab.train("bc", episodes, env="d4rl/hopper", seeds=[0, 1, 2])
replaylab.evaluate(run, episodes=100)
actions = replaylab.load_policy(run).act(observations)
"""

import os

__version__ = "0.1.0"

# Before torch is imported: its threads would otherwise spin while they wait, and two busy processes on one machine
# slow each other down by an order of magnitude.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from replaylab.data.episodes import Episodes, from_rows
from replaylab.data.read import load
from replaylab.data.write import save
from replaylab.errors import DataError, ReplaylabError, UsageError
from replaylab.evaluate import evaluate, load_policy
from replaylab.report import report
from replaylab.train import train

__all__ = [
    "DataError",
    "Episodes",
    "ReplaylabError",
    "UsageError",
    "evaluate",
    "from_rows",
    "load",
    "load_policy",
    "report",
    "save",
    "train",
]
