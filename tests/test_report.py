"""The report on fabricated run folders, and the pieces that pages are made of."""

import json
import re
import shutil

import numpy as np
import pytest
from pages import check_page

from replaylab import scores
from replaylab.config import write_yaml
from replaylab.data.episodes import from_rows
from replaylab.data.inspect import summarize
from replaylab.errors import ReplaylabError, UsageError
from replaylab.page import aligned, duration, number, size_of, table
from replaylab.report import report, summarize_runs
from replaylab.run import RunFolder

HOPPER = "d4rl/hopper"


@pytest.fixture(scope="module")
def data_summary():
    rng = np.random.default_rng(0)
    ends = np.arange(60) % 20 == 19
    meta = {"env_id": HOPPER, "source": "log.npz", "notes": ["a note about the data"]}
    return summarize(
        from_rows(rng.normal(size=(60, 3)), rng.uniform(-1, 1, (60, 2)), rng.normal(size=60), ends, meta=meta)
    )


def evaluation(step, seed, returns, env=HOPPER, **settings):
    known = scores.reference(env) is not None
    return {
        "step": step,
        "seed": seed,
        "env": env,
        "episodes": len(returns),
        "returns": returns,
        "lengths": [10] * len(returns),
        "normalized": scores.normalize(env, returns).tolist() if known else None,
        "settings": settings,
        "seconds": 1.5,
    }


