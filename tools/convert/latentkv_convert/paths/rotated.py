"""rotated (K): z_g = E_k k_g is cached after bias, norm and RoPE, and q' = E_q q; nothing is rebuilt at
read."""

from __future__ import annotations

import numpy as np

from ..gguf_write import OutTensor
from ..ir import F32
from . import SideJob, full, head_rows, query_side


def tensors(job: SideJob) -> list[OutTensor]:
    return [*full.tensors(job), key_side(job), query_side(job)]


def key_side(job: SideJob) -> OutTensor:
    """E_k [Σr, group·head_dim]: columns are the head dimensions of a group's heads in the file's order."""
    width = job.plan.group * job.spec.head_dim
    columns = head_rows(job.spec, job.plan.group)

    def load() -> F32:
        rows = np.concatenate([basis.down.T for basis in job.factors()]).astype(np.float32)
        return rows if columns is None else rows[:, columns]

    return OutTensor(job.name("attn_{side}_e"), (sum(job.plan.ranks), width), "factor", load)
