"""The Decision Transformer: a causal transformer over (return-to-go, state, action) tokens.

Every parameter has a leading member axis, as in mlp.py: the seeds of a run are members of one stack. Each step of an
episode gives three tokens, R s a (two, s a, without return conditioning), and attention is causal. There are two styles
of token:

norm  (the original's Gym code)    LayerNorm(embedding + timestep)
tanh  (the original's Atari code)  tanh(embedding) + timestep + position of the token in the window
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from replaylab.models.attention import attend
from replaylab.models.mlp import ACTIVATIONS, Linear

Generators = Sequence[torch.Generator]
STYLES = ("norm", "tanh")
FEW = 16  # with at most so many inputs, a sum of columns, which the compiler fuses, is faster than a product


@dataclass(frozen=True)
class Shape:
    observation: tuple[int, ...]  # (features,), or (stack, 84, 84)
    actions: int  # dimensions, or number of discrete actions
    discrete: bool
    context: int = 20  # steps in a window
    width: int = 128
    layers: int = 3
    heads: int = 1
    activation: str = "relu"
    dropout: float = 0.1
    style: str = "norm"
    max_timestep: int = 1000
    returns: bool = True  # use return-to-go tokens
    ahead: bool = False  # add heads for the next state and the next return-to-go
    timestep_std: float = 0.02  # of the timestep table's initial weights; the tanh style starts with zeros


def gaussian(weight: Tensor, generators: Generators, std: float) -> None:
    """Fill (members, ...) with N(0, std), each member from its own generator."""
    with torch.no_grad():
        for member, generator in zip(weight, generators, strict=True):
            member.normal_(0, std, generator=generator)


class Table(nn.Module):
    """An embedding table of shape (members, rows, width)."""

    def __init__(self, generators: Generators, rows: int, width: int, std: float):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(len(generators), rows, width))
        if std:
            gaussian(self.weight, generators, std)

    def forward(self, index: Tensor) -> Tensor:  # (members, ...) -> (members, ..., width)
        members, rows, width = self.weight.shape
        offset = torch.arange(members, device=index.device).view(-1, *[1] * (index.ndim - 1)) * rows
        return self.weight.flatten(0, 1).index_select(0, (index + offset).flatten()).view(*index.shape, width)


class LayerNorm(nn.Module):
    def __init__(self, members: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(members, width))
        self.bias = nn.Parameter(torch.zeros(members, width))

    def forward(self, x: Tensor) -> Tensor:  # (members, tokens, width)
        if len(self.weight) == 1:  # one fused kernel
            return F.layer_norm(x, x.shape[-1:], self.weight.squeeze(0), self.bias.squeeze(0))
        return torch.addcmul(self.bias[:, None], F.layer_norm(x, x.shape[-1:]), self.weight[:, None])


class Exact(Linear):
    """A layer that is never in bfloat16, for raw measurements: bfloat16 would round a return of 3600 to steps of 16."""

    def forward(self, x: Tensor) -> Tensor:  # (members, batch, inputs) -> (members, batch, outputs)
        with torch.autocast(x.device.type, enabled=False):
            if torch.compiler.is_compiling() and x.is_cuda and x.shape[-1] <= FEW:
                columns = zip(x.split(1, 2), self.weight.split(1, 1), strict=True)
                return sum((value * weight for value, weight in columns), self.bias)
            return super().forward(x)


class Conv(nn.Module):
    """Weights of one convolution per member, with PyTorch's default initialisation."""

    def __init__(self, generators: Generators, inputs: int, outputs: int, kernel: int):
        super().__init__()
        bound = (inputs * kernel * kernel) ** -0.5

        def draw(*shape: int) -> nn.Parameter:
            return nn.Parameter(
                torch.stack([torch.empty(shape).uniform_(-bound, bound, generator=g) for g in generators])
            )

        self.weight, self.bias = draw(outputs, inputs, kernel, kernel), draw(outputs)


