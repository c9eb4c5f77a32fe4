"""How torch computes while a model runs, put back afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

HOST_THREADS = 4  # beside a GPU: what is left to the processor are copies, and idle threads spin


@contextlib.contextmanager
def model_arithmetic() -> Iterator[None]:
    """Products of f32 on a GPU in TF32, whose 10 bits are what a runtime's f16 has; everything that is
    measured on them is float64.

    Numbers below the smallest normal one are 0, in the threads of torch too: softmax weights and their
    gradients underflow by the million, and a processor takes a hundred cycles for each; a window takes up to
    five times as long with them.
    """
    import torch

    products = torch.backends.cuda.matmul
    before = products.allow_tf32
    products.allow_tf32 = True
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        products.allow_tf32 = before
        torch.set_flush_denormal(False)


@contextlib.contextmanager
def host_threads(device: str) -> Iterator[None]:
    """HOST_THREADS at most, where `device` is none of the host's."""
    if device == "cpu":
        yield
        return
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(min(before, HOST_THREADS))
    try:
        yield
    finally:
        torch.set_num_threads(before)
