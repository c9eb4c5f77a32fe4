"""absorbed (K without RoPE): z is cached and queries move into its space, q' = E_q q.

The projection's bias is left out, and the mean where rows are centred: they add the same to every score of a
query, which the softmax removes.
"""

from __future__ import annotations

from ...weights.out_tensor import OutTensor
from . import SideJob, down, query_side


def tensors(job: SideJob) -> list[OutTensor]:
    return [*down(job), query_side(job)]
