"""Training: the only loop. Phases, progress, metrics, evaluation, checkpoints, exact resume."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from replaylab.algos import Phase, Spaces, system
from replaylab.config import knob, read_yaml, resolve, write_yaml
from replaylab.data.episodes import Episodes
from replaylab.data.inspect import summarize
from replaylab.data.read import load
from replaylab.data.sample import BLOCK
from replaylab.errors import DataError, ReplaylabError, UsageError, nearest
from replaylab.evaluate import check_spaces, evaluate_agent, pick_device, summary
from replaylab.progress import Progress, duration
from replaylab.run import RunFolder, machine
from replaylab.step import Stepper
from replaylab.track import TRACKERS, open_trackers

# what may differ between a run and its resumption
FREE_TO_CHANGE = {"steps", "device", "compile", "track", "checkpoint_minutes", "preset"}


@dataclass
class Options:
    """Training run."""

    env: str | None = knob(None, "environment to evaluate in; default: the one the data names")
    seeds: list[int] = knob([0], "trained side by side in one process")
    device: str = knob("auto", "auto, cpu or cuda")
    compile: str = knob(
        "auto", "auto: one captured graph per step on CUDA; on: torch.compile too", ("auto", "on", "off")
    )
    deterministic: bool = knob(False, "bit-equal results on CUDA, at some cost in speed")
    eval_every: int = knob(0, "steps between evaluations; 0: ten evaluations a run, -1: only the last")
    eval_episodes: int = knob(10, "episodes per seed in these evaluations")
    final_episodes: int = knob(100, "episodes per seed in the evaluation at the end")
    log_every: int = knob(0, "steps between metric lines; 0: two hundred a run")
    checkpoint_minutes: float = knob(2.0, "minutes between checkpoints")
    track: list[str] = knob([], "send metrics there too", TRACKERS)


class Interrupted(ReplaylabError):
    """Ctrl-C or SIGTERM: the run was saved."""


def train(
    system_name: str,
    data: Episodes | str | Path | Sequence[str | Path],
    *,
    out: str | Path | None = None,
    preset: str | None = None,
    config: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    data_options: dict[str, Any] | None = None,
    **settings: Any,
) -> Path:
    """Train a system on logged data; returns the run folder.

    `settings` are fields of `Options` and of the system's `Config`. They win over the YAML file `config`, which wins
    over `preset`, which wins over the defaults.
    """
    module = system(system_name)
    if preset is not None and preset not in module.PRESETS:
        raise UsageError(f"{system_name}: unknown preset '{preset}'{nearest(preset, module.PRESETS)}")
    layers = [
        (f"preset {preset}", module.PRESETS[preset] if preset else {}),
        (str(config), read_yaml(config) if config else {}),
        ("settings", settings),
    ]
    options, algorithm = resolve([Options, module.Config], layers)
    if not options.seeds or len(set(options.seeds)) != len(options.seeds):
        raise UsageError("seeds must be distinct, and at least one")
    if isinstance(data, Episodes):
        episodes, paths = data, [str(data.meta.get("source") or "arrays")]
    else:
        paths = [str(p) for p in ([data] if isinstance(data, (str, Path)) else data)]
        episodes = load(paths, **(data_options or {}))
    if options.env:  # whatever the data says, or does not say
        check_spaces(options.env, Spaces.of(episodes))
        episodes = replace(episodes, meta=episodes.meta | {"env_id": options.env})
    elif episodes.env_id:
        options.env = _usable(episodes.env_id, Spaces.of(episodes))
    values = {"system": system_name, "data": paths, "data_options": data_options or {}, "preset": preset}
    values |= asdict(options) | asdict(algorithm)
    folder = RunFolder(out or Path("runs") / f"{system_name}-{_name(episodes, paths)}")
    with folder.lock():
        _prepare(folder, values, resume, overwrite)
        with Trainer(folder, module, options, algorithm, episodes, values) as trainer:
            trainer.run()
    return folder.path


def _usable(env_id: str, spaces: Spaces) -> str | None:
    """The environment that the data names, if it can be had here: nobody asked for it, so training goes on without."""
    try:
        check_spaces(env_id, spaces)
    except ReplaylabError as error:
        print(f"note: nothing will be evaluated: {error}", file=sys.stderr)
        return None
    return env_id


def _name(episodes: Episodes, paths: Sequence[str]) -> str:
    """A short name for the data: what it calls itself, else its file's name."""
    if len(paths) > 1:
        return "mix"
    return str(episodes.meta.get("dataset_id") or Path(paths[0]).stem).replace("/", "-")