class Frames(nn.Module):
    """pixels.NatureCNN with a member axis and a dense layer: stacks of bytes -> (members, batch, width).

    In Pong all but a few hundred pixels never change. Divided by 255, as in the original, frames differ so little that
    nothing is learned from them for thousands of updates. So `look_at` fits a mean frame, which is subtracted.
    """

    backdrop: Tensor
    spread: Tensor

    def __init__(self, generators: Generators, stack: int, width: int):
        super().__init__()
        self.register_buffer("backdrop", torch.zeros(84, 84))
        self.register_buffer("spread", torch.tensor(255.0))
        sizes = [(stack, 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1)]
        self.convs = nn.ModuleList(Conv(generators, *size) for *size, _ in sizes)
        self.strides = [stride for *_, stride in sizes]
        self.dense = Linear(generators, 64 * 7 * 7, width)

    def look_at(self, frames: Tensor) -> None:
        """From frames (rows, 84, 84), set the mean to subtract and the deviation to divide by. The mean is rounded, so
        that bfloat16 holds it exactly; one deviation serves all pixels, because most never change."""
        self.backdrop.copy_(frames.float().mean(0).round())
        self.spread.copy_((frames - self.backdrop.to(frames.device)).square().mean().sqrt().clamp(min=1))

    def forward(self, frames: Tensor) -> Tensor:  # (members, batch, stack, 84, 84) uint8
        kind = torch.bfloat16 if torch.is_autocast_enabled(frames.device.type) else torch.float32
        layers = [zip(c.weight.unbind(), c.bias.unbind(), strict=True) for c in self.convs if isinstance(c, Conv)]
        encoded = [self._encode(_blocks(member, kind), *own) for member, *own in zip(frames, *layers, strict=True)]
        return self.dense(torch.stack(encoded))

    def _encode(self, blocks: Tensor, *layers: tuple[Tensor, Tensor]) -> Tensor:
        """The first convolution, 8 x 8 with stride 4, is computed as a 2 x 2 kernel over 4 x 4 blocks, whose pixels
        become channels: the same sums, in a shape that suits tensor cores."""
        (weight, bias), *others = layers
        backdrop = _blocks(self.backdrop.expand(1, weight.shape[1], -1, -1), blocks.dtype)
        x = torch.relu(F.conv2d(blocks - backdrop, _blocks(weight, weight.dtype) / self.spread, bias))
        for (weight, bias), stride in zip(others, self.strides[1:], strict=True):
            x = torch.relu(F.conv2d(x, weight, bias, stride))
        return x.flatten(1)


def _blocks(x: Tensor, kind: torch.dtype) -> Tensor:
    """(n, c, 4 h, 4 w) -> (n, 16 c, h, w) of type `kind`, channels last in memory."""
    blocks = x.unflatten(3, (-1, 4)).unflatten(2, (-1, 4)).permute(0, 2, 4, 1, 3, 5)  # (n, h, w, c, 4, 4)
    return blocks.to(kind, memory_format=torch.contiguous_format).flatten(3).permute(0, 3, 1, 2)


