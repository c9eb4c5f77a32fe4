"""attn_qkv: Q, K and V of a layer as one tensor, for architectures whose stock readers know no other layout.

Only a layer with full K and V can be packed; a layer with a latent keeps attn_q beside its factors.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from ..ir import F32, LayerPlan
from ..weights.tensor import OutTensor
from ..work import Work


def is_packed(work: Work, layer: LayerPlan) -> bool:
    return work.spec.packed_qkv and layer.k.path == "full" and layer.v.path == "full"


def together(work: Work, layer: int) -> list[OutTensor]:
    """attn_qkv [q_width + 2·kv_width, n_embd] and its bias where the checkpoint has one."""
    return _tensors(work, layer, "qkv")


def query(work: Work, layer: int) -> list[OutTensor]:
    """attn_q [q_width, n_embd] and its bias, beside a latent K or V."""
    return _tensors(work, layer, "q")


def _tensors(work: Work, layer: int, sides: str) -> list[OutTensor]:
    spec = work.spec.at(layer)
    rows = sum(spec.q_width if side == "q" else spec.kv_width for side in sides)
    role = f"attn_{sides}"
    stem, stored = f"blk.{layer}.{role}", partial(work.source.stored, layer=layer)
    load = partial(_weight, work, layer, sides)
    tensors = [OutTensor(f"{stem}.weight", (rows, spec.n_embd), "weight", load, stored(f"{role}.weight"))]
    parts = [bias for bias in (work.bias(layer, side) for side in sides) if bias is not None]
    if parts:
        bias = np.concatenate(parts)
        load = partial(np.asarray, bias)
        tensors.append(OutTensor(f"{stem}.bias", bias.shape, "vector", load, stored(f"{role}.bias")))
    return tensors


def _weight(work: Work, layer: int, sides: Sequence[str]) -> F32:
    return np.concatenate([work.weight(layer, side) for side in sides])