def make_run(path, evaluations, summary=None, *, status="finished", metrics=None, info=(), **config):
    path.mkdir(parents=True)
    settings = {"system": "bc", "data": ["logs/hopper.npz"], "env": HOPPER, "steps": 200, "seeds": [0, 1]}
    write_yaml(path / "config.yaml", settings | config)
    machine = {"device": "cpu", "cores": 2, "torch": "2.13.0"}
    about = {"command": "replaylab train bc", "started": "2026-01-02T03:04:05", "finished": None}
    about |= {"seconds": 83.0, "status": status, "machine": machine, "data": summary, "parameters": 1234}
    (path / "run.json").write_text(json.dumps(about | dict(info)))
    if metrics is None:
        metrics = [
            {"step": s, "phase": "policy", "seed": seed, "seconds": 1.0, "loss": 1.0 / s, "gradient_norm": 2.0}
            for s in range(10, 210, 10)
            for seed in (0, 1)
        ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    (path / "eval.jsonl").write_text("".join(json.dumps(line) + "\n" for line in evaluations))
    return path


def two_seeds():
    """The best evaluation comes first, so that a report of the best would show."""
    return [
        evaluation(100, 0, [3000.0, 3000.0]),
        evaluation(100, 1, [3000.0, 3000.0]),
        evaluation(200, 0, [1000.0, 1200.0]),
        evaluation(200, 1, [1400.0, 1600.0]),
    ]


# --- the table as data


def test_score_is_the_last_over_seeds(tmp_path):
    (row,) = summarize_runs([make_run(tmp_path / "a", two_seeds())])
    assert (row["run"], row["system"], row["env"], row["step"]) == ("a", "bc", HOPPER, 200)
    assert (row["seeds"], row["episodes"], row["status"], row["seconds"]) == (2, 4, "finished", 83)
    assert row["return"]["mean"] == 1300 and row["return"]["unit"] == "seed"
    assert row["return"]["error"] == pytest.approx(200)  # seed means 1100 and 1500: s = 282.8, over sqrt(2)
    assert (row["return"]["low"], row["return"]["high"]) == (1100, 1500)
    assert row["normalized"]["mean"] == pytest.approx(float(scores.normalize(HOPPER, 1300)))
    assert row["notes"] == []
    json.dumps(row, allow_nan=False)


def test_one_seed_is_over_its_episodes(tmp_path):
    run = make_run(tmp_path / "a", [evaluation(200, 0, [1.0, 3.0])], seeds=[0])
    (row,) = summarize_runs([run])
    assert row["return"]["unit"] == "episode" and row["return"]["error"] == pytest.approx(1)


def test_later_line_wins_and_a_cut_line_is_ignored(tmp_path):
    run = make_run(tmp_path / "a", [*two_seeds(), evaluation(200, 0, [0.0, 0.0])])
    with open(run / "eval.jsonl", "a") as file:
        file.write('{"step": 300, "seed": 0, "retu')
    (row,) = summarize_runs([run])
    assert row["step"] == 200 and row["return"]["mean"] == 750 and row["episodes"] == 4


def test_settings_make_rows_of_their_own(tmp_path):
    lines = [evaluation(200, s, [r], target=r, scale=1) for s in (0, 1) for r in (1800.0, 3600.0)]
    first, second = summarize_runs([make_run(tmp_path / "a", lines)])
    assert (first["label"], second["label"]) == ("target 1800", "target 3600")
    assert (first["return"]["mean"], second["return"]["mean"]) == (1800, 3600)


def test_of_many_evaluations_each_run_keeps_its_own(tmp_path):
    plain = [make_run(tmp_path / f"plain{i}", [evaluation(9, 0, [1.0])]) for i in range(10)]
    swept = make_run(tmp_path / "swept", [evaluation(9, 0, [2.0]), *(evaluation(9, 0, [3.0], a=i) for i in (1, 2))])
    asked = make_run(tmp_path / "asked", [evaluation(9, 0, [4.0], target=t) for t in (10, 20)])
    page = report([*plain, swept, asked], tmp_path / "page.html").read_text()
    table, rest = page.split("3 evaluations with other settings")
    assert all(f"<b>{run.name}</b>" in table for run in (*plain, swept, asked)) and "target 10" in table
    assert "a 1" in rest and "a 2" in rest and "target 20" in rest and "<td><b>plain" not in rest


def test_unfinished_runs_say_so(tmp_path):
    lines = [evaluation(100, 0, [1.0]), evaluation(200, 0, [2.0]), evaluation(100, 1, [3.0]), evaluation(100, 2, [])]
    lines[1]["returns"] = lines[1]["normalized"] = [2.0, float("nan")]
    lines[3]["returns"] = [float("nan")] * 2
    lines[0]["lengths"] = [100_000]
    run = make_run(tmp_path / "a", lines, status="interrupted", seeds=[0, 1, 2])
    (row,) = summarize_runs([run])
    notes = " / ".join(row["notes"])
    assert "interrupted" in notes and "2 of 3 seeds evaluated" in notes and "different steps, 100 to 200" in notes
    assert "1 evaluation without a single finished episode" in notes and "1 return not finite" in notes
    assert "1 episode cut off after 100,000 steps" in notes
    assert row["return"]["mean"] == 2.5


def test_a_failed_run_says_why(tmp_path):
    run = make_run(tmp_path / "a", [], status="failed", info={"error": "loss became\nNaN"})
    assert summarize_runs([run])[0]["notes"] == ["not finished (failed: loss became NaN): this is what there is so far"]


def test_the_report_of_a_folder_is_not_in_the_way_of_its_runs(tmp_path, capsys):
    """`report runs` writes runs/report.html, which the shell hands over with the rest of `runs/*`."""
    make_run(tmp_path / "runs" / "a", two_seeds())
    report(tmp_path / "runs", tmp_path / "runs" / "report.html")
    given = sorted((tmp_path / "runs").iterdir())
    assert [row["run"] for row in summarize_runs(given)] == ["a"]
    assert "note: left out: " in capsys.readouterr().err
    with pytest.raises(UsageError, match="does not exist"):
        summarize_runs([*given, tmp_path / "runs" / "b"])
    with pytest.raises(UsageError, match="none of these is a run folder"):
        summarize_runs(given[1:] + given[1:])


def test_a_run_that_is_named_twice_counts_once(tmp_path):
    for name in "ab":
        make_run(tmp_path / "many" / name, two_seeds())
    rows = summarize_runs([tmp_path / "many", tmp_path / "many" / ".." / "many" / "b"])
    assert [row["run"] for row in rows] == ["a", "b"] and len(summarize_runs(tmp_path / "many" / "a")) == 1


def test_a_damaged_run_does_not_hide_the_others(tmp_path):
    good, bad = (make_run(tmp_path / name, two_seeds()) for name in ("good", "bad"))
    for name in ("run.json", "config.yaml"):
        whole = (bad / name).read_text()
        (bad / name).write_text("{" + whole[:30])
        rows = summarize_runs([good, bad])
        assert [row["status"] for row in rows] == ["finished", "unreadable"] and name in rows[1]["notes"][0]
        assert "unreadable" in check_page(report([good, bad], tmp_path / "page.html")).text
        (bad / name).write_text(whole)


def test_not_a_run_folder(tmp_path):
    (tmp_path / "holiday").mkdir()
    with pytest.raises(UsageError, match="holiday"):
        summarize_runs([tmp_path / "holiday"])
    with pytest.raises(UsageError, match="no run folders"):
        report([], tmp_path / "page.html")
    run = make_run(tmp_path / "a", [])
    (tmp_path / "page.html").mkdir()
    with pytest.raises(UsageError, match="cannot write"):
        report([run], tmp_path / "page.html")
    with pytest.raises(UsageError, match=r"cannot write .*page\.md: its name must end in \.html"):
        report([run], tmp_path / "page.md")


# --- the page


def test_page_of_two_runs(tmp_path, data_summary):
    a = make_run(tmp_path / "one" / "run", two_seeds(), data_summary)
    b = make_run(
        tmp_path / "two" / "run", [evaluation(200, s, [500.0 + s]) for s in (0, 1)], data_summary, batch_size=64
    )
    page = check_page(report([a, b], tmp_path / "out" / "page.html"))
    assert str(a) in page.text and str(b) in page.text  # equal names are told apart by their paths
    low, high = scores.normalize(HOPPER, [1100, 1500])
    mean, error = (low + high) / 2, (high - low) / 2
    assert " ± ".join(aligned([mean, error], error)) in page.text
    assert "1,300 ± 200" in page.text
    assert "Learning curve in d4rl/hopper" in page.text and "2 seeds" in page.text and "95%" in page.text
    assert "batch_size" in page.text and "a note about the data" in page.text and "2.13.0" in page.text
    assert page.text.count("a note about the data") == 1  # one data set, shown once
    assert "Phase: policy" in page.text and "gradient_norm" in page.text and "1 min 23 s" in page.text
    assert page.html.count('role="img"') >= 5
    assert len(page.html) < 200_000


def test_page_of_one_run_without_environment(tmp_path, data_summary):
    run = make_run(tmp_path / "a", [], data_summary, env=None)
    page = check_page(report([run], tmp_path / "page.html"))
    assert "No environment was given: nothing was evaluated. `replaylab assess RUN`" in page.text
    page = check_page(report([make_run(tmp_path / "b", [], data_summary)], tmp_path / "page.html"))
    assert "No evaluation has finished yet." in page.text


def test_long_training_curves_are_averaged(tmp_path):
    metrics = [{"step": s, "phase": "p", "seed": 0, "seconds": 0.1, "loss": 1.0} for s in range(3000)]
    metrics += [{"step": 3000, "phase": "p", "seed": 0, "loss": float("inf"), "word": "text", "flag": True}]
    page = check_page(report([make_run(tmp_path / "a", [], metrics=metrics)], tmp_path / "page.html"))
    assert "a point is the mean of up to 21 logged values" in page.text
    assert "word" not in page.text and len(page.html) < 40_000


def test_without_run_json_or_logs(tmp_path, data_summary):
    run = make_run(tmp_path / "a", [], data_summary)
    for name in ("run.json", "metrics.jsonl", "eval.jsonl"):
        (run / name).unlink()
    page = check_page(report([run], tmp_path / "page.html"))
    assert "unknown" in page.text and "No training metrics were logged." in page.text


EVIL = '<script>alert(1)</script>"><img src=x onerror=alert(2)>\ud800'


def poison(value):
    """The same structure with every string made hostile."""
    if isinstance(value, dict):
        return {k: poison(v) for k, v in value.items()}
    if isinstance(value, list):
        return [poison(v) for v in value]
    return EVIL if isinstance(value, str) else value


def test_hostile_content_is_escaped(tmp_path, data_summary):
    folder = tmp_path / "<script>alert(3)<"
    metrics = [{"step": 1, "phase": EVIL, "seed": EVIL, EVIL: 1.0}]
    summary = poison(data_summary | {"extras": {EVIL: "f"}, "source": [EVIL, EVIL]})
    lines = [evaluation(200, seed, [1.0], **{EVIL: n}) | {"env": EVIL, "seed": EVIL} for seed in (0, 1) for n in (1, 2)]
    info = {"status": EVIL, "machine": {EVIL: EVIL}, "command": EVIL, "started": EVIL, "parameters": EVIL}
    config = {"system": EVIL, "data": [EVIL], "env": EVIL, "note": {EVIL: EVIL}}
    run = make_run(folder, lines, summary, metrics=metrics, info=info, **config)
    other = make_run(tmp_path / "b", two_seeds(), data_summary)
    page = check_page(report([run, other], tmp_path / "page.html"))
    assert "<script>alert(1)</script>" in page.text and "<script>alert(3)<" in page.text
    check_page(report([run], tmp_path / "page.html"))


JUNK = [None, True, "x", -1, 1e308, float("nan"), 10**400, [], [1, "a"], {}, {"mean": None}]


@pytest.mark.parametrize("junk", JUNK, ids=lambda junk: repr(junk)[:20])
def test_wrong_types_never_crash(tmp_path, data_summary, junk):
    """Whatever a folder holds, the answer is a page or one clear error."""
    for key in ("data", "seconds", "status", "machine", "parameters", "started"):
        run = make_run(tmp_path / "a", two_seeds(), data_summary, info={key: junk})
        check_page(report([run], tmp_path / "page.html"))
        shutil.rmtree(run)
    for key in ("system", "data", "env", "steps", "seeds"):
        run = make_run(tmp_path / "a", two_seeds(), data_summary, **{key: junk})
        check_page(report([run, make_run(tmp_path / "b", [])], tmp_path / "page.html"))
        shutil.rmtree(run), shutil.rmtree(tmp_path / "b")
    lines = [
        evaluation(100, 0, [1.0]) | {key: junk} for key in ("step", "seed", "env", "returns", "normalized", "settings")
    ]
    run = make_run(
        tmp_path / "a", [*lines, junk], metrics=[{"step": junk, "loss": junk}, {"step": 1, "loss": junk}, junk]
    )
    check_page(report([run], tmp_path / "page.html"))
    for key in data_summary:
        (run / "run.json").write_text(json.dumps({"data": data_summary | {key: junk}}))
        check_page(report([run], tmp_path / "page.html"))
    for content in ("{", json.dumps([junk])):
        (run / "run.json").write_text(content)
        with pytest.raises(ReplaylabError, match=r"run\.json"):
            report([run], tmp_path / "page.html")


# --- numbers, ticks, charts


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (0.00123, "0.00123"),
        (-0.25, "-0.25"),
        (53.514, "53.51"),
        (123.46, "123.5"),
        (1426.4, "1426"),
        (9999.9, "10k"),
        (12_345, "12.35k"),
        (250_000, "250k"),
        (999_999, "1M"),
        (1_234_567, "1.23M"),
        (2e15, "2e15"),
        (3.1e-5, "3.1e-5"),
        (-1e-9, "-1e-9"),
        (float("inf"), "∞"),
        (float("nan"), "–"),
        (None, "–"),
        ("x", "–"),
    ],
)
def test_numbers(value, shown):
    assert number(value) == shown


