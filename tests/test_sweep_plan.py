"""Sweeps as they are planned: the file, its mistakes, and how long it will take."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import fields, replace
from inspect import signature
from pathlib import Path

import numpy as np
import pytest
from conftest import make_episodes
from sweeping import TINY, write

import replaylab
from replaylab.algos import SYSTEMS
from replaylab.cli import build, main
from replaylab.cli.parser import read_options
from replaylab.data.episodes import from_rows
from replaylab.data.read import PART
from replaylab.errors import UsageError
from replaylab.sweep import read_plan, run
from replaylab.sweep.estimate import (
    DEBUG_SECONDS,
    UPDATE_MS,
    Watch,
    configured,
    estimate,
    finished_before,
    together,
    usual_preset,
)
from replaylab.sweep.plan import Plan, Reading
from replaylab.sweep.queue import Queue

# --- the file


def test_cells_are_systems_by_datasets_by_settings(place):
    systems = [
        "bc",
        {"system": "bc", "name": "best", "settings": {"top_fraction": 0.5}, "datasets": ["two"], "seeds": [7]},
        {"system": "bc", "name": "grid", "grid": {"lr": [0.001, "3e-4"], "hidden": [[8], [8, 4]]}, "datasets": ["one"]},
    ]
    plan = read_plan(write(place, systems=systems, datasets=["one.npz", {"name": "two", "path": ["two.npz"]}]))
    assert [c.name for c in plan.cells] == [
        "bc-one", "bc-two", "best-two",
        "grid-one-lr0.001-hidden8", "grid-one-lr0.001-hidden8x4", "grid-one-lr0.0003-hidden8",
        "grid-one-lr0.0003-hidden8x4",
    ]  # fmt: skip
    best, last = plan.cells[2], plan.cells[-1]
    assert best.seeds == [7] and best.settings == TINY | {"top_fraction": 0.5} and best.data == ["two.npz"]
    assert last.settings["lr"] == 3e-4 and last.settings["hidden"] == [8, 4]  # YAML takes 3e-4 for a word
    assert Plan.from_json(plan.to_json()) == plan
    assert "--top-fraction 0.5" in " ".join(best.command("x")) and "--seeds 7" in " ".join(best.command("x"))


def test_names_may_be_in_any_script(place):
    systems = [{"system": "bc", "name": name} for name in ("복제", "기준 1")]
    plan = read_plan(write(place, name="비교", systems=systems, datasets=[{"name": "병원", "path": "one.npz"}]))
    assert plan.name == "비교" and [c.name for c in plan.cells] == ["복제-병원", "기준-1-병원"]
    assert [c.label for c in plan.cells] == ["복제", "기준-1"]


def test_list_of_settings_joined_data_and_split_seeds(place):
    both = {"path": ["one.npz", "two.npz"], "env": "d4rl/hopper"}
    plan = read_plan(write(place, datasets=[both], list=[{"lr": 0.1}, {"batch_size": 4}], split_seeds=True))
    assert [c.name for c in plan.cells] == [
        "bc-one+two-lr0.1-seed0",
        "bc-one+two-lr0.1-seed1",
        "bc-one+two-batch_size4-seed0",
        "bc-one+two-batch_size4-seed1",
    ]
    assert plan.cells[0].seeds == [0] and plan.cells[0].env == "d4rl/hopper"
    assert plan.cells[0].data == ["one.npz", "two.npz"]
    online = write(place, systems=[{"system": "mbarc", "environments": ["atari/pong"]}], settings={})
    assert [c.seeds for c in read_plan(online).cells] == [[0], [1]]  # it trains one seed a run


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"systems": ["bcc"]}, r"systems\[0\]: unknown system 'bcc'; did you mean"),
        ({"systems": ["bc", {"system": "bc", "preset": "debgu"}]}, r"systems\[1\]: unknown preset .* 'debug'"),
        ({"systems": [{"system": "bc", "settings": {"lrr": 1}}]}, r"systems\[0\]: .*unknown key 'lrr'; .*'lr'"),
        ({"grid": {"lr": ["fast"]}}, r"systems\[0\]: lr must be float"),
        ({"grid": {"lr": 0.1}}, "grid: lr must be a list"),
        (
            {"datasets": ["one.npz", "tow.npz"]},
            r"datasets\[1\]: tow.npz: no such file.*did you mean 'two.npz'\? \(looked for from /.*, where this is",
        ),
        ({"datasets": ["one.npz", "one.npz"]}, "'one' is there twice"),
        ({"systems": ["bc", "bc"]}, "'bc-one' is there twice"),
        (  # they would share a row of the table
            {"systems": [{"system": "bc", "split_seeds": True}, {"system": "bc", "settings": {"lr": 0.5}}]},
            "'bc-one' is there twice",
        ),
        ({"list": [{"lr": 0.1}, {"lr": 0.1}]}, r"systems\[0\]: `grid` or `list`: 'lr0.1' is there twice"),
        ({"systems": [{"system": "bc", "name": False}]}, r"systems\[0\]: a name must be text, .*: False"),
        ({"datasets": [{"path": "one.npz", "name": 5}]}, r"datasets\[0\]: a name must be text"),
        ({"systems": [{"system": "bc", "datasets": ["three"]}]}, "unknown dataset 'three'"),
        ({"seeds": [1, 1]}, "tiny.yaml: seeds must be distinct"),
        ({"seeds": 3}, "tiny.yaml: seeds must be a list of int, not 3"),
        ({"systems": [{"system": "bc", "seeds": 3}]}, r"systems\[0\]: seeds must be a list of int, not 3"),
        ({"environments": ["atari/pong"]}, "tiny.yaml: no system takes `environments`"),
        (
            {"environments": ["atari/pong"], "systems": [{"system": "mbarc", "environments": ["atari/freeway"]}]}
            | {"settings": {}},
            "tiny.yaml: no system takes `environments`",
        ),
        ({"sytems": []}, "unknown key 'sytems'; did you mean 'systems'"),
        ({"budget": "long"}, "budget must be minutes"),
        ({"name": "a/b"}, "fit for a folder"),
        ({"systems": [{"system": "bc", "name": "***"}]}, r"systems\[0\]: the name '\*\*\*' has no letter"),
        ({"datasets": []}, "bc learns from logs: list `datasets`"),
        ({"datasets": [["one.npz", 3]]}, r"datasets\[0\]: a path is a word"),
        ({"systems": [{"system": "bc", "datasets": "one"}]}, r"systems\[0\]: `datasets` must be a list"),
        ({"systems": [{"system": "bc", "datasets": [["one"]]}]}, "unknown dataset"),
        ({"systems": [{"system": "bc", "preset": ["debug"]}]}, "unknown preset"),
        ({"split_seeds": "no"}, "tiny.yaml: split_seeds must be true or false"),
        ({"settings": {"steps": 5, "seeds": [5]}}, "tiny.yaml: seeds are no setting"),
        ({"grid": {"seeds": [[5], [6]]}}, "tiny.yaml: seeds are no setting"),
        (
            {"datasets": [{"path": "one.npz", "env": "d4rl/hoper"}]},
            r"datasets\[0\]: unknown environment 'd4rl/hoper'; did you mean 'd4rl/hopper'",
        ),
        ({"datasets": [{"path": "one.npz", "env": "Hopper-v99"}]}, "unknown environment 'Hopper-v99'"),
        (
            {"datasets": [{"path": "one.npz", "env": "atari/pung"}]},
            r"datasets\[0\]: .*'atari/pung'; did you mean 'pong'",
        ),
        ({"datasets": [{"path": "one.npz", "env": 3}]}, r"datasets\[0\]: env must be str, not 3"),
        ({"settings": {"env": "walker3d"}}, r"systems\[0\]: unknown environment 'walker3d'"),
        (
            {"systems": [{"system": "mbarc", "environments": ["atari/frewway"]}]},
            r"systems\[0\]: .* did you mean 'freeway'",
        ),
        ({"systems": [{"system": "mbarc", "environments": ["hopper"]}]}, "mbarc plays Atari games"),
        (
            {"datasets": [{"path": "one.npz", "options": {"formt": "npz"}}]},
            r"datasets\[0\]: .*'formt'; did you mean 'format'",
        ),
        (
            {"datasets": [{"path": "one.npz", "options": {"xyz": 1}}]},
            "options: unknown key 'xyz'; known: .*columns",
        ),
        ({"datasets": [{"path": "one.npz", "options": {"max_steps": "few"}}]}, "max_steps must be int, not 'few'"),
        (
            {"datasets": [{"path": "one.npz", "options": {"max_episode_steps": 0}}]},
            "max_episode_steps must be at least 1",
        ),
        ({"settings": {"device": "tpu"}}, r"systems\[0\]: unknown device 'tpu': use auto, cpu or cuda"),
        (
            {"datasets": [{"path": "one.npz", "options": {"split": "flag"}}]},
            "split: unknown value 'flag'; did you mean",
        ),
        ({"datasets": [{"path": "one.npz", "options": {"columns": {"reward": "r"}}}]}, "no column role 'reward'"),
        ({"datasets": [{"path": "one.npz", "options": {"columns": {"rewards": 3}}}]}, "columns takes names"),
        (  # wrong beside its preset alone
            {"systems": [{"system": "diffusion-dice", "preset": "quick"}], "settings": {"returns_steps": 0}},
            r"systems\[0\]: --backup data builds on",
        ),
        ({"settings": {"steps": "many"}}, r"systems\[0\]: steps must be int, not 'many'"),
        ({"settings": {"compile": "of"}}, "compile: unknown value 'of'; did you mean 'off'"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_place(place, change, told):
    with pytest.raises(UsageError, match=told) as caught:
        run(write(place, **change))
    assert "\n" not in str(caught.value) and "tiny.yaml" in str(caught.value)
    assert not (place / "sweeps").exists()


def test_a_plan_is_read_from_a_path():
    with pytest.raises(UsageError, match="a sweep is named by the path of its file, not dict"):
        run({"systems": ["bc"]})


def test_a_sweep_can_read_data_as_load_can(place):
    taken = [*signature(replaylab.load).parameters][1:-1]  # but the paths, and the parts of a DQN-replay log
    assert {f.name for f in fields(Reading)} | {"columns"} == {*taken, *PART}
    (place / "log.dat").write_text("a,b,r\n1,2,3\n4,5,6\n")
    options = {
        "format": "table",
        "columns": {"observations": ["a"], "actions": "b", "rewards": "r"},
        "max-episode-steps": 1,
    }
    (cell,) = read_plan(write(place, datasets=[{"path": "log.dat", "options": options}])).cells
    assert replaylab.load(cell.data, **cell.options).num_episodes == 2


def test_the_command_of_a_cell_reads_the_data_as_the_cell_does(place):
    part = {"max_steps": 50, "checkpoints": 2, "episodes_per_checkpoint": 3}
    columns = {"observations": ["a", "b"], "rewards": "r"}
    options = {"format": "table", "columns": columns, "max_episode_steps": 9, "split": "discontinuity"}
    assert {*part, *options} == {f.name for f in fields(Reading)} | {"columns"}
    cell = replace(read_plan(write(place)).cells[0], options=options | part)
    words = cell.command("x")[1:]
    assert read_options(build(words).parse_args(words)) == cell.options | {"columns": columns | {"rewards": ["r"]}}


def test_a_gpu_that_is_not_there_is_refused(place, monkeypatch):
    for seen, told in ((0, "cuda:1 was asked for, but torch sees no GPU here"), (1, "torch sees 1 GPU here")):
        monkeypatch.setattr("torch.cuda.device_count", lambda seen=seen: seen)
        with pytest.raises(UsageError, match=told):
            run(write(place), devices=["cuda:1"], dry_run=True)
    with pytest.raises(UsageError, match="unknown device 'cuda:x'"):
        run(write(place), devices=["cuda:x"], dry_run=True)


def test_environments_are_checked_without_simulators(place):
    """Where one is not installed, the cell will say so; a name that no one knows is told at once."""
    path = write(place, datasets=[{"path": "one.npz", "env": "d4rl/hopper"}, {"path": "two.npz", "env": "atari/pung"}])
    code = f"""
