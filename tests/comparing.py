"""Run folders with known scores, alone and as a sweep."""

from __future__ import annotations

import json

from replaylab import scores
from replaylab.config import write_yaml
from replaylab.sweep.plan import Cell, Plan
from replaylab.sweep.queue import Queue

LOW, HIGH = scores.REFERENCES["hopper"]


def returns(*normalized):
    """Returns of hopper with these normalised scores."""
    return [LOW + score / 100 * (HIGH - LOW) for score in normalized]


def make_run(
    path, evaluations, *, system="bc", data="hopper-medium.npz", status="finished", seconds=360.0, rows=9, **config
):
    """evaluations: (step, seed, normalised scores, settings) each; rows: of the data."""
    path.mkdir(parents=True)
    given = {"system": system, "data": [data], "env": "d4rl/hopper", "preset": None, "steps": 200, "seeds": [0, 1]}
    write_yaml(path / "config.yaml", given | config)
    machine = {"device": "NVIDIA H200", "cpu": "EPYC", "cores": 16, "torch": "2.11"}
    about = {
        "command": f"replaylab train {system}",
        "started": "2026-01-02T03:04:05",
        "finished": "2026-01-03T03:04:05",
    }
    about |= {"seconds": seconds, "status": status, "machine": machine, "parameters": 1234}
    about |= {"data": {"steps": rows, "episodes": 1, "return": {"mean": 1.0}}}
    (path / "run.json").write_text(json.dumps(about))
    lines = []
    for step, seed, values, *settings in evaluations:
        line = {"step": step, "seed": seed, "env": "d4rl/hopper", "episodes": len(values), "returns": returns(*values)}
        line |= {"normalized": list(values), "lengths": [1] * len(values), "settings": dict(*settings), "seconds": 1.0}
        lines.append(json.dumps(line) + "\n")
    (path / "eval.jsonl").write_text("".join(lines))
    return path


def make_sweep(path):
    """Two systems on two datasets, one cell missing; the best evaluation of `bc` is not its last."""
    folder = path / "sweeps" / "demo"
    make_run(
        folder / "bc-hopper-medium", [(100, 0, [90, 90]), (100, 1, [80, 80]), (200, 0, [40, 60]), (200, 1, [60, 80])]
    )
    make_run(folder / "bc-hopper-expert", [(200, 0, [100, 100]), (200, 1, [110, 110])], data="hopper-expert.npz")
    targets = [(200, s, [v, v], {"target": t}) for s in (0, 1) for t, v in ((3600.0, 70 + s), (1800.0, 30 + s))]
    make_run(folder / "dt-hopper-medium", targets, system="dt")
    cells = [
        Cell(f"{s}-{d}", s, s, d, "", [f"{d}.npz"], None, None, {}, [0, 1])
        for s in ("bc", "dt")
        for d in ("hopper-medium", "hopper-expert")
    ]
    queue = Queue(folder)
    queue.write(Plan("demo", cells))
    queue.record(cells[3], "started")
    queue.record(cells[3], "failed", error="out of <memory>")
    return folder