def test_numbers_with_their_error():
    assert aligned([49.626, 0.996], 0.996) == ["49.6", "1.0"]
    assert aligned([1594.85, 32.4], 32.4) == ["1,595", "32"]
    assert aligned([0.51234, 0.0123], 0.0123) == ["0.512", "0.012"]
    assert aligned([5.0], 0.0) == ["5"]


def test_units():
    assert [duration(s) for s in (0.25, 41.2, 59.7, 200)] == ["0.2 s", "41 s", "1 min 00 s", "3 min 20 s"]
    assert [duration(s) for s in (7500, None)] == ["2 h 05 min", "–"]
    assert [size_of(n) for n in (0, 2048, 3.5 * 2**20, 2**43)] == ["0 bytes", "2 KiB", "3.5 MiB", "8 TiB"]


def test_columns_of_numbers_stand_right():
    made = table(["name", "value", "note"], [["1", "-2.5", "x"], ["2", "–", "3 of 4"]])
    assert "<td>1</td><td class=n>-2.5</td><td>x</td>" in made


def test_a_folder_of_runs_stands_for_the_runs_in_it(tmp_path):
    for name in ("b", "a"):
        make_run(tmp_path / "many" / name, two_seeds())
    (tmp_path / "many" / "notes.txt").write_text("not a run")
    assert [row["run"] for row in summarize_runs([tmp_path / "many"])] == ["a", "b"]


