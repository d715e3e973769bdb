"""The comparison on fabricated run folders: numbers by hand, a page that is whole."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil

import pytest
from comparing import make_run, make_sweep, returns
from pages import Page

from replaylab.cli import main
from replaylab.compare import compare, export, gather, markdown, results_markdown, to_csv
from replaylab.config import read_yaml, write_yaml
from replaylab.errors import ReplaylabError
from replaylab.published import PUBLISHED, canonical, dataset_name, published
from replaylab.sweep.plan import Cell, Plan
from replaylab.sweep.queue import Queue


@pytest.fixture
def sweep(tmp_path):
    return make_sweep(tmp_path)


def test_the_table_shows_the_last_score_and_the_best_apart(sweep):
    found = gather(sweep)
    assert found.rows == ["bc", "dt, highest target", "dt, second target"]
    assert found.tasks == ["hopper-medium", "hopper-expert"]  # as in the sweep's file
    entry = found.at("bc", "hopper-medium")
    # seeds have means 50 and 70: mean 60, standard error 20 / sqrt(2) / sqrt(2) = 10
    assert entry.summary()["mean"] == 60 and entry.summary()["error"] == pytest.approx(10)
    assert entry.summary("best")["mean"] == 85  # 90 and 80, at step 100
    assert entry.seed_means() == [50, 70]
    assert found.at("dt, highest target", "hopper-medium").summary()["mean"] == pytest.approx(70.5)
    assert found.at("dt, second target", "hopper-expert") is None
    assert found.complete() == (["bc"], ["hopper-medium", "hopper-expert"], found.rows[1:])
    assert found.unfinished == {"dt-hopper-expert": "out of <memory>"}


def test_markdown_and_csv_hold_the_same_table(sweep):
    found = gather(sweep)
    text = markdown(found)
    assert "| bc | 60 ± 10 | 105.0 ± 5.0 |" in text
    assert "| dt, highest target | 70.50 ± 0.50 | failed |" in text
    assert "| *published:* BC (CORL) | 53.5 ± 1.8 | – |" in text and "last checkpoint, mean ± std, 4 seeds" in text
    assert "2 seeds, 2 episodes a seed" in text and "- dt-hopper-expert: out of <memory>" in text
    rows = list(csv.DictReader(io.StringIO(to_csv(found))))
    ours = next(r for r in rows if r["row"] == "bc" and r["task"] == "hopper-medium")
    assert (
        float(ours["mean"]) == 60
        and float(ours["best_mean"]) == 85
        and ours["seeds"] == "2"
        and ours["published"] == ""
    )
    assert float(ours["gpu_hours"]) == pytest.approx(0.1)
    theirs = next(r for r in rows if r["row"] == "DT (CORL)")
    assert (theirs["mean"], theirs["error"], theirs["published"]) == ("65.1", "1.6", "yes") and theirs["protocol"]


def test_the_best_checkpoint_stands_apart_in_markdown_too(sweep):
    first, _, best = markdown(gather(sweep)).partition("Best checkpoint of each seed")
    assert "| bc | 60 ± 10 | 105.0 ± 5.0 |" in first and "85" not in first
    assert "optimistic" in best and "2 seeds, 2 episodes a seed" in best and "| bc | 85.0 ± 5.0 | 105.0 ± 5.0 |" in best


def test_what_is_not_finished_is_marked_everywhere(sweep, tmp_path):
    run = make_run(sweep / "mopo-hopper-medium", [(1100, 0, [20, 30]), (1200, 1, [40, 50])], status="running")
    make_run(sweep / "bcq-hopper-medium-seed0", [(200, 0, [33])])  # its other seed has not begun
    queue = Queue(sweep)
    cells = [Cell(run.name, "mopo", "mopo", "hopper-medium", "", ["m.npz"], None, None, {}, [0, 1])]
    for seed in (0, 1):
        name = f"bcq-hopper-medium-seed{seed}"
        cells.append(Cell(name, "bcq", "bcq", "hopper-medium", "", ["m.npz"], None, None, {}, [seed]))
    for task in ("hopper-medium", "hopper-expert"):
        cells.append(Cell(f"none-{task}", "none", "bc", task, "", ["m.npz"], None, None, {}, [0]))
    queue.write(Plan("demo", queue.plan().cells + cells))
    queue.record(cells[0], "started")  # by a process that is gone
    found = gather(sweep)
    assert "| mopo | 35 ± 10 (step 1,100, interrupted) | – |" in markdown(found)
    assert "| none | new | new |" in markdown(found) and found.rows.count("none") == 1
    assert "| bcq | 33 (step 200, new) | – |" in markdown(found) and "| bc | 60 ± 10 | 105.0 ± 5.0 |" in markdown(found)
    rows = csv.DictReader(io.StringIO(to_csv(found)))
    told = {(r["row"], r["task"]): (r["status"], r["step"], r["mean"]) for r in rows if r["published"] != "yes"}
    assert told["mopo", "hopper-medium"] == ("interrupted", "1100", "35.0")
    assert told["bcq", "hopper-medium"] == ("new", "200", "33.0")
    assert told["dt", "hopper-expert"] == ("failed", "", "")  # nothing was evaluated
    assert told["bc", "hopper-medium"] == ("finished", "200", "60.0")
    text = Page(compare(sweep, tmp_path / "c.html", reports=False).read_text()).text
    assert "2 x 2, step 1,100, interrupted" in text and "mopo-hopper-medium: interrupted" in text
    assert "nonenewnew" in text  # a row of the table
    assert "2 x 2, step 200" not in text  # finished
    for cell in ("bc-hopper-expert", "dt-hopper-medium"):  # one task is left, and all systems take part
        shutil.rmtree(sweep / cell)
    text = Page(compare(sweep, tmp_path / "c.html", reports=False).read_text()).text
    told = "bcq on hopper-medium (step 200, new); mopo on hopper-medium (step 1,100, interrupted)"
    assert f"With scores of what is not finished: {told}." in text
    export(run, tmp_path / "results")
    assert "**35 ± 10** (step 1,100, running)" in results_markdown(tmp_path / "results", tmp_path / "R.md")


def test_doubts_stand_in_every_table(sweep, tmp_path):
    """What is left out of a score is said wherever the score is; what a run noted while training is not a doubt."""
    run = sweep / "bc-hopper-medium"
    lines = (run / "eval.jsonl").read_text().splitlines()
    line = json.loads(lines[-1])
    line["returns"], line["normalized"] = [*line["returns"], float("nan")], [*line["normalized"], float("nan")]
    (run / "eval.jsonl").write_text("\n".join([*lines[:-1], json.dumps(line)]) + "\n")
    (run / "run.json").write_text(json.dumps(json.loads((run / "run.json").read_text()) | {"notes": ["trained well"]}))
    doubt, found = "1 return not finite and left out", gather(sweep)
    text = markdown(found)
    assert f"- bc-hopper-medium: {doubt}" in text and "trained well" not in text
    assert "- dt-hopper-expert: out of <memory>" in text
    row = next(
        r for r in csv.DictReader(io.StringIO(to_csv(found))) if (r["row"], r["task"]) == ("bc", "hopper-medium")
    )
    assert doubt in row["doubts"] and "trained well" not in row["doubts"]
    assert "trained well" in Page(compare(sweep, tmp_path / "c.html", reports=False).read_text()).text
    export(run, tmp_path / "results")
    assert f"- bc-hopper-medium: {doubt}" in results_markdown(tmp_path / "results", tmp_path / "R.md")
    make_run(tmp_path / "again", [(200, 0, [1, 2])])
    assert "seed 0 is in" in markdown(gather([run, tmp_path / "again"]))


def test_curves_say_how_many_episodes_they_are_of(tmp_path):
    run = make_run(tmp_path / "a", [(100, s, [1, 2, 3]) for s in (0, 1)] + [(200, s, [5] * 7) for s in (0, 1)])
    text = Page(compare(run, tmp_path / "c.html", reports=False).read_text()).text
    assert "2 seeds, 7 episodes a seed at the last step, 3 episodes a seed before." in text


def test_the_page_is_whole_and_links_to_the_reports(sweep, tmp_path):
    page = compare(sweep, tmp_path / "comparison.html")
    html = page.read_text()
    links = re.findall(r'<a href="([^"#]+)"', html)
    assert sorted(links) == sorted(
        f"sweeps/demo/{c}/report.html" for c in ("bc-hopper-medium", "bc-hopper-expert", "dt-hopper-medium")
    )
    assert all((tmp_path / link).exists() for link in links)
    shown = Page(re.sub(r'<a href="[^"#]+"', '<a href="#"', html))  # otherwise nothing leads out of the page
    for words in (
        "60 ± 10",
        "85.0 ± 5.0",
        "optimistic",
        "published",
        "Optimality gap",
        "Performance profiles",
        "GPU hours",
    ):
        assert words in shown.text, words
    assert "dt-hopper-expert: out of <memory>" in shown.text  # escaped on the page
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", html)
    assert len(captions) >= 6 and all(re.search(r"\d seed.*episode", caption) for caption in captions)
    assert page.with_suffix(".md").exists() and page.with_suffix(".csv").exists()


def test_who_beats_whom(sweep, tmp_path):
    make_run(
        sweep / "dt-hopper-expert",
        [(200, s, [v], {"target": t}) for s in (0, 1) for t, v in ((3600.0, 120), (1800.0, 0))],
        system="dt",
        data="hopper-expert.npz",
    )
    page = compare(sweep, tmp_path / "c.html", reports=False)
    text = Page(page.read_text()).text
    # dt at its highest target: 120 beats 100 and 110 always; on medium 70 and 71 beat 50 and, once fully and once in
    # a tie, 70: (2 + 1.5) / 4. The mean of 1 and 0.875
    assert "0.94 [" in text and "Probability of improvement" in text


def test_a_system_with_tasks_of_its_own_does_not_hide_the_aggregates(tmp_path):
    for system, data, score in (("bc", "a", 10), ("dt", "a", 30), ("mopo", "b", 50)):
        make_run(tmp_path / "s" / f"{system}-{data}", [(9, s, [score + s]) for s in (0, 1)], system=system, data=data)
    assert gather(tmp_path / "s").complete() == (["bc", "dt"], ["a"], ["mopo"])
    text = Page(compare(tmp_path / "s", tmp_path / "c.html", reports=False).read_text()).text
    assert "Probability of improvement" in text and "Without mopo: not evaluated on a, or" in text and "1 task," in text
    assert "Without the tasks b: no normalised scores" in text and "Parameters, all seeds" in text
    assert "1,234finished2026-01-03 03:04" in text


def test_plain_runs_are_told_apart_by_what_differs(tmp_path):
    make_run(tmp_path / "a", [(200, 0, [10])], lr=0.1)
    make_run(tmp_path / "b", [(200, 0, [20])], lr=0.2)
    assert gather([tmp_path / "a", tmp_path / "b"]).rows == ["bc (lr 0.1)", "bc (lr 0.2)"]
    make_run(tmp_path / "c", [(200, 1, [20])], lr=0.1, seeds=[1], data="x/hopper/medium-v0")
    found = gather([tmp_path / "a", tmp_path / "c"])
    assert found.rows == ["bc"] and found.tasks == ["hopper-medium"]
    assert len(found.entries[0].last) == 2  # seeds of two runs are one entry


def test_different_data_of_one_name_are_different_tasks(tmp_path):
    """The seeds of a run at one site are no seeds of a run at another, though both call their log log.npz."""
    make_run(tmp_path / "a", [(200, 0, [10])], data="a/log.npz")
    make_run(tmp_path / "b", [(200, 1, [20])], data="b/log.npz", rows=8)
    make_run(tmp_path / "c", [(200, 1, [30])], data="/copy/of/a/log.npz", system="dt")
    assert gather([tmp_path / "a", tmp_path / "c"]).tasks == ["log"]
    found = gather([tmp_path / "a", tmp_path / "b"])
    assert found.tasks == ["a/log.npz", "b/log.npz"] and [len(entry.last) for entry in found.entries] == [1, 1]
    make_run(tmp_path / "d", [(200, 0, [20])], data="hopper/medium-v0")
    make_run(tmp_path / "e", [(200, 1, [20])], data="hopper-medium-v2.hdf5", rows=8)
    assert gather([tmp_path / "d", tmp_path / "e"]).tasks == ["hopper-medium-v0", "hopper-medium-v2"]
    make_run(tmp_path / "f", [(200, 1, [20])], data="a/log.npz", rows=7)  # the file has changed
    assert gather([tmp_path / "a", tmp_path / "f"]).tasks == ["a/log.npz #1", "a/log.npz #2"]


def test_normalised_scores_and_returns_are_not_mixed(tmp_path):
    make_run(tmp_path / "a", [(200, 0, [10])])
    run = make_run(tmp_path / "b", [(200, 1, [30])])
    (run / "eval.jsonl").write_text(json.dumps(json.loads((run / "eval.jsonl").read_text()) | {"normalized": None}))
    (entry,) = gather([tmp_path / "a", tmp_path / "b"]).entries
    assert entry.kind == "return" and entry.seed_means() == pytest.approx(returns(10, 30))


def test_datasets_of_a_sweep_keep_their_names(tmp_path):
    cells = []
    for i, name in enumerate(("hopper-medium-v0", "hopper-medium-v2")):
        make_run(tmp_path / "s" / f"bc-{name}", [(200, 0, [10.0 + i])], data=f"{name}.npz")
        cells.append(Cell(f"bc-{name}", "bc", "bc", name, "", [f"{name}.npz"], None, None, {}, [0]))
    Queue(tmp_path / "s").write(Plan("s", cells))
    found = gather(tmp_path / "s")
    assert found.tasks == ["hopper-medium-v0", "hopper-medium-v2"]
    assert "published" in markdown(found)


def test_runs_that_left_the_sweeps_file_are_told(sweep):
    make_run(sweep / "bc-old", [(200, 0, [10])], seeds=[0], lr=0.5)
    found = gather(sweep)
    assert [line for line in found.doubts if "not in its file" in line] == [
        "bc-old: in the sweep's folder, but not in its file"
    ]


def test_published_scores_stand_only_beside_scores_of_their_kind(tmp_path):
    run = make_run(tmp_path / "a", [(200, 0, [10])])
    line = json.loads((run / "eval.jsonl").read_text()) | {"normalized": None}
    (run / "eval.jsonl").write_text(json.dumps(line))
    found = gather(run)
    assert found.entries[0].kind == "return" and "published" not in markdown(found)
    assert found.complete()[0] == []  # nothing to aggregate


def test_published_returns_of_games_are_normalised_like_ours(tmp_path):
    run = make_run(tmp_path / "mbarc-krull", [(200, 0, [50, 60])], system="mbarc", data="x", seeds=[0])
    config = read_yaml(run / "config.yaml") | {"data": [], "env": "atari-rgb/krull"}
    write_yaml(run / "config.yaml", config)
    found = gather(run)
    assert found.tasks == ["atari/krull"]
    text = markdown(found)
    # 100 (3332.4 - 1598) / (2665.5 - 1598), and SimPLe's 2204.8
    assert "| *published:* MBARC (MBARC README) | 162.5 |" in text and "SimPLe" in text and "| 56.84 |" in text
    assert "best checkpoint, 1 seed, normalised here." in text and "of one seed: over episodes" in text
    theirs = next(r for r in csv.DictReader(io.StringIO(to_csv(found))) if r["row"].startswith("MBARC"))
    assert theirs["score"] == "normalised" and float(theirs["mean"]) == pytest.approx(100 * 1734.4 / 1067.5)
    assert "normalised here" in Page(re.sub(r'<a href="[^"#]+"', '<a href="#"', compare(run).read_text())).text
    export(run, tmp_path / "results")
    text = results_markdown(tmp_path / "results", tmp_path / "R.md")
    assert "| MBARC (MBARC README) | 162.5 |" in text and "1 seed, normalised here\n" in text


def test_a_sweep_without_any_evaluation_has_a_page(tmp_path):
    make_run(tmp_path / "s" / "a", [], status="running")
    text = Page(re.sub(r'<a href="[^"#]+"', '<a href="#"', compare(tmp_path / "s").read_text())).text
    assert "No evaluation has finished yet" in text and "not finished (running)" in text


def test_a_sweep_whose_cells_all_failed_at_once_has_a_page(tmp_path, capsys):
    cell = Cell("bc-mine", "bc", "bc", "mine", "", ["mine.npz"], None, None, {}, [0])
    queue = Queue(tmp_path / "s")
    queue.write(Plan("s", [cell]))
    queue.record(cell, "failed", error="mine.npz is gone")
    text = markdown(gather(tmp_path / "s"))
    assert "| bc | failed |" in text and "No evaluation has finished" in text and "bc-mine: mine.npz is gone" in text
    assert "bc-mine: mine.npz is gone" in Page(compare(tmp_path / "s").read_text()).text
    assert main(["report", str(tmp_path / "s"), "--json"]) == 2
    assert "no cell of" in capsys.readouterr().err


def test_a_sweep_without_a_simulator_says_so(tmp_path):
    run = make_run(tmp_path / "s" / "bc-mine", [], env=None, data="mine.npz")
    (run / "metrics.jsonl").write_text('{"step": 200, "seed": 0}\n')
    found = gather(tmp_path / "s")
    text = markdown(found)
    assert text.splitlines()[:3] == ["| | mine |", "|---|---|", "| bc | finished |"]
    assert "No environment was given" in text and "replaylab assess" in text and "Best checkpoint" not in text
    (row,) = csv.DictReader(io.StringIO(to_csv(found)))
    assert [row[k] for k in ("status", "step", "seeds", "hours")] == ["finished", "200", "2", "0.1"]
    page = Page(compare(tmp_path / "s", tmp_path / "c.html", reports=False).read_text())
    assert "replaylab assess" in page.text and "1 system, 1 task, 1 run " in page.text


def test_a_dataset_has_a_column_for_each_environment_it_was_played_in(sweep):
    run = sweep / "bc-hopper-medium"
    line = json.loads((run / "eval.jsonl").read_text().splitlines()[0]) | {"env": "Hopper-v5", "normalized": None}
    with open(run / "eval.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")
    found = gather(sweep)
    assert found.tasks == ["hopper-medium in d4rl/hopper", "hopper-medium in Hopper-v5", "hopper-expert"]
    assert found.at("dt, highest target", "hopper-medium in d4rl/hopper") is not None
    shutil.rmtree(sweep / "dt-hopper-medium")
    assert gather(sweep).instead("dt", "hopper-medium in d4rl/hopper") == "new"


@pytest.mark.parametrize("name", ["run.json", "config.yaml"])
def test_a_damaged_cell_does_not_hide_the_others(sweep, tmp_path, name):
    (sweep / "bc-hopper-medium" / name).write_text('{"status": [')
    page = compare(sweep, tmp_path / "c.html")
    found = gather(sweep)
    assert found.instead("bc", "hopper-medium") == "unreadable" and name in found.unfinished["bc-hopper-medium"]
    assert "| bc | unreadable | 105.0 ± 5.0 |" in markdown(found)
    assert page.read_text().count(f"{name} is not") == 1  # told once
    with pytest.raises(ReplaylabError, match=name):
        export(sweep, tmp_path / "results")


def test_the_format_is_that_of_the_suffix(sweep, tmp_path, capsys):
    one, two = str(sweep / "bc-hopper-medium"), str(sweep / "dt-hopper-medium")
    for runs in ([one], [one, two], [str(sweep)]):
        for suffix, begin in ((".md", "| | "), (".csv", "row,system"), (".html", "<!doctype html>")):
            out = tmp_path / "out" / f"r{suffix}"
            assert main(["report", *runs, "--out", str(out)]) == 0
            assert out.read_text().startswith(begin)
            if suffix != ".html":
                assert [p.name for p in out.parent.iterdir()] == [out.name]
            shutil.rmtree(out.parent)
        assert main(["report", *runs, "--out", str(tmp_path / "r.pdf")]) == 2
        assert "r.pdf: its name must end in .html or .md or .csv" in capsys.readouterr().err
    export(one, tmp_path / "results")
    assert main(["report", str(tmp_path / "results"), "--out", str(tmp_path / "r.html")]) == 2
    assert "r.html: its name must end in .md" in capsys.readouterr().err


def test_the_same_seed_twice_is_told(tmp_path):
    make_run(tmp_path / "s" / "a", [(200, 0, [30])], seeds=[0])
    make_run(tmp_path / "s" / "b", [(200, 1, [50])], seeds=[1])
    make_run(tmp_path / "s" / "c", [(200, 0, [90])], seeds=[0])
    found = gather(tmp_path / "s")
    assert len(found.entries) == 1 and found.entries[0].seed_means() == [90, 50]
    assert any(f"seed 0 is in {tmp_path / 's' / 'a'} too" in note for run in found.runs for note in run.notes)


# --- published numbers


def test_published_scores_have_a_protocol_and_add_up():
    for p in PUBLISHED:
        assert p.protocol and p.scores and p.kind in ("normalised", "return")
    corl = {p.label: p for p in PUBLISHED if p.source == "CORL"}
    means = {label: sum(v for v, _ in p.scores.values()) / len(p.scores) for label, p in corl.items()}
    # the averages that CORL prints itself
    for label, told in (("BC", 50.4), ("10%BC", 69.3), ("DT", 73.8), ("TD3+BC", 76.4), ("IQL", 81.6), ("EDAC", 92.9)):
        assert means[label] == pytest.approx(told, abs=0.12), label
    dice = next(p for p in PUBLISHED if p.label == "Diffusion-DICE")
    assert sum(v for v, _ in dice.scores.values()) / 9 == pytest.approx(90.6, abs=0.05)


def test_published_are_found_by_any_spelling():
    assert {p.label for p in published(["hopper_medium-v2"], ["dt"])} == {"DT"}
    assert published(["nobody-knows"]) == []
    assert canonical("mujoco/hopper/medium-v0") == canonical("hopper-medium.hdf5") == "hopper-medium"
    assert canonical("hopper-medium+hopper-expert") == "hopper-medium-expert"
    assert canonical("hopper-medium+walker2d-expert") == "hopper-medium+walker2d-expert"
    assert dataset_name("data/hopper/medium-v0") == "hopper-medium-v0" and dataset_name("logs/mine.npz") == "mine"
    assert next(p for p in published(["atari/pong"]) if p.label == "SimPLe").scores["atari/pong"] == (12.8, None)
