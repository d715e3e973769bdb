"""The documentation's site leads to every page."""

from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent


def test_every_page_is_in_the_navigation_and_the_quickstart_comes_first():
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    pages = [page for entry in nav for page in entry.values()]
    made = ["reference-cli.md", "reference-python.md"]  # by docs/reference.py
    assert pages[0] == "quickstart.md" and sorted(pages) == sorted(
        [p.name for p in (ROOT / "docs").glob("*.md")] + made
    )
