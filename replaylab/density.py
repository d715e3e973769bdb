"""Fit a density model to logged data, save it to a folder, and score other data with it.

    model = fit("hopper-medium", "realnvp", out="D")       # D/density.json, D/weights.safetensors, D/report.html
    result = score("D", "hopper-ood-1.4")                  # share below the threshold; AUROC where rows are labelled

Episodes are split 80/10/10 at random: the first part trains, the second chooses the best weights and the thresholds,
the third is shifted on purpose (`data.damage.corrupt`) to test whether the model detects it. Whole episodes, because
the rows of one are near copies of each other: with a split by rows the model would have almost seen its validation
rows, and the threshold would flag a far larger share of new data than its percentile.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from replaylab.algos import Phase
from replaylab.data.damage import check_seed, corrupt
from replaylab.data.ends import plain, refuse_huge
from replaylab.data.episodes import Episodes
from replaylab.data.read import load as load_data
from replaylab.data.sample import BLOCK, draw, left_out
from replaylab.density_pages import fit_page, summary
from replaylab.errors import DataError, UsageError, nearest
from replaylab.evaluate import pick_device
from replaylab.models.adam import adam, anneal, clipped_step
from replaylab.models.density import INPUTS, KINDS, Density, make
from replaylab.models.density.base import check_percentile
from replaylab.models.density.detect import auroc, binned, detection, doubts
from replaylab.page import check_suffix, page, write_page
from replaylab.progress import Progress
from replaylab.step import Stepper
from replaylab.tensors import load_tensors, save_tensors

__all__ = ["auroc", "columns", "detection", "evaluate", "fit", "load", "save", "score", "split", "train"]

Data = Episodes | str | Path | Sequence[str | Path]

DISTANCES = {"hopper": [1.0, 1.2, 1.4, 1.6, 1.8], "halfcheetah": [0.4, 0.6, 0.8, 1.0], "walker2d": [0.4, 0.6, 0.8, 1.0]}
STEPS = {"realnvp": 20_000, "vae": 20_000, "kde": 0, "diffusion": 30_000, "neuralode": 10_000}
BATCH, LR = 512, 1e-3
CHECKS = 20  # evaluations on the validation rows during training
JUDGES = 2048  # validation rows that choose the best weights; diffusion is costly to score
TEST_ROWS = 10_000  # about this many held-out rows are shifted to test the model


# --- rows


def columns(episodes: Episodes, inputs: str) -> tuple[np.ndarray, np.ndarray]:
    """The input columns of a model, (rows, dim) float32, and the indices of their rows in the log. If the inputs
    include the next observation, rows whose next observation is not in the log are left out."""
    if inputs not in INPUTS:
        raise UsageError(f"inputs must be one of {', '.join(INPUTS)}, not '{inputs}'")
    for name, column in (("observations", episodes.observations), ("actions", episodes.actions)):
        if column.ndim != 2 or column.dtype.kind != "f":
            raise UsageError(f"a density needs vectors of real numbers; {name} are {column.dtype} {column.shape[1:]}")
        refuse_huge(name, column)
    known = np.ones(len(episodes), bool)
    known[episodes.last_rows] = episodes.final_known | (inputs == "sa")
    rows = np.flatnonzero(known)
    if not len(rows):
        what = f"no next observation of {len(episodes):,} rows, which are all or those held out"
        raise DataError(f"the log tells {what}, so there is nothing to see; the inputs `sa` need none")
    parts = [] if inputs == "nsa" else [episodes.observations[rows]]
    if inputs == "nsa":
        parts.append(episodes.next_observations(rows))
    parts.append(episodes.actions[rows])
    if inputs == "sas":
        parts.append(episodes.next_observations(rows))
    found = np.concatenate(parts, 1).astype(np.float32)
    if not np.isfinite(found).all():
        raise DataError("the data holds NaN or infinity: see `replaylab data info`; clean the log first")
    return found, rows


def split(episodes: Episodes, seed: int = 0) -> list[np.ndarray]:
    """Episode ids of the training, validation and test parts: 80, 10 and 10 %."""
    count = episodes.num_episodes
    if count < 10:
        raise UsageError(f"a density model needs 10 episodes to hold some out, the data has {count}; mopo needs none")
    order = np.random.default_rng([seed, 80]).permutation(count)
    held = max(1, count // 10)
    return [np.sort(part) for part in (order[2 * held :], order[:held], order[held : 2 * held])]


# --- fitting


class Rows:
    """Training rows on the device, drawn as in `data.sample`: a function of (seed, step)."""

    resident = True

    def __init__(self, rows: Tensor, batch_size: int, seed: int):
        self.rows, self.batch_size, self.seed = rows, batch_size, seed

    def draw(self, start: int, steps: int) -> np.ndarray:
        return draw(len(self.rows), (self.batch_size,), self.seed, 0, start, steps)

    def gather(self, index: Tensor) -> dict[str, Tensor]:
        return {"x": self.rows[index]}


class Descent:
    """Adam on `model.loss` with cosine decay of its rate to zero; one call per batch, nothing copied to the host."""

    def __init__(self, model: Density, steps: int, lr: float):
        self.model, self.steps, self.lr = model, steps, lr
        self.parameters = list(model.parameters())
        device = self.parameters[0].device
        self.done = torch.zeros((), device=device)
        rate = torch.tensor(lr, device=device)
        self.optimizer = adam(self.parameters, rate)

    def __call__(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        anneal(self.optimizer, self.lr, self.done, self.steps)
        self.done += 1
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.model.loss(batch["x"])
        loss.backward()
        clipped_step(self.optimizer, 1, 10.0)  # an outlier must not undo the rest
        return {"loss": loss.detach()}


def train(
    model: Density, x: Tensor, validation: Tensor, steps: int, batch_size: int, lr: float, seed: int
) -> list[dict[str, float]]:
    """Standardise, train, keep the weights best on the validation rows, calibrate, freeze; returns the curve."""
    model.standardise(x)
    with torch.no_grad():
        model.fit(x, validation)
    curve: list[dict[str, float]] = []
    if model.needs_steps:
        devices = [x.device] if x.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed)
            _descend(model, Rows(x, batch_size, seed), validation[:JUDGES], steps, lr, curve)
    model.requires_grad_(False).calibrate(validation)
    return curve


def _descend(model: Density, rows: Rows, judges: Tensor, steps: int, lr: float, curve: list[dict[str, float]]) -> None:
    stepper = Stepper(Phase("density", steps, rows, Descent(model, steps, lr)), judges.device)
    best, kept = -math.inf, {k: v.clone() for k, v in model.state_dict().items()}
    bar, done, every = Progress("density", steps), 0, min(BLOCK, max(1, steps // CHECKS))
    while done < steps:
        count = min(every, steps - done)
        stepper.run(done, count)
        done += count
        loss = float(np.mean(stepper.read()["loss"]))
        with torch.no_grad():
            likelihood = model.log_prob(judges).clamp(min=-1e3).mean().item()  # one outlier must not decide
        if not math.isfinite(loss):
            raise DataError(f"the density's loss is not a number after {done} steps: try a smaller --lr")
        curve.append({"step": done, "loss": loss, "validation": likelihood})
        bar.update(done, loss=loss, validation=likelihood)
        if likelihood > best:
            best, kept = likelihood, {k: v.clone() for k, v in model.state_dict().items()}
    bar.close()
    model.load_state_dict(kept)


def fit(
    data: Data,
    kind: str = "realnvp",
    out: str | Path | None = None,
    *,
    inputs: str = "nsa",
    steps: int | None = None,
    batch_size: int | None = None,
    lr: float | None = None,
    seed: int = 0,
    percentile: float = 1.0,
    distances: Sequence[float] | None = None,
    device: str = "auto",
    overwrite: bool = False,
    data_options: dict[str, Any] | None = None,
    **settings: Any,
) -> Density:
    """Fit a density model to the data; with `out`, also write a folder that `score` and GORMPO read.

    `settings` are those of the kind, such as couplings=8. Results are in `model.report`. The defaults of `steps`,
    `batch_size` and `lr` are STEPS[kind], BATCH and LR; a kind that is not trained in steps does not take them.
    """
    _check_training(kind, steps, batch_size, lr)
    _check_folder(out, overwrite)
    check_seed(seed)
    check_percentile(percentile)
    seed, percentile = int(seed), float(percentile)  # NumPy numbers are no seed to torch, and nothing to JSON
    settings = {name: plain(value) for name, value in settings.items()}
    episodes = data if isinstance(data, Episodes) else load_data(data, **(data_options or {}))
    place = pick_device(device)
    if place.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32; the kernel density raises it where it matters
    began = time.monotonic()
    parts = [episodes.select(ids) for ids in split(episodes, seed)]
    order = np.random.default_rng([seed, 81])  # shuffled, so that the first n rows are a fair sample
    x, validation, test = (torch.tensor(order.permutation(columns(p, inputs)[0])) for p in parts)
    x, validation = x.to(place), validation.to(place)
    steps, batch_size, lr = int(steps or STEPS[kind]), int(batch_size or BATCH), float(lr or LR)
    shifts = _check_distances(distances) or default_distances(episodes)
    model = make(kind, x.shape[1], seed, **settings).to(place)
    curve = train(model, x, validation, steps, batch_size, lr, seed)
    model.report = {
        "kind": kind,
        "inputs": inputs,
        "observation_dim": episodes.observations.shape[1],
        "action_dim": episodes.actions.shape[1],
        "settings": settings,
        "seed": seed,
        "steps": steps if model.needs_steps else 0,
        "batch_size": batch_size,
        "lr": lr,
        "percentile": percentile,
        "threshold": model.threshold(percentile),
        "rows": [len(x), len(validation), len(test)],
        "episodes": [p.num_episodes for p in parts],
        "env_id": episodes.env_id,
        "curve": curve,
        "validation": model.log_prob(validation).mean().item(),
    }
    tests = shifted_tests(model, parts[2], shifts)
    notes = [*([] if inputs == "sa" else left_out(episodes, "density")), *doubts(kind, tests, percentile)]
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    model.report |= {"tests": tests, "notes": notes, "seconds": round(time.monotonic() - began, 2)}
    if out is not None:
        save(model, out)
    return model


def _check_training(kind: str, steps: int | None, batch_size: int | None, lr: float | None) -> None:
    if not isinstance(kind, str) or kind not in KINDS:
        raise UsageError(f"unknown density '{kind}'{nearest(str(kind), KINDS)}")
    for name, value in {"steps": steps, "batch-size": batch_size, "lr": lr}.items():
        if value is None:
            continue
        if not KINDS[kind].needs_steps:
            raise UsageError(f"{kind} is not trained in steps: leave out --{name}")
        if not isinstance(value, Real) or not 0 < value < math.inf:
            raise UsageError(f"{name} must be above 0, not {value!r}")
        if name != "lr" and value % 1:
            raise UsageError(f"{name} must be a whole number, not {value!r}")


def _check_distances(distances: Any) -> list[float]:
    """Before the training, which a mistake found after it would waste."""
    try:
        found = [] if distances is None else [float(distance) for distance in np.ravel(distances)]
    except (TypeError, ValueError):
        found = [math.nan]
    if not all(map(math.isfinite, found)):
        raise UsageError(f"distances must be numbers, not {distances!r}")
    return found


def _check_folder(out: str | Path | None, overwrite: bool) -> None:
    """Fail before the training, not after it."""
    if out is None:
        return
    if not isinstance(out, str | Path):
        raise UsageError(f"a density is written to a folder named by its path, not {type(out).__name__}")
    try:
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".replaylab-", dir=Path(out).parent):
            pass
    except OSError as error:
        raise DataError(f"cannot write {out}: {error.strerror}") from error
    if not Path(out).exists():
        return
    if not (Path(out) / "density.json").exists():
        raise UsageError(f"{out} exists already and is no density folder: choose another --out")
    if not overwrite:
        raise UsageError(f"{out} exists already: choose another --out, or pass --overwrite")


def default_distances(episodes: Episodes) -> list[float]:
    """GORMPO's for its environments; for others, 0.5 and 1 times the typical deviation of the observations."""
    for word in re.split(r"[-_/]", (episodes.env_id or "").lower()):
        if word in DISTANCES:
            return DISTANCES[word]
    spread = episodes.observation_stats()[1]
    if not spread.any():
        raise DataError("the observations never change: there is nothing to learn a density of")
    typical = float(np.median(spread[spread > 0]))
    return [float(f"{0.5 * typical:.6g}"), float(f"{typical:.6g}")]


