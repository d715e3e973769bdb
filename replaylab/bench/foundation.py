"""Reading data, behaviour cloning, SAC, evaluation and the environments."""

from __future__ import annotations

import tempfile
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from replaylab.algos import Spaces
from replaylab.bench.common import Rows, hopper_like, seconds_per_call
from replaylab.fuse import fused
from replaylab.page import count
from replaylab.step import Graph, Stepper


def bc_update(device: torch.device) -> Rows:
    from replaylab.algos import bc

    episodes = hopper_like()
    for seeds in (1, 8):
        agent = bc.Agent(bc.Config(), Spaces.of(episodes), range(seeds), device)
        stepper = Stepper(agent.phases(episodes)[0], device)
        calls = 500 if device.type == "cuda" else 20
        spent = seconds_per_call(partial(stepper.run, 0, calls), device, 1) / calls
        yield f"bc update, batch 256, 256x256, {count(seeds, 'seed')}", 1e3 * spent, "ms"


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

        call = Graph(fused(body, device.type == "cuda"), device)  # as `data collect` runs it
        spent = seconds_per_call(call, device, 500 if device.type == "cuda" else 20)
        name = f"sac update, batch 256, 256x256, {count(seeds, 'seed')}"
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
        for games in (1, 10):
            began = time.perf_counter()
            _, lengths = rollout(agent.act, 1, "d4rl/halfcheetah", games, device=device)
            spent = time.perf_counter() - began
            yield f"evaluation in d4rl/halfcheetah, {games} side by side", lengths.sum() / spent, "steps/s"


def env_steps(device: torch.device) -> Rows:
    from replaylab import envs

    rng = np.random.default_rng(0)
    for name in ("hopper", "halfcheetah", "walker2d", "ant"):
        for robots in (1, 64):
            env = envs.make_vec(f"d4rl/{name}", robots)
            env.reset(seed=0)
            actions = rng.uniform(-1, 1, (200, robots, *env.single_action_space.shape)).astype(np.float32)
            began, steps = time.perf_counter(), 0
            while time.perf_counter() - began < 1:
                _, _, terminated, truncated, _ = env.step(actions[steps % 200])
                steps += 1
                if (terminated | truncated).any():
                    env.reset(options={"reset_mask": terminated | truncated})
            yield f"d4rl/{name}, {robots} side by side", steps * robots / (time.perf_counter() - began), "steps/s"
            env.close()


CASES: dict[str, Callable[[torch.device], Rows]] = {
    "load": load_data,
    "bc-update": bc_update,
    "sac-update": sac_update,
    "evaluation": evaluation,
    "env-steps": env_steps,
}
