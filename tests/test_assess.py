"""Assessing a run folder from its logs: what is told, shown and refused."""

from __future__ import annotations

import dataclasses
import json
import random

import numpy as np
import pytest
from test_offpolicy import TINY, Constant, chain, habits

import replaylab
from replaylab import offpolicy
from replaylab.algos import Spaces
from replaylab.errors import DataError, UsageError
from replaylab.offpolicy import assess, assess_agent
from replaylab.results import read_runs
from replaylab.sections.common import without_simulator


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("assess")
    replaylab.save(habits(), folder / "train.npz")
    replaylab.save(habits(10, seed=3), folder / "held.npz")
    out = replaylab.train(
        "bc", folder / "train.npz", preset="debug", steps=20, seeds=[0, 1], device="cpu", out=folder / "run"
    )
    return folder, out


def test_assess_a_run_folder(run):
    folder, out = run
    found = assess(out, folder / "held.npz", device="cpu", budget=TINY)
    assert json.loads((out / "offpolicy.json").read_text()) == json.loads(json.dumps(found, allow_nan=False))
    assert found["seen"] == 0 and found["rows"] == 250 and found["seeds"] == [0, 1] and found["system"] == "bc"
    assert found["support"]["states"] and found["fqe"]["gamma"] == 0.99
    lines = offpolicy.summary(found)
    assert (
        lines[0].startswith("data: discounted return") and lines[2].startswith("seed 1: ") and "- Nothing" in str(lines)
    )
    own = assess(out, device="cpu", budget=TINY, gamma=np.float32(0.5))  # written as JSON
    assert own["seen"] == 1 and own["rows"] == 1000 and own["fqe"]["gamma"] == 0.5
    (folder / "other.npz").write_bytes((folder / "train.npz").read_bytes())
    same = assess(out, [folder / "other.npz"], device="cpu", budget=TINY)
    assert same["seen"] == 1  # its own data under another name is still its own
    assert same["fqe"]["policies"][0]["mean"] == assess(out, device="cpu", budget=TINY)["fqe"]["policies"][0]["mean"]


def test_the_runs_data_may_be_gone(run, monkeypatch):
    folder, out = run

    def gone(*_, **__):
        raise DataError("gone")

    held = replaylab.load(folder / "held.npz")
    monkeypatch.setattr(offpolicy, "load", gone)
    with pytest.raises(UsageError, match="name a log"):
        assess(out, device="cpu", budget=TINY)
    assert assess(out, held, device="cpu", budget=TINY)["support"]["states"] is None


def test_the_report_shows_it(run):
    folder, out = run
    assess(out, folder / "held.npz", device="cpu", budget=TINY)
    ((title, body),) = without_simulator(read_runs([out])[0])
    assert title == "Without a simulator" and "What cannot be known" in body and "policy, seed 1" in body
    assert body.count("<svg") >= 4 and "Nothing here was measured" in body and "assess` again" not in body
    path = out / "offpolicy.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"step": 5}))
    assert "at step 5; the run is at step 20" in without_simulator(read_runs([out])[0])[0][1]


def damaged(value, rng):
    """The same structure with something wrong in it."""
    odd = [None, "<script>", -1, 1e400, float("nan"), [], {}, True, [None], "x" * 50]
    if rng.random() < 0.04:
        return rng.choice(odd)
    if isinstance(value, dict):
        return {k: damaged(v, rng) for k, v in value.items() if rng.random() > 0.02}
    return [damaged(v, rng) for v in value] if isinstance(value, list) else value


def test_a_broken_file_breaks_nothing(run):
    folder, out = run
    assess(out, folder / "held.npz", device="cpu", budget=TINY)
    path, good, (shown,) = out / "offpolicy.json", (out / "offpolicy.json").read_text(), read_runs([out])
    rng = random.Random(0)
    for text in ["", "{", "[]", "null", "{}", "3", "[" * 100_000]:
        path.write_text(text)
        assert len(without_simulator(shown)) == 1
    for _ in range(150):
        path.write_text(json.dumps(damaged(json.loads(good), rng)))
        assert "<script>" not in without_simulator(shown)[0][1]
    path.unlink()
    assert without_simulator(shown) == []


def test_a_policy_that_is_slow_to_ask_is_asked_about_fewer_rows():
    log = chain()
    agent = Constant(0.3)
    agent.effort = 4
    budget = dataclasses.replace(TINY, rows=len(log))
    found = [assess_agent(a, Spaces.of(log), [0], log, budget=budget)["rows"] for a in (Constant(0.3), agent)]
    assert found[0] == len(log) and len(log) / 8 < found[1] < len(log) / 2


def test_a_part_of_a_file_is_not_taken_for_the_whole(run, tmp_path):
    folder, _ = run
    whole = replaylab.load(folder / "train.npz")
    part, rest = whole.select(range(20)), whole.select(range(20, 40))
    out = replaylab.train("bc", part, preset="debug", steps=5, device="cpu", out=tmp_path / "run")
    with pytest.raises(UsageError, match="was trained on other episodes than its file holds now"):
        assess(out, device="cpu", budget=TINY)
    found = assess(out, rest, device="cpu", budget=TINY)  # was said to be all seen
    assert found["seen"] is None and any("What the policy was trained on" in line for line in found["limits"])
    page = replaylab.report([out], tmp_path / "report.html").read_text()
    assert "it is not known how many of the episodes were trained on" in page
    assert assess(out, rest, train=part, device="cpu", budget=TINY)["seen"] == 0
    assert assess(out, part, train=part, device="cpu", budget=TINY)["seen"] == 1


def test_what_cannot_be_assessed_is_one_line(run):
    folder, out = run
    log = replaylab.load(folder / "held.npz")
    for wrong, told in {"train": "train must be the Episodes", "gamma": "gamma must be at least 0"}.items():
        with pytest.raises(UsageError, match=told):
            assess(out, log, device="cpu", budget=TINY, **{wrong: "x"})
    with pytest.raises(UsageError, match=r"budget must be a replaylab\.offpolicy\.Budget, such as QUICK or FULL"):
        assess(out, log, device="cpu", budget=5)
    with pytest.raises(UsageError, match="data is a path or a list of paths, not ndarray"):
        assess(out, log.observations, device="cpu")
    with pytest.raises(DataError, match="rewards holds NaN or infinity"):
        assess(out, dataclasses.replace(log, rewards=np.full_like(log.rewards, np.nan)), device="cpu", budget=TINY)
