"""Softmax weights and their gradients underflow by the million, and a processor takes a hundred cycles for
each such number: a window takes up to five times as long with them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def flushed() -> Iterator[None]:
    """Numbers below the smallest normal one are 0, in the threads of torch too."""
    import torch

    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
