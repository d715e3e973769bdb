"""The world model of SimPLe (Kaiser et al., 2020) and MBARC: four frames and an action -> next frame, reward, value.

A convolutional encoder halves the frames several times, the action and 128 latent bits (bits.py) modulate the result,
and a decoder with skip connections doubles it back to one softmax per pixel. The loss, in `world_loss`, is

    mean over pixels max(0, -log p(pixel) - 0.03) + 0.01 (V - return)^2 + prior / 50 + continue   (+ reward, if online)

with the bits' prior loss and a cross-entropy for whether the game continues. Frames are bytes: indices into a colour
table (`palette`, Atari has 128 colours), or three intensities (`rgb`, as the original).

`fidelity original` keeps what we would not do: dropout in dreams, bits that end up continuous, attention maps with
heads and positions interleaved, a value weight of 1, no continue head.
"""

from __future__ import annotations

import copy
import importlib.util
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from replaylab.errors import UsageError
from replaylab.models.bits import Bits, modulated
from replaylab.models.layers import convolve, linear, standardize, unfold
from replaylab.models.reward import HEADS, FramesHead, MbarcHead, SimpleHead, focal_loss, likeliest

# not emulated: on Ampere and newer
if KERNELS := torch.cuda.is_bf16_supported(False) and importlib.util.find_spec("triton") is not None:
    from replaylab.models.world_kernel import likeliest_colours

DROPOUT, MIDDLE_DROPOUT = 0.15, 0.5
LOSS_FLOOR = 0.03  # a pixel predicted this well adds no loss
VALUE_WEIGHT = 0.01  # the original: 1, so that nearly all of the clipped gradient comes from the value
PRIOR_WEIGHT = 1 / 50  # the original divides this loss by the length of its rollouts


@dataclass(frozen=True)
class WorldShape:
    actions: int
    height: int = 105
    width: int = 80
    stack: int = 4
    hidden: int = 96
    compress: int = 5  # times the frame is halved
    double: int = 3  # times the channels are doubled on the way
    bits: int = 128
    pixels: str = "palette"  # or rgb
    palette: int = 128
    reward_head: str = "mbarc"  # or another of reward.HEADS
    continue_head: bool = True
    fidelity: str = "improved"  # or original

    def __post_init__(self) -> None:
        if self.hidden < 8 or self.hidden % 4 or self.bits % 8 or self.bits < 8:
            raise UsageError("hidden must be a multiple of 4 from 8 on, bits a multiple of 8")
        if self.double > self.compress:
            raise UsageError(f"double must be at most compress ({self.compress}), not {self.double}")
        if min(self.height, self.width) < 16 or min(self.sizes[-1]) < 1:
            raise UsageError(f"frames of {self.height} x {self.width} are too small to be halved {self.compress} times")
        for value, known in (
            (self.pixels, ("palette", "rgb")),
            (self.reward_head, HEADS),
            (self.fidelity, ("improved", "original")),
        ):
            if value not in known:
                raise UsageError(f"unknown '{value}'; known: {', '.join(known)}")

    @property
    def channels(self) -> list[int]:  # at each scale, the finest first
        return [self.hidden * 2 ** min(i, self.double) for i in range(self.compress + 1)]

    @property
    def sizes(self) -> list[tuple[int, int]]:
        return [(self.height >> i, self.width >> i) for i in range(self.compress + 1)]

    @property
    def bottom(self) -> int:  # numbers at the coarsest scale
        return self.channels[-1] * math.prod(self.sizes[-1])


class Prediction(NamedTuple):
    next_frame: Tensor  # (batch, height, width), or (batch, 3, height, width); bytes
    reward: Tensor  # (batch,) of -1, 0, 1: the most likely class under the training draws
    reward_logits: Tensor  # (batch, 3), corrected to how often each class really occurs
    value: Tensor  # (batch,) V of the state before the step
    continues: Tensor  # (batch,) probability that the game continues


class Sight(NamedTuple):
    """What the encoder makes of the frames; the action comes later."""

    seen: Tensor  # (batch, height, width, 3 stack), standardised colours
    x: Tensor  # (batch, wide, h, w), the coarsest map
    skips: list[Tensor]  # the finer ones, the finest first


class Imagined(NamedTuple):
    """A prediction without its reward."""

    next_frame: Tensor
    value: Tensor
    continues: Tensor
    of_interest: tuple[Tensor, Tensor]  # what the reward head reads


