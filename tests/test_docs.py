"""What the documentation shows is run, and what it links to is there."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from glob import glob
from pathlib import Path
from urllib.request import urlopen

import pytest
import yaml
from conftest import make_episodes

from replaylab import distributed, load, save, stats
from replaylab.algos import dt
from replaylab.cli import build, main
from replaylab.cli.parser import _leaf, _options
from replaylab.offpolicy import Budget
from replaylab.published import canonical, published
from replaylab.scores import reference

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "README.ko.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

# Added to a command that begins so, to make it short: on a command line the last one wins.
FEW = "--eval-every -1 --final-episodes 1"
IMAGINE = f"{FEW} --steps 4 --max-epochs 1 --rollout-batch 20 --dynamics-hidden 16"
DICE = f"{FEW} --behavior-steps 2 --behavior-batch 16 --critic-steps 2 --batch-size 16 --returns-steps 2 --candidates 4"
DREAM = "--world-steps 2 --world-first 1 --world-batch 2 --rollout 4 --reward-steps 2 --agents 4 --hidden 8 --shrink 2"
SAC = "--train-steps 64 --chapter 64 --environments 4 --warm-up 32 --eval-episodes 1 --hidden 16"
SMALL = {
    "train bc ": f"{FEW} --steps 4",
    "train bcq": f"{FEW} --steps 4 --hidden 16 --vae-hidden 16 --act-samples 2",
    "train dt": f"{FEW} --steps 2 --batch-size 4 --context 5 --layers 1",
    "train gormpo --data hopper-medium --density-model": IMAGINE,
    "train gormpo": f"{IMAGINE} --density-steps 4",
    "train mopo": IMAGINE,
    "train diffusion-dice --data Ant_maze": f"{DICE} --final-episodes 0",  # an ant plays its 1,000 steps to the end
    "train diffusion-dice": DICE,
    "train mbarc": f"{DREAM} --epochs 1 --random-steps 32 --collect-steps 32 --ppo-updates 1 --final-episodes 0",
    "density fit": "--steps 4",
    "eval runs/diffusion-dice": "--episodes 1 --guidance 0 1 --candidates 1 4 --solver-steps 5",  # of 96 combinations
    "eval": "--episodes 1",
    "export runs/careful": "--solver-steps 2",
    "data collect atari": "--steps 64 --environments 4 --eval-episodes 0",
    "data collect pointmaze": "--steps 300",
    "data collect": f"--steps 50 {SAC}",
    "bench": "bc-update",
}
# A sweep's file instead of a command line. test_sweep.py reads these files whole; `make test` runs smoke.yaml whole.
PLAN = {"systems": ["bc"], "settings": {"steps": 4, "final_episodes": 1, "eval_every": -1}}
NOT_RUN = {  # a command that begins so is only parsed, because
    "sweep benchmarks/locomotion.yaml --on ray": "it needs a Ray cluster, which test_sweep.py makes where there is Ray",
}


@pytest.mark.parametrize("page", [p for p in PAGES if "```" in p.read_text()], ids=lambda p: p.name)
def test_code_blocks_run(page, scratch):
    """The blocks of a page run one after another, as a reader would type them."""
    text = page.read_text()
    provide(text)
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.S | re.M)
    assert 2 * len(blocks) == text.count("```")  # none is left out
    names: dict = {}
    for language, block in blocks:
        if language == "python":
            if begins := re.match(r"# (\w+\.py)\n", block):  # it is shown as a file
                Path(begins[1]).write_text(block)
            exec(compile(block, page.name, "exec"), names)
        elif language == "yaml":
            run_settings(block, page.stem)
        elif language != "text":  # what nobody types
            assert not language
            for line in block.replace("\\\n", "").splitlines():
                run_line(line)


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    """A folder to type commands in, where what no option makes short is short all the same."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    for name in ("QUICK", "FULL"):
        monkeypatch.setattr(f"replaylab.offpolicy.{name}", Budget(2000, 30, (16, 16), 50))
    # an untrained SAC passes for medium: candidate, chapters of medium and expert, returns of random and medium
    monkeypatch.setattr("replaylab.collect.levels.choose", lambda online: (0, 0, 0, 0.0, 1.0))
    monkeypatch.setattr("replaylab.envs.atari_rgb.MAX_STEPS", 50)
    monkeypatch.setattr("replaylab.play.ThreadingHTTPServer.serve_forever", answer_once)
    monkeypatch.setattr(dt, "Agent", dt.Agent)  # put back what replaylab.distributed changes


