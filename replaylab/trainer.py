"""The training loop: runs the phases of an agent with progress, metrics, evaluations, checkpoints and exact resume."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from replaylab.algos import Phase, Spaces
from replaylab.config import COUNT, FROM_0, Settings, Within, knob, write_yaml
from replaylab.data.episodes import Episodes
from replaylab.data.sample import BLOCK
from replaylab.errors import DataError, ReplaylabError, UsageError
from replaylab.evaluate import evaluate_agent, pick_device, summary
from replaylab.page import count
from replaylab.progress import Progress, duration
from replaylab.run import RunFolder, command_line, machine
from replaylab.step import Stepper
from replaylab.tensors import by_index, under
from replaylab.track import TRACKERS, Trackers

WORTH = 20.0  # seconds since the last checkpoint after which the end of a phase is saved too,
THRIFT = 20.0  # and how many times what that checkpoint took


@dataclass
class Options(Settings):
    """Training run."""

    env: str | None = knob(
        None, "environment to play and evaluate in; default: the one that the data names (mbarc: none)"
    )
    seeds: list[int] = knob([0], "random seeds; all are trained together in one process (mbarc: one)", Within(0, 1e12))
    device: str = knob("auto", "auto, cpu or cuda; auto: cuda if there is a GPU")
    compile: str = knob(
        "auto", "auto: one CUDA graph per update; on: torch.compile too; off: neither", ("auto", "on", "off")
    )
    deterministic: bool = knob(False, "only deterministic kernels on CUDA, and no TF32: slower")
    eval_every: int = knob(0, "updates between evaluations; 0: ten per run, -1: only at the end", Within(-1))
    eval_episodes: int = knob(10, "episodes per seed in these evaluations", COUNT)
    final_episodes: int = knob(100, "episodes per seed in the evaluation at the end; 0: no evaluation", FROM_0)
    log_every: int = knob(0, "updates between metric lines; 0: two hundred lines per run", FROM_0)
    checkpoint_minutes: float = knob(2.0, "minutes between checkpoints", FROM_0)
    track: list[str] = knob([], "also send metrics to these trackers", tuple(TRACKERS))


class Interrupted(ReplaylabError):
    """Ctrl-C or SIGTERM: the run was saved."""


class Trainer:
    """One training run and its state between updates."""

    def __init__(
        self,
        folder: RunFolder,
        module: Any,
        options: Options,
        algorithm: Any,
        source: Episodes | str,
        about: dict[str, Any] | None,  # summary of the logs, if the system learns from logs
        spaces: Spaces,
        values: dict[str, Any],
        resume: bool = False,
    ):
        self.folder, self.options, self.logged = folder, options, about is not None
        self.device = pick_device(options.device)
        self.determined = torch.are_deterministic_algorithms_enabled()  # restored after this run
        _set_precision(options.deterministic, self.device)
        torch.manual_seed(options.seeds[0])
        self.agent = module.Agent(algorithm, spaces, options.seeds, self.device)
        self.phases: list[Phase] = self.agent.phases(source)
        self.total = sum(phase.steps for phase in self.phases)
        self.step = 0  # updates done in all phases
        self.phase = self.done = 0  # index of the phase, and its updates done
        self.ended = False  # the phase stopped early
        self.findings: dict[str, Any] = {}  # of finished phases
        self.notes: list[str] = []
        self.hooked: dict[str, Tensor] = {}  # latest metrics of the hook
        self.spent = 0.0  # seconds before the last resume
        self.paces: dict[str, float] = {}  # seconds an update of the newest whole phase of each name, all counted
        self.loaded: dict[str, Tensor] = {}
        self.loaded_count = 0
        self.stopped = self.judging = False
        self.trackers = Trackers(options.track)
        self.began = self.saved = time.monotonic()
        self.saving = 0.0  # seconds that the last checkpoint took
        if not resume:
            folder.clear()  # only now: a run refused above has neither deleted an old run nor left a new one
        self._restore()
        self.over = resume and self._over()  # then the record of the run stays as it is
        if self.over:
            return
        self.trackers.open(folder.path, values)
        write_yaml(folder.path / "config.yaml", values)
        for warning in about["warnings"] if about and not resume else ():
            print(f"note: the data: {warning}", file=sys.stderr)
        folder.write_info(
            command=command_line(),
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            finished=None,
            seconds=0.0,
            status="running",
            machine=machine(self.device),
            spaces=asdict(spaces),
            parameters=sum(p.numel() for p in self.agent.parameters()),
            planned=self.total,
            data=about,
            findings=self.findings,
            notes=self.notes,
        )

    def __enter__(self) -> Trainer:
        def stop(signum: int, frame: FrameType | None) -> None:
            self.stopped = True
            if self.judging:  # training is over and saved; otherwise the loop stops by itself soon
                self._interrupt()
            if signum == signal.SIGINT:  # a second one does not wait
                signal.signal(signum, signal.default_int_handler)
                with contextlib.suppress(OSError):  # not `print`, which may be what was interrupted
                    os.write(2, b"\nstopping; Ctrl-C again stops at once, without saving\n")

        try:
            self.handlers = {s: signal.signal(s, stop) for s in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not the main thread
            self.handlers = {}
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        torch.use_deterministic_algorithms(self.determined)
        self.trackers.close()
        if self.over:
            return
        stopped = isinstance(error, Interrupted | KeyboardInterrupt)
        status = "finished" if error is None else "interrupted" if stopped else "failed"
        finished = datetime.now(UTC).isoformat(timespec="seconds")
        why = None
        if status == "failed":
            why = f"{error}" if isinstance(error, ReplaylabError) else f"{kind.__name__}: {error}"
        with contextlib.suppress(OSError):  # if the disk is full, the original error matters more
            self.folder.write_info(status=status, error=why, finished=finished, seconds=round(self.seconds, 3))

    @property
    def seconds(self) -> float:
        return self.spent + time.monotonic() - self.began

    # --- the loop

    def run(self) -> None:
        stepper: Stepper | None = None
        for index in range(self.phase, len(self.phases)):
            phase = self.phases[index]
            if index > self.phase:
                self.phase, self.done, self.ended, self.hooked = index, 0, False, {}
            if self.done < phase.steps and not self.ended:
                stepper = Stepper(phase, self.device, self.options.compile)
                self._train(phase, stepper)
                worth = time.monotonic() - self.saved > max(WORTH, THRIFT * self.saving)
                if self.stopped or index == len(self.phases) - 1 or worth:
                    self._save(stepper)  # so that a finished phase is not lost
                if self.stopped:
                    self._interrupt()
                stepper.release()
        episodes = self.options.final_episodes
        judged = [line for line in self.folder.lines("eval.jsonl") if line.get("step") == self.step]
        if stepper is not None or not any(line.get("episodes", 0) >= episodes for line in judged):
            self.judging = True
            self._evaluate(episodes)

    def _train(self, phase: Phase, stepper: Stepper) -> None:
        log_every = self.options.log_every or max(1, self.total // 200)
        eval_every, before = self._evaluations(phase)
        stepper.sums = {k: v.to(self.device) for k, v in self.loaded.items()}
        stepper.count, self.loaded, self.loaded_count = self.loaded_count, {}, 0
        entered, fresh = time.monotonic(), self.done == 0
        bar = Progress(self._label(phase), phase.steps, self.done, after=self._after())
        if phase.begin and self.done == 0 and (told := phase.begin()):
            bar.say(f"{self._label(phase)}: {told}")
        self._tell(bar)
        piece = 1
        while self.done < phase.steps:
            if phase.hook and self.done % phase.every == 0:
                self.hooked = phase.hook(self.done) or {}
                self._tell(bar)
                if phase.stop and phase.stop():
                    self.ended = True
                    break
            left = [phase.steps - self.done, piece, BLOCK, log_every - self.step % log_every]
            left += [eval_every - (before + self.done) % eval_every] if eval_every > 0 else []
            left += [phase.every - self.done % phase.every] if phase.every else []
            began = time.monotonic()
            stepper.run(self.done, steps := min(left))
            self.done += steps
            self.step += steps
            if self.step % log_every == 0 or self.done == phase.steps:
                self._log(phase, stepper, bar)
            bar.update(self.done)
            # short enough for Ctrl-C and the progress bar, long enough to cost nothing
            piece = BLOCK if time.monotonic() - began < 0.25 else max(1, steps // 2)
            if self.done == phase.steps:
                break  # `run` saves when the phase has finished
            if self.stopped:
                self._save(stepper)
                bar.close()
                self._interrupt()
            if eval_every > 0 and (before + self.done) % eval_every == 0:
                self._evaluate(self.options.eval_episodes, bar)
            if time.monotonic() - self.saved > 60 * self.options.checkpoint_minutes:
                self._save(stepper)
        if stepper.count:  # the phase ended between two metric lines
            self._log(phase, stepper, bar)
        if phase.finish:
            self._keep(phase.name, phase.finish() or {})
        if fresh and self.done:
            self.paces[phase.name] = (time.monotonic() - entered) / self.done
        self._tell(bar)
        bar.close()
        if eval_every > 0 and (before + self.done) % eval_every == 0 and self.phase < len(self.phases) - 1:
            self._evaluate(self.options.eval_episodes)

    def _after(self) -> float | None:
        """Seconds that the phases after this one will take, if each is like one that was seen."""
        coming = self.phases[self.phase + 1 :]
        if not coming or any(phase.name not in self.paces for phase in coming):
            return None
        return sum(self.paces[phase.name] * phase.steps for phase in coming)

    def _label(self, phase: Phase) -> str:
        """The name of the phase, with its number if several have that name."""
        alike = [p is phase for p in self.phases if p.name == phase.name]
        return phase.name if len(alike) == 1 else f"{phase.name} {alike.index(True) + 1}/{len(alike)}"

    def _interrupt(self) -> None:
        raise Interrupted(f"stopped at step {self.step}; resume with the same command plus --resume")

    def _evaluations(self, phase: Phase) -> tuple[int, int]:
        """Updates between evaluations (0: none), and the updates of earlier phases that evaluate."""
        if not phase.evaluates or self.options.eval_every < 0:
            return 0, 0
        steps = [p.steps for p in self.phases if p.evaluates]
        before = sum(p.steps for p in self.phases[: self.phase] if p.evaluates)
        return self.options.eval_every or max(1, sum(steps) // 10), before

    def _tell(self, bar: Progress) -> None:
        """Show the agent's new notes, each once, and store them in run.json."""
        said = dict.fromkeys(getattr(self.agent, "notes", []))
        new = [note for note in said if note not in self.notes]
        for note in new:
            bar.say(f"note: {note}")
        if new:
            self.notes += new
            self.folder.write_info(notes=self.notes)

    def _keep(self, phase: str, found: dict[str, Any]) -> None:
        """Store the findings of a phase in run.json, and pictures and films as files beside it."""
        for name, value in found.items():
            if isinstance(value, bytes):
                self.folder.write_media(name, value)
                found[name] = f"media/{name}"
        if found:
            self.findings[phase] = found
            self.folder.write_info(findings=self.findings)

    def _log(self, phase: Phase, stepper: Stepper, bar: Progress) -> None:
        means = stepper.read() | {name: value.tolist() for name, value in self.hooked.items()}
        lines = [
            {"step": self.step, "phase": phase.name, "seed": seed, "seconds": round(self.seconds, 3)}
            | {name: values[i] for name, values in means.items()}
            for i, seed in enumerate(self.options.seeds)
        ]
        self.folder.append("metrics.jsonl", lines)
        average = {name: sum(values) / len(values) for name, values in means.items()}
        bar.update(self.done, **dict(list(average.items())[:4]))
        self.trackers.log(self.step, {f"{phase.name}/{name}": value for name, value in average.items()})
        self._check(stepper)

    def _check(self, stepper: Stepper) -> None:
        """Raise if a metric or weight is NaN or infinite, before it gets into a checkpoint."""
        broken = stepper.first_broken()
        if broken is None:
            hooked = [name for name, value in self.hooked.items() if not value.isfinite().all()]
            weights = [name for name, value in self.agent.named_parameters() if not value.isfinite().all()]
            broken = next(((name, 1) for name in hooked + weights), None)
        if broken is not None:
            name, ago = broken
            what = f"{name} became NaN or infinite at step {self.step - ago + 1}"
            if len(self.phases) > 1:
                what += f" (update {self.done - ago + 1} of {self.phases[self.phase].name})"
            kept = "the checkpoint before it is kept" if self.folder.checkpoints() else "no checkpoint was made before"
            look = ", or see `replaylab data info`" if self.logged else ""
            raise DataError(f"{what}: lower the learning rate{look}; {kept}")

    def _evaluate(self, episodes: int, bar: Progress | None = None) -> None:
        if self.options.env is None or episodes < 1:
            return
        self.agent.eval()
        records = evaluate_agent(self.agent, self.options.seeds, self.options.env, episodes, device=self.device)
        self.agent.train()
        self.folder.append("eval.jsonl", [{"step": self.step, **record} for record in records])
        found = summary(records)
        self.trackers.log(self.step, {"eval/return": found["return"], f"eval/{found['score']}": found["mean"]})
        error = "" if found["error"] is None else f" ± {found['error']:.1f}"
        (bar.say if bar else lambda text: print(text, file=sys.stderr))(
            f"step {self.step}: {found['env']} {found['score']} {found['mean']:.1f}{error} "
            f"({count(found['seeds'], 'seed')} x {count(episodes, 'episode')}, {duration(records[0]['seconds'])})"
        )

    # --- checkpoints

    def _save(self, stepper: Stepper) -> None:
        began = time.monotonic()
        self._check(stepper)
        training = {"rng.cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            training["rng.cuda"] = torch.cuda.get_rng_state(self.device)
        training |= {f"metric.{name}": total for name, total in stepper.sums.items()}
        training |= {f"hook.{name}": value for name, value in self.hooked.items()}
        if hasattr(self.agent, "training_state"):
            training |= {f"agent.{name}": value for name, value in self.agent.training_state().items()}
        groups = {}
        for name, optimizer in self.agent.optimizers.items():
            state = optimizer.state_dict()
            groups[name] = [_plain(group) for group in state["param_groups"]]
            for index, entries in state["state"].items():
                training |= {f"optimizer.{name}.{index}.{key}": torch.as_tensor(v) for key, v in entries.items()}
        state = {"step": self.step, "seconds": self.seconds, "count": stepper.count, "groups": groups}
        state |= {"phase": self.phase, "done": self.done, "ended": self.ended, "phases": self._lengths()}
        state |= {"findings": self.findings, "notes": self.notes}
        self.folder.save(self.step, self.agent.state_dict(), training, state)
        self.saved = time.monotonic()
        self.saving = self.saved - began

    def _lengths(self) -> list[list[Any]]:
        return [[phase.name, phase.steps] for phase in self.phases]

    def _restore(self) -> None:
        found = self.folder.load()
        if found is None:
            self.folder.rewind(-1)
            return
        weights, training, state = found
        over, now = state["phases"][: state["phase"]], self._lengths()
        if over != now[: state["phase"]] or [name for name, _ in state["phases"]] != [name for name, _ in now]:
            listed = ", ".join(f"{name} {steps:,}" for name, steps in state["phases"])
            raise UsageError(f"cannot resume {self.folder.path}: finished phases keep their steps, which were {listed}")
        name, steps = now[state["phase"]]
        if state["done"] > steps:
            done = f"{state['done']:,} updates of {name} are done"
            raise UsageError(f"cannot resume {self.folder.path}: {done}, {steps:,} were asked for")
        try:
            self.agent.load_state_dict(weights)
            for name, optimizer in self.agent.optimizers.items():
                entries = by_index(under(f"optimizer.{name}.", training))
                current = optimizer.state_dict()["param_groups"]
                groups = [now | saved for now, saved in zip(current, state["groups"][name], strict=True)]
                optimizer.load_state_dict({"state": entries, "param_groups": groups})
        except (RuntimeError, KeyError, ValueError) as error:
            raise DataError(f"the checkpoint in {self.folder.path} does not fit this system: {error}") from error
        if hasattr(self.agent, "load_training_state"):
            self.agent.load_training_state(under("agent.", training))
        torch.set_rng_state(training["rng.cpu"])
        if self.device.type == "cuda" and "rng.cuda" in training:
            torch.cuda.set_rng_state(training["rng.cuda"], self.device)
        self.loaded, self.loaded_count = under("metric.", training), state["count"]
        self.hooked = under("hook.", training)
        self.step, self.spent = state["step"], state["seconds"]
        self.phase, self.done, self.ended = state["phase"], state["done"], state["ended"]
        self.findings, self.notes = state["findings"], state["notes"]
        self.folder.rewind(self.step)

    def _over(self) -> bool:
        """Whether the run finished, and nothing has been added to it since."""
        known = (self.folder.path / "run.json").exists() and self.folder.info().get("status") == "finished"
        last = len(self.phases) - 1
        return known and self.phase == last and (self.ended or self.done == self.phases[last].steps)


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    """The parts of an optimiser's group that JSON can hold; the rest is rebuilt from the configuration."""
    return {k: v for k, v in group.items() if isinstance(v, (int, float, str, bool, list, tuple)) and k != "params"}


def _set_precision(deterministic: bool, device: torch.device) -> None:
    if device.type != "cuda":
        return
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("highest" if deterministic else "high")  # TF32
