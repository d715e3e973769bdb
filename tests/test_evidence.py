"""Results that are kept as files, and the text that is made from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from comparing import make_run, make_sweep

from replaylab.cli import main
from replaylab.compare import export, holds_results, results_markdown
from replaylab.compare.evidence import FORMAT
from replaylab.errors import UsageError


@pytest.fixture
def sweep(tmp_path):
    return make_sweep(tmp_path)


def test_evidence_is_small_and_the_text_is_made_from_it(sweep, tmp_path):
    folder = tmp_path / "results"
    for cell in ("bc-hopper-medium", "dt-hopper-medium"):
        export(sweep / cell, folder, note="shared the GPU" if cell.startswith("dt") else "")
    bench = {"machine": {"device": "NVIDIA H200", "cores": 16, "torch": "2.11"}}
    row = {"case": "sac-update", "unit": "ms"}
    bench["rows"] = [row | {"what": "sac update", "figure": 0.25}, row | {"what": "eight seeds", "figure": 0.5}]
    (folder / "bench-h200.json").write_text(json.dumps(bench))
    (folder / "curve.json").write_text('{"of": "another kind"}')
    result = json.loads((folder / "bc-hopper-medium.json").read_text())
    assert (folder / "bc-hopper-medium.json").stat().st_size < 4000
    (only,) = result["scores"]
    assert [line["mean"] for line in only["last"]] == [50, 70] and [line["mean"] for line in only["best"]] == [90, 80]
    assert only["last"][0] | {"return": 0} == {
        "seed": 0, "step": 200, "episodes": 2, "mean": 50, "std": 10, "min": 40, "max": 60, "return": 0,
    }  # fmt: skip
    assert result["settings"] == {"steps": 200} and result["date"] == "2026-01-03" and result["seconds"] == 360
    debug = make_run(tmp_path / "debug", [(500, 0, [1])], preset="debug", steps=500, hidden=[64, 64], lr=0.5)
    (path,) = export(debug, tmp_path / "debug.json")
    assert path == tmp_path / "debug.json"
    assert json.loads(path.read_text())["settings"] == {"lr": 0.5}  # neither defaults nor the preset's
    text = results_markdown(folder, tmp_path / "R.md")
    assert (
        "| bc | `steps 200` | **60 ± 10** | 85.0 ± 5.0 | 60.0 [50.0, 70.0] | 2 x 2 | 6 min 00 s | NVIDIA H200 |" in text
    )
    assert "| dt, target 3600 |" in text and "| DT (CORL) | 65.1 ± 1.6 |" in text and "- CORL: D4RL v2" in text
    assert "1 further evaluation of these" in text and "| dt-hopper-medium | target 1800 | **30.50 ± 0.50** |" in text
    assert (
        "\n- dt-hopper-medium: shared the GPU\n" in text
        and "dt-hopper-medium\n```\nreplaylab train dt\n" in text
        and "2026-01-03" in text
    )
    assert "| `sac-update` | sac update | 0.25 ms | 12.9 ms (GORMPO) |" in text
    assert "| `sac-update` | eight seeds | 0.5 ms |  |" in text  # the original was timed with one
    with pytest.raises(UsageError, match="no result files"):
        results_markdown(tmp_path / "sweeps", tmp_path / "R.md")


def test_the_evidence_names_its_own_folder_and_only_files_that_are_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    export(make_run(Path("a"), [(200, 0, [10])]), "mine/kept")
    text = results_markdown("mine/kept", "R.md")
    assert "`replaylab report mine/kept --out R.md` from the files in `mine/kept/`" in text
    assert "[a](mine/kept/a.json)" in text and "NOTES.md" not in text
    Path("NOTES.md").write_text("")
    assert "[NOTES.md](NOTES.md)" in results_markdown("mine/kept", "R.md")


def test_evidence_of_a_run_without_a_simulator_has_a_row(tmp_path):
    run = make_run(tmp_path / "a", [], env=None)
    info = json.loads((run / "run.json").read_text()) | {"command": "-"}  # started by `python -`
    (run / "run.json").write_text(json.dumps(info))
    export(run, tmp_path / "results")
    text = results_markdown(tmp_path / "results", tmp_path / "R.md")
    assert "| bc | `steps 200` | not evaluated |  |  |  | 6 min 00 s | NVIDIA H200 | 2026-01-03 | [a]" in text
    assert "```" not in text


def test_a_sweep_is_exported_run_by_run(sweep, tmp_path, capsys):
    folder = tmp_path / "results"
    assert main(["report", str(sweep), "--export", str(folder)]) == 0
    names = ["bc-hopper-expert.json", "bc-hopper-medium.json", "dt-hopper-medium.json"]
    assert capsys.readouterr().out.splitlines() == [f"wrote {folder / name}" for name in names]
    assert sorted(p.name for p in folder.iterdir()) == names
    assert main(["report", str(sweep / "bc-hopper-medium"), "--export", str(tmp_path / "one.json")]) == 0
    assert capsys.readouterr().out == f"wrote {tmp_path / 'one.json'}\n" and (tmp_path / "one.json").is_file()
    with pytest.raises(UsageError, match="one file for 3 runs"):
        export(sweep, tmp_path / "one.json")
    make_run(tmp_path / "again" / "bc-hopper-medium", [])
    with pytest.raises(UsageError, match=r"two of the runs would be .*bc-hopper-medium\.json"):
        export([sweep, tmp_path / "again"], folder)


def test_from_runs_to_the_evidence_by_the_command_line(sweep, tmp_path, capsys):
    folder = tmp_path / "results"
    folder.mkdir()
    assert main(["report", str(sweep / "bc-hopper-medium"), "--export", str(folder)]) == 0
    assert main(["report", str(folder), "--out", str(tmp_path / "RESULTS.md")]) == 0
    assert (tmp_path / "RESULTS.md").read_text() == results_markdown(folder, tmp_path / "RESULTS.md")
    assert capsys.readouterr().out.count("wrote") == 2
    assert main(["report", str(folder), "--json"]) == 2 and "are JSON already" in capsys.readouterr().err
    assert main(["report", str(sweep), "--json", "--out", "x.html"]) == 2
    assert "--out and --json are different reports" in capsys.readouterr().err


def test_the_committed_results_are_made_from_the_committed_files(monkeypatch):
    monkeypatch.chdir(Path(__file__).parent.parent)
    text = results_markdown("benchmarks/results", "benchmarks/RESULTS.md")
    assert Path("benchmarks/RESULTS.md").read_text() == text


def test_an_export_replaces_only_its_own_result(tmp_path, capsys):
    first, longer, other = (tmp_path / name / "a" for name in "xyz")
    make_run(first, [(200, 0, [10])])
    make_run(longer, [(400, 0, [20])], steps=400)
    make_run(other, [(200, 0, [30])], data="walker2d-medium.npz")
    (kept,) = export(first, tmp_path / "r")
    export(longer, tmp_path / "r")
    assert json.loads(kept.read_text())["steps"] == 400
    with pytest.raises(UsageError, match=r"a.json holds the result of a run with another task: remove it"):
        export(other, tmp_path / "r")
    (tmp_path / "mine.json").write_text("[1, 2]")
    with pytest.raises(UsageError, match=r"mine.json holds something else"):
        export(first, tmp_path / "mine.json")
    assert (tmp_path / "mine.json").read_text() == "[1, 2]" and json.loads(kept.read_text())["task"] == "hopper-medium"


def test_a_damaged_result_is_named(tmp_path):
    (whole,) = export(make_run(tmp_path / "a", [(200, 0, [10])]), tmp_path / "r")
    kept = whole.read_text()
    for change, words in (
        ({"scores": [{}]}, "it lacks 'settings'"),
        ({"scores": 3}, "int"),
        ({"format": FORMAT}, "'task'"),
    ):
        values = {k: v for k, v in json.loads(kept).items() if k != "task" or "scores" in change} | change
        whole.write_text(json.dumps(values, indent=1))
        with pytest.raises(UsageError, match=rf"a.json is no whole result \(.*{words}.*\): export its run again"):
            results_markdown(tmp_path / "r", tmp_path / "R.md")
    whole.write_text(kept)
    (tmp_path / "r" / "b.json").write_bytes(b"\xff\x00")
    assert holds_results(tmp_path / "r")
    with pytest.raises(UsageError, match=r"b\.json is not valid JSON"):
        results_markdown(tmp_path / "r", tmp_path / "R.md")
