"""`replaylab bench`: times the hot paths on this machine, on synthetic data with the real shapes."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from replaylab.bench.common import Rows
from replaylab.config import write_whole
from replaylab.errors import UsageError, nearest
from replaylab.evaluate import pick_device
from replaylab.run import machine

PARTS = ("foundation", "dt", "gormpo", "dice", "world", "mbarc", "exported")  # modules with CASES
PEERS = ("sb3", "d3rlpy")  # modules with `against`, which times another library and ours


def all_cases() -> dict[str, Callable[[torch.device], Rows]]:
    return {name: case for part in PARTS for name, case in _module(part).CASES.items()}


def _module(name: str) -> Any:
    return importlib.import_module(f"replaylab.bench.{name}")


def bench(
    cases: list[str] | None = None, *, device: str = "auto", json_path: str | None = None, against: str | None = None
) -> dict[str, Any]:
    """Run cases, print a row for each figure, and return all rows with a description of the machine.

    json_path: also write them to this file. against: instead, compare with this library.
    """
    if against is not None and against not in PEERS:
        raise UsageError(f"unknown peer '{against}'{nearest(against, PEERS)}")
    if against is not None and cases:
        raise UsageError("--against times what both have: name no cases beside it")
    known = {f"against-{against}": _module(against).against} if against else all_cases()
    unknown = [] if against else [case for case in cases or [] if case not in known]
    if unknown:
        raise UsageError(f"unknown bench case '{unknown[0]}'{nearest(unknown[0], known)}")
    chosen = {case: known[case] for case in known if against or not cases or case in cases}
    where = pick_device(device)
    if where.type == "cuda":
        torch.set_float32_matmul_precision("high")
    found: list[dict[str, Any]] = []
    result = {"machine": machine(where), "rows": found}

    def keep() -> None:
        if json_path:
            write_whole(Path(json_path), json.dumps(result, indent=1))

    keep()  # what cannot be written is found out before anything is timed
    for case, run in chosen.items():
        for what, figure, unit in run(where):
            found.append({"case": case, "what": what, "figure": figure, "unit": unit})
            print(f"{case:12s} {what:75s} {figure:12,.4g} {unit}", flush=True)
            keep()  # after every row, so that an interrupted run keeps its results
    return result