def answer_once(server):
    with ThreadPoolExecutor(1) as pool:
        page = pool.submit(lambda: urlopen(f"http://127.0.0.1:{server.server_port}/", timeout=20).read())
        server.handle_request()
        assert b"<canvas" in page.result()


def provide(page: str) -> None:
    """What the pages take for granted, a reader's logs and files of the repository, but for what this page makes."""
    hopper = load("sample").select(range(40))
    mine = replace(hopper, meta={})  # names no environment
    ant = "Ant_maze_big-maze_noisy_multistart_True_multigoal_False_sparse_fixed.hdf5"
    logs = dict.fromkeys(("hopper_medium-v2.hdf5", "hopper-medium", "data/hopper-medium", "data/hopper-expert"), hopper)
    logs |= dict.fromkeys(("my-logs.npz", "log.npz", "logs.npz", "train.npz", "held-out.npz"), mine)
    logs |= {"halfcheetah-medium": make_episodes((30,) * 10, 17, 6), ant: make_episodes((30,) * 10, 29, 8)}
    made = re.findall(r"(?:--out|convert \S+) (\S+)", page)
    for name in logs.keys() - made:
        save(logs[name], name)
    Path("trips.csv").write_text("x1,x2,a,r,trip_id\n" + "1,2,0.5,1.0,0\n" * 9 + "1,3,0.5,1.0,1\n" * 9)
    Path("my-logs.csv").write_text("obs_0,obs_1,action,reward,done\n" + "1,2,0.5,1.0,0\n" * 9)
    for name in ("dqn_replay/Breakout", "atari-log"):
        shutil.copytree(ROOT / "tests" / "data" / "dqn_replay" / "Breakout", name)
    shutil.copytree(ROOT / "configs", "configs")
    Path("benchmarks").mkdir()
    for path in (ROOT / "benchmarks").glob("*.yaml"):
        plan = yaml.safe_load(path.read_text())
        Path("benchmarks", path.name).write_text(yaml.safe_dump(plan | PLAN | {"datasets": plan["datasets"][:1]}))


def run_line(line: str) -> None:
    program, *words = shlex.split(line, comments=True) or [""]
    if program == "replaylab":
        run_ours([found for word in words for found in (sorted(glob(word)) if "*" in word else [word])])
    elif program == "torchrun":  # as one process; test_distributed.py has two
        distributed.main([*words[words.index("replaylab.distributed") + 1 :], *small("train dt")])
    elif program == "make":  # it sets up .venv and runs all tests: only what it would do
        subprocess.run(["make", "-n", "-C", ROOT, *words], check=True)
    else:
        subprocess.run(line.replace("tests/", f"{ROOT}/tests/"), shell=True, check=True)


def run_ours(words: list[str]) -> None:
    line = " ".join(words)
    if any(line.startswith(start) for start in NOT_RUN):
        assert callable(build(words).parse_args(words).run), line
    elif "--help" in words:
        with pytest.raises(SystemExit, match="0"):
            main(words)
    else:
        assert main(["--debug", *words, *small(line)]) == 0, line


def small(line: str) -> list[str]:
    return next((words.split() for start, words in SMALL.items() if line.startswith(start)), [])


def run_settings(text: str, system: str) -> None:
    Path("block.yaml").write_text(text)
    if "systems" in yaml.safe_load(text):
        run_ours(["sweep", "block.yaml", "--dry-run", "--out", "sweeps/block"])
    else:
        run_ours(f"train {system} --data hopper-medium --config block.yaml --out runs/block".split())


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target


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
    """The same commands, code, links, headings, rows and scores, whatever the words."""
    english, korean = ((ROOT / name).read_text() for name in ("README.md", "README.ko.md"))

    def shape(text):
        code = re.findall(r"^(?:make|replaylab|import|[a-z]+ = ).*?(?=\s+#|$)", text, re.M)
        links = [target for target in re.findall(r"\]\(([^)]+)\)", text) if not target.startswith("README")]
        figures = re.findall(r"[\d.,]+ ± [\d.]+|\d+ × \d+|\([\d.]+\)", text)
        starts = re.findall(r"^(?:#+|- |\|)", text, re.M)
        return {"code": code, "links": sorted(links), "starts": starts, "figures": figures}

    assert shape(korean) == shape(english)