def shifted_tests(model: Density, held_out: Episodes, distances: Sequence[float]) -> list[dict[str, Any]]:
    """For each distance, how well the model separates held-out episodes from the same ones shifted."""
    found: list[dict[str, Any]] = []
    count = math.ceil(TEST_ROWS / held_out.lengths.mean())
    bar = Progress("test", len(distances), unit="distances")
    for distance in distances:
        noise = min(0.1, abs(distance) / 4)  # 0.1 at all of GORMPO's; where less is a shift, that would be all of it
        test = corrupt(held_out, distance, episodes_count=min(count, held_out.num_episodes), scale=noise)
        log_prob, rows = evaluate(model, test)
        labels, threshold = test.extras["ood"][rows], model.report["threshold"]
        histogram = binned(log_prob, labels, threshold)
        found.append({"distance": distance, **detection(log_prob, labels, threshold), "histogram": histogram})
        bar.update(len(found))
    bar.close()
    return found


def evaluate(model: Density, episodes: Episodes) -> tuple[np.ndarray, np.ndarray]:
    """log_prob of the rows of a log, and their indices."""
    report = model.report
    wanted, given = (
        (report["observation_dim"], report["action_dim"]),
        (math.prod(episodes.observations.shape[1:]), episodes.actions.shape[1] if episodes.actions.ndim == 2 else 1),
    )
    if wanted != given:
        raise DataError(
            f"the density was fitted on {wanted[0]} observation and {wanted[1]} action columns, "
            f"the data has {given[0]} and {given[1]}"
        )
    x, rows = columns(episodes, report["inputs"])
    with torch.no_grad():
        return model.log_prob(torch.tensor(x, device=model.mean.device)).double().cpu().numpy(), rows


