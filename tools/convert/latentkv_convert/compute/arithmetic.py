"""How torch computes while a model runs. The settings are restored afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from latentkv import processor

HOST_THREADS = 4  # beside a GPU: what is left to the processor are copies, and idle threads spin
_AMX = frozenset({"amx_bf16"})
_BF16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})  # words of /proc/cpuinfo, the last one ARM's


def multiplies_bf16(device: str) -> bool:
    """Whether the host computes the model, and has instructions for products of bf16."""
    return device == "cpu" and bool(_BF16 & processor.features())


@contextlib.contextmanager
def model_arithmetic(device: str, reduced: bool = False) -> Iterator[None]:
    """Products of f32 on a GPU in TF32, whose 10 bits are what a runtime's f16 has; everything that is
    measured on them is float64. reduced: on the host they may round their factors to bf16 and add up in f32.

    Numbers below the smallest normal one are 0, in the threads of torch too: softmax weights and their
    gradients underflow by the million, and a processor takes a hundred cycles for each; a window takes up to
    five times as long with them.
    """
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(_precision(device, reduced))
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        torch.set_flush_denormal(False)


def _precision(device: str, reduced: bool) -> str:
    """For torch. On a processor `medium` means oneDNN's products, which are rounded to bf16 with AMX alone.
    Without it they are f32 (relative error 5e-7, MKL's 3e-7) and take half of MKL's time on an AMD EPYC."""
    if device != "cpu":
        return "high"
    return "medium" if reduced or not _AMX & processor.features() else "highest"


@contextlib.contextmanager
def host_threads(device: str) -> Iterator[None]:
    """Limits torch to HOST_THREADS threads if `device` is not the host."""
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
