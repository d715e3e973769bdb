"""What the documentation shows is run, and what it links to is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from replaylab.cli import build

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "README.ko.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", [p for p in PAGES if "```python" in p.read_text()], ids=lambda p: p.name)
def test_python_examples_run(page, tmp_path, monkeypatch):
    """The blocks of a page run one after another, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
    assert blocks
    for block in blocks:
        exec(compile(block, page.name, "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_are_known(page):
    """Every `replaylab ...` line of a code block parses. What `eval` takes depends on the run, which is not here."""
    for block in re.findall(r"```\n(.*?)```", page.read_text(), re.S):
        for line in re.findall(r"^replaylab (.+?)(?:\s+#.*)?$", block, re.M):
            for words in (part.removeprefix("replaylab ").split() for part in line.split(" ; ")):
                assert words[0] == "eval" or callable(build(words).parse_args(words).run), line
