"""full: the stock projection."""

from __future__ import annotations

from ...fuse import center
from ...weights.out_tensor import OutTensor
from . import SideJob, projection


def tensors(job: SideJob) -> list[OutTensor]:
    return [*projection(job), *job.bias(center.whole_bias(job.work, job.layer, job.side))]
