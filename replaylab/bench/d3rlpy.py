"""Our updates against d3rlpy's on the same shapes, in one run.

d3rlpy is timed twice: the update alone, on a batch drawn before, and the update with drawing its batch, as in its
`fit`. Ours always draws its batch.
"""

from __future__ import annotations

import contextlib
import logging
from functools import partial
from typing import Any

import numpy as np
import torch

from replaylab.algos import Spaces, bc, dt
from replaylab.bench.common import Rows, hopper_like, seconds_per_call
from replaylab.errors import require
from replaylab.step import Stepper

CONTEXT = 20


def against(device: torch.device) -> Rows:
    """d3rlpy's Decision Transformer and behaviour cloning, and ours."""
    theirs: Any = require("d3rlpy", "timing against d3rlpy")
    _quieten()
    where = "cuda:0" if device.type == "cuda" else "cpu:0"
    episodes = hopper_like(50_000, 100)
    replay = theirs.dataset.MDPDataset(
        episodes.observations, episodes.actions, episodes.rewards.astype(np.float32), episodes.terminated
    )
    wide = partial(theirs.models.VectorEncoderFactory, activation="relu")
    transformer = theirs.algos.DecisionTransformerConfig(
        batch_size=64, context_size=CONTEXT, num_heads=1, num_layers=3, max_timestep=1000,
        encoder_factory=wide(hidden_units=[128], exclude_last_activation=True), compile_graph=device.type == "cuda",
    ).create(device=where)  # fmt: skip
    cloning = theirs.algos.BCConfig(
        batch_size=256, encoder_factory=wide(hidden_units=[256, 256]), compile_graph=device.type == "cuda"
    ).create(device=where)
    drawing = {
        "dt": partial(replay.sample_trajectory_batch, 64, CONTEXT),
        "bc": partial(replay.sample_transition_batch, 256),
    }
    ours = {
        "dt": dt.Agent(_dt_config(), Spaces.of(episodes), [0], device),
        "bc": bc.Agent(bc.Config(), Spaces.of(episodes), [0], device),
    }
    for name, model in (("dt", transformer), ("bc", cloning)):
        model.create_impl((11,), 3)
        yield from _side_by_side(theirs.__version__, name, model, drawing[name], ours[name], episodes, device)


def _dt_config() -> dt.Config:
    return dt.Config(batch_size=64, context=CONTEXT, width=128, layers=3, heads=1)


def _side_by_side(
    version: str, name: str, model: Any, draw: Any, agent: Any, episodes: Any, device: torch.device
) -> Rows:
    calls = 200 if device.type == "cuda" else 10
    batch = draw()
    alone = seconds_per_call(partial(model.update, batch), device, calls)
    whole = seconds_per_call(lambda: model.update(draw()), device, calls)
    stepper = Stepper(agent.phases(episodes)[0], device)
    spent = seconds_per_call(partial(stepper.run, 0, calls), device, 1) / calls
    yield f"{name} update of d3rlpy {version}, its batch drawn before", 1e3 * alone, "ms"
    yield f"{name} update of d3rlpy {version}, with drawing its batch", 1e3 * whole, "ms"
    yield f"{name} update of replaylab, one seed, with drawing its batch", 1e3 * spent, "ms"
    yield f"{name}: ours is faster than d3rlpy's update alone by", alone / spent, "x"
    yield f"{name}: ours is faster than d3rlpy's update with its batch by", whole / spent, "x"


def _quieten() -> None:
    """Silence d3rlpy, which logs every array it inspects."""
    with contextlib.suppress(ImportError):
        import structlog

        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
