"""rotated (K): z_g = E_k k_g is cached after bias, norm and RoPE, and q' = E_q q; nothing is rebuilt at
read."""

from __future__ import annotations

from ...weights.out_tensor import OutTensor
from . import SideJob, encoder, full, query_side


def tensors(job: SideJob) -> list[OutTensor]:
    return [*full.tensors(job), encoder(job), query_side(job)]