def test_scores_in_the_readme_are_those_of_the_result_files():
    """Each score: the mean ± error of the files it links to (pooled, if they are several), the seeds × episodes of its
    row, and in brackets what is published for that system on that data."""
    text = (ROOT / "README.md").read_text().split("## Scores")[1].split("\n## ")[0].replace("\n  ", " ")
    scores = list(scores_in(text))
    assert len(scores) == len(re.findall(r"\d ± \d", text)) == 43
    for line, column, mean, error, links, beside in scores:
        found = [json.loads((ROOT / name).read_text()) for name in re.findall(r"\((\S+?)\)", links)]
        system, task = found[0]["system"], canonical(found[0]["task"])
        assert {f["system"] for f in found} == {system} and {canonical(f["task"]) for f in found} == {task}
        name = task.removeprefix("atari/").replace("-medium-expert", " medium + expert")
        assert f"`{system}`" in line and name in (column + line[: line.find("|", 1)]).lower(), line
        sizes = re.findall(r"(?:([\w-]+) )?(\d+ × \d+)", line)  # 5 × 50, halfcheetah 3 × 20
        size = [size for start, size in sizes if column.startswith(start)][-1]
        assert size in sizes_of(found, mean, error), line
        figures = {p.label: p.scores[task][0] for p in published([task]) if task in p.scores}
        figures["random"] = (reference(found[0]["env"]) or [None])[0]
        ours = {p.scores[task][0] for p in published([task], [system]) if task in p.scores}
        for name, figure in re.findall(r"([A-Za-z]+ )?(\d[\d,]*(?:\.\d+)?)", beside):
            assert abs(figures[name.strip()] - number(figure)) < 0.5 if name else number(figure) in ours, line


def scores_in(text: str) -> Iterator[tuple[str, ...]]:
    """Of each score: line, head of its column (of a note, the line again), mean, error, links, what is in brackets."""
    score = r"\[(\S+) ± (\S+)\]((?: ?(?:\[\+\])?\(benchmarks/results/\S+?\.json\))+)(?: \((.+?)\))?"
    header: list[str] = []
    for line in text.splitlines():
        cells = line.split("|")
        header = [line] if len(cells) == 1 else cells if len(header) == 1 else header
        for column, cell in zip(header, cells, strict=True):
            yield from ((line, column.strip(), *groups) for groups in re.findall(score, cell))


def test_scores_on_the_pages_are_those_of_the_result_files():
    """In a row that ends with the names of result files, each mean ± error is that of one of them."""
    held = 0
    for line in "\n".join(page.read_text() for page in (ROOT / "docs").glob("*.md")).splitlines():
        names = re.findall(r"`([\w-]+)`", line.split("|")[-2]) if line.startswith("|") else []
        files = [ROOT / "benchmarks" / "results" / f"{name}.json" for name in names]
        if not all(file.exists() for file in files):  # `-seeds-5-9`: pooled with another
            continue
        found = [json.loads(file.read_text()) for file in files]
        for mean, error in re.findall(r"([\d.,]+) ± ([\d.]+)", line) if found else ():
            assert any(sizes_of([one], mean, error) for one in found), line
            held += 1
    assert held > 40


def sizes_of(found: list[dict], mean: str, error: str) -> list[str]:
    """The seeds × episodes of those evaluations in result files that have this mean and error, as rounded."""
    sizes = []
    slack = 0.5001 * 0.1 ** len(mean.partition(".")[2])
    points = "atari" in found[0]["env"]  # told as the game's own, and of one seed its games' error
    for evaluations in zip(*(f["scores"][: None if len(found) == 1 else 1] for f in found), strict=True):
        seeds = [seed for evaluation in evaluations for seed in evaluation["last"]]
        value, spread = stats.mean_and_error([seed["return" if points else "mean"] for seed in seeds])
        if len(seeds) == 1:
            low, high = reference(found[0]["env"])
            spread = seeds[0]["std"] * (high - low) / 100 / (seeds[0]["episodes"] - 1) ** 0.5
        if abs(value - number(mean)) < slack and abs(spread - number(error)) < slack:
            sizes.append(f"{len(seeds)} × {seeds[0]['episodes']}")
    return sizes


def number(told: str) -> float:
    return float(told.replace(",", ""))
