"""full: the stock projection."""

from __future__ import annotations

from ..fuse import center
from ..gguf_write import OutTensor
from . import SideJob


def tensors(job: SideJob) -> list[OutTensor]:
    spec = job.spec
    weight = OutTensor(
        f"blk.{job.layer}.attn_{job.side}.weight",
        (spec.kv_width, spec.n_embd),
        "weight",
        lambda: job.in_file_order(job.work.weight(job.layer, job.side)),
    )
    return [weight, *job.bias(center.whole_bias(job.work, job.layer, job.side))]
