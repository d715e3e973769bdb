"""Sweeps as they run: the queue on disk, workers that fail, stop and die; a Ray cluster that loses a node."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from processes import Started
from sweeping import TINY, write

import replaylab
from replaylab.cli import main
from replaylab.errors import UsageError
from replaylab.run import RunFolder
from replaylab.sweep import cluster, local, read_plan, run
from replaylab.sweep.estimate import Watch
from replaylab.sweep.queue import Queue
from replaylab.trainer import Trainer


@pytest.fixture
def quick(monkeypatch):
    """Workers that need not import torch."""
    monkeypatch.setattr(local, "_start", lambda queue, device, began: Started(local.work, str(queue.folder), began))


def begin_late(folder):
    """Train the first cell, after a while."""
    queue, train = Queue(folder), Trainer.run
    Trainer.run = lambda self: (time.sleep(2), train(self))  # in this process alone
    (cell, *_) = queue.plan().cells
    with queue.claim(cell):
        queue.work(cell)


def starts(folder, cell):
    lines = (folder / "status" / f"{cell}.jsonl").read_text().splitlines()
    return [json.loads(line)["event"] for line in lines]


# --- running


def test_a_failed_cell_is_recorded_and_the_rest_goes_on(place, capfd):
    path = write(place, systems=["bc", {"system": "bc", "name": "mad", "settings": {"lr": 1e30}, "datasets": ["one"]}])
    found = run(path)
    folder = place / "sweeps" / "tiny"
    assert found.finished == ["bc-one", "bc-two"] and found.left == []
    assert "lower the learning rate" in found.failed["mad-one"]
    assert "DataError" in (folder / "status" / "mad-one.error.txt").read_text()
    assert [RunFolder(folder / c).info()["status"] for c in ("bc-one", "mad-one")] == ["finished", "failed"]
    assert RunFolder(folder / "bc-one").info()["command"].startswith("replaylab train bc --data one.npz --steps 20")
    assert "mad-one: failed" in capfd.readouterr().err
    # the same command again does only what is missing
    run(path)
    assert starts(folder, "bc-one") == ["started", "finished"]
    assert starts(folder, "mad-one") == ["started", "failed"] * 2
    # a mistake that is mended starts its cell anew
    mended = [{"system": "bc", "name": "mad", "settings": {"lr": 0.1}, "datasets": ["one"]}]
    assert run(write(place, systems=mended)).finished == ["mad-one"]
    # a cell is the run that `train` makes
    alone = replaylab.train("bc", "one.npz", out="alone", seeds=[0, 1], **TINY)
    assert_equal(folder / "bc-one", alone)
    # other settings under the same name are not mixed in, and the plan says so
    changed = write(place, settings=TINY | {"steps": 30})
    for dry in (True, False):
        with pytest.raises(
            UsageError, match=r"bc-one was run with other settings \(settings was .*\): rename the sweep"
        ):
            run(changed, dry_run=dry)


def test_a_damaged_line_in_the_record_does_no_harm(place):
    (cell, *_), queue = read_plan(write(place)).cells, Queue(place / "sweep")
    queue.status.mkdir(parents=True)
    (queue.status / f"{cell.name}.jsonl").write_bytes(b'\xff\xfe\n5\n{"event": "fai')
    assert queue.state(cell) == "new"
    queue.record(cell, "failed", error="why")
    assert queue.state(cell) == "failed" and queue.error(cell) == "why"


def assert_equal(first, second):
    ours, theirs = (RunFolder(path).weights() for path in (first, second))
    assert ours.keys() == theirs.keys() and all((ours[k] == theirs[k]).all() for k in ours)


def test_seeds_can_be_added_where_each_is_a_cell(place, quick):
    one = {"datasets": ["one.npz"]}
    run(write(place, **one))
    with pytest.raises(UsageError, match=r"seeds was \[0, 1\], now \[0, 1, 2\]\): .*`split_seeds: true`.*rename"):
        run(write(place, **one, seeds=[0, 1, 2]))
    run(write(place, **one, split_seeds=True))
    assert len(run(write(place, **one, split_seeds=True, seeds=[0, 1, 2])).finished) == 3
    assert starts(place / "sweeps" / "tiny", "bc-one-seed0") == ["started", "finished"]


def test_an_interrupted_cell_is_resumed_and_ends_the_same(place, quick):
    path = write(place, settings=TINY | {"steps": 3000, "log_every": 10}, datasets=["one.npz"])
    process = Started(run, path)
    metrics = place / "sweeps/tiny/bc-one/metrics.jsonl"
    _until(lambda: metrics.exists() and metrics.stat().st_size > 0)
    process.terminate()
    process.wait(60)
    folder = place / "sweeps" / "tiny"
    assert starts(folder, "bc-one") == ["started", "interrupted"]
    step = int(RunFolder(folder / "bc-one").checkpoints()[-1].name.removeprefix("step-"))
    assert 0 < step < 3000
    RunFolder(folder / "bc-one").append("metrics.jsonl", [{"step": 0, "kept": True}])  # a new start would lose it
    assert run(path).finished == ["bc-one"]
    assert starts(folder, "bc-one") == ["started", "interrupted", "started", "finished"]
    assert any("kept" in line for line in RunFolder(folder / "bc-one").lines("metrics.jsonl"))
    alone = replaylab.train("bc", "one.npz", out="alone", seeds=[0, 1], **TINY | {"steps": 3000})
    assert_equal(folder / "bc-one", alone)


def test_a_killed_worker_costs_its_cell_only(place, quick):
    path = write(
        place, systems=[{"system": "bc", "name": "long", "settings": {"steps": 10**7}, "datasets": ["one"]}, "bc"]
    )
    folder = place / "sweeps" / "tiny"

    def kill():
        _until(lambda: (folder / "long-one" / "metrics.jsonl").exists())
        lines = (folder / "status" / "long-one.jsonl").read_text().splitlines()
        os.kill(json.loads(lines[-1])["pid"], signal.SIGKILL)

    def killed():
        threading.Thread(target=kill).start()
        found = run(path)
        assert found.finished == ["bc-one", "bc-two"]
        last = (folder / "status" / "long-one.jsonl").read_text().splitlines()[-1]
        assert json.loads(last)["seconds"] > 0
        return found.failed["long-one"]

    assert killed() == "its process died (SIGKILL)"  # nobody has said anything
    shutil.rmtree(folder / "long-one")
    (folder / "status" / "long-one.log").write_text("last words")
    assert killed() == "its process died (SIGKILL); see status/long-one.log"


def test_a_sweep_that_was_killed_whole_goes_on(place, quick):
    """Its last cell was begun by a process that is gone with its watcher."""
    path = write(place)
    run(path)
    queue = Queue(place / "sweeps" / "tiny")
    last = read_plan(path).cells[-1]
    shutil.rmtree(queue.folder / last.name)
    queue.record(last, "started")
    assert queue.state(last) == "interrupted"
    assert last.name in run(path).finished and queue.state(last) == "finished"


def test_a_cell_that_another_process_has_is_waited_for(place, quick, capfd):
    """As after a kill of the watcher alone: its worker trains on."""
    long = {"system": "bc", "name": "long", "datasets": ["one"]}
    path = write(place, systems=[long, {"system": "bc", "datasets": ["two"]}])
    queue, plan = Queue(place / "sweeps" / "tiny"), read_plan(path)
    queue.write(plan)

    other = Started(begin_late, queue.folder)
    _until(lambda: queue.state(plan.cells[0]) == "running")
    found = run(path)
    assert found.finished == ["long-one", "bc-two"] and other.wait(60) == 0
    assert f"long-one: process {other.pid} on {platform.node()} has it; waiting" in capfd.readouterr().err
    assert starts(queue.folder, "long-one") == ["started", "finished"]


def test_a_sweep_with_something_left_is_no_success(place, monkeypatch, capsys):
    monkeypatch.setattr("replaylab.sweep.run_local", lambda *arguments: None)  # as if the budget were spent
    path = str(write(place))
    assert main(["sweep", path]) == 1
    assert capsys.readouterr().err.endswith("replaylab: of 2 cells, 2 left: bc-one, bc-two\n")
    assert main(["sweep", path, "--dry-run"]) == 0


def test_what_has_ended_is_not_read_again(place, quick, monkeypatch):
    run(write(place))
    read = Counter()
    events, info = Queue.events, RunFolder.info
    monkeypatch.setattr(Queue, "events", lambda self, cell: read.update([cell.name]) or events(self, cell))
    monkeypatch.setattr(RunFolder, "info", lambda self: read.update([self.path.name]) or info(self))
    long = {"system": "bc", "name": "long", "settings": {"steps": 3000}, "datasets": ["one"]}
    found = run(write(place, systems=["bc", long]))
    assert found.finished == ["bc-one", "bc-two", "long-one"]
    assert read["long-one"] > 5 * max(read["bc-one"], read["bc-two"])


def test_two_sweeps_at_once_share_the_work(place, quick):
    path = write(place, grid={"lr": [0.1, 0.01, 0.001]})
    both = [Started(run, path) for _ in range(2)]
    assert [p.wait(100) for p in both] == [0, 0]
    folder = place / "sweeps" / "tiny"
    cells = read_plan(path).cells
    assert len(cells) == 6 and all(starts(folder, c.name) == ["started", "finished"] for c in cells)


def test_several_processes_share_a_device(place, quick):
    path = write(place, systems=[{"system": "bc", "settings": {"steps": 10**7}}], budget=0.5)
    folder = place / "sweeps" / "tiny"
    process = Started(partial(run, path, per_device=2))
    _until(lambda: len(list(folder.glob("*/metrics.jsonl"))) == 2)
    pids = {json.loads(p.read_text().splitlines()[0])["pid"] for p in (folder / "status").glob("*.jsonl")}
    process.terminate()
    process.wait(60)
    assert len(pids) == 2
    with pytest.raises(UsageError, match="unknown device 'tpu'"):
        run(path, devices=["tpu"], dry_run=True)
    with pytest.raises(UsageError, match="per_device must be a whole number"):
        run(path, per_device=0)
    with pytest.raises(UsageError, match="on Ray cells share a GPU with `gpus`"):
        run(path, on="ray", per_device=2)


def test_the_budget_ends_a_sweep_and_the_next_one_goes_on(place, quick):
    long = {"system": "bc", "name": "long", "settings": {"steps": 10**7}, "datasets": ["one"]}
    plan = read_plan(write(place, systems=[long, "bc"], budget=0.03))
    queue = Queue(place / "sweeps" / "tiny")
    queue.write(plan)
    watch = Watch("tiny", queue, plan.cells, {c.name: 1.0 for c in plan.cells}, 1)
    local.run_local(plan, queue, watch, ["cpu"], time.time())
    assert queue.state(plan.cells[0]) in ("interrupted", "new") and not queue.finished(plan.cells[0])
    assert "left" in watch._line()


def test_a_sweep_leaves_the_handler_of_sigterm_as_it_was(place, quick):
    def mine(number, frame):
        pass

    before = signal.signal(signal.SIGTERM, mine)
    try:
        run(write(place, datasets=["one.npz"]))
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_interrupted_sweep_says_how_to_go_on(place, monkeypatch, capsys):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("replaylab.sweep.run_local", interrupt)
    assert main(["sweep", str(write(place))]) == 1
    assert "run the same command again to go on" in capsys.readouterr().err


def test_a_worker_that_cannot_start_is_one_error(place, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(UsageError, match=r"workers\.log"):
        run(write(place))


def _until(condition, seconds=60.0):
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds
        time.sleep(0.02)


# --- Ray


def test_a_cell_that_fits_no_node_is_refused():
    nodes = [{"CPU": 4.0}, {"CPU": 8.0, "GPU": 1.0}]
    assert cluster.room(nodes, {"CPU": 1.0, "GPU": 0.0}) == 12
    assert cluster.room(nodes, {"CPU": 1.0, "GPU": 0.1}) == 8  # ten by the GPU
    assert cluster.room(nodes, {"CPU": 0.0, "GPU": 0.1}) == 10
    for wanted in ({"CPU": 1.0, "GPU": 2.0}, {"CPU": 9.0, "GPU": 0.0}):
        with pytest.raises(UsageError, match="no node of the Ray cluster has that"):
            cluster.room(nodes, wanted)
    with pytest.raises(UsageError, match=r"a cell wants 1 CPU and 0.5 GPU, .* \(the most of each: 4 CPU, 0 GPU\)"):
        cluster.room(nodes[:1], {"CPU": 1.0, "GPU": 0.5})


def test_cells_learn_from_the_store_and_their_runs_name_the_paths(place, capfd):
    replaylab.save(replaylab.load("two.npz"), place / "three", format="native")
    sets = ["three", ["one.npz", "three"], {"path": "two.npz", "options": {"columns": {"rewards": "nowhere"}}}]
    plan = read_plan(write(place, datasets=sets))
    queue = Queue(place / "sweeps" / "tiny")
    queue.write(plan)
    watch = Watch("tiny", queue, plan.cells, {c.name: 1.0 for c in plan.cells}, 1)
    errors = SimpleNamespace(ObjectStoreFullError=MemoryError, OutOfDiskError=MemoryError)
    stored = cluster._stored(SimpleNamespace(put=lambda log: log, exceptions=errors), plan.cells, watch)
    single, mix, bad = (stored[cluster._key(cell)] for cell in plan.cells)
    assert bad is None and "two is read by path" in capfd.readouterr().err
    assert all(type(log.observations) is np.ndarray for log in (single, mix))  # a memory map would be copied
    assert len(mix) == len(replaylab.load("one.npz")) + len(single)
    alone = replaylab.train("bc", ["one.npz", "three"], out="alone", seeds=[0, 1], **TINY)
    for name in ("one.npz", "three"):
        (place / name).rename(place / f"was-{name}")
    for cell, log in zip(plan.cells, (single, mix), strict=False):
        assert Started(cluster.do_cell, str(queue.folder), cell, str(place), log).wait(60) == 0
        assert queue.finished(cell) and RunFolder(queue.folder / cell.name).config()["data"] == cell.data
    assert_equal(queue.folder / plan.cells[1].name, alone)


@pytest.fixture
def one_cluster():
    """Ray looks for the cluster of a machine, and there must be one: tests that start one wait for each other."""
    with open(Path(tempfile.gettempdir()) / "replaylab-ray.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_ray_shows_its_cells_by_name_and_keeps_what_they_print(place, capfd, one_cluster):
    import ray
    from ray.util.state import list_tasks

    small = {"steps": 2, "batch_size": 4, "context": 3, "width": 16, "layers": 1}
    path = write(place, systems=["dt"], datasets=["one.npz", ["one.npz", "two.npz"]], settings=small)
    ray.init(num_cpus=2, num_gpus=0)
    try:
        with pytest.raises(UsageError, match="no node of the Ray cluster"):
            run(path, on="ray", gpus=0.5)
        found = run(path, on="ray", data="store")
        tasks = {task.name for task in list_tasks()}
    finally:
        ray.shutdown()
    assert found.finished == ["dt-one", "dt-one+two"] and tasks == {*found.finished}
    assert re.search(r"Ray's dashboard: http://127.0.0.1:\d+", capfd.readouterr().err)
    for name in found.finished:
        assert "on a CPU try" in (place / "sweeps/tiny/status" / f"{name}.log").read_text()
    assert RunFolder(place / "sweeps/tiny/dt-one+two").config()["data"] == ["one.npz", "two.npz"]


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize("data", ["path", "store"])
def test_ray_cluster_loses_a_node_and_no_cell(place, data, one_cluster):
    import ray  # `make test-slow` installs it
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    victim, _ = [cluster.add_node(num_cpus=1) for _ in range(2)]
    cluster.wait_for_nodes()
    path = write(place, settings=TINY | {"steps": 4000, "checkpoint_minutes": 0.01}, grid={"lr": [0.1, 0.01]})
    folder = place / "sweeps" / "tiny"
    killed = []

    def kill():
        _until(lambda: len(list(folder.glob("*/checkpoints/step-*"))) >= 2, 120)
        killed.append({c: starts(folder, c) for c in (p.stem for p in (folder / "status").glob("*.jsonl"))})
        cluster.remove_node(victim, allow_graceful=False)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        found = run(path, on="ray", address=cluster.address, data=data)
    finally:
        thread.join()
        ray.shutdown()
        cluster.shutdown()
    cells = read_plan(path).cells
    assert not found.failed and not found.left and sorted(found.finished) == sorted(c.name for c in cells)
    assert killed and any(events[-1] == "started" for events in killed[0].values())
    events = {c.name: starts(folder, c.name) for c in cells}
    assert all(e.count("finished") == 1 and e[-1] == "finished" for e in events.values())
    assert any(e.count("started") > 1 for e in events.values()), events  # the lost one was taken up again
    alone = replaylab.train("bc", "one.npz", out="alone", seeds=[0, 1], **TINY | {"steps": 4000, "lr": 0.1})
    assert_equal(folder / "bc-one-lr0.1", alone)