import sys
from replaylab.sweep import read_plan
for missing in ("gymnasium", "ale_py"):
    sys.modules[missing] = None
    read_plan({str(path)!r})
    del sys.modules[missing]
assert not {{"mujoco", "ale_py"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_options_of_another_place_are_an_error(place, capsys):
    path = str(write(place))
    assert main(["sweep", path, "--address", "auto"]) == main(["sweep", path, "--gpus", "1", "--dry-run"]) == 2
    told = capsys.readouterr().err.splitlines()
    assert told[0].startswith("replaylab: address is for a Ray cluster: add --on ray") and len(told) == 2
    assert main(["sweep", path, "--on", "ray", "--devices", "cpu"]) == 2
    assert "devices and per_device are for this machine" in capsys.readouterr().err
    assert not (place / "sweeps").exists()


def test_what_a_cluster_is_asked_for_has_names(capsys):
    known = signature(run).parameters
    assert {"address", "gpus", "cpus", "data"} < {*known} and all(p.kind != p.VAR_KEYWORD for p in known.values())
    with pytest.raises(SystemExit):
        main(["sweep", "--help"])
    assert "FILE                  YAML: systems" in capsys.readouterr().out


def test_the_shipped_files_are_valid(place):
    benchmarks = Path(__file__).parent.parent / "benchmarks"
    smoke = read_plan(benchmarks / "smoke.yaml")
    assert {c.system for c in smoke.cells} == set(SYSTEMS) and {c.preset for c in smoke.cells} == {"debug"}
    online = next(c for c in smoke.cells if c.system == "mbarc")
    assert online.name == "mbarc-freeway" and online.data is None and online.env == "atari/freeway"
    for name in ("hopper-medium", "hopper-expert", "halfcheetah-medium", "halfcheetah-expert"):
        replaylab.save(make_episodes(), place / "data" / name, format="native")
    locomotion = read_plan(benchmarks / "locomotion.yaml")
    assert "bc10-hopper-medium-expert" in [c.name for c in locomotion.cells]
    busy = read_plan(benchmarks / "busy.yaml")
    assert len(busy.cells) == 8 and all(len(c.seeds) == 5 for c in busy.cells)
    small = {"bc", "bcq", "mopo", "gormpo"}  # networks
    assert all(len(c.seeds) == (5 if c.system in small else 3) for c in locomotion.cells)


def test_the_documented_files_are_valid(place):
    def documented(page):
        text = (Path(__file__).parent.parent / "docs" / page).read_text()
        (place / "documented.yaml").write_text(re.findall(r"```yaml\n(.*?)```", text, re.S)[0])
        return read_plan(place / "documented.yaml")

    for name in ("hopper-medium", "hopper-expert"):
        replaylab.save(make_episodes(), place / "data" / name, format="native")
    plan = documented("sweep.md")
    assert len(plan.cells) == 2 * (1 + 2 + 1 + 1) + 5 and (plan.budget, plan.per_device) == (60, 2)
    assert [c.settings["pixels"] for c in documented("mbarc.md").cells] == 2 * ["palette", "palette", "rgb", "rgb"]


def test_dry_run_shows_cells_and_time_and_does_nothing(place, capsys):
    path = write(place)
    run(path, dry_run=True)
    shown = capsys.readouterr().out
    assert "bc-one  2 seeds   new" in shown and "2 cells, 2 to do" in shown and "as measured" in shown
    run(path, dry_run=True, per_device=2)
    assert "with 2 processes" in capsys.readouterr().out
    assert together([30.0, 60.0], 2) == together([60.0], 1)  # a cell has one process, however many there are
    run(path, dry_run=True, on="ray")  # of the cluster nothing is known
    shown = capsys.readouterr().out
    assert "one after another on a CPU; Ray runs as many at once" in shown and "process" not in shown
    on_cpu = shown.split("to do")[1]
    run(path, dry_run=True, on="ray", gpus=0.5)
    shown = capsys.readouterr().out
    assert "one after another on a GPU" in shown and shown.split("to do")[1] != on_cpu
    run(write(place, datasets=["one.npz"]), dry_run=True)
    assert "1 cell, 1 to do" in capsys.readouterr().out
    assert not (place / "sweeps").exists()


def test_time_is_guessed_from_earlier_runs_else_from_a_table(place):
    cell = read_plan(write(place)).cells[0]
    core, gpu = UPDATE_MS["bc"]["steps"]
    assert estimate(cell, [], False)[0] == pytest.approx(2 * 20 * core / 1e3)  # two seeds, one core
    assert estimate(cell, [], True)[0] == pytest.approx(20 * gpu / 1e3)  # they share a GPU
    other = {"system": "bc", "steps": 10, "seconds": 4.0, "data": ["x"], "seeds": [0, 1]}
    assert estimate(cell, [other, other | {"system": "dt", "seconds": 99.0}], False)[0] == pytest.approx(8.0)
    assert estimate(cell, [other, other | {"preset": "debug", "seconds": 99.0}], False)[0] == pytest.approx(8.0)
    options, config = configured(cell)
    same = options | other | config | {"data": ["one.npz"], "seconds": 3.0}
    assert estimate(cell, [other, same], False) == (3.0, "the same run before")
    in_size = (3.0, "earlier runs of bc with the same sizes, scaled by updates")
    for change in ({"lr": 1.0}, {"final_episodes": 1000}):
        assert estimate(cell, [other, same | change], False) == in_size
    assert estimate(replace(cell, env="d4rl/hopper"), [other, same], False) == in_size
    short = other | {"steps": 1}  # most of it was its start
    assert estimate(cell, [short], False) == estimate(cell, [], False)


def test_batches_and_widths_of_another_size_are_no_measure(place):
    wide = {"batch_size": 64, "hidden": [512]}
    cells = read_plan(write(place, datasets=["one.npz"], list=[{}, {"lr": 0.1}, wide])).cells
    runs = [configured(cell)[1] | {"system": "bc", "seeds": [0, 1]} for cell in cells]
    before = [runs[0] | {"seconds": 2.0}, runs[2] | {"seconds": 50.0, "steps": 10}]
    assert [estimate(cell, before, False)[0] for cell in cells] == pytest.approx([2.0, 2.0, 100.0])
    watch = Watch("tiny", Queue(place / "sweep"), cells, {cell.name: 1.0 for cell in cells}, 1)
    for cell, seconds, told in ((cells[0], 2.0, [2.0, 2.0, 2.0]), (cells[2], 90.0, [2.0, 2.0, 90.0])):
        watch._learn(cell, {"event": "finished", "seconds": seconds})
        assert list(watch.seconds.values()) == told


def test_every_system_has_a_time_and_what_is_not_known_is_said(place, monkeypatch):
    """Every kind of update that a system's settings count has its price."""
    assert set(UPDATE_MS) == set(DEBUG_SECONDS) == set(SYSTEMS)
    smoke = read_plan(Path(__file__).parent.parent / "benchmarks" / "smoke.yaml").cells
    for cell in smoke:
        assert estimate(cell, [], False)[0] == pytest.approx(DEBUG_SECONDS[cell.system])
        whole = replace(cell, preset=None)
        assert estimate(whole, [], False)[0] > 100 * DEBUG_SECONDS[cell.system]
    mbarc = replace(smoke[-1], preset="paper")
    prices = UPDATE_MS["mbarc"]
    wanted = 255_000 * prices["world"][0] + 22_500 * prices["reward"][0] + 19_000 * prices["policy"][0]
    assert estimate(mbarc, [], False)[0] == pytest.approx(wanted / 1e3)
    changes = ({}, {"solver_steps": 99}, {"critic_steps": 1}, {"stage": "critic", "behavior": "run"})
    dice = [replace(smoke[-2], preset="plain", settings=s) for s in changes]
    usual, acting, short, stage = (estimate(cell, [], False)[0] for cell in dice)
    assert usual - stage == pytest.approx(2 * 100_000 * UPDATE_MS["diffusion-dice"]["behavior_steps"][0] / 1e3)
    assert acting == usual  # steps of the solver are no updates
    assert usual - short == pytest.approx(2 * 299_999 * UPDATE_MS["diffusion-dice"]["critic_steps"][0] / 1e3)
    fast = replace(smoke[-1], preset=None)
    part = configured(fast)[1] | {
        "system": "mbarc",
        "seconds": 100.0,
        "seeds": [0],
        "ppo_updates": 0,
        "reward_steps": 1,
    }
    world, reward, policy = (price[1] for price in prices.values())
    share = (42_500 * world + 15 * reward) / (42_500 * world + 22_500 * reward + 2_470 * policy)
    assert estimate(fast, [part], True)[0] == pytest.approx(100 / share)
    monkeypatch.delitem(UPDATE_MS, "mbarc")
    assert estimate(fast, [], True) == (None, "mbarc was not timed yet")


def test_the_time_is_that_of_the_preset_that_the_data_will_choose(place, monkeypatch):
    def preset(**values):
        return usual_preset(read_plan(write(place, settings={}, **values)).cells[0])

    dice, dt = {"systems": ["diffusion-dice"]}, {"systems": ["dt"]}
    for name in ("halfcheetah-medium", "halfcheetah-expert"):
        log = make_episodes()
        if name == "halfcheetah-medium":
            log = log.cut(log.terminated & False, log.terminated | log.truncated)
        replaylab.save(log, place / name, format="native")
    mix = {"path": ["halfcheetah-medium", "halfcheetah-expert"], "env": "d4rl/halfcheetah"}
    assert preset(**dice, datasets=["sample"]) == "locomotion"
    assert preset(**dice, datasets=["toy-bandit"]) == "toy"
    assert preset(**dice, datasets=[mix | {"path": "halfcheetah-medium"}]) == "runner"
    assert preset(**dice, datasets=[mix | {"path": "halfcheetah-expert"}]) == "locomotion"  # an episode terminates
    assert preset(**dice, datasets=[mix]) == "locomotion"
    assert preset(**dt, datasets=["sample"]) is None is preset(systems=["bc"])
    assert preset(systems=[{"system": "diffusion-dice", "preset": "plain"}], datasets=["sample"]) == "plain"
    frames = from_rows(np.zeros((6, 4, 4), np.uint8), np.arange(6) % 2, np.ones(6), meta={"env_id": "atari/pong"})
    replaylab.save(frames, place / "pong.npz")
    assert preset(**dt, datasets=["pong.npz"]) == "pong"
    cell = read_plan(write(place, **dice, datasets=["sample"], settings={})).cells[0]
    assert estimate(cell, [], False) == estimate(replace(cell, preset="locomotion"), [], False)
    assert estimate(cell, [], False) != estimate(replace(cell, preset="plain"), [], False)
    options, config = configured(replace(cell, preset="locomotion"))
    ran = options | config | {"system": cell.system, "preset": "locomotion", "data": ["sample"], "seeds": [0, 1]}
    assert estimate(cell, [ran | {"seconds": 5.0}], False) == (5.0, "the same run before")
    monkeypatch.setattr(sys.modules[estimate.__module__], "SMALL", 1000)  # what is slow to read is not read for a guess
    assert preset(**dice, datasets=["sample"]) is None


def test_an_unknown_time_is_learnt_from_the_first_cell(place, capsys, monkeypatch):
    plan = read_plan(write(place))
    queue = Queue(place / "sweeps" / "tiny")
    queue.write(plan)
    first, second = plan.cells
    watch = Watch("tiny", queue, plan.cells, {first.name: None, second.name: None}, 1)
    assert "about 0.0s and 2 cells of unknown length left" in watch._line()
    queue.record(first, "finished", seconds=7.0)
    watch.show([second])
    assert watch.seconds[second.name] == 7.0 and "about 7.0s left" in watch._line()


def test_earlier_runs_are_those_of_the_same_kind_of_device(place):
    results = place / "results"
    results.mkdir()
    kept = {"format": "replaylab-result-1", "system": "bc", "preset": None, "settings": {"steps": 40}, "seeds": [0, 1]}
    kept |= {"env": None, "data": {"paths": ["x.npz"]}, "seconds": 12.0, "status": "finished"}
    for name, device in (("a", "cpu"), ("b", "NVIDIA H200")):
        (results / f"{name}.json").write_text(json.dumps(kept | {"machine": {"device": device}}))
    (results / "bench.json").write_text('[{"machine": 3}]')
    (results / "broken.json").write_text("{")
    replaylab.train("bc", "one.npz", out=place / "sweeps/other/run", **TINY)
    cpu, gpu = (finished_before(place / "sweeps/tiny", results, cuda) for cuda in (False, True))
    assert [r["steps"] for r in cpu] == [40, 20] and [r["seconds"] for r in gpu] == [12.0]
    cell = read_plan(write(place)).cells[0]
    assert estimate(cell, gpu, True)[0] == pytest.approx(6.0)
    kept |= {"settings": TINY, "data": {"paths": ["one.npz"]}, "machine": {"device": "NVIDIA H200"}}
    (results / "c.json").write_text(json.dumps(kept))
    gpu = finished_before(place / "sweeps/tiny", results, True)
    assert estimate(cell, gpu, True) == (12.0, "the same run before")
    assert estimate(replace(cell, settings=TINY | {"final_episodes": 7}), gpu, True)[1] != "the same run before"
