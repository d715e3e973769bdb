from __future__ import annotations

import json
import re

import replaylab
from replaylab.run import RunFolder


def make_run(path, system="dt", **info):
    path.mkdir()
    (path / "config.yaml").write_text(f'system: "{system}"\nseeds: [0, 1]\nsteps: 10\n')
    (path / "run.json").write_text(json.dumps({"status": "finished"} | info))
    return RunFolder(path)


def line(target, seed, returns):
    settings = {"target": target}
    return {
        "step": 10,
        "seed": seed,
        "env": "d4rl/hopper",
        "settings": settings,
        "returns": returns,
        "normalized": None,
    }


def test_the_return_sweep_shows_what_was_asked_and_achieved(tmp_path):
    run = make_run(tmp_path / "r", data={"return": {"max": 3222.5}})
    run.append("eval.jsonl", [line(3600.0, 0, [3000.0, 3100.0]), line(3600.0, 1, [2000.0])])
    page = tmp_path / "page.html"
    assert "Asked and achieved" not in replaylab.report([run.path], page).read_text()  # one target is no sweep
    run.append("eval.jsonl", [line(900.0, 0, [1000.0]), line(900.0, 1, [950.0])])
    text = replaylab.report([run.path], page).read_text()
    assert "Asked and achieved return" in text and "best in the data" in text
    cells = re.findall(r"<td[^>]*>(.*?)</td>", text[text.index("Asked and achieved return</h2>") :])
    assert cells[:8] == ["900", "975", "950", "1000", "3600", "2525", "2000", "3050"]


def test_a_sweep_with_other_settings_has_a_picture_of_its_own(tmp_path):
    run = make_run(tmp_path / "r", data={"return": {"max": 20.0}})
    for temperature in (1.0, 0.1):
        lines = [line(target, 0, [target / 2]) for target in (20.0, 0.0)]
        run.append(
            "eval.jsonl", [each | {"settings": each["settings"] | {"temperature": temperature}} for each in lines]
        )
    text = replaylab.report([run.path], tmp_path / "page.html").read_text()
    assert "d4rl/hopper, temperature 1.0" in text and "d4rl/hopper, temperature 0.1" in text


def test_broken_findings_do_not_break_the_page(tmp_path):
    run = make_run(tmp_path / "r", data={"return": [1]})
    run.append("eval.jsonl", [line(1.0, 0, [1.0]), line(2.0, 0, [1.0])])
    assert "not readable" in replaylab.report([run.path], tmp_path / "page.html").read_text()
    for system in ("no-such-system", "../../etc", "__init__"):
        strange = make_run(tmp_path / system.replace("/", ""), system)
        assert replaylab.report([strange.path], tmp_path / "page.html").exists()


def test_two_runs_share_a_section(tmp_path):
    for name in "ab":
        run = make_run(tmp_path / name)
        run.append("eval.jsonl", [line(1.0, 0, [1.0]), line(2.0, 0, [1.0])])
    text = replaylab.report([tmp_path / "a", tmp_path / "b"], tmp_path / "page.html").read_text()
    assert text.count("<h2>Asked and achieved return</h2>") == 1
