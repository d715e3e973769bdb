"""The reference pages hold what the code has."""

import importlib.util
from pathlib import Path

import replaylab

PATH = Path(__file__).parent.parent / "docs" / "reference.py"
spec = importlib.util.spec_from_file_location("reference", PATH)
reference = importlib.util.module_from_spec(spec)
spec.loader.exec_module(reference)


def test_every_option_of_every_verb_is_listed():
    page = reference.cli_page()
    train = page.partition("## replaylab train bc\n")[2].partition("\n## ")[0]
    assert (
        "`--top-fraction FLOAT` | clone only the best episodes, up to this fraction of the rows (default: 1.0)" in train
    )
    assert "`--data X [X ...]`" in train and "`--deterministic, --no-deterministic`" in train
    collect = page.partition("## replaylab data collect\n")[2].partition("\n## ")[0]
    assert "`--out D`" in collect and "`--train-steps" in collect  # also what is built only when it is asked for
    assert "## replaylab report" in page and "## replaylab eval" in page


def test_every_public_name_has_its_signature_and_words():
    page = reference.python_page()
    for name in replaylab.__all__:
        assert f"### {name}\n\n```text\nreplaylab.{name}" in page, name
    assert "replaylab.stats.iqm(values" in page and "Interquartile mean" in page
    assert "replaylab.sweep.run(path" in page
