"""Sections that a system adds to the report: one module per system, `sections(run)` -> [(title, HTML), ...]."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable

from replaylab import charts
from replaylab.page import Html, escape
from replaylab.results import BROKEN, Run, text
from replaylab.sections.common import without_simulator


def sections_of(runs: Iterable[Run]) -> list[tuple[str, Html]]:
    """The sections of all runs; those with the same title are merged, each part under its run's name."""
    runs = list(runs)
    found: dict[str, list[Html]] = {}
    for run in runs:
        for title, body in _own(run) + without_simulator(run):
            name = Html(f"<h4>{escape(run.name)}</h4>") if len(runs) > 1 else Html("")
            found.setdefault(title, []).append(Html(name + body))
    return [(title, Html("".join(parts))) for title, parts in found.items()]


def _own(run: Run) -> list[tuple[str, Html]]:
    name = f"replaylab.sections.{text(run.config.get('system')).replace('-', '_')}"
    if not name.rsplit(".", 1)[1].isidentifier() or importlib.util.find_spec(name) is None:
        return []
    try:
        return importlib.import_module(name).sections(run)
    except BROKEN:
        return [("Findings", charts.nothing("What the run found is not readable."))]
