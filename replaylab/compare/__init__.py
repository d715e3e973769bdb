"""One honest table from many runs: a self-contained page, and the same table as Markdown and CSV.

`compare("sweeps/locomotion")` reads run folders and nothing else. `export` keeps what matters of a run in a small JSON
file, and `results_markdown` writes the evidence from a folder of such files.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from replaylab.compare.evidence import export, holds_results, results_markdown
from replaylab.compare.gather import Comparison, Entry, gather
from replaylab.compare.sections import sections
from replaylab.compare.tables import markdown, to_csv
from replaylab.errors import UsageError
from replaylab.page import page, write_page
from replaylab.report import report

__all__ = [
    "Comparison",
    "Entry",
    "compare",
    "export",
    "gather",
    "holds_results",
    "markdown",
    "results_markdown",
    "to_csv",
]


def compare(runs: str | Path | Iterable[str | Path], out: str | Path | None = None, *, reports: bool = True) -> Path:
    """Write the comparison of a sweep's folder, or of run folders, and return the page's path.

    Beside the page stand the same table as .md and .csv. With `reports` every run without a page of its own gets one.
    """
    runs = runs if isinstance(runs, (str, Path)) else list(runs)
    found = gather(runs)
    alone = Path(runs) if isinstance(runs, (str, Path)) else Path()
    path = Path(out) if out is not None else alone / "comparison.html"
    if path.suffix in (".md", ".csv"):
        raise UsageError(f"{path} is what a table beside the page would be called: name the page, {path.stem}.html")
    for run in found.runs if reports else []:
        own = run.path / "report.html"
        if not own.exists() or own.stat().st_mtime < (run.path / "run.json").stat().st_mtime:
            report([run.path], own)
    subtitle = f"{len(found.rows)} systems, {len(found.tasks)} tasks, {len(found.runs)} runs · replaylab comparison"
    written = write_page(path, page(found.name, subtitle, sections(found, path)))
    write_page(path.with_suffix(".md"), markdown(found))
    write_page(path.with_suffix(".csv"), to_csv(found))
    return written