def test_a_shorter_evaluation_does_not_replace_a_longer_one(tmp_path):
    long, short = [evaluation(200, seed, [1000.0] * 5) for seed in (0, 1)], [evaluation(200, 0, [3000.0] * 2)]
    (row,) = summarize_runs([make_run(tmp_path / "a", long + short)])
    assert row["episodes"] == 10 and row["return"]["mean"] == 1000
    (row,) = summarize_runs([make_run(tmp_path / "b", short + long)])
    assert row["episodes"] == 10
    again = [evaluation(200, 0, [2000.0] * 5)]  # a resumed run repeats itself
    (row,) = summarize_runs([make_run(tmp_path / "c", long + again)])
    assert row["return"]["mean"] == 1500


def test_steps_are_those_of_all_phases_and_a_killed_run_is_told(tmp_path):
    done = make_run(tmp_path / "done", [], info={"planned": 500})
    page = check_page(report([done], tmp_path / "a.html"))
    assert "of 500" not in page.text and summarize_runs([done])[0]["step"] == 200
    running = make_run(tmp_path / "running", [], status="running", info={"planned": 500, "seconds": 0.0})
    assert summarize_runs([running])[0]["status"] == "running"  # without its lock nobody can tell
    (running / ".lock").write_text("")
    (row,) = summarize_runs([running])
    assert (row["status"], row["seconds"], row["steps"]) == ("killed", 1.0, 500)
    assert "200 of 500" in check_page(report([running], tmp_path / "b.html")).text
    with RunFolder(running).lock():
        assert summarize_runs([running])[0]["status"] == "running"


