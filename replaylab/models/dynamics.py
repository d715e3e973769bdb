"""An ensemble of Gaussian dynamics (Chua et al., 2018): (s, a) -> mean and variance of (s' - s, r).

    loss    sum over members (mean[(mu - y)^2 e^-lv + lv] + sum_l c_l |W_l|^2) + 0.01 (sum max - sum min)
    lv      log variance: max - softplus(max - raw), then min + softplus(that - min); max and min are learned bounds

with y = (s' - s, r). The decay c_l |W_l|^2 has no factor 1/2 (as in GORMPO; OfflineRL-Kit has one). The members of a
seed share the bounds; they differ in their initial weights and in the bootstrap sample of rows that they see. Training
stops for a seed when none of its members has improved its held-out error by more than 1 % for `patience` epochs. Each
member then returns to its best weights, and the members with the lowest error are the elites. All members of all seeds
are one stack of networks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

from replaylab.errors import UsageError
from replaylab.models.adam import adam
from replaylab.models.mlp import MLP, generators
from replaylab.models.standard import divisors

FIRST, SECOND, INNER, LAST = 2.5e-5, 5e-5, 7.5e-5, 1e-4  # c_l
BOUND_COST = 0.01
IMPROVES = 0.01  # smaller relative improvements do not count
WORST = 1e10
COVERAGE = (50, 80, 95)  # per cent: prediction intervals whose coverage is reported


def soft_clamp(raw: Tensor, low: Tensor, high: Tensor) -> Tensor:
    between = high - softplus(high - raw)
    return low + softplus(between - low)


@torch.no_grad()
def slopes(raw: Tensor, target: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss (seeds, members) of the networks' output, and its gradients in the output and in the two bounds. Written
    by hand, because autograd's many tiny kernels would take longer than the networks themselves."""
    mean, logvar = raw.chunk(2, -1)
    below_high = high - logvar
    above_low = (high - low) - softplus(below_high)
    logvar = low + softplus(above_low)
    error = mean - target
    weighted = error * torch.exp(-logvar)
    square = error * weighted
    loss = (square + logvar).mean((-2, -1))
    share = square.shape[-1] * square.shape[-2]
    of_logvar = torch.rsub(square, 1 / share, alpha=1 / share)
    of_between = of_logvar * torch.sigmoid(above_low)
    of_raw = of_between * torch.sigmoid(below_high)
    of_low, of_high = ((a - b).sum((1, 2), keepdim=True) for a, b in ((of_logvar, of_between), (of_between, of_raw)))
    return loss, torch.cat([weighted * (2 / share), of_raw], -1), of_low, of_high


def decays(layers: int) -> list[float]:
    return [FIRST, SECOND, *[INNER] * (layers - 3), LAST] if layers > 2 else [FIRST, LAST][-layers:]


