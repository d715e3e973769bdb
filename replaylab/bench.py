"""`replaylab bench`: the hot paths, timed on this machine on made-up data of the real shapes."""

from __future__ import annotations

import json
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from replaylab.algos import Spaces
from replaylab.data.episodes import Episodes
from replaylab.errors import UsageError, nearest, require
from replaylab.evaluate import pick_device
from replaylab.run import machine
from replaylab.step import Graph, Stepper

Rows = Iterator[tuple[str, float, str]]  # (what, figure, unit)


def hopper_like(rows: int = 299_470, episodes: int = 663) -> Episodes:
    """Noise with the shapes of hopper-medium."""
    rng = np.random.default_rng(0)
    offsets = np.linspace(0, rows, episodes + 1).astype(np.int64)
    terminated = np.zeros(rows, bool)
    terminated[offsets[1:] - 1] = True
    return Episodes(
        observations=rng.standard_normal((rows, 11)).astype(np.float32),
        actions=rng.uniform(-1, 1, (rows, 3)).astype(np.float32),
        rewards=rng.standard_normal(rows),
        terminated=terminated,
        truncated=np.zeros(rows, bool),
        offsets=offsets,
        final_observations=rng.standard_normal((episodes, 11)).astype(np.float32),
        final_known=np.ones(episodes, bool),
        meta={"env_id": "d4rl/hopper"},
    )


