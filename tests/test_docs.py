"""What the documentation shows is run, and what it links to is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from replaylab.cli import build
from replaylab.cli.parser import _leaf, _options

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
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.S | re.M)  # in pairs, whatever the language
    for block in (text for language, text in fenced if not language):
        for line in re.findall(r"^replaylab (.+?)(?:\s+#.*)?$", block, re.M):
            for words in (part.removeprefix("replaylab ").split() for part in line.split(" ; ")):
                assert words[0] == "eval" or "--help" in words or callable(build(words).parse_args(words).run), line
        for line in re.findall(r"^torchrun .*-m replaylab\.distributed (.+)$", block, re.M):
            words = ["train", *line.split()]
            assert callable(build(words).parse_args(words).run), line


def test_the_original_decision_transformers_flags_have_an_equivalent():
    """Every flag of experiment.py and run_dt_atari.py stands in the table, and what it names here is an option."""
    page = (ROOT / "docs" / "decision-transformer.md").read_text().partition("## Coming from the original")[2]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("|")]

    def flags(*columns: int) -> set[str]:
        return set(re.findall(r"--?[a-zA-Z][\w-]*", " ".join(row[c] for row in rows[2:] for c in columns)))

    gym = """--env --dataset --mode --K --pct_traj --batch_size --model_type --embed_dim --n_layer --n_head
        --activation_function --dropout --learning_rate -lr --weight_decay -wd --warmup_steps --num_eval_episodes
        --max_iters --num_steps_per_iter --device --log_to_wandb -w"""
    atari = """--seed --context_length --epochs --model_type --num_steps --num_buffers --game --batch_size
        --trajectories_per_buffer --data_dir_prefix --block_size"""
    assert flags(0) == set(gym.split()) and flags(3) == set(atari.split())
    words = ["train", "dt"]
    assert flags(1, 4) <= set(_options(_leaf(build(words), words)))


def test_the_korean_readme_is_in_step():
    """The same commands, code, links, headings and rows, whatever the words."""
    english, korean = ((ROOT / name).read_text() for name in ("README.md", "README.ko.md"))

    def shape(text):
        code = re.findall(r"^(?:make|replaylab|import|[a-z]+ = ).*?(?=\s+#|$)", text, re.M)
        links = [target for target in re.findall(r"\]\(([^)]+)\)", text) if not target.startswith("README")]
        return {"code": code, "links": sorted(links), "starts": re.findall(r"^(?:#+|- |\|)", text, re.M)}

    assert shape(korean) == shape(english)
