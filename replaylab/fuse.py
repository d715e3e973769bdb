"""torch.compile, as the whole package calls it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def fused(function: Callable[..., Any], wanted: bool = True) -> Callable[..., Any]:
    """Compiled, if wanted; on CUDA with one kernel for many small ones that do not wait for each other."""
    if not wanted:
        return function
    options: dict[str, Any] | None = {"combo_kernels": True} if torch.cuda.is_available() else None
    return torch.compile(function, dynamic=False, options=options)
