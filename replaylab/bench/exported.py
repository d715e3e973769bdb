"""What one answer takes: of a policy of a run, and of the files that it is exported to."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from replaylab.bench.common import Rows, hopper_like, seconds_per_call

CPU = torch.device("cpu")  # where exported files run


def exported_act(device: torch.device) -> Rows:
    from replaylab import export, load_policy, train

    settings: dict[str, Any] = {"steps": 1, "eval_every": -1, "final_episodes": 0, "device": "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        for system, calls in (("bc", 500), ("dt", 20)):
            run = train(system, hopper_like(2000, 4), out=Path(folder) / system, **settings)
            policy, observations = load_policy(run), np.zeros((1, 11), np.float32)
            rewards = {"rewards": np.zeros(1)} if system == "dt" else {}
            spent = seconds_per_call(partial(policy.act, observations, **rewards), CPU, calls)
            yield f"{system} at its defaults, one observation of hopper, replaylab", 1e3 * spent, "ms"
            given: list[Any] = [observations]
            if system == "dt":
                given += [np.zeros(1, np.float32), policy.state.packed()[0].numpy()]
            answer = torch.export.load(export(run)).module()
            spent = seconds_per_call(partial(answer, *map(torch.from_numpy, given)), CPU, calls)
            yield f"{system} at its defaults, one observation of hopper, .pt2", 1e3 * spent, "ms"
            if find_spec("onnxscript") and find_spec("onnxruntime"):
                import onnxruntime

                session = onnxruntime.InferenceSession(export(run, Path(folder) / f"{system}.onnx"))
                names = [entry.name for entry in session.get_inputs()]
                spent = seconds_per_call(partial(session.run, None, dict(zip(names, given, strict=True))), CPU, calls)
                yield f"{system} at its defaults, one observation of hopper, .onnx", 1e3 * spent, "ms"


CASES: dict[str, Callable[[torch.device], Rows]] = {"exported-act": exported_act}
