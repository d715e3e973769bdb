"""Decision Transformer: an update and an action, on vectors and on frames, with the shapes of its paper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from replaylab.algos import Phase, Spaces, dt
from replaylab.bench.common import Rows, Variants, hopper_like, seconds_per_call, time_updates
from replaylab.data.episodes import Episodes
from replaylab.page import count


def frames(rows: int = 50_000, episodes: int = 25) -> Episodes:
    """Noise with the shapes of an Atari log: single 84 x 84 frames."""
    rng = np.random.default_rng(0)
    offsets = np.linspace(0, rows, episodes + 1).astype(np.int64)
    terminated = np.zeros(rows, bool)
    terminated[offsets[1:] - 1] = True
    return Episodes(
        observations=rng.integers(0, 256, (rows, 84, 84), np.uint8),
        actions=rng.integers(0, 6, rows),
        rewards=rng.integers(-1, 2, rows).astype(np.float64),
        terminated=terminated,
        truncated=np.zeros(rows, bool),
        offsets=offsets,
        final_observations=np.zeros((episodes, 84, 84), np.uint8),
        final_known=np.ones(episodes, bool),
        meta={"env_id": "atari/pong", "frame_stack": 4},
    )


def _train(device: torch.device, episodes: Episodes, preset: str, what: str, variants: Variants) -> Rows:
    def phase_of(seeds: int, precision: str) -> Phase:
        config = dt.Config(**dt.PRESETS[preset], precision=precision)
        return dt.Agent(config, Spaces.of(episodes), range(seeds), device).phases(episodes)[0]

    yield from time_updates(phase_of, device, what, variants)


def _act(device: torch.device, spaces: Spaces, preset: str, what: str, counts: tuple[int, ...]) -> Rows:
    agent = dt.Agent(dt.Config(**dt.PRESETS[preset]), spaces, [0], device).eval()
    for rows in counts:
        shape = (1, rows, *spaces.seen)
        seen = torch.randint(0, 256, shape, dtype=torch.uint8) if len(shape) > 3 else torch.randn(shape)
        seen = seen.to(device)
        state: Any = agent.begin(rows, [1.0])

        def answer(seen: torch.Tensor = seen, state: Any = state) -> None:
            agent.act(seen, state)[0].cpu()

        spent = seconds_per_call(answer, device, 50 if device.type == "cuda" else 3)
        yield f"{what}, {count(rows, 'environment')}, result on the host", 1e3 * spent, "ms"


def hopper_train(device: torch.device) -> Rows:
    rows = (1_000_000, 2_200) if device.type == "cuda" else (100_000, 220)
    variants = [(1, "auto", "fp32"), (1, "on", "fp32"), (1, "on", "bf16"), (3, "on", "fp32")]
    yield from _train(device, hopper_like(*rows), "gym", "dt update, batch 64, K 20, width 128, 3 layers", variants)


def hopper_act(device: torch.device) -> Rows:
    yield from _act(device, Spaces.of(hopper_like(1000, 2)), "gym", "dt answer, K 20", (1, 100))


def atari_train(device: torch.device) -> Rows:
    variants = [(1, "auto", "fp32"), (1, "auto", "bf16"), (1, "on", "bf16")]
    log = frames(50_000 if device.type == "cuda" else 2_000)
    yield from _train(device, log, "atari", "dt update, batch 128, K 30, 4x84x84, 6 layers", variants)


def atari_act(device: torch.device) -> Rows:
    yield from _act(device, Spaces.of(frames(100, 1)), "atari", "dt answer, K 30, frames", (1, 100))


CASES: dict[str, Callable[[torch.device], Rows]] = {
    "dt-hopper-train": hopper_train,
    "dt-hopper-act": hopper_act,
    "dt-atari-train": atari_train,
    "dt-atari-act": atari_act,
}
