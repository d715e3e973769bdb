"""Density models of logs: columns, splits, folders, bad input, the command line."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import make_episodes
from pages import check_page
from test_density import SMALL

from replaylab import density, from_rows
from replaylab.algos import Spaces, gormpo
from replaylab.cli import main
from replaylab.data.damage import corrupt
from replaylab.errors import DataError, UsageError
from replaylab.models.density import KINDS, join, make


def test_columns_are_the_exact_transitions():
    episodes = make_episodes((5, 3, 8))
    s, a, after = episodes.observations, episodes.actions, episodes.next_observations()
    for inputs, parts in {"sa": [s, a], "nsa": [after, a], "sas": [s, a, after]}.items():
        found, rows = density.columns(episodes, inputs)
        np.testing.assert_array_equal(found, np.concatenate(parts, 1))
        assert len(rows) == 16
        joined = join(inputs, *(torch.tensor(x) for x in (s, a, after)))
        np.testing.assert_array_equal(found, joined)
    episodes.final_known[1] = False
    assert 7 not in density.columns(episodes, "nsa")[1] and 7 in density.columns(episodes, "sa")[1]


def test_split_is_by_whole_episodes_and_seeded():
    episodes = make_episodes([3] * 40)
    parts = density.split(episodes, 0)
    assert [len(p) for p in parts] == [32, 4, 4]
    assert sorted(np.concatenate(parts)) == list(range(40))
    assert all((a == b).all() for a, b in zip(parts, density.split(episodes, 0), strict=True))
    assert not (parts[1] == density.split(episodes, 1)[1]).all()


def walk(rows: int = 3000, seed: int = 0):
    """Episodes whose two observation columns lie near a circle, and one constant column."""
    rng = np.random.default_rng(seed)
    angle = np.cumsum(rng.uniform(0, 0.5, rows))
    observations = np.stack([10 * np.cos(angle), 0.1 * np.sin(angle), np.full(rows, 4.0)], 1)
    observations[:, :2] *= rng.normal(1, 0.05, (rows, 1))
    actions = np.tanh(np.sin(angle) + 0.1 * rng.standard_normal(rows))[:, None]
    return from_rows(observations, actions, rng.standard_normal(rows), max_episode_steps=50)


@pytest.mark.parametrize("kind", KINDS)
def test_folder_round_trip_and_scores(kind, tmp_path):
    episodes = walk()
    out = tmp_path / "model"
    settings = SMALL[kind] | ({"hidden": [32, 32]} if "hidden" in SMALL[kind] else {})  # JSON has lists
    settings |= {"steps": 100} if KINDS[kind].needs_steps else {}
    model = density.fit(episodes, kind, out, device="cpu", distances=[0.05, 2.0], **settings)
    assert [p.name for p in sorted(out.iterdir())] == ["density.json", "report.html", "weights.safetensors"]
    assert model.report["tests"][1]["auroc"] > 0.9
    again = density.load(out, "cpu")
    x = torch.tensor(density.columns(episodes, "nsa")[0])
    with torch.no_grad():
        assert torch.equal(model.log_prob(x), again.log_prob(x))
    assert again.threshold(1.0) == model.threshold(1.0) == model.report["threshold"]
    shifted = corrupt(episodes, 2.0, episodes_count=10)
    result = density.score(out, shifted, percentile=5, out=tmp_path / "page.html", device="cpu")
    assert (
        result["auroc"] > 0.9 and result["tpr"] > 0.6 and result["rows"] == len(shifted) - 20
    )  # final ones are unknown
    assert "auroc" not in density.score(out, episodes, device="cpu")
    with pytest.raises(UsageError, match=r"must end in \.html"):
        density.score(out, episodes, out=tmp_path / "page.md", device="cpu")
    assert "threshold" in check_page(tmp_path / "page.html").text and "AUROC" in check_page(out / "report.html").text


def test_bad_input_is_one_clear_line(tmp_path):
    out = tmp_path / "model"
    density.fit(walk(600), "kde", out, device="cpu")
    with pytest.raises(DataError, match="fitted on 3 observation and 1 action columns, the data has 4 and 2"):
        density.score(out, make_episodes([3] * 12), device="cpu")
    with pytest.raises(UsageError, match="exists already: choose another --out, or pass --overwrite"):
        density.fit(walk(600), "kde", out, device="cpu")
    with pytest.raises(UsageError, match="exists already and is no density folder"):
        density.fit(walk(600), "kde", tmp_path, device="cpu", overwrite=True)
    for option in ("steps", "batch_size", "lr"):
        with pytest.raises(UsageError, match=f"kde is not trained in steps: leave out --{option.replace('_', '-')}"):
            density.fit(walk(600), "kde", device="cpu", **{option: 5})
    with pytest.raises(UsageError, match="seed must be at least 0, not -1"):
        density.fit(walk(600), "kde", seed=-1)
    huge = walk(600)
    huge.observations[7, 0] = 1e300
    with pytest.raises(DataError, match=r"observations reach 1e\+300, which float32 cannot hold"):
        density.score(out, huge, device="cpu")
    density.fit(walk(600), "kde", out, device="cpu", overwrite=True)
    with pytest.raises(UsageError, match="did you mean 'realnvp'"):
        density.fit(walk(600), "realnpv")
    with pytest.raises(UsageError, match="did you mean 'centres'"):
        density.fit(walk(600), "kde", centers=3, device="cpu")
    with pytest.raises(UsageError, match="percentile must be"):
        density.fit(walk(600), "kde", percentile=0.0)
    with pytest.raises(UsageError, match="above 0"):
        density.fit(walk(600), "realnvp", steps=0)
    with pytest.raises(UsageError, match="above 0"):
        density.fit(walk(600), "realnvp", lr=float("nan"))
    with pytest.raises(UsageError, match="bandwidth must be a number above 0"):
        density.fit(walk(600), "kde", bandwidth=-1.0, device="cpu")
    with pytest.raises(UsageError, match="at least 1"):
        density.fit(walk(600), "vae", latent=0, device="cpu")
    alone = from_rows(np.zeros((20, 2)), np.zeros((20, 1)), np.zeros(20), np.ones(20, bool))
    with pytest.raises(DataError, match="tells no next observation of 16 rows, which are all or those held out"):
        density.fit(alone, "kde", device="cpu")
    with pytest.raises(UsageError, match="10 episodes"):
        density.fit(make_episodes(), "kde", device="cpu")
    with pytest.raises(UsageError, match="real numbers"):
        density.fit(make_episodes([3] * 12, discrete=True), "kde", device="cpu")
    still = make_episodes([3] * 12)
    still = replace(
        still, observations=still.observations * 0, final_observations=still.final_observations * 0, meta={"notes": []}
    )
    with pytest.raises(DataError, match="never change"):
        density.fit(still, "kde", device="cpu")
    counts = [("realnvp", "couplings", 0), ("vae", "samples", True), ("vae", "latent", 2.5), ("diffusion", "width", 0)]
    for kind, name, value in [*counts, ("kde", "centres", "9"), ("neuralode", "ode_steps", -1)]:
        with pytest.raises(UsageError, match=f"{name} must be a whole number, at least 1, not"):
            make(kind, 4, **{name: value})
    for hidden in ([16, 0], "x", 16):
        with pytest.raises(UsageError, match="hidden must be a list of whole numbers"):
            make("realnvp", 4, hidden=hidden)
    with pytest.raises(UsageError, match="inputs must be"):
        density.fit(walk(600), "kde", inputs="ss", device="cpu")
    with pytest.raises(UsageError, match="not a density folder"):
        density.load(tmp_path)
    (out / "weights.safetensors").write_bytes(b"nonsense")
    with pytest.raises(DataError, match="safetensors"):
        density.load(out)
    (out / "density.json").write_text("{}")
    with pytest.raises(DataError, match="readable"):
        density.load(out)


def wide():
    """Rows so far apart that a small shift is lost among them."""
    rng = np.random.default_rng(0)
    return from_rows(rng.normal(0, 50, (1000, 3)), rng.normal(0, 50, (1000, 1)), np.ones(1000), max_episode_steps=20)


def test_the_unit_of_the_observations_does_not_decide_whether_a_shift_is_found():
    rng, found = np.random.default_rng(0), []
    z, actions = rng.standard_normal((2000, 3)), rng.uniform(-1, 1, (2000, 2))
    for unit in (1.0, 1e-3):
        log = from_rows(unit * z, actions, np.zeros(2000), max_episode_steps=50)
        found.append([test["auroc"] for test in density.fit(log, "kde", inputs="sa", device="cpu").report["tests"]])
    assert found[0] == pytest.approx(found[1], abs=0.1) and found[1][0] < 0.7


def test_a_model_that_cannot_tell_says_so(tmp_path, capsys):
    model = density.fit(wide(), "kde", tmp_path / "D", device="cpu", distances=[1.0, 0.0])
    missing, doubt = model.report["notes"]
    assert missing == "density: 50 of 1,000 rows left out, as the log does not tell what followed them"
    assert "this kde hardly tells" in doubt and "at distance 1)" in doubt  # at the furthest one
    assert capsys.readouterr().err == f"note: {missing}\nnote: {doubt}\n"
    assert doubt in check_page(tmp_path / "D" / "report.html").text
    told = density.fit(wide(), "kde", inputs="sa", device="cpu", distances=[300.0, 0.0])
    assert told.report["notes"] == []


def test_a_threshold_that_does_not_hold_for_other_episodes_says_so():
    rng = np.random.default_rng(0)
    log = from_rows(rng.normal(size=(1000, 3)), rng.normal(size=(1000, 1)), np.ones(1000), max_episode_steps=50)
    assert density.fit(log, "kde", inputs="sa", device="cpu").report["notes"] == []
    *_, unseen = density.split(log, 0)
    log.observations[np.isin(log.episode_ids, unseen)] += 5
    (note,) = density.fit(log, "kde", inputs="sa", device="cpu").report["notes"]
    assert note.startswith("100% of the rows of unseen episodes lie below a threshold meant for 1 %")


def test_a_run_of_gormpo_says_that_its_density_cannot_tell(monkeypatch):
    monkeypatch.setattr(density, "default_distances", lambda episodes: [0.0])
    log = wide()
    config = gormpo.Config(density="kde", hidden=[8], dynamics_hidden=[8], rollout_batch=10, rollout_every=5)
    agent = gormpo.Agent(config, Spaces.of(log), [0], torch.device("cpu"))
    agent.phases(log)
    agent.density.begin()
    agent._about_density()
    assert "this kde hardly tells shifted rows" in agent.notes[-1]


def test_command_line(tmp_path, capsys):
    from replaylab import save

    data, folder = str(tmp_path / "data.npz"), str(tmp_path / "model")
    save(corrupt(walk(), 2.0, episodes_count=30), data)
    options = ["--inputs", "sa", "--steps", "30", "--set", "hidden=[16,16]", "couplings=4", "--device", "cpu"]
    options += ["--distances", "3"]
    assert main(["density", "fit", "--data", data, "--kind", "realnvp", "--out", folder, *options]) == 0
    assert "AUROC" in capsys.readouterr().out
    for taken in ("kind", "seed"):
        words = ["--kind", "realnvp", "--out", folder + taken, "--set", f"{taken}=3"]
        assert main(["density", "fit", "--data", data, *words]) == 2
        assert f"--set takes settings of the kind of model, and {taken} is not one" in capsys.readouterr().err
    assert main(["density", "score", folder, "--data", data, "--json", "--device", "cpu"]) == 0
    assert {"threshold", "flagged", "auroc"} <= set(json.loads(capsys.readouterr().out))
    page = tmp_path / "page.html"
    assert main(["density", "score", folder, "--data", data, "--out", str(page), "--device", "cpu"]) == 0
    assert page.exists() and "below the threshold" in capsys.readouterr().out
    assert main(["density", "fit", "--data", data, "--kind", "kd", "--out", folder + "2"]) == 2


def test_a_place_that_cannot_be_written_is_refused_before_the_training(tmp_path, monkeypatch):
    monkeypatch.setattr(density, "train", lambda *args: pytest.fail("trained"))
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot write .*file/model: "):
        density.fit(walk(), "realnvp", tmp_path / "file" / "model", device="cpu", **SMALL["realnvp"])


def test_a_model_without_its_percentile_is_not_readable(tmp_path):
    density.fit(walk(), "kde", tmp_path / "m", device="cpu")
    report = json.loads((tmp_path / "m" / "density.json").read_text())
    del report["percentile"]
    (tmp_path / "m" / "density.json").write_text(json.dumps(report))
    with pytest.raises(DataError, match="does not hold a readable density model: 'percentile'"):
        density.load(tmp_path / "m")


def test_mistakes_are_found_before_the_training(monkeypatch):
    monkeypatch.setattr(density, "train", lambda *args: pytest.fail("it was trained"))
    for wrong, told in {
        "distances": (["far"], "distances must be numbers, not"),
        "steps": (2.5, "steps must be a whole number, not 2.5"),
        "batch_size": ("8", "batch-size must be above 0, not '8'"),
        "seed": ("a", "seed must be at least 0, not 'a'"),
        "percentile": ("1", "percentile must be from 0.1 to 99.9, not 1"),
    }.items():
        with pytest.raises(UsageError, match=told[1]):
            density.fit(walk(600), "realnvp", device="cpu", **{wrong: told[0]})
    for kind in (3, ["kde"]):
        with pytest.raises(UsageError, match="unknown density '"):
            density.fit(walk(600), kind)
    with pytest.raises(UsageError, match="a density is written to a folder named by its path, not int"):
        density.fit(walk(600), "kde", 5)
    with pytest.raises(UsageError, match="a density is read from the folder that fit wrote with `out`, not dict"):
        density.score({}, walk(600))


def test_numpys_numbers_are_taken(tmp_path):
    given = {"steps": np.int64(2), "distances": np.array([1.0, 2.0]), "seed": np.int64(3), "percentile": np.float32(5)}
    settings = {"couplings": np.int64(2), "hidden": np.array([8, 8])}
    model = density.fit(walk(600), "realnvp", tmp_path / "d", device="cpu", **given, **settings)
    assert [test["distance"] for test in model.report["tests"]] == [1.0, 2.0]
    report = density.load(tmp_path / "d", "cpu").report
    assert (report["seed"], report["percentile"]) == (3, 5) and report["settings"] == {"couplings": 2, "hidden": [8, 8]}
    assert json.loads(json.dumps(density.score(tmp_path / "d", walk(600), percentile=np.int64(2))))["percentile"] == 2
