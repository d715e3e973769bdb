"""replaylab: learn decisions from logged data.

episodes = replaylab.load("my-logs.npz")
run = replaylab.train("bc", episodes, env="d4rl/hopper", seeds=[0, 1, 2])
replaylab.evaluate(run, episodes=100)
actions = replaylab.load_policy(run).act(observations)
"""

import os

__version__ = "0.1.0"

# Before torch is imported: its threads spin while they wait, which makes two busy processes on one machine slow each
# other down a hundredfold. A short spin and then sleep costs a tenth when alone (docs/training.md has the figures).
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ |= {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "1000"}

from replaylab.data.episodes import Episodes, from_rows
from replaylab.data.read import load
from replaylab.data.write import save
from replaylab.errors import DataError, ReplaylabError, UsageError
from replaylab.evaluate import evaluate, load_policy
from replaylab.export import export
from replaylab.offpolicy import assess
from replaylab.report import report
from replaylab.train import train

__all__ = [
    "DataError",
    "Episodes",
    "ReplaylabError",
    "UsageError",
    "assess",
    "evaluate",
    "export",
    "from_rows",
    "load",
    "load_policy",
    "report",
    "save",
    "train",
]
