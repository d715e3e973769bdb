"""Two streams of kernels instead of one, where neither fills the GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar

import torch

Found = TypeVar("Found")


def beside(body: Callable[[], Found], device: torch.device, urgent: bool = False) -> Callable[[], Found]:
    """Begin a computation while the caller goes on; call what is returned for its result. It may be captured. On a CPU
    it is simply done. Neither side may free, before that, what the other still reads. Small kernels beside large ones
    are urgent, or each waits until a large one has no more blocks to start."""
    if device.type != "cuda":
        found = body()
        return lambda: found
    main, other = torch.cuda.current_stream(device), _second(device, urgent)
    other.wait_stream(main)
    with torch.cuda.stream(other):
        found = body()

    def result() -> Found:
        main.wait_stream(other)
        return found

    return result


@lru_cache
def _second(device: torch.device, urgent: bool) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1 if urgent else 0)
