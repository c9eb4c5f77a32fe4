"""rebuild (K): z is cached before RoPE; k = B z + bias, then norm and RoPE at read."""

from __future__ import annotations

from ...fuse import center
from ...weights.out_tensor import OutTensor
from . import SideJob, down, up


def tensors(job: SideJob) -> list[OutTensor]:
    bias = center.output_bias(job.work, job.layer, job.side)
    return [*down(job), up(job), *job.bias(bias)]
