"""torch.compile, as the whole package calls it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

# torch's word to its own developers, once for each softmax over few rows: nothing that a user could do about
warnings.filterwarnings("ignore", r"\s*Online softmax is disabled on the fly")


def fused(function: Callable[..., Any], wanted: bool = True) -> Callable[..., Any]:
    """Compiled, if wanted; on CUDA with one kernel for many small ones that do not wait for each other."""
    if not wanted:
        return function
    options: dict[str, Any] | None = {"combo_kernels": True} if torch.cuda.is_available() else None
    return torch.compile(function, dynamic=False, options=options)
