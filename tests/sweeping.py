"""A small sweep file."""

from __future__ import annotations

import json

TINY = {"steps": 20, "batch_size": 8, "hidden": [8], "log_every": 10}


def write(place, file="tiny", **values):
    values = {"systems": ["bc"], "datasets": ["one.npz", "two.npz"], "seeds": [0, 1], "settings": TINY} | values
    path = place / f"{file}.yaml"
    path.write_text(json.dumps(values))  # JSON is YAML
    return path
