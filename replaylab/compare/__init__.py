"""One honest table from many runs: a self-contained page, and the same table as Markdown and CSV.

`compare("sweeps/locomotion")` reads run folders and nothing else. `export` writes the results of each run to a small
JSON file, and `results_markdown` makes one text from a folder of such files.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from replaylab.compare.evidence import export
from replaylab.compare.evidence_text import holds_results, results_markdown, write_results
from replaylab.compare.gather import Comparison, Entry, gather
from replaylab.compare.sections import sections
from replaylab.compare.tables import markdown, to_csv
from replaylab.page import check_suffix, count, page, write_page
from replaylab.report import report
from replaylab.results import UNREADABLE, Run

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
    "write_results",
]

TABLES = {".md": markdown, ".csv": to_csv}


def compare(runs: str | Path | Iterable[str | Path], out: str | Path | None = None, *, reports: bool = True) -> Path:
    """Write the comparison of a sweep's folder, or of run folders, and return its path.

    An .html file is a page, with the same table as .md and .csv beside it; an .md or .csv file is the table alone. With
    `reports`, the report of every run that the page links to is written, unless it is up to date.
    """
    runs = runs if isinstance(runs, (str, Path)) else list(runs)
    alone = Path(runs) if isinstance(runs, (str, Path)) else Path()
    path = check_suffix(alone / "comparison.html" if out is None else out, [".html", *TABLES])
    found = gather(runs)
    if path.suffix.lower() in TABLES:
        return write_page(path, TABLES[path.suffix.lower()](found))
    for run in found.runs if reports else []:
        if run.info.get("status") != UNREADABLE and _outdated(run):
            report([run.path], run.path / "report.html")
    amounts = [count(len(found.rows), "system"), count(len(found.tasks), "task"), count(len(found.runs), "run")]
    subtitle = f"{', '.join(amounts)} · replaylab comparison"
    written = write_page(path, page(found.name, subtitle, sections(found, path)))
    for suffix, table in TABLES.items():
        write_page(path.with_suffix(suffix), table(found))
    return written


def _outdated(run: Run) -> bool:
    """Whether the run's report is missing or older than its files."""
    own = run.path / "report.html"
    return not own.exists() or any(p.stat().st_mtime > own.stat().st_mtime for p in run.path.glob("*.json*"))