def test_a_score_is_held_against_the_data(tmp_path, data_summary):
    run = make_run(tmp_path / "a", two_seeds(), data_summary)
    page = report(run, tmp_path / "page.html").read_text()
    low, high = scores.REFERENCES["hopper"]
    mean, best = (100 * (data_summary["return"][key] - low) / (high - low) for key in ("mean", "max"))
    assert f"logs/hopper.npz: normalised score {mean:.1f} on average, {best:.1f} at best." in page
    other = make_run(tmp_path / "b", [evaluation(9, 0, [1.0], env="reacher2d")], data_summary, env="reacher2d")
    assert "For comparison" not in report(other, tmp_path / "page.html").read_text()
    nowhere = data_summary | {"env_id": None}  # nobody knows that it is from where `eval --env` played
    played = make_run(tmp_path / "c", [evaluation(9, 0, [1.0], env="Pendulum-v1")], nowhere, env=None)
    assert "For comparison" not in report(played, tmp_path / "page.html").read_text()


def test_what_training_noted_is_no_warning(tmp_path):
    lines, notes = two_seeds(), {"notes": ["imagines 5 steps"]}
    page = report(make_run(tmp_path / "a", lines, info=notes), tmp_path / "page.html").read_text()
    assert '<p class="note">Training noted: imagines 5 steps.</p>' in page and "<li>" not in page
    page = report(make_run(tmp_path / "b", lines[:1], info=notes), tmp_path / "page.html").read_text()
    assert "<li>d4rl/hopper: 1 of 2 seeds evaluated</li>" in page and "Learning curve" not in page


def test_every_evaluation_has_its_own_colour(tmp_path):
    lines = [evaluation(200, s, [r], target=r) for s in (0, 1) for r in (1.0, 2.0, 3.0)]
    runs = [make_run(tmp_path / "a", lines), make_run(tmp_path / "b", two_seeds())]
    page = report(runs, tmp_path / "page.html").read_text()
    bars = page[page.index("Last score") : page.index("Learning curve")]
    colours = re.findall(r'class="bar (c\d)"', bars)
    assert len(colours) == len(set(colours)) == 4


def test_curves_say_what_they_show(tmp_path):
    metrics = [{"step": s, "phase": "policy", "seed": 0, "alpha": 1.0, "unheard_of": s} for s in (1, 2)]
    page = report(make_run(tmp_path / "a", [], metrics=metrics), tmp_path / "page.html").read_text()
    assert "Weight of the policy&#x27;s entropy beside the reward. One seed." in page
    assert "<figcaption>One seed.</figcaption>" in page


def test_noise_is_told_in_words(tmp_path):
    noisy = evaluation(9, 0, [1.0], noise={"action_scale": 0.5, "action_rate": 1.0})
    run = make_run(tmp_path / "a", [evaluation(9, 0, [2.0]), noisy])
    assert [row["label"] for row in summarize_runs(run)] == ["", "noise action_scale 0.5, noise action_rate 1"]
