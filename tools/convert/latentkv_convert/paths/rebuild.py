"""rebuild (K): z = A x is cached before RoPE; k = B z + bias, then norm and RoPE at read."""

from __future__ import annotations

from ..gguf_write import OutTensor
from . import SideJob, down, up


def tensors(job: SideJob) -> list[OutTensor]:
    return [down(job), up(job), *job.bias()]