class Features(NamedTuple):
    value: Tensor  # (batch,)
    x_mid: Tensor  # (batch, wide, h, w), after action and bits
    x_fin: Tensor  # (batch, hidden, height, width)
    prior_loss: Tensor  # scalar; 0 in dreams
    action: Tensor  # (batch, actions), one-hot


def timing_signal(channels: int, height: int, width: int) -> Tensor:
    """Position encoding, sines and cosines of row and column: (1, channels, height, width)."""
    scales = channels // 4
    rates = 10_000.0 ** (-torch.arange(scales) / (scales - 1))
    rows = (torch.arange(height) * rates[:, None])[:, :, None].expand(-1, -1, width)
    columns = (torch.arange(width) * rates[:, None])[:, None, :].expand(-1, height, -1)
    return torch.cat([rows.sin(), rows.cos(), columns.sin(), columns.cos()])[None]


class Norm(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        scale, shift = (p[:, None, None].to(x.dtype) for p in (self.weight, self.bias))
        return standardize(x, 1e-6) * scale + shift


class World(nn.Module):
    colours: Tensor
    rarity: Tensor

    def __init__(self, shape: WorldShape, seed: int = 0, colours: Tensor | None = None, precision: str = "auto"):
        super().__init__()
        self.shape, self.precision = shape, precision
        self.original = shape.fidelity == "original"
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            self._build(shape)
        if colours is None:  # greys, for tests; an environment has its own
            colours = torch.linspace(0, 255, shape.palette)[:, None].expand(-1, 3)
        if colours.shape != (shape.palette, 3):
            raise UsageError(f"the colour table must be ({shape.palette}, 3), not {tuple(colours.shape)}")
        self.register_buffer("colours", colours.float().clone())
        self.register_buffer("rarity", torch.zeros(3))  # added to reward logits, see reward.correction
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def _build(self, shape: WorldShape) -> None:
        wide, n = shape.channels, shape.compress
        self.embed = nn.Linear(3 * shape.stack, shape.hidden)
        nn.init.normal_(self.embed.bias, 0, 0.01)
        self.down = nn.ModuleList(nn.Conv2d(wide[i], wide[i + 1], 4, 2, 1) for i in range(n))
        self.down_norm = nn.ModuleList(Norm(wide[i + 1]) for i in range(n))
        self.value = nn.Linear(shape.bottom, 1)
        # widths of the (gate, shift) pairs by which the action modulates the bottom, each up-convolution, the posterior
        self.places = [2 * c for c in (wide[-1], *wide[:0:-1], shape.hidden)]
        self.action = nn.Linear(shape.actions, sum(self.places))
        self.bits = Bits(shape)
        self.middle = nn.ModuleList(nn.Conv2d(wide[-1], wide[-1], 3, 1, 1) for _ in range(2))
        self.middle_norm = Norm(wide[-1])
        grow = reversed(range(n))
        self.up = nn.ModuleList(nn.ConvTranspose2d(wide[i + 1], wide[i], 4, 2, 1) for i in grow)
        self.up_norm = nn.ModuleList(Norm(wide[i]) for i in reversed(range(n)))
        self.pixels = nn.Linear(shape.hidden, shape.palette if shape.pixels == "palette" else 768)
        for i in range(n):
            self.register_buffer(f"timing{i}", timing_signal(wide[i], *shape.sizes[i]), persistent=False)
        positions = math.prod(shape.sizes[-1])
        heads = {
            "mbarc": lambda: MbarcHead(wide[-1], shape.hidden, n, positions),
            "simple": lambda: SimpleHead(wide[-1], shape.hidden),
            "frames": lambda: FramesHead(3 * (shape.stack + 1), shape.actions, shape.sizes[0]),
        }
        self.reward: nn.Module = heads[shape.reward_head]()
        self.going = nn.Linear(shape.bottom, 1) if shape.continue_head and not self.original else None

    # --- predictions and loss

    @torch.no_grad()
    def predict(self, frames: Tensor, actions: Tensor) -> Prediction:
        """One step of a dream: frames (batch, stack, h, w), or (batch, 3 stack, h, w) in rgb; actions (batch,)."""
        told = self.imagine(self.look(frames), actions)
        logits = self.reward_logits(*told.of_interest)
        return Prediction(told.next_frame, likeliest(logits), logits + self.rarity, told.value, told.continues)

    @torch.no_grad()
    def imagine(self, sight: Sight, actions: Tensor) -> Imagined:
        """The same in parts, of which some can run beside others: `look`, this, and `reward_logits`."""
        found = self.features(sight, actions)
        following = self._told(found.x_fin)
        going = self._going(found).sigmoid()
        return Imagined(following, found.value, going, self._of_interest(sight.seen, found, following))

    @torch.no_grad()
    def tell(self, frames: Tensor, actions: Tensor) -> Tensor:
        """Only the predicted next frame."""
        return self._told(self.features(self.look(frames), actions).x_fin)

    @torch.no_grad()
    def reward_features(self, frames: Tensor, actions: Tensor, told: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The two inputs of the reward head. For a head that reads frames, `told` is the predicted next one."""
        if told is None:
            found = self.features(self.look(frames), actions)
            return found.x_mid, found.x_fin
        seen = self._standard(frames)
        return torch.cat([seen, self._standard(told)], 3), self._one_hot(actions)

    def reward_logits(self, first: Tensor, second: Tensor, train: bool = False) -> Tensor:  # (batch, 3)
        return self.reward(first, second, train)

    def world_loss(
        self,
        frames: Tensor,
        actions: Tensor,
        next_frame: Tensor,
        value_target: Tensor,
        continue_target: Tensor,
        epsilon: Tensor,
        reward_target: Tensor | None = None,
        class_weights: Any = None,
    ) -> dict[str, Tensor]:
        """Scalars `loss` and its parts, `accuracy` (share of pixels exactly right), and the predicted `next_frame`.

        The reward head is trained only if there is a target (`online`), with the focal loss if there are weights."""
        sight = self.look(frames, train=True)
        found = self.features(sight, actions, next_frame, epsilon)
        logits = self._pixel_logits(found.x_fin).float()
        target = self._pixels_last(next_frame).long()
        surprise = F.cross_entropy(logits.flatten(0, -2), target.flatten(), reduction="none")
        parts = {
            "pixel": (surprise - LOSS_FLOOR).clamp(min=0).mean(),
            "value": F.mse_loss(found.value, value_target) * (1.0 if self.original else VALUE_WEIGHT),
            "prior": found.prior_loss * PRIOR_WEIGHT,
        }
        if self.going is not None:
            parts["continue"] = F.binary_cross_entropy_with_logits(self._going(found), continue_target.float())
        frame = self._frame(logits.detach())
        if reward_target is not None:
            answer = self.reward_logits(*self._of_interest(sight.seen, found, frame), train=True)
            classes = reward_target.long() + 1
            plain = class_weights is None
            parts["reward"] = F.cross_entropy(answer, classes) if plain else focal_loss(answer, classes, class_weights)
        accuracy = (frame == next_frame).float().mean()
        return {"loss": sum(parts.values()), **parts, "accuracy": accuracy, "next_frame": frame}  # type: ignore[dict-item]

    # --- the trunk

    def look(self, frames: Tensor, train: bool = False) -> Sight:
        seen = self._standard(frames)
        return Sight(seen, *self._encode(seen, train or self.original))

    def features(
        self, sight: Sight, actions: Tensor, next_frame: Tensor | None = None, epsilon: Tensor | None = None
    ) -> Features:
        """With the next frame (training), the bits are read from it; without (dreams), the prior draws them."""
        drop = next_frame is not None or self.original
        seen, x, skips = sight
        one_hot = self._one_hot(actions)
        at_bottom, *at_ups, at_posterior = linear(self.action, one_hot).split(self.places, 1)
        # the original does not detach: there the value's gradient is hundreds of times that of the pixels
        value = linear(self.value, (x if self.original else x.detach()).flatten(1))[:, 0].float()
        x = modulated(x, at_bottom)
        drawn = self.bits.draw(x)
        if next_frame is None or epsilon is None:
            loss, x = drawn.new_zeros(()), self.bits.put(x, drawn)
        else:
            real = self.bits.posterior(seen, self._standard(next_frame), at_posterior, self.timing(0))
            loss, x = self.bits.prior_loss(x, real), self.bits.mix(x, real, drawn, epsilon).to(x.dtype)
        return Features(value, x, self._decode(x, skips, at_ups, drop), loss, one_hot)

    def _one_hot(self, actions: Tensor) -> Tensor:
        return F.one_hot(actions.long(), self.shape.actions).to(self.compute)

    def _of_interest(self, seen: Tensor, found: Features, predicted: Tensor) -> tuple[Tensor, Tensor]:
        """The two inputs of the reward head: frames (with the predicted one) and action, or feature maps."""
        if self.shape.reward_head == "frames":
            return torch.cat([seen, self._standard(predicted)], 3), found.action
        return found.x_mid, found.x_fin

    def _encode(self, seen: Tensor, drop: bool) -> tuple[Tensor, list[Tensor]]:
        x = linear(self.embed, seen).permute(0, 3, 1, 2)
        x = x + self.timing(0).to(x.dtype)
        skips = []
        for i, (conv, norm) in enumerate(zip(self.down, self.down_norm, strict=True)):
            skips.append(x)
            x = F.dropout(x, DROPOUT, drop) + self.timing(i).to(x.dtype)
            x = norm(torch.relu(convolve(conv, x)))
        return x, skips

    def _decode(self, x: Tensor, skips: list[Tensor], at_ups: list[Tensor], drop: bool) -> Tensor:
        first, second = self.middle
        x = torch.relu(convolve(first, F.dropout(x, MIDDLE_DROPOUT, drop)))
        x = self.middle_norm(x + torch.relu(convolve(second, F.dropout(x, MIDDLE_DROPOUT, drop))))
        for i, up, norm, action in zip(reversed(range(len(skips))), self.up, self.up_norm, at_ups, strict=True):
            x = unfold(up, modulated(F.dropout(x, DROPOUT, drop), action), skips[i].shape[2:])
            x = norm(torch.relu(x) + skips[i]) + self.timing(i).to(x.dtype)
        return x

    def timing(self, scale: int) -> Tensor:
        return getattr(self, f"timing{scale}")

    def _going(self, found: Features) -> Tensor:
        if self.going is None:
            return torch.full_like(found.value, 100.0)
        return linear(self.going, found.x_mid.flatten(1))[:, 0].float()

    # --- frames in and out

    @property
    def compute(self) -> torch.dtype:
        if self.precision == "auto":
            return torch.bfloat16 if self.embed.weight.is_cuda else self.embed.weight.dtype
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    def _standard(self, frames: Tensor) -> Tensor:
        """Colours (batch, h, w, 3 per frame), each channel of each sample standardised."""
        if self.shape.pixels == "palette":
            frames = frames if frames.ndim == 4 else frames[:, None]
            x = F.embedding(frames.permute(0, 2, 3, 1).long().contiguous(), self.colours.float()).flatten(3) / 255
        else:
            x = frames.permute(0, 2, 3, 1).float() / 255
        pixels = x.shape[1] * x.shape[2]
        mean = x.mean((1, 2), keepdim=True)
        variance = (x.square().mean((1, 2), keepdim=True) - mean.square()) * pixels / (pixels - 1)
        return ((x - mean) * variance.clamp(min=1 / pixels).rsqrt()).to(self.compute)

    def _pixel_logits(self, x_fin: Tensor) -> Tensor:  # (batch, h, w, palette), or (batch, h, w, 3, 256)
        x = x_fin.permute(0, 2, 3, 1)
        if self.shape.pixels == "palette":
            return linear(self.pixels, x)
        # stored as (256, 3), like the original's; transposing the weights is cheaper than transposing the logits
        weight = self.pixels.weight.unflatten(0, (256, 3)).transpose(0, 1).flatten(0, 1)
        bias = self.pixels.bias.view(256, 3).t().flatten()
        return F.linear(x, weight.to(x.dtype), bias.to(x.dtype)).unflatten(3, (3, 256))

    def _pixels_last(self, frame: Tensor) -> Tensor:
        return frame if self.shape.pixels == "palette" else frame.permute(0, 2, 3, 1)

    def _told(self, x_fin: Tensor) -> Tensor:
        """The likeliest next frame."""
        if KERNELS and x_fin.is_cuda and self.shape.pixels == "palette" and self.shape.palette in (64, 128, 256):
            return likeliest_colours(x_fin, self.pixels.weight.to(x_fin.dtype), self.pixels.bias)
        return self._frame(self._pixel_logits(x_fin))

    def _frame(self, logits: Tensor) -> Tensor:
        frame = logits.argmax(-1).to(torch.uint8)
        return frame if self.shape.pixels == "palette" else frame.permute(0, 3, 1, 2)


def snapshot(world: World) -> World:
    """A frozen copy, stored in the precision it computes in, for dreams and to train with; `refresh` updates it."""
    copied = copy.deepcopy(world).requires_grad_(False).to(world.compute)
    copied.colours, copied.rarity = world.colours.clone(), world.rarity.clone()  # what is measured stays exact
    return copied


@torch.no_grad()
def refresh(copied: World, world: World) -> None:
    """Copy the weights in place, so that captured CUDA graphs of the copy stay valid."""
    torch._foreach_copy_(list(copied.parameters()), list(world.parameters()))
    copied.colours.copy_(world.colours)
    copied.rarity.copy_(world.rarity)