# --- folders


def save(model: Density, out: str | Path) -> Path:
    """Write the folder under a temporary name and rename it: a folder with its final name is complete."""
    out = Path(out)
    part = out.with_name(out.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        save_tensors(part / "weights.safetensors", model.state_dict())
        (part / "density.json").write_text(json.dumps(model.report, indent=1))
        write_page(part / "report.html", fit_page(model.report))
        shutil.rmtree(out, ignore_errors=True)
        os.rename(part, out)
    except OSError as error:
        raise DataError(f"cannot write {out}: {error}") from error
    return out


def load(folder: str | Path, device: str = "auto") -> Density:
    """The model in a folder that `fit` wrote."""
    if not isinstance(folder, str | Path):
        raise UsageError(f"a density is read from the folder that fit wrote with `out`, not {type(folder).__name__}")
    folder = Path(folder)
    try:
        report = json.loads((folder / "density.json").read_text())
        width = report["observation_dim"] * (2 if report["inputs"] == "sas" else 1) + report["action_dim"]
        model = make(report["kind"], width, **report["settings"])
        model.load_state_dict(load_tensors(folder / "weights.safetensors"))
        model.threshold(report["percentile"])
    except OSError as error:
        raise UsageError(f"{folder} is not a density folder: {error}") from error
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise DataError(f"{folder} does not hold a readable density model: {error}") from error
    model.report = report
    return model.to(pick_device(device)).requires_grad_(False)


def score(
    folder: str | Path,
    data: Data,
    *,
    percentile: float | None = None,
    out: str | Path | None = None,
    device: str = "auto",
    data_options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """How likely the data is under the model and, with labels in `extras["ood"]`, how well it detects them.

    out: also write a page.
    """
    out = None if out is None else check_suffix(out)
    model = load(folder, device)
    episodes = data if isinstance(data, Episodes) else load_data(data, **(data_options or {}))
    log_prob, rows = evaluate(model, episodes)
    percentile = model.report["percentile"] if percentile is None else percentile
    threshold = model.threshold(percentile)
    result: dict[str, Any] = {
        "kind": model.report["kind"],
        "inputs": model.report["inputs"],
        "rows": len(rows),
        "percentile": float(percentile),
        "threshold": threshold,
        "flagged": float((log_prob < threshold).mean()),
        "mean": float(log_prob.mean()),
        "quantiles": {str(p): float(np.percentile(log_prob, p)) for p in (1, 5, 25, 50, 75, 95, 99)},
    }
    labels = episodes.extras["ood"][rows].astype(bool) if "ood" in episodes.extras else None
    if labels is not None and labels.any() and not labels.all():
        result |= detection(log_prob, labels, threshold)
    result["histogram"] = binned(log_prob, labels, threshold)
    if out is not None:
        title = f"{result['kind']} density on {episodes.env_id or 'data'}"
        write_page(out, page(title, f"{len(rows):,} rows", [("Likelihood", summary(result))]))
    return result