class Block(nn.Module):
    def __init__(self, generators: Generators, shape: Shape):
        super().__init__()
        self.heads, self.dropout, self.activation = shape.heads, shape.dropout, ACTIVATIONS[shape.activation]
        width, members = shape.width, len(generators)
        self.norm1, self.norm2 = LayerNorm(members, width), LayerNorm(members, width)
        self.qkv, self.out = Linear(generators, width, 3 * width), Linear(generators, width, width)
        self.up, self.down = Linear(generators, width, 4 * width), Linear(generators, 4 * width, width)

    def forward(self, x: Tensor, tokens: int, seed: Tensor, keep: slice | None = None) -> Tensor:
        """(members, batch * tokens, width) -> the same. With `keep`, only those tokens pass through the second half of
        the block, because nobody reads the others."""
        drop = self.dropout if self.training else 0.0
        qkv = self.qkv(self.norm1(x)).view(-1, tokens, 3, self.heads, x.shape[-1] // self.heads)
        y = attend(qkv, drop, seed)
        if keep is not None:
            y = y[:, keep]
            x = x.view(len(x), -1, tokens, x.shape[-1])[:, :, keep].flatten(1, 2)
        x = x + F.dropout(self.out(y.reshape(x.shape)), drop)
        return x + F.dropout(self.down(self.activation(self.up(self.norm2(x)))), drop)


class DecisionTransformer(nn.Module):
    def __init__(self, generators: Generators, shape: Shape):
        super().__init__()
        self.shape, members, width = shape, len(generators), shape.width
        self.per_step = 3 if shape.returns else 2
        tokens, squash = self.per_step * shape.context, shape.style == "tanh"
        self.states = slice(self.per_step - 2, None, self.per_step)  # the positions of the state tokens
        pixels = len(shape.observation) == 3
        if pixels:
            self.embed_state: nn.Module = Frames(generators, shape.observation[0], width)
        else:
            self.embed_state = Exact(generators, shape.observation[0], width)
        if shape.returns:
            self.embed_return = Exact(generators, 1, width)
        if shape.discrete:
            self.embed_action: nn.Module = Table(generators, shape.actions, width, 0.02 if squash else 1.0)
        else:
            self.embed_action = Exact(generators, shape.actions, width)
        self.embed_timestep = Table(generators, shape.max_timestep, width, 0.0 if squash else shape.timestep_std)
        if squash:
            self.embed_place = Table(generators, tokens, width, 0.0)
        else:
            self.embed_norm = LayerNorm(members, width)
        self.blocks = nn.ModuleList(Block(generators, shape) for _ in range(shape.layers))
        self.norm = LayerNorm(members, width)
        self.head = Linear(generators, width, shape.actions)
        if shape.ahead:
            self.next_state = Linear(generators, width, shape.observation[0])
            self.next_return = Linear(generators, width, 1)
        self._initialise(generators)

    def _initialise(self, generators: Generators) -> None:
        """N(0, 0.02) and zero biases in the blocks, in the tanh style also in the head; else PyTorch's defaults."""
        parts = [*self.blocks.modules(), *([self.head] if self.shape.style == "tanh" else [])]
        for layer in parts:
            if isinstance(layer, Linear):
                gaussian(layer.weight, generators, 0.02)
                nn.init.zeros_(layer.bias)

    def decayed(self) -> list[nn.Parameter]:
        """The weights of matrices and convolutions, without biases, norms and tables."""
        return [m.weight for m in self.modules() if isinstance(m, Linear | Conv)]

    def encode(self, observations: Tensor) -> Tensor:  # (members, batch..., observation) -> (members, batch..., width)
        inner = observations.shape[1 : -len(self.shape.observation)]
        states = self.embed_state(observations.reshape(len(observations), -1, *self.shape.observation))
        states = torch.tanh(states) if self.shape.style == "tanh" else states
        return states.view(len(observations), *inner, -1)

    def forward(
        self,
        states: Tensor,  # (members, batch, context, width), from `encode`
        actions: Tensor,  # (members, batch, context, dims), or (members, batch, context) integers
        returns: Tensor,  # (members, batch, context), scaled
        timesteps: Tensor,  # (members, batch, context) integers
        keep: slice | None = None,
    ) -> Tensor:
        """The output at each token, (members, batch, context, tokens per step, width): [..., -2, :] has seen everything
        up to the state, [..., -1, :] the action too. With `keep`, only at those tokens of the window, (members, batch,
        kept, width). Padding is on the right, where causal attention never looks."""
        members, batch, steps = timesteps.shape
        x = self._tokens(states, actions, returns, timesteps).reshape(members, -1, self.shape.width)
        if self.shape.style == "norm":
            x = self.embed_norm(x)
        x = F.dropout(x, self.shape.dropout, self.training)
        tokens = steps * self.per_step
        *seeds, last = torch.randint(2**62, (len(self.blocks), 1), device=x.device)
        for block, seed in zip(self.blocks, seeds, strict=False):
            x = block(x, tokens, seed)
        x = self.norm(self.blocks[-1](x, tokens, last, keep))
        return x.view(members, batch, *((steps, self.per_step) if keep is None else (-1,)), self.shape.width)

    def _tokens(self, states: Tensor, actions: Tensor, returns: Tensor, timesteps: Tensor) -> Tensor:
        def flat(layer: nn.Module, x: Tensor) -> Tensor:
            return layer(x.flatten(1, 2)).view(*timesteps.shape, -1)

        squash = self.shape.style == "tanh"
        embedded = [self.embed_action(actions) if self.shape.discrete else flat(self.embed_action, actions)]
        if self.shape.returns:
            embedded.insert(0, flat(self.embed_return, returns[..., None]))
        embedded = [torch.tanh(x) for x in embedded] if squash else embedded
        embedded.insert(-1, states)  # R s a; `encode` has applied tanh to the states
        x = torch.stack(torch.broadcast_tensors(*embedded), 3)  # (members, batch, context, tokens per step, width)
        x = x + self.embed_timestep(timesteps.clamp(max=self.shape.max_timestep - 1))[:, :, :, None]
        if squash:
            places = self.embed_place.weight[:, : timesteps.shape[2] * self.per_step]
            x = x + places.view(len(places), 1, -1, self.per_step, self.shape.width)
        return x