def seconds_per_call(call: Callable[[], Any], device: torch.device, calls: int, repeats: int = 5) -> float:
    """Median over repeats of the mean time of a call, the device waited for."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    times = []
    for _ in range(repeats + 1):  # the first one warms up
        wait()
        began = time.perf_counter()
        for _ in range(calls):
            call()
        wait()
        times.append((time.perf_counter() - began) / calls)
    return float(np.median(times[1:]))


def bc_update(device: torch.device) -> Rows:
    from replaylab.algos import bc

    episodes = hopper_like()
    for seeds in (1, 8):
        agent = bc.Agent(bc.Config(), Spaces.of(episodes), range(seeds), device)
        stepper = Stepper(agent.phases(episodes)[0], device)
        count = 500 if device.type == "cuda" else 20
        spent = seconds_per_call(partial(stepper.run, 0, count), device, 1) / count
        yield f"bc update, batch 256, 256x256, {seeds} seed{'s' if seeds > 1 else ''}", 1e3 * spent, "ms"


def sac_update(device: torch.device) -> Rows:
    from replaylab.algos.sac import SAC, Config
    from replaylab.collect.online import Replay

    spaces = Spaces([11], "float32", 3, False, [-1.0] * 3, [1.0] * 3)
    for seeds in (1, 8):
        sac = SAC(Config(), spaces, range(seeds), device)
        replay = Replay(seeds, 1_000_000 if device.type == "cuda" else 100_000, 11, 3, device)
        replay.table.normal_()
        replay.filled.fill_(replay.table.shape[1])

        def body(sac: SAC = sac, replay: Replay = replay) -> None:
            sac.update(replay.sample(256))

        fused = torch.compile(body) if device.type == "cuda" else body  # as `data collect` runs it
        spent = seconds_per_call(Graph(fused, device), device, 500 if device.type == "cuda" else 20)
        name = f"sac update, batch 256, 256x256, {seeds} seed{'s' if seeds > 1 else ''}"
        yield name, 1e3 * spent, "ms"
        yield name, seeds / spent, "updates/s"


def load_data(device: torch.device) -> Rows:
    from replaylab.data.read import load
    from replaylab.data.write import save

    episodes = hopper_like()
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("minari", "native", "npz", "d4rl"):
            path = Path(folder) / ("x.hdf5" if kind == "d4rl" else "x.npz" if kind == "npz" else f"{kind}-v0")
            save(episodes, path, format=kind)
            yield f"load {len(episodes)} hopper rows, {kind}", seconds_per_call(partial(load, path), device, 1, 3), "s"
            tracemalloc.start()
            load(path)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            yield f"load {len(episodes)} hopper rows, {kind}: peak over the arrays' size", peak / episodes.nbytes, "x"


def evaluation(device: torch.device) -> Rows:
    from replaylab.algos import bc
    from replaylab.evaluate import rollout

    episodes = hopper_like(20_000, 20)
    agent = bc.Agent(bc.Config(), Spaces.of(episodes), [0], device)
    one, ten = (torch.randn(1, n, 11, device=device) for n in (1, 10))
    with torch.no_grad():

        def answer(observations: torch.Tensor) -> None:
            agent.act(observations)[0].cpu()

        single, batch = (seconds_per_call(partial(answer, x), device, 200) for x in (one, ten))
        yield "bc policy, 10 episodes side by side against one after another", 10 * single / batch, "x"
        cheetah = Spaces([17], "float32", 6, False, [-1.0] * 6, [1.0] * 6)
        agent = bc.Agent(bc.Config(), cheetah, [0], device)
        for count in (1, 10):
            began = time.perf_counter()
            _, lengths = rollout(agent.act, 1, "d4rl/halfcheetah", count, device=device)
            spent = time.perf_counter() - began
            yield f"evaluation in d4rl/halfcheetah, {count} side by side", lengths.sum() / spent, "steps/s"


def env_steps(device: torch.device) -> Rows:
    from replaylab import envs

    rng = np.random.default_rng(0)
    for name in ("hopper", "halfcheetah", "walker2d", "ant"):
        for count in (1, 64):
            env = envs.make_vec(f"d4rl/{name}", count)
            env.reset(seed=0)
            actions = rng.uniform(-1, 1, (200, count, *env.single_action_space.shape)).astype(np.float32)
            began, steps = time.perf_counter(), 0
            while time.perf_counter() - began < 1:
                _, _, terminated, truncated, _ = env.step(actions[steps % 200])
                steps += 1
                if (terminated | truncated).any():
                    env.reset(options={"reset_mask": terminated | truncated})
            yield f"d4rl/{name}, {count} side by side", steps * count / (time.perf_counter() - began), "steps/s"
            env.close()


CASES: dict[str, Callable[[torch.device], Rows]] = {
    "load": load_data,
    "bc-update": bc_update,
    "sac-update": sac_update,
    "evaluation": evaluation,
    "env-steps": env_steps,
}


def against_sb3(device: torch.device) -> Rows:
    """Stable-Baselines3's SAC update and ours on the same shapes, in one run."""
    sb3 = require("stable_baselines3", "timing against Stable-Baselines3")
    gymnasium: Any = require("gymnasium", "timing against Stable-Baselines3")

    class Noise(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(-1, 1, (11,), np.float32)
        action_space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
            return self.observation_space.sample(), {}

        def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
            return self.observation_space.sample(), 0.0, False, False, {}

    theirs = sb3.SAC("MlpPolicy", Noise(), batch_size=256, buffer_size=100_000, device=device, learning_starts=500)
    theirs.learn(600)  # fills the replay and warms up
    updates = 100 if device.type == "cuda" else 20
    spent = seconds_per_call(partial(theirs.train, updates, 256), device, 1) / updates
    yield f"sac update of stable-baselines3 {sb3.__version__}", 1e3 * spent, "ms"
    (_, ours, _), *_ = sac_update(device)
    yield "sac update of replaylab, one seed", ours, "ms"
    yield "ours is faster by", 1e3 * spent / ours, "x"


PEERS = {"sb3": against_sb3}


def bench(
    cases: list[str] | None = None, *, device: str = "auto", json_path: str | None = None, against: str | None = None
) -> dict[str, Any]:
    """Run cases, print a row for each figure, and return (and write) them with the machine they were taken on.

    `against` names a peer to time beside us instead.
    """
    if against is not None and against not in PEERS:
        raise UsageError(f"unknown peer '{against}'{nearest(against, PEERS)}")
    chosen = {f"against-{against}": PEERS[against]} if against else {c: CASES[c] for c in cases or CASES if c in CASES}
    for case in cases or []:
        if case not in CASES:
            raise UsageError(f"unknown bench case '{case}'{nearest(case, CASES)}")
    where = pick_device(device)
    if where.type == "cuda":
        torch.set_float32_matmul_precision("high")
    found = []
    for case, run in chosen.items():
        for what, figure, unit in run(where):
            found.append({"case": case, "what": what, "figure": figure, "unit": unit})
            print(f"{case:12s} {what:75s} {figure:12,.4g} {unit}", flush=True)
    result = {"machine": machine(where), "rows": found}
    if json_path:
        Path(json_path).write_text(json.dumps(result, indent=1))
    return result
