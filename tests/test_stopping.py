"""Training in processes of their own: killed, interrupted, and without any other package."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
from test_train import same

from replaylab.run import RunFolder

SCRIPT = """
import sys
sys.path[:0] = ["tests", "."]
import torch; torch.set_num_threads(1)
import replaylab
from conftest import make_episodes
out, steps, resume = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "resume"
log = make_episodes(lengths=(50, 30, 40))
print("ready", flush=True)
replaylab.train("bc", log, out=out, steps=steps, batch_size=32, hidden=[32], device="cpu", seeds=[0, 1], resume=resume,
                checkpoint_minutes=0.001, log_every=50)
"""


def start(out, steps, resume="resume"):
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(out), str(steps), resume],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(condition, seconds=60):
    for _ in range(seconds * 100):
        if condition():
            return
        time.sleep(0.01)
    pytest.fail("it did not happen")


def kill_and_resume(tmp_path, kills, steps, rng):
    whole = start(tmp_path / "whole", steps)
    assert whole.wait() == 0, whole.stderr.read()
    spent = RunFolder(tmp_path / "whole").info()["seconds"]
    reached = set()
    for _ in range(kills):
        process = start(tmp_path / "killed", steps)
        assert process.stdout.readline() == "ready\n", process.stderr.read()
        time.sleep(rng.random() * (2 + spent / kills))  # in the start, in the first steps, in the middle
        process.kill()
        process.wait()
        found = RunFolder(tmp_path / "killed").load()
        reached.add(found[2]["step"] if found else 0)
    assert len(reached) > kills / 3  # many of them fell into the training
    last = start(tmp_path / "killed", steps)
    assert last.wait() == 0, last.stderr.read()
    whole, killed = (RunFolder(tmp_path / name) for name in ("whole", "killed"))
    assert same(whole.load()[0], killed.load()[0]) and same(whole.load()[1], killed.load()[1])
    strip = [
        [{k: v for k, v in line.items() if k != "seconds"} for line in r.lines("metrics.jsonl")]
        for r in (whole, killed)
    ]
    assert strip[0] == strip[1]


def test_kill_9_once(tmp_path):
    kill_and_resume(tmp_path, 1, 3000, random.Random(0))


@pytest.mark.slow
def test_kill_9_twenty_times(tmp_path):
    kill_and_resume(tmp_path, 20, 40_000, random.Random(int(time.time())))


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path):
    process = start(tmp_path / "r", 1_000_000)
    wait_for(lambda: (tmp_path / "r" / "checkpoints").exists())
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0 and "resume with the same command plus --resume" in errors
    info = json.loads((tmp_path / "r" / "run.json").read_text())
    assert info["status"] == "interrupted" and RunFolder(tmp_path / "r").load()[2]["step"] > 0


def test_a_second_process_on_the_folder_is_refused(tmp_path):
    first = start(tmp_path / "r", 1_000_000)
    try:
        wait_for(lambda: (tmp_path / "r" / "metrics.jsonl").exists())
        second = start(tmp_path / "r", 1_000_000)
        _, errors = second.communicate(timeout=60)
        assert second.returncode != 0 and "another process is training" in errors
    finally:
        first.kill()
        first.wait()


def test_only_numpy_and_torch_are_needed(tmp_path):
    """Training from arrays in a process in which nothing else can be imported."""
    script = f"""
import sys
import torch, torch._dynamo  # torch looks around for other packages; after this, there are none
class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in OTHERS:
            raise ImportError(name)
OTHERS = "h5py yaml pyarrow gymnasium mujoco ale_py safetensors minari tqdm rich matplotlib pandas scipy".split()
sys.meta_path.insert(0, Nothing())
for name in [name for name in sys.modules if name.split(".")[0] in OTHERS]:
    del sys.modules[name]
sys.path[:0] = ["."]
import numpy as np, replaylab
rng = np.random.default_rng(0)
ends = np.arange(100) % 20 == 19
rows = rng.standard_normal((100, 3)), rng.uniform(-1, 1, (100, 1)), rng.standard_normal(100), ends
log = replaylab.from_rows(*rows, meta={{"env_id": "d4rl/hopper"}})  # whose simulator is not there
run = replaylab.train("bc", log, out={str(tmp_path / "r")!r}, preset="debug", device="cpu")
replaylab.report([run], run / "report.html")
from replaylab.cli import main
replaylab.save(log, run / "log.npz")
assert main(["data", "info", str(run / "log.npz"), "--json"]) == 0
print(replaylab.load_policy(run).act(np.zeros((2, 3))).shape)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("(2, 1)")
    assert "nothing will be evaluated: replaylab.envs needs gymnasium: pip install" in done.stderr
