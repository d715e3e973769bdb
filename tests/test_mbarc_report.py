"""MBARC's part of the report, from findings that are whole, missing or damaged."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from dreaming import Stub, likeliest, small_replay

from replaylab.models.dream import judge
from replaylab.results import Run
from replaylab.sections.mbarc import sections

CONFIG = {"system": "mbarc", "strategy": "<b>", "dream_rewards": "expected", "fidelity": "improved"}


def report_run(tmp_path, findings, film=b"GIF89a film"):
    (tmp_path / "media").mkdir(parents=True, exist_ok=True)
    (tmp_path / "media/dream.gif").write_bytes(film)
    return Run(tmp_path, "run", CONFIG, {"findings": findings}, [], [])


def test_report_sections(tmp_path):
    judged = judge(Stub(), small_replay(), np.array([3, 4, 11, 12, 43, 48]), likeliest)
    ledger = {"recorded": 64, "budget": 102_400, "frames": 300, "reset_frames": 44, "resets": 2}
    collected = {"steps": 64, "episodes": 3, "mean_return": -7.25, "seconds": 1.0}
    world = [{"epoch": i, "ledger": ledger, "collected": collected, "seconds": 70.0} for i in range(2)]
    world[1]["fresh"] = judged
    held = {"held_out": {"episodes": [3, 9]} | judge(Stub(), small_replay(), np.arange(43, 49), likeliest)}
    phases = {"world": {"epochs": world}, "reward": {"epochs": [{"seconds": 9.0}]}, "policy": {"epochs": []}}
    plain = dict(sections(report_run(tmp_path, phases)))["Reward model"]
    assert "6 frames. Measured on the steps that an epoch collected, before" in plain and "held-out" not in plain
    assert "No episode was held out" in plain
    world[1] |= held
    phases["reward"]["epochs"][0] |= held
    found = dict(sections(report_run(tmp_path, phases)))
    assert list(found) == ["Dream and reality", "Reward model", "Real steps and time"]
    assert '<img alt="reality left, dream right" src="data:image/gif;base64,' in found["Dream and reality"]
    rewards = found["Reward model"]
    assert "&lt;b&gt;" in rewards and "<b>" not in rewards and "50.0 %" in rewards
    assert (
        "epoch 1: 6 frames of 2 episodes. Measured on held-out episodes" in rewards
        and plain.partition('<p class="note">No')[0] in rewards
    )
    assert "No episode was held out" not in rewards
    assert "before the correction" in rewards
    assert "that it was trained on" in found["Dream and reality"]
    filmed = report_run(tmp_path, phases | {"policy": {"epochs": [], "filmed": "held out"}})
    assert "an episode that was held out" in dict(sections(filmed))["Dream and reality"]
    assert "Share, on held-out episodes" in found["Dream and reality"]
    repeated = f"{held['held_out']['still_pixels']:.2%}".replace("%", " %")
    assert f"repeating the last frame {repeated}" in found["Dream and reality"]
    assert "reward -1: recall" in rewards and "reward -1: precision" not in rewards  # it never told one
    assert "-7.25 (3)" in found["Real steps and time"] and "1 min 10 s" in found["Real steps and time"]
    assert "Real play" in found["Real steps and time"] and "6 games in all" in found["Real steps and time"]
    assert "over the budget" not in found["Real steps and time"]
    for changed in ({"strategy": "online"}, {"dream_rewards": "likeliest"}, {"fidelity": "original"}):
        other = replace(report_run(tmp_path, phases), config=CONFIG | changed)
        assert "before the correction" not in dict(sections(other))["Reward model"]
    ledger["frames"] = 4 * 102_400 + 1
    assert (
        "over the budget, as --no-strict-budget" in dict(sections(report_run(tmp_path, phases)))["Real steps and time"]
    )
    assert "102.4k" in found["Real steps and time"] and "2 resets" in found["Real steps and time"]


@pytest.mark.parametrize(
    "findings",
    [
        None, [], {"world": 3}, {"world": {"epochs": "x"}}, {"world": {"epochs": [{"held_out": {}}]}},
        {"world": {"epochs": [{"ledger": {"recorded": "<i>"}, "collected": None, "held_out": {"confusion": [[1]]}}]}},
    ],
)  # fmt: skip
def test_report_survives_anything(tmp_path, findings):
    for film in (b"", b"<script>", b"GIF89a"):
        for _, body in sections(report_run(tmp_path, findings, film)):
            assert "<script" not in body and "<i>" not in body
