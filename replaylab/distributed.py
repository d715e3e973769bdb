"""Data-parallel training of one large run under torchrun: the batch is shared out, gradients are averaged.

    torchrun --nproc-per-node 2 -m replaylab.distributed dt --data atari-log --preset atari --out runs/dt

Every process draws the indices of the whole batch, which are a function of seed and step, and gathers its own part. The
gradient of each parameter is averaged over the processes as soon as it is there, so clipping and optimisers see what
one process with the whole batch would have seen: the same run to rounding, whatever the number of processes. Noise is
that of a row's place in the whole batch (`models/draws.py`). Where a batch has a mask, a process counts by its unmasked
share, seed by seed; dropout, of course, draws other units, and `dt --ahead` has a mask of its own.
The first process writes the run folder, evaluates and prints notes. The others keep theirs in a folder that is thrown
away, and print errors alone.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed

from replaylab.algos import Phase, system
from replaylab.config import read_yaml, write_yaml
from replaylab.data.sample import Pair
from replaylab.errors import ReplaylabError, UsageError
from replaylab.models import draws

BATCH = 2  # axis of the indices: (steps, seeds, batch, ...)
EXTREMES = {"_min": distributed.ReduceOp.MIN, "_max": distributed.ReduceOp.MAX}  # by how a metric's name ends


def world() -> int:
    """Processes that torchrun started for this run; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def start() -> None:
    """Meet the other processes; on a machine with GPUs each takes its own."""
    if world() > 1 and not distributed.is_initialized():
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")


class Part:
    """A sampler whose draws are this process's part of the batch."""

    def __init__(self, sampler: Any, weights: Tensor):
        self.sampler, self.weights, self.begun = sampler, weights, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sampler, name)

    @property
    def batch_size(self) -> int:
        return self.sampler.batch_size // world()

    def draw(self, start: int, steps: int) -> np.ndarray:
        if rank() and not self.begun:  # dropout differs from process to process; a checkpoint has the first one's seed
            torch.manual_seed(torch.initial_seed() + rank() * 1_000_003 + start)
        self.begun = True
        drawn = self.sampler.draw(start, steps)
        size = drawn.shape[BATCH] if drawn.ndim > BATCH else 1
        if size % world():
            raise UsageError(f"a batch of {size} cannot be shared out to {world()} processes")
        share = size // world()
        return drawn[:, :, rank() * share : (rank() + 1) * share]

    def gather(self, indices: Tensor) -> dict[str, Tensor]:
        batch = self.sampler.gather(indices)
        if "mask" in batch:  # the loss is a mean over what is not masked, of which another process may have more
            counted = batch["mask"].flatten(1).sum(1)  # (seeds,)
            distributed.all_reduce(everyone := counted.clone())
            self.weights.copy_(counted / everyone)
        return batch


def join(agent: Any, phases: Sequence[Phase]) -> None:
    """Make an agent and its phases one of several."""
    if world() == 1:
        return
    for phase in phases:
        if phase.hook is not None:
            raise UsageError(f"phase '{phase.name}' works between its updates and cannot be shared out")
    start()
    for tensor in agent.state_dict().values():
        distributed.broadcast(tensor, 0)
    parameters = [p for p in agent.parameters() if p.requires_grad]
    weights = torch.full((len(agent.seeds),), 1 / world(), device=parameters[0].device)
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(partial(_average, weights))
    for phase in phases:
        phase.sampler, phase.update = _part(phase.sampler, weights), partial(_update, phase.update, weights)
    draws.take(rank(), world())


def _part(sampler: Any, weights: Tensor) -> Any:
    if isinstance(sampler, Pair):  # each of the two has a batch of its own to be shared out
        return Pair(*(_part(each, weights) for each in (sampler.first, sampler.second)))
    return Part(sampler, weights)


def _update(update: Callable[[dict[str, Tensor]], dict[str, Tensor]], weights: Tensor, batch: Any) -> dict[str, Tensor]:
    """An update whose metrics are those of the whole batch."""
    found = update(batch)  # (seeds,) each
    for name, value in found.items():
        extreme = EXTREMES.get(name[-4:])
        found[name] = value * weights if extreme is None else value.clone()
        distributed.all_reduce(found[name], extreme or distributed.ReduceOp.SUM)
    return found


def _average(weights: Tensor, parameter: Tensor) -> None:
    """Sum of the processes' gradients by their weights. The first axis of a parameter is the seeds'."""
    assert parameter.grad is not None
    own = weights if parameter.shape[:1] == weights.shape else weights.mean().expand(1)
    distributed.all_reduce(parameter.grad.mul_(own.view(-1, *[1] * (parameter.ndim - 1))))


def _join_what_is_made(module: Any) -> None:
    """Every agent of the system that this process makes from now on is one of several."""

    class Joined(module.Agent):
        def phases(self, source: Any) -> list[Phase]:
            found = super().phases(source)
            join(self, found)
            return found

    module.Agent = Joined


def train(system_name: str, data: Any = None, *, out: str | Path, resume: bool = False, **given: Any) -> Path:
    """`replaylab.train` in one of several processes; returns the run folder, which the first one writes."""
    from replaylab.train import train as train_one

    module = system(system_name)
    if world() > 1 and getattr(module, "ONLINE", False):
        raise UsageError(f"{system_name} plays while it learns, in one process: use `replaylab train {system_name}`")
    start()
    _join_what_is_made(module)
    if rank() == 0:
        return train_one(system_name, data, out=out, resume=resume, **given)
    quiet = {"eval_every": -1, "final_episodes": 0, "track": []}
    # the first process says all that there is to say; an error leaves this block before it is printed
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
        if resume and (Path(out) / "config.yaml").exists():
            shutil.copytree(out, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".lock", "*.jsonl"))
            config = Path(folder) / "config.yaml"
            write_yaml(config, read_yaml(config) | quiet)
        train_one(system_name, data, out=folder, resume=resume, **given | quiet | {"overwrite": False})
    return Path(out)


def main(words: list[str]) -> None:
    """`replaylab train`'s own options; only --out must be given."""
    from replaylab.cli import build
    from replaylab.cli.runs import train_arguments
    from replaylab.report import report

    args = build(["train", *words]).parse_args(["train", *words])
    if not hasattr(args, "out"):
        raise UsageError("name the run folder with --out: all processes must know it")
    path = train(args.system, **train_arguments(args))
    if rank() == 0:
        print(f"run folder: {path}\nreport:     {report([path], path / 'report.html')}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ReplaylabError as error:
        print(f"replaylab{f' (process {rank()})' if rank() else ''}: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()
