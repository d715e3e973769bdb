"""Training of the world model and its reward head: one update per call, all on the device, in one CUDA graph.

The weights that learn are float32. With a twin, a copy of the world in the precision that losses are computed in, none
is converted on the way: the loss and its gradients are the twin's, and the optimiser writes new weights to both.

`WorldTrainer` walks along sequences: each call learns one step of each sequence, then feeds back as the newest frame
either the true one, with probability epsilon (scheduled sampling), or the model's own prediction. `RewardTrainer`
trains the head alone on inputs from a frozen trunk. On CUDA both compile their losses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

from replaylab.fuse import fused
from replaylab.models.adafactor import Adafactor
from replaylab.models.adam import adam, clipped_step
from replaylab.models.reward import focal_loss, focal_weights
from replaylab.models.world import World
from replaylab.tensors import under

AVERAGED = 10  # updates between two samples of the running mean of weights
FRAMES_LR, FRAMES_DECAY = 5e-4, 0.01  # AdamW's, for a reward head that reads frames


def truth_share(update: Tensor, decay: int) -> Tensor:
    """Scheduled sampling's epsilon: the probability of feeding back the true frame; 0 from `decay` updates on."""
    if decay < 1:
        return torch.zeros_like(update)
    quarter = max(decay // 4, 1)
    early = 0.01 ** ((quarter - update).clamp(min=0) / quarter)
    return 1 - early * (0.01 + 0.99 * (update / decay).clamp(max=1))


def counted_median(flat: Tensor, values: int) -> Tensor:
    """The median of each row of bytes, (batch, k, bytes) -> (batch, k, 1), from counts of the bytes up to each possible
    value, because sorting is slow on a GPU."""
    levels = torch.arange(values - 1, device=flat.device).to(torch.uint8)
    below = (flat[:, :, None] <= levels[:, None]).sum(3)  # (batch, k, values - 1)
    return (below < (flat.shape[2] + 1) // 2).sum(2, keepdim=True).to(flat.dtype)


def corrupted(frames: Tensor, share: float, channels: int, values: int = 256) -> Tensor:
    """Frames (batch, k * channels, h, w) with a random share of their bytes replaced by the frame's median."""
    flat = frames.unflatten(1, (-1, channels)).flatten(2)  # (batch, k, bytes of a frame)
    median = counted_median(flat, values) if flat.is_cuda else flat.median(2, keepdim=True).values
    noisy = torch.where(torch.rand(flat.shape, device=frames.device) < share, median, flat)
    return noisy.view(frames.shape)


def shifted(frames: Tensor, most: int) -> Tensor:
    """Frames (batch, k, h, w), each sample moved by up to `most` pixels in any direction, edges repeated. This keeps a
    head that sees few rewards from memorising their positions."""

    def places(length: int) -> Tensor:  # (batch, length)
        offset = torch.randint(-most, most + 1, (len(frames), 1), device=frames.device)
        return (torch.arange(length, device=frames.device) + offset).clamp(0, length - 1)

    rows, columns = (places(length) for length in frames.shape[2:])
    return frames.gather(2, rows[:, None, :, None].expand_as(frames)).gather(
        3, columns[:, None, None, :].expand_as(frames)
    )


def descend(optimizer: torch.optim.Optimizer, limit: float) -> Tensor:
    """One optimiser step with the gradient clipped to norm `limit`; returns the norm before clipping."""
    if isinstance(optimizer, Adafactor):  # clips by itself
        optimizer.step()
        return optimizer.norm
    return clipped_step(optimizer, 1, limit)


class RunningMean:
    """A running mean of the weights, which replaces them at the end of a phase. With a constant learning rate weights
    never settle, and all dreams would depend on what the last few updates happened to do."""

    def __init__(self, weights: Iterable[Tensor], decay: float, every: int = AVERAGED, closely: int = 4):
        self.weights, self.decay, self.every = list(weights), decay, every  # decay per update; 0: no mean
        self.closely = closely  # the mean covers about the last 1/closely of the phase, or decay's span if shorter
        self.means: list[Tensor] = []

    def _now(self) -> list[Tensor]:
        return [w.detach() for w in self.weights]  # not cached: an optimiser may have moved their storage

    def follow(self, k: int) -> None:
        """Called before update k of a phase, a multiple of `every`. The mean follows closely at first, so that it soon
        forgets the initial weights."""
        if self.decay:
            n = k // self.every
            if n == 0 or not self.means:
                self.means = [w.clone() for w in self._now()]
            pace = max(1 - self.decay**self.every, self.closely / (n + self.closely))
            torch._foreach_lerp_(self.means, self._now(), pace)

    def settle(self) -> None:
        if self.means:
            torch._foreach_copy_(self._now(), self.means)
        self.means = []

    def state(self) -> dict[str, Tensor]:
        return {f"means.{i}": mean for i, mean in enumerate(self.means)}

    def load_state(self, state: dict[str, Tensor]) -> None:
        kept, device = under("means.", state), self.weights[0].device
        self.means = [kept[str(i)].to(device) for i in range(len(kept))]


class WorldTrainer:
    """Batches hold `frames` (batch, stack, h, w), `actions`, `next_frames`, `values`, `continues`,
    `rewards`, and `first`: (batch,) booleans, true where a sequence starts and its real frames are loaded.
    (In rgb, frames are (batch, 3 stack, h, w) and next frames (batch, 3, h, w).)"""

    def __init__(
        self,
        world: World,
        *,
        twin: World | None = None,  # of world.snapshot, equal to the world but for its precision; it stays so
        online: bool = False,  # train the reward head here too
        noise: float = 0.05,
        decay: int = 22_250,
        rollout: int = 50,
        max_norm: float = 1.0,
        lr: float = 0.0,  # Adam's; 0: Adafactor, as the original
        average: float = 0.0,
        compile: bool | None = None,
    ):
        self.world, self.online, self.noise, self.decay, self.rollout = world, online, noise, decay, rollout
        self.max_norm = max_norm
        self.twin = (twin or world).requires_grad_()
        weights, twins = list(world.parameters()), list(twin.parameters()) if twin else None
        learns = (p for name, p in world.named_parameters() if online or not name.startswith("reward."))
        self.mean = RunningMean(learns, average)
        self.device = world.embed.weight.device
        compile = self.device.type == "cuda" if compile is None else compile
        # unless `online`, the reward head gets no gradient here and does not move
        self.optimizers: dict[str, torch.optim.Optimizer] = {
            "world": adam(weights, lr, flat=False, twins=twins)
            if lr
            else Adafactor(weights, max_norm=max_norm, compile=compile, twins=twins)
        }
        self.loss: Callable[..., dict[str, Tensor]] = fused(self.twin.world_loss, compile)
        self.enter, self.leave = fused(self._enter, compile), fused(self._leave, compile)
        palette = world.shape.pixels == "palette"
        self.channels, self.values = (1, world.shape.palette) if palette else (3, 256)
        self.done = torch.zeros((), device=self.device)  # updates so far
        self.context: Tensor | None = None  # the frames that the model sees: true ones and its own
        self.class_weights: Tensor | None = None

    def use_focal_loss(self, counts: Tensor) -> None:
        """From now on the online reward loss is the focal loss, weighted by these counts of rewards -1, 0, 1."""
        weights = focal_weights(counts).to(self.device)
        self.class_weights = weights if self.class_weights is None else self.class_weights.copy_(weights)

    def update(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """One step along the sequences; metrics of shape (1,)."""
        if self.context is None or self.context.shape != batch["frames"].shape:
            self.context = torch.zeros_like(batch["frames"])
        context, epsilon = self.enter(batch["frames"], batch["first"], self.context)
        found = self._learn(context, batch, epsilon)
        self.context.copy_(self.leave(context, found["next_frame"], batch["next_frames"], epsilon))
        return self._metrics(found, epsilon)

    def update_teacher(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """One update on true frames only, which need no sequence."""
        context, epsilon = self.enter(batch["frames"])
        return self._metrics(self._learn(context, batch, epsilon), epsilon)

    def _enter(
        self, frames: Tensor, first: Tensor | None = None, context: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The frames that the model sees, noisy, and scheduled sampling's epsilon."""
        seen = self._noisy(frames)
        if first is not None and context is not None:
            seen = torch.where(first[:, None, None, None], seen, context)
        return seen, truth_share(self.done - self.done % self.rollout, self.decay)

    def _leave(self, context: Tensor, own: Tensor, true: Tensor, epsilon: Tensor) -> Tensor:
        """The same for the next step: the newest frame is the true one or the model's own."""
        own, true = (f.reshape(len(f), self.channels, *f.shape[-2:]) for f in (own, true))
        keep_true = torch.rand(len(own), 1, 1, 1, device=self.device) < epsilon
        newest = self._noisy(torch.where(keep_true, true, own))
        return torch.cat([context[:, self.channels :], newest], 1)

    def _noisy(self, frames: Tensor) -> Tensor:
        return corrupted(frames, self.noise, self.channels, self.values)

    def _learn(self, context: Tensor, batch: dict[str, Tensor], epsilon: Tensor) -> dict[str, Tensor]:
        self.twin.zero_grad()
        found = self.loss(
            context,
            batch["actions"],
            batch["next_frames"],
            batch["values"],
            batch["continues"],
            epsilon,
            batch["rewards"] if self.online else None,
            self.class_weights,
        )
        found["loss"].backward()
        found["grad_norm"] = descend(self.optimizers["world"], self.max_norm)
        self.done += 1
        return found

    def _metrics(self, found: dict[str, Tensor], epsilon: Tensor) -> dict[str, Tensor]:
        shown = found | {"epsilon": epsilon}
        return {name: value.detach().view(1) for name, value in shown.items() if name != "next_frame"}

    def training_state(self) -> dict[str, Tensor]:
        context = {} if self.context is None else {"context": self.context}
        weights = {} if self.class_weights is None else {"class_weights": self.class_weights}
        return {"done": self.done, **context, **weights, **self.mean.state()}

    def load_training_state(self, state: dict[str, Tensor]) -> None:
        self.done.copy_(state["done"])
        for name in ("context", "class_weights"):
            setattr(self, name, state[name].to(self.device) if name in state else None)
        self.mean.load_state(state)


class RewardTrainer:
    """Batches hold `frames`, `actions` and `rewards` (-1, 0, 1). `trunk`, for example the snapshot of the world for
    dreams, makes the inputs of the head; the head that learns is the world's own. A head that reads frames is trained
    on next frames that the trunk predicts, not on the true ones, so it learns how far to trust them."""

    def __init__(
        self,
        world: World,
        *,
        trunk: World | None = None,
        focal: bool = False,
        shift: int = 0,  # most pixels that frames are moved by, at random
        max_norm: float = 1.0,
        average: float = 0.0,
        compile: bool | None = None,
    ):
        self.world, self.device, self.focal, self.shift = world, world.embed.weight.device, focal, shift
        compile = self.device.type == "cuda" if compile is None else compile
        trunk = trunk or world
        self.features, self.tell = fused(trunk.reward_features, compile), fused(trunk.tell, compile)
        self.loss = fused(self._loss, compile)
        parameters, self.max_norm = list(world.reward.parameters()), max_norm
        self.mean = RunningMean(parameters, average)
        self.reads_frames = world.shape.reward_head == "frames"
        self.optimizers: dict[str, torch.optim.Optimizer] = {
            "reward": adam(parameters, FRAMES_LR, weight_decay=FRAMES_DECAY)
            if self.reads_frames  # with Adafactor it learns at half the speed
            else Adafactor(parameters, max_norm=max_norm, compile=compile)
        }
        self.class_weights = torch.ones(3, device=self.device)

    def set_counts(self, counts: Tensor) -> None:
        """Counts of rewards -1, 0, 1 in the replay, for the focal loss."""
        self.class_weights.copy_(focal_weights(counts))

    def _loss(self, first: Tensor, second: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.world.reward_logits(first, second, train=True)
        loss = focal_loss(logits, classes, self.class_weights) if self.focal else F.cross_entropy(logits, classes)
        return loss, (logits.argmax(1) == classes).float().mean()

    def update(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        frames, actions, optimizer = batch["frames"], batch["actions"], self.optimizers["reward"]
        predicted = [self.tell(frames, actions)] if self.reads_frames else []
        if self.shift:
            parts = [frames, *(t.view(len(t), -1, *t.shape[-2:]) for t in predicted)]
            frames, *moved = shifted(torch.cat(parts, 1), self.shift).split([p.shape[1] for p in parts], 1)
            predicted = [m.reshape(t.shape) for m, t in zip(moved, predicted, strict=True)]
        optimizer.zero_grad(set_to_none=True)
        loss, accuracy = self.loss(*self.features(frames, actions, *predicted), batch["rewards"].long() + 1)
        loss.backward()
        descend(optimizer, self.max_norm)
        return {"loss": loss.detach().view(1), "accuracy": accuracy.view(1)}

    def training_state(self) -> dict[str, Tensor]:
        return {"class_weights": self.class_weights, **self.mean.state()}

    def load_training_state(self, state: dict[str, Tensor]) -> None:
        self.class_weights.copy_(state["class_weights"])
        self.mean.load_state(state)
