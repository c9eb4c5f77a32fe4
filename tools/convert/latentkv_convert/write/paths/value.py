"""value (K): no rows. A key is the row of V, normed as keys are, then RoPE; the projection of both stays."""

from __future__ import annotations

from ...weights.out_tensor import OutTensor
from . import SideJob, projection


def tensors(job: SideJob) -> list[OutTensor]:
    return projection(job)
