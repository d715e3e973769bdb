"""Layers of the world model and its reward heads. They compute in the precision of their input; the weights may be
stored in another.

cuDNN is slow where a convolution has few positions or long strides. So on a GPU

    few positions     are a product of matrices: of the pixels under each position with the weights (`gathered`), or,
                      where the size doubles, the product first, which is then added up where it overlaps (`spread`)
    strides of four   are no strides over blocks of pixels (`blocks`), as in the policy's network
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

FEW = 2048  # positions in a batch; beyond, cuDNN is as fast or faster (H200)


def linear(layer: Any, x: Tensor) -> Tensor:
    return F.linear(x, layer.weight.to(x.dtype), layer.bias.to(x.dtype))


def convolve(layer: Any, x: Tensor) -> Tensor:
    stride, padding, kernel = layer.stride[0], layer.padding[0], layer.kernel_size[0]
    if x.is_cuda and len(x) * math.prod(folded(x.shape[2:], layer)) <= FEW:
        return gathered(layer, x)
    weight, bias = layer.weight.to(x.dtype), layer.bias.to(x.dtype)
    if x.is_cuda and stride >= 4 and kernel == 2 * stride:
        return F.conv2d(blocks(F.pad(x, 4 * [padding]), stride), blocks(weight, stride), bias)
    return F.conv2d(x, weight, bias, stride, padding)


def unfold(layer: Any, x: Tensor, size: torch.Size) -> Tensor:
    """A transposed convolution that doubles height and width, to `size` or just short of it."""
    if x.is_cuda and len(x) * math.prod(x.shape[2:]) <= FEW:
        return spread(layer, x, size)
    weight, bias = layer.weight.to(x.dtype), layer.bias.to(x.dtype)
    return F.conv_transpose2d(x, weight, bias, 2, 1, output_padding(x.shape[2:], size))


def standardize(x: Tensor, eps: float = 1e-5) -> Tensor:
    """Instance normalisation in plain operations, which the compiler can fuse with their neighbours. It takes two sums
    instead of `var_mean`, whose running mean costs a division a number."""
    wide = x.float()
    mean = wide.mean((2, 3), keepdim=True)
    variance = (wide.square().mean((2, 3), keepdim=True) - mean.square()).clamp(min=0)
    return ((wide - mean) * (variance + eps).rsqrt()).to(x.dtype)


# --- sizes


def folded(size: torch.Size, layer: Any) -> list[int]:
    """Height and width behind a convolution."""
    return [(n + 2 * layer.padding[0] - layer.kernel_size[0]) // layer.stride[0] + 1 for n in size]


def output_padding(size: torch.Size, wanted: torch.Size) -> list[int]:
    """What a transposed convolution that doubles the size must add to reach the wanted size."""
    return [w - 2 * s for s, w in zip(size, wanted, strict=True)]


# --- the same sums in other shapes


def gathered(layer: Any, x: Tensor) -> Tensor:
    """A convolution as a product with the pixels under each position."""
    (kernel, _), (stride, _), (padding, _) = layer.kernel_size, layer.stride, layer.padding
    height, width = folded(x.shape[2:], layer)
    x = F.pad(x.permute(0, 2, 3, 1), (0, 0, *4 * [padding]))
    tall, wide = (stride * (length - 1) + 1 for length in (height, width))
    rows = torch.stack([x[:, i : i + tall : stride] for i in range(kernel)], 3)  # (n, height, w, kernel, c)
    under = torch.stack([rows[:, :, i : i + wide : stride] for i in range(kernel)], 4)
    found = F.linear(under.flatten(3), _flat(layer, x), layer.bias.to(x.dtype))
    return found.permute(0, 3, 1, 2)


def spread(layer: Any, x: Tensor, size: torch.Size) -> Tensor:
    """A transposed convolution of kernel 4, stride 2 and padding 1: its products, added up where they overlap."""
    height, width = x.shape[2:]
    products = (x.permute(0, 2, 3, 1) @ _flat(layer, x)).unflatten(3, (4, 4, -1))  # (n, h, w, 4, 4, c)
    pairs = _overlapped(_overlapped(products, 1, 3), 2, 4)  # (n, h + 1, w + 1, 2, 2, c)
    pixels = pairs.transpose(2, 3).reshape(len(x), 2 * height + 2, 2 * width + 2, -1)
    pixels = pixels[:, 1 : size[0] + 1, 1 : size[1] + 1] + layer.bias.to(x.dtype)
    return pixels.permute(0, 3, 1, 2)


def _overlapped(products: Tensor, place: int, tap: int) -> Tensor:
    """Place i writes its four taps from row 2 i - 1 on: rows come in pairs, of taps 0 and 1, and of 2 and 3 of the
    place before."""
    own, before = products.chunk(2, tap)
    ahead = 2 * (products.ndim - 1 - place) * [0]
    return F.pad(own, (*ahead, 0, 1)) + F.pad(before, (*ahead, 1, 0))


def _flat(layer: Any, x: Tensor) -> Tensor:  # a view of weights that lie channels last in memory
    return layer.weight.to(x.dtype).permute(0, 2, 3, 1).flatten(1)


def blocks(x: Tensor, size: int) -> Tensor:
    """(n, c, h, w) -> (n, size size c, h // size, w // size), channels last in memory: the pixels of a block become
    channels, those beyond the last whole block are dropped."""
    height, width = (length // size * size for length in x.shape[2:])
    x = x[:, :, :height, :width].unflatten(3, (-1, size)).unflatten(2, (-1, size))
    return x.permute(0, 2, 4, 3, 5, 1).contiguous().flatten(3).movedim(3, 1)  # through (n, h, w, size, size, c)