def _prepare(folder: RunFolder, values: dict[str, Any], resume: bool, overwrite: bool) -> None:
    if folder.exists() and resume:
        stored = folder.config()
        changed = [k for k in values if k in stored and stored[k] != values[k] and k not in FREE_TO_CHANGE]
        if changed:
            raise UsageError(
                f"cannot resume {folder.path} with other settings: "
                + ", ".join(f"{k} was {stored[k]!r}, now {values[k]!r}" for k in changed)
            )
    elif folder.exists() and not overwrite:
        raise UsageError(f"{folder.path} holds a run already: pass --resume, --overwrite or another --out")
    elif not folder.exists() and any(p.name != ".lock" for p in folder.path.iterdir()):
        raise UsageError(f"{folder.path} exists and is not a run folder: choose another --out")
    else:
        folder.clear()
    write_yaml(folder.path / "config.yaml", values)


class Trainer:
    """State of one training run between its steps."""

    def __init__(
        self,
        folder: RunFolder,
        module: Any,
        options: Options,
        algorithm: Any,
        episodes: Episodes,
        values: dict[str, Any],
    ):
        self.folder, self.options, self.episodes = folder, options, episodes
        self.device = pick_device(options.device)
        _set_precision(options.deterministic, self.device)
        self.spaces = Spaces.of(episodes)
        torch.manual_seed(options.seeds[0])
        self.agent = module.Agent(algorithm, self.spaces, options.seeds, self.device)
        self.phases: list[Phase] = self.agent.phases(episodes)
        self.total = sum(phase.steps for phase in self.phases)
        self.step = 0  # updates done, over all phases
        self.spent = 0.0  # seconds of earlier sittings
        self.loaded: dict[str, Tensor] = {}
        self.loaded_count = 0
        self.stopped = False
        self.began = self.saved = time.monotonic()
        self.track = open_trackers(options.track, folder.path, values)
        folder.write_info(
            command=" ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            finished=None,
            seconds=0.0,
            status="running",
            machine=machine(self.device),
            spaces=asdict(self.spaces),
            parameters=sum(p.numel() for p in self.agent.parameters()),
            data=summarize(episodes),
        )
        self._restore()

    def __enter__(self) -> Trainer:
        def stop(signum: int, frame: FrameType | None) -> None:
            self.stopped = True

        try:
            self.handlers = {s: signal.signal(s, stop) for s in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not the main thread
            self.handlers = {}
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        status = "finished" if error is None else "interrupted" if isinstance(error, Interrupted) else "failed"
        finished = datetime.now(UTC).isoformat(timespec="seconds")
        with contextlib.suppress(OSError):  # a full disk has its own error
            self.folder.write_info(status=status, finished=finished, seconds=round(self.seconds, 3))

    @property
    def seconds(self) -> float:
        return self.spent + time.monotonic() - self.began

    # --- the loop

    def run(self) -> None:
        log_every = self.options.log_every or max(1, self.total // 200)
        eval_every = self.options.eval_every or max(1, self.total // 10)
        first = 0
        stepper: Stepper | None = None
        for phase in self.phases:
            if self.step < first + phase.steps:
                stepper = Stepper(phase, self.device, self.options.compile)
                self._train(phase, stepper, first, log_every, eval_every)
            first += phase.steps
        if stepper is not None:  # otherwise the run had finished before
            self._evaluate(self.options.final_episodes)
            self._save(stepper)

    def _train(self, phase: Phase, stepper: Stepper, first: int, log_every: int, eval_every: int) -> None:
        stepper.sums = {k: v.to(self.device) for k, v in self.loaded.items()}
        stepper.count, self.loaded = self.loaded_count, {}
        bar = Progress(phase.name, phase.steps, self.step - first)
        piece = 1
        while self.step < first + phase.steps:
            stop = min(first + phase.steps, (self.step // log_every + 1) * log_every)
            if eval_every > 0:
                stop = min(stop, (self.step // eval_every + 1) * eval_every)
            steps = min(stop - self.step, piece, BLOCK)
            before = time.monotonic()
            stepper.run(self.step - first, steps)
            self.step += steps
            if self.step % log_every == 0 or self.step == first + phase.steps:
                self._log(phase, stepper, bar)
            bar.update(self.step - first)
            # short enough to answer Ctrl-C and show progress, long enough not to matter
            piece = BLOCK if time.monotonic() - before < 0.25 else max(1, steps // 2)
            if self.stopped:
                self._save(stepper)
                bar.close()
                raise Interrupted(f"stopped at step {self.step}; resume with the same command plus --resume")
            if eval_every > 0 and self.step % eval_every == 0 and self.step < self.total:
                self._evaluate(self.options.eval_episodes, bar)
            if time.monotonic() - self.saved > 60 * self.options.checkpoint_minutes:
                self._save(stepper)
        bar.close()

    def _log(self, phase: Phase, stepper: Stepper, bar: Progress) -> None:
        means = stepper.read()
        lines = [
            {"step": self.step, "phase": phase.name, "seed": seed, "seconds": round(self.seconds, 3)}
            | {name: values[i] for name, values in means.items()}
            for i, seed in enumerate(self.options.seeds)
        ]
        self.folder.append("metrics.jsonl", lines)
        average = {name: sum(values) / len(values) for name, values in means.items()}
        bar.update(self.step, **dict(list(average.items())[:4]))
        self.track(self.step, {f"{phase.name}/{name}": value for name, value in average.items()})
        broken = [name for name, value in average.items() if not math.isfinite(value)]
        if broken:
            raise DataError(f"{broken[0]} became {average[broken[0]]} at step {self.step}: lower the learning rate")

    def _evaluate(self, episodes: int, bar: Progress | None = None) -> None:
        if self.options.env is None or episodes < 1:
            return
        self.agent.eval()
        records = evaluate_agent(self.agent, self.options.seeds, self.options.env, episodes, device=self.device)
        self.agent.train()
        self.folder.append("eval.jsonl", [{"step": self.step, **record} for record in records])
        found = summary(records)
        self.track(self.step, {"eval/return": found["return"], f"eval/{found['score']}": found["mean"]})
        error = "" if found["error"] is None else f" ± {found['error']:.1f}"
        (bar.say if bar else lambda text: print(text, file=sys.stderr))(
            f"step {self.step}: {found['env']} {found['score']} {found['mean']:.1f}{error} "
            f"({found['seeds']} seeds x {episodes} episodes, {duration(records[0]['seconds'])})"
        )

    # --- checkpoints

    def _save(self, stepper: Stepper) -> None:
        training = {"rng.cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            training["rng.cuda"] = torch.cuda.get_rng_state(self.device)
        training |= {f"metric.{name}": total for name, total in stepper.sums.items()}
        groups = {}
        for name, optimizer in self.agent.optimizers.items():
            state = optimizer.state_dict()
            groups[name] = [_plain(group) for group in state["param_groups"]]
            for index, entries in state["state"].items():
                training |= {f"optimizer.{name}.{index}.{key}": torch.as_tensor(v) for key, v in entries.items()}
        state = {"step": self.step, "seconds": self.seconds, "count": stepper.count, "groups": groups}
        self.folder.save(self.step, self.agent.state_dict(), training, state)
        self.saved = time.monotonic()

    def _restore(self) -> None:
        found = self.folder.load()
        if found is None:
            self.folder.rewind(-1)
            return
        weights, training, state = found
        try:
            self.agent.load_state_dict(weights)
            for name, optimizer in self.agent.optimizers.items():
                entries: dict[int, dict[str, Tensor]] = {}
                for key, value in training.items():
                    if key.startswith(f"optimizer.{name}."):
                        index, field = key.removeprefix(f"optimizer.{name}.").split(".", 1)
                        entries.setdefault(int(index), {})[field] = value
                current = optimizer.state_dict()["param_groups"]
                groups = [now | saved for now, saved in zip(current, state["groups"][name], strict=True)]
                optimizer.load_state_dict({"state": entries, "param_groups": groups})
        except (RuntimeError, KeyError, ValueError) as error:
            raise DataError(f"the checkpoint in {self.folder.path} does not fit this system: {error}") from error
        torch.set_rng_state(training["rng.cpu"])
        if self.device.type == "cuda" and "rng.cuda" in training:
            torch.cuda.set_rng_state(training["rng.cuda"], self.device)
        self.loaded = {k.removeprefix("metric."): v for k, v in training.items() if k.startswith("metric.")}
        self.loaded_count = state["count"]
        self.step, self.spent = state["step"], state["seconds"]
        self.folder.rewind(self.step)


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    """What of an optimiser's group JSON can hold; the rest is rebuilt from the configuration."""
    return {k: v for k, v in group.items() if isinstance(v, (int, float, str, bool, list, tuple)) and k != "params"}


def _set_precision(deterministic: bool, device: torch.device) -> None:
    if device.type != "cuda":
        return
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    else:
        torch.set_float32_matmul_precision("high")  # TF32


def settings_of(module: Any) -> set[str]:
    return {f.name for cls in (Options, module.Config) for f in fields(cls)}