class Dynamics(nn.Module):
    input_mean: Tensor
    input_std: Tensor
    target_mean: Tensor
    target_std: Tensor
    elites: Tensor
    bounds: Tensor

    def __init__(
        self,
        seeds: Sequence[int],
        observation: int,
        action: int,
        hidden: Sequence[int] = (200, 200, 200, 200),
        members: int = 7,
        elites: int = 5,
    ):
        super().__init__()
        self.count, self.members, self.outputs = len(seeds), members, observation + 1
        self.net = MLP(generators(seeds, members), observation + action, hidden, 2 * self.outputs, "silu")
        shape = (self.count, 1, 1, self.outputs)
        self.max_logvar = nn.Parameter(torch.full(shape, 0.5))
        self.min_logvar = nn.Parameter(torch.full(shape, -10.0))
        self.register_buffer("input_mean", torch.zeros(observation + action))
        self.register_buffer("input_std", torch.ones(observation + action))
        self.register_buffer("target_mean", torch.zeros(self.outputs))
        self.register_buffer("target_std", torch.ones(self.outputs))
        self.register_buffer("elites", torch.arange(elites).repeat(self.count, 1))  # (seeds, elites)
        bounds = torch.tensor([-10.0, 0.5])[:, None, None].repeat(self.count, members, 1, 1, self.outputs)
        self.register_buffer("bounds", bounds)  # (seeds, members, 2, 1, outputs): at each member's best weights

    def standardise(self, inputs: Tensor, targets: Tensor, scale_targets: bool) -> None:
        self._statistics(self.input_mean, self.input_std, inputs, 1.0)
        if scale_targets:
            self._statistics(self.target_mean, self.target_std, targets, 1e-6)  # constant columns stay constant

    @staticmethod
    def _statistics(mean: Tensor, std: Tensor, x: Tensor, constant: float) -> None:
        center, found = x.double().mean(0), x.double().std(0, correction=0)
        mean.copy_(center)
        std.copy_(divisors(center, found, constant))

    @torch.no_grad()
    def take(self, theirs: dict[str, Tensor], places: Sequence[int]) -> None:
        """Copy the ensembles at these `places` of another stack."""
        if theirs.keys() != self.state_dict().keys():
            raise UsageError("it has another number of layers")
        count = len(theirs["elites"])
        for name, ours in self.state_dict().items():
            found = theirs[name]
            if not name.startswith(("input_", "target_")):  # these belong to the data, not to a seed
                found = found.unflatten(0, (count, -1))[list(places)].flatten(0, 1)
            if found.shape != ours.shape:
                raise UsageError(f"its {name} is {tuple(found.shape)}, this one's {tuple(ours.shape)}")
            ours.copy_(found)

    # --- in training: standardised rows, learned bounds

    def raw(self, inputs: Tensor) -> Tensor:  # (seeds, members, rows, inputs)
        return self.net(inputs.flatten(0, 1)).unflatten(0, (self.count, self.members))

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        mean, logvar = self.raw(inputs).chunk(2, -1)
        return mean, soft_clamp(logvar, self.min_logvar, self.max_logvar)

    # --- after training: raw observations and actions

    def inputs(self, observations: Tensor, actions: Tensor) -> Tensor:
        return (torch.cat([observations, actions], -1) - self.input_mean) / self.input_std

    def networks(self, elites_only: bool) -> tuple[list[tuple[Tensor, Tensor]], Tensor, Tensor]:
        """Weights and biases of each layer, lower and upper bound of lv: of all members, or of each seed's elites."""
        which = (
            self.elites if elites_only else torch.arange(self.members, device=self.elites.device).repeat(self.count, 1)
        )
        first = torch.arange(self.count, device=which.device)[:, None] * self.members
        rows = (first + which).flatten()
        layers = [(layer.weight[rows], layer.bias[rows]) for layer in self.net.layers]  # type: ignore[index]
        low, high = self.bounds.flatten(0, 1)[rows].unbind(1)
        return layers, low, high

    def predict(
        self, inputs: Tensor, networks: tuple[list[tuple[Tensor, Tensor]], Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Standardised rows (networks, rows, inputs) -> mean and deviation of (s' - s, r) in the data's units."""
        layers, low, high = networks
        x = inputs
        for weight, bias in layers[:-1]:
            x = silu(torch.baddbmm(bias, x, weight))
        weight, bias = layers[-1]
        mean, raw = torch.baddbmm(bias, x, weight).chunk(2, -1)
        deviation = torch.exp(0.5 * soft_clamp(raw, low, high))
        return torch.addcmul(self.target_mean, mean, self.target_std), deviation * self.target_std


class Fit:
    """Trains the ensemble on a table of transitions; has the sampler, update, hook, stop and finish of a Phase."""

    resident = True

    def __init__(
        self,
        model: Dynamics,
        seeds: Sequence[int],
        inputs: Tensor,
        targets: Tensor,
        *,
        batch_size: int = 256,
        lr: float = 1e-3,
        patience: int = 5,
        max_epochs: int = 200,
        scale_targets: bool = True,
    ):
        self.model, self.seeds, self.device = model, list(seeds), inputs.device
        self.batch_size, self.patience, self.max_epochs = batch_size, patience, max_epochs
        model.standardise(inputs, targets, scale_targets)
        columns = [(inputs - model.input_mean) / model.input_std, (targets - model.target_mean) / model.target_std]
        self.table, self.widths = torch.cat(columns, 1), [inputs.shape[1], targets.shape[1]]
        self._split(len(inputs))
        self.weights: list[Any] = [layer.weight for layer in model.net.layers]
        self.costs = [2 * c for c in decays(len(self.weights))]  # the gradient of c |W|^2 is 2 c W
        self.parameters = list(model.parameters())
        self.optimizer = adam(self.parameters, lr)
        shape = (len(self.seeds), model.members)
        self.best = torch.full(shape, WORST, device=self.device)  # held-out errors, on standardised targets
        self.stale = torch.zeros(len(self.seeds), dtype=torch.int64, device=self.device)  # epochs without improvement
        self.epochs = torch.zeros_like(self.stale)  # that each seed has trained
        self.kept = [p.detach().clone() for p in model.net.parameters()]
        self.kept_bounds = model.bounds.clone()
        self.epoch = 0

    def _split(self, rows: int) -> None:
        """Choose held-out rows, training rows and bootstrap samples, as functions of the seed alone."""
        held = min(rows // 5, 1000) or 1
        self.batches = max(1, math.ceil((rows - held) / self.batch_size))
        holdout, samples = [], []
        for seed in self.seeds:
            rng = np.random.default_rng([seed, 70])
            order = rng.permutation(rows)
            train = order[held:] if rows > 1 else order
            holdout.append(order[:held])
            samples.append(train[rng.integers(0, len(train), (self.model.members, len(train)))])
        self.holdout = torch.as_tensor(np.stack(holdout), device=self.device)  # (seeds, held)
        self.samples = torch.as_tensor(np.stack(samples), device=self.device)  # (seeds, members, rows)
        shape = (self.batches, len(self.seeds), self.model.members, self.batch_size)
        self.order = torch.zeros(shape, dtype=torch.int64, device=self.device)  # rows of all batches of the epoch

    def shuffle(self, epoch: int) -> None:
        """Shuffle the bootstrap sample of each member, as a function of (seed, epoch)."""
        generator = torch.Generator(self.device)
        size = self.samples.shape[2]
        wrapped = torch.arange(self.batches * self.batch_size, device=self.device) % size  # fills up the last batch
        for i, seed in enumerate(self.seeds):
            generator.manual_seed((seed * 1_000_003 + epoch) * 2 + 1)
            keys = torch.rand(self.model.members, size, generator=generator, device=self.device)
            order = self.samples[i].gather(1, keys.argsort(1))[:, wrapped]
            self.order[:, i].copy_(order.view(-1, self.batches, self.batch_size).movedim(1, 0))

    # --- the phase

    @property
    def steps(self) -> int:
        return self.batches * self.max_epochs

    def draw(self, start: int, steps: int) -> np.ndarray:
        return (np.arange(start, start + steps, dtype=np.int64) % self.batches)[:, None]

    def gather(self, index: Tensor) -> dict[str, Tensor]:
        rows = self.table[self.order.index_select(0, index)[0]]
        inputs, targets = rows.split(self.widths, -1)  # (seeds, members, batch, columns)
        return {"inputs": inputs, "targets": targets}

    def update(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        self.optimizer.zero_grad(set_to_none=True)
        low, high = self.model.min_logvar, self.model.max_logvar
        raw = self.model.raw(batch["inputs"])
        loss, slope, of_low, of_high = slopes(raw, batch["targets"], low, high)
        raw.backward(slope)
        low.grad, high.grad = of_low - BOUND_COST, of_high + BOUND_COST
        with torch.no_grad():
            decay = torch._foreach_mul(self.weights, self.costs)
            torch._foreach_add_([w.grad for w in self.weights], list(decay))
        self.optimizer.step()
        return {"loss": loss.mean(1)}

    @torch.no_grad()
    def hook(self, step: int) -> dict[str, Tensor]:
        """Runs before each epoch: measure the held-out error, keep weights that improved, shuffle."""
        self.epoch = step // self.batches
        errors = self._judge()
        if self.epoch < self.max_epochs:
            self.shuffle(self.epoch)
        return {"holdout_error": errors.mean(1)}

    def _judge(self) -> Tensor:  # (seeds, members)
        mean, _ = self._holdout()
        errors = (mean - self._targets()).square().mean((2, 3))
        running = self.stale < self.patience
        better = ((self.best - errors) / self.best > IMPROVES) & running[:, None]  # nan is not better
        self.best.copy_(torch.where(better, errors, self.best))
        self.stale.copy_(torch.where(better.any(1), 0, self.stale + 1))
        self.epochs.copy_(torch.where(running, self.epoch, self.epochs))
        flat = better.flatten()[:, None, None]
        for kept, now in zip(self.kept, self.model.net.parameters(), strict=True):
            kept.copy_(torch.where(flat, now, kept))
        bounds = torch.stack([self.model.min_logvar, self.model.max_logvar], 2).expand_as(self.kept_bounds)
        self.kept_bounds.copy_(torch.where(better[..., None, None, None], bounds, self.kept_bounds))
        return errors

    def _holdout(self) -> tuple[Tensor, Tensor]:
        inputs = self.table[self.holdout][..., : self.widths[0]]
        return self.model(inputs[:, None].expand(-1, self.model.members, -1, -1))

    def _targets(self) -> Tensor:  # (seeds, 1, held, columns)
        return self.table[self.holdout][:, None, :, self.widths[0] :]

    def stop(self) -> bool:
        return bool((self.stale >= self.patience).all())

    @torch.no_grad()
    def finish(self) -> dict[str, Any]:
        """Restore each member's best weights and choose the elites. Returns findings on the held-out rows."""
        if not self.stop():
            self.epoch = self.max_epochs
            self._judge()
        for kept, now in zip(self.kept, self.model.net.parameters(), strict=True):
            now.copy_(kept)
        self.model.bounds.copy_(self.kept_bounds)
        self.model.elites.copy_(self.best.argsort(1)[:, : self.model.elites.shape[1]].sort(1).values)
        inputs = self.table[self.holdout][..., : self.widths[0]].repeat_interleave(self.model.members, 0)
        mean, deviation = self.model.predict(inputs, self.model.networks(elites_only=False))
        shape = (len(self.seeds), self.model.members)
        raw = self._targets() * self.model.target_std + self.model.target_mean
        errors = mean.unflatten(0, shape) - raw
        return {
            "seeds": self.seeds,
            "error": errors.square().mean((2, 3)).tolist(),
            "error_of_the_mean": (raw - raw.mean(2, keepdim=True)).square().mean((1, 2, 3)).tolist(),
            "elites": self.model.elites.tolist(),
            "epochs": self.epochs.tolist(),
            "holdout_rows": self.holdout.shape[1],
            "coverage": self._coverage(errors / deviation.unflatten(0, shape)),
        }

    def _coverage(self, z: Tensor) -> dict[str, list[float]]:
        """Share of held-out numbers inside the elites' prediction intervals; ideally 0.5 in the 50 % interval, etc."""
        chosen = z[torch.arange(len(self.seeds), device=z.device)[:, None], self.model.elites].abs()
        edges = {p: math.sqrt(2) * torch.erfinv(torch.tensor(p / 100)).item() for p in COVERAGE}
        return {str(p): (chosen < edge).float().mean((1, 2, 3)).tolist() for p, edge in edges.items()}

    # --- checkpoints

    def state(self) -> dict[str, Tensor]:
        state = {"best": self.best, "stale": self.stale, "epochs": self.epochs, "epoch": torch.tensor(self.epoch)}
        state |= {f"kept.{i}": kept for i, kept in enumerate(self.kept)}
        return state | {"kept_bounds": self.kept_bounds}

    def load(self, state: dict[str, Tensor]) -> None:
        for name in ("best", "stale", "epochs", "kept_bounds"):
            getattr(self, name).copy_(state[name])
        for i, kept in enumerate(self.kept):
            kept.copy_(state[f"kept.{i}"])
        self.epoch = int(state["epoch"])
        self.shuffle(self.epoch)
