"""Out of memory, told in the user's terms."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from replaylab.errors import UsageError


@contextmanager
def memory(what: str, *settings: str) -> Iterator[None]:
    """Turn out-of-memory errors into a UsageError that names the settings to lower."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        gpu = isinstance(error, torch.cuda.OutOfMemoryError)
        if not (gpu or isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)):
            raise
        where = "the GPU has" if gpu else "there is"
        raise UsageError(f"{where} too little memory for {what}: lower --{' or --'.join(settings)}") from error
