"""Weights on disk in the safetensors format: a JSON header and raw bytes, nothing that can execute.

Written here in a few lines because a training run must need numpy and torch alone; a test reads these files with
the safetensors package and the other way round.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from replaylab.errors import DataError

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_TYPES = {name: dtype for dtype, name in _NAMES.items()}
_MAX_HEADER = 100 << 20


def save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    header, offset, blobs = {}, 0, []
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        size = tensor.numel() * tensor.element_size()
        shape = list(tensor.shape)
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": shape, "data_offsets": [offset, offset + size]}
        blobs.append(tensor.reshape(-1).view(torch.uint8).numpy() if size else np.empty(0, np.uint8))
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for blob in blobs:
            file.write(blob.data)


def load_tensors(path: Path) -> dict[str, Tensor]:
    try:
        data = np.fromfile(path, np.uint8)
        if len(data) < 8:
            raise ValueError("the file is cut off")
        (length,) = struct.unpack("<Q", data[:8].tobytes())
        if length > min(_MAX_HEADER, len(data) - 8):
            raise ValueError("the header is longer than the file")
        header = json.loads(data[8 : 8 + length].tobytes())
        header.pop("__metadata__", None)
        body = torch.from_numpy(data[8 + length :])
        return {name: _one(name, entry, body) for name, entry in header.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise DataError(f"{path} is not a readable safetensors file: {error}") from error


def _one(name: str, entry: dict, body: Tensor) -> Tensor:
    dtype, shape = _TYPES[entry["dtype"]], entry["shape"]
    begin, end = entry["data_offsets"]
    if any(not isinstance(n, int) or n < 0 for n in [*shape, begin, end]) or not begin <= end <= len(body):
        raise ValueError(f"{name} lies outside the file")
    if math.prod(shape) * dtype.itemsize != end - begin:
        raise ValueError(f"{name} does not have the size of its shape")
    return body[begin:end].clone().view(dtype).reshape(shape)


def by_index(tensors: dict[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    """The state of an optimiser's parameters, {0: {"exp_avg": x}}, from names such as `0.exp_avg`."""
    found: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        index, key = name.split(".", 1)
        found.setdefault(int(index), {})[key] = value
    return found


def under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those whose names begin so, by the rest of their names."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
