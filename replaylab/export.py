"""A trained policy as one file that runs without replaylab: `.pt2` for PyTorch, `.onnx` for ONNX Runtime.

    actions = policy(observations)                               one row or more
    actions, memory = policy(observations, rewards, memory)      a policy with a memory; a row of zeros is a new episode

The file is played back and held against the policy before it is written.
"""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import replaylab
from replaylab.algos import system
from replaylab.config import write_whole
from replaylab.errors import DataError, UsageError, require
from replaylab.evaluate import Policy, load_policy
from replaylab.progress import Progress
from replaylab.run import RunFolder

ROWS, FEW = 64, 8  # played back; of a policy with a memory few, for more steps than it remembers
CLOSE = 1e-4  # two answers are the same if they differ by less, in widths of the action's box
TIES = 0.05  # of the answers, where rounding may choose another of two actions that are as good

Play = Callable[..., Sequence[np.ndarray]]


class Memoryless(nn.Module):
    inputs, outputs = ["observations"], ["actions"]

    def __init__(self, policy: Policy):
        super().__init__()
        self.agent = policy.agent

    def forward(self, observations: Tensor) -> Tensor:
        return self.agent.act(observations[None])[0][0]


class Remembering(nn.Module):
    inputs, outputs = ["observations", "rewards", "memory"], ["actions", "next_memory"]

    def __init__(self, policy: Policy):
        super().__init__()
        self.agent = policy.agent
        self.targets = policy.agent.targets if policy.target is None else [policy.target]

    def forward(self, observations: Tensor, rewards: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        # joined, because ONNX would repeat a single row of one of them; the cast makes PyTorch check for bytes
        together = torch.cat([observations.flatten(1)[:, :1].float(), rewards[:, None], memory], 1)
        state = self.agent.begin(observations.shape[0], self.targets)
        state.unpack(together[None, :, 2:])
        state.receive(together[None, :, 1])
        actions, state = self.agent.act(observations[None], state)
        return actions[0], state.packed()[0]


@torch.no_grad()
def export(
    run: str | Path,
    out: str | Path | None = None,
    *,
    seed: int | None = None,
    target: float | None = None,
    **acting: Any,
) -> Path:
    """Write the policy of a run to a file that ends in .pt2 (by default RUN/policy.pt2) or .onnx; returns its path.

    seed: which of the run's, by default its first. target: the return to aim for.
    acting: other values for settings of how the policy acts, such as candidates=4, if its system has any.
    """
    folder = RunFolder(run).require()
    if not isinstance(out, str | Path | None):
        raise UsageError(f"a policy is exported to a file named by its path, not {type(out).__name__}")
    path = folder.path / "policy.pt2" if out is None else Path(out)
    suffix = path.suffix.lower()
    if suffix not in (".pt2", ".onnx"):
        raise UsageError(f"a policy is exported to a file that ends in .pt2 or .onnx, not to {path}")
    if path.is_dir():
        raise UsageError(f"{path} is a folder: name a file")
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {path.parent} to write {path.name} into")
    if suffix == ".onnx":
        for package in ("onnxscript", "onnxruntime"):
            require(package, "a policy in ONNX")
    policy = load_policy(run, seed, target=target, **acting)
    answers = Remembering(policy) if hasattr(policy.agent, "begin") else Memoryless(policy)
    answers.eval().requires_grad_(False)
    steps, memory = _example(policy)
    expected, others = (_played(_ours(policy), steps, [], draws) for draws in (0, 1))
    if not np.isfinite(expected).all():
        raise DataError("the policy answers with NaN or infinity")
    about = _about(folder, policy, seed) | {"memory": memory[0].shape[1] if memory else 0}
    bar = Progress("export", 3, unit="stages")
    with _quiet():
        program = _traced(answers, [*steps[0], *memory])
        bar.update(1)
        content, play = (_onnx if suffix == ".onnx" else _pt2)(program, answers, about)
        bar.update(2)
    found = _played(play, steps, memory, 0)
    bar.erase()
    _check(policy, expected, found, compared=suffix == ".pt2" or bool((expected == others).all()))
    write_whole(path, content)
    return path


def _about(run: RunFolder, policy: Policy, seed: int | None) -> dict[str, Any]:
    agent, spaces, name = policy.agent, policy.spaces, run.system()
    acting = [key for key in getattr(system(name), "ACTING", ()) if key not in getattr(agent, "idle", ())]
    target = getattr(agent, "targets", []) if policy.target is None else [policy.target]
    return {
        "system": name,
        "run": run.path.resolve().name,
        "seed": run.seeds()[0] if seed is None else int(seed),
        "step": policy.step,
        "observation": spaces.seen,
        "actions": spaces.action_dim if spaces.discrete else {"low": spaces.action_low, "high": spaces.action_high},
        "acting": {key: getattr(agent.config, key) for key in acting} | ({"target": target[0]} if target else {}),
        "replaylab": replaylab.__version__,
    }


# --- tracing


def _traced(answers: Any, example: Sequence[np.ndarray]) -> torch.export.ExportedProgram:
    """The program of an answer to any number of rows, without the weights that only training needs."""
    rows = torch.export.Dim("rows", min=1)
    given = tuple(torch.from_numpy(array[:2]) for array in example)
    program = torch.export.export(answers, given, dynamic_shapes={name: {0: rows} for name in answers.inputs})
    signature = program.graph_signature
    for node in [n for n in program.graph.nodes if n.op == "placeholder" and not n.users]:
        (spec,) = (spec for spec in signature.input_specs if spec.arg.name == node.name)
        if spec.target is not None:  # not an input of the policy's own
            program.graph.erase_node(node)
            signature.input_specs.remove(spec)
            for held in (program.state_dict, program.constants):
                held.pop(spec.target, None)
    for part in program.graph_module.modules():
        for node in getattr(getattr(part, "graph", None), "nodes", ()):
            node.meta.pop("stack_trace", None)  # paths and lines of this machine
    program.graph_module.recompile()
    return program


def _pt2(program: torch.export.ExportedProgram, answers: Any, about: dict[str, Any]) -> tuple[bytes, Play]:
    file = io.BytesIO()
    torch.export.save(program, file, extra_files={"about.json": json.dumps(about)})
    file.seek(0)
    return file.getvalue(), _numpy(torch.export.load(file).module())


def _onnx(program: torch.export.ExportedProgram, answers: Any, about: dict[str, Any]) -> tuple[bytes, Play]:
    import onnx_ir
    import onnxruntime
    from onnxscript import opset18 as onnx

    def silu_backward(flow: Any, x: Any) -> Any:  # ONNX has none, and the guidance of Diffusion-DICE needs it
        gate = onnx.Sigmoid(x)
        return flow * gate * (1.0 + x * (1.0 - gate))

    made = torch.onnx.export(
        program, (), input_names=answers.inputs, output_names=answers.outputs, dynamo=True, verbose=False,
        custom_translation_table={torch.ops.aten.silu_backward.default: silu_backward},
    )  # fmt: skip
    assert made is not None  # it is where no file is named
    for value in (*made.model.graph.inputs, *made.model.graph.outputs):
        value.shape = onnx_ir.Shape(["rows", *list(value.shape or [])[1:]])
    for node in made.model.graph:
        node.metadata_props.clear()  # where in our files it comes from
    made.model.metadata_props.update({name: json.dumps(value) for name, value in about.items()})
    content = made.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(content)
    return content, lambda *given: session.run(None, dict(zip(answers.inputs, given, strict=True)))


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporters warn of operators that no policy has."""
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(level)


# --- playing back


def _ours(policy: Policy) -> Play:
    """The run's own way of acting, from the start of an episode."""
    policy.reset()
    return lambda *given: [policy.act(*given)]


def _numpy(answers: Callable[..., Tensor | tuple[Tensor, ...]]) -> Play:
    def play(*given: np.ndarray) -> list[np.ndarray]:
        found = answers(*map(torch.from_numpy, given))
        return [x.numpy() for x in (found if isinstance(found, tuple) else [found])]

    return play


def _example(policy: Policy) -> tuple[list[list[np.ndarray]], list[np.ndarray]]:
    """What the policy is shown at each step, random numbers of the size of its data, and its memory before."""
    agent, rng, remembers = policy.agent, np.random.default_rng(0), hasattr(policy.agent, "begin")
    rows, count = (FEW, agent.config.context + 2) if remembers else (ROWS, 1)
    shape, steps = (rows, *policy.spaces.seen), []
    for _ in range(count):
        if len(shape) > 2:
            seen = rng.integers(0, len(getattr(agent, "palette", range(256))), shape, np.uint8)
        else:
            seen = rng.normal(agent.normalizer.mean.numpy(), agent.normalizer.std.numpy(), shape).astype(np.float32)
        rewards = rng.normal(scale=100, size=rows).astype(np.float32)
        steps.append([seen, rewards] if remembers else [seen])
    memory = [np.zeros_like(agent.begin(rows, []).packed()[0].numpy())] if remembers else []
    return steps, memory


def _played(play: Play, steps: list[list[np.ndarray]], memory: list[np.ndarray], draws: int) -> np.ndarray:
    """The actions of all steps, one below the other. A policy that draws does so from this seed, but for ONNX."""
    found = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(draws)
        for given in steps:
            actions, *memory = play(*given, *memory)
            found.append(actions)
    return np.concatenate(found)


def _check(policy: Policy, expected: np.ndarray, found: np.ndarray, compared: bool) -> None:
    spaces = policy.spaces
    if found.shape != expected.shape or found.dtype != expected.dtype or not np.isfinite(found).all():
        raise DataError("the exported policy's answers are not those of the run: please report this")
    if spaces.discrete:
        far = found != expected
    else:
        width = np.array(spaces.action_high) - np.array(spaces.action_low)
        far = (np.abs(found - expected) > CLOSE * np.where(width > 0, width, 1)).any(1)
    if compared and far.mean() > TIES:
        raise DataError(f"the exported policy answers {far.mean():.0%} of the time unlike the run: please report this")
