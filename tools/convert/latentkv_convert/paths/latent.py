"""latent (V): z = A x is cached; a head's output is B applied to the attention-weighted sum of z, plus the
bias once."""

from __future__ import annotations

from ..gguf_write import OutTensor
from . import SideJob, down, up


def tensors(job: SideJob) -> list[OutTensor]:
    return [down(job), up(job), *job.bias()]
