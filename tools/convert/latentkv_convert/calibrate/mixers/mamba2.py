"""A Mamba-2 layer in torch, f32, on tensors as the file has them: what mixes tokens in a layer that does not
attend. The recurrence is transformers' own."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional

from ...ir import ModelSpec
from ...source.recurrent import Mamba2Sizes
from .recurrence import convolved, recurrence

_RECURRENCE = ("granitemoehybrid.modeling_granitemoehybrid", "mamba2_chunk_scan")
_CHUNK = 64  # tokens whose products with each other are computed together


def mixed(live: Any, spec: ModelSpec, x: Tensor) -> Tensor:
    """live: a layer with the modules ssm_* of its tensors. x [n, T, d] -> [n, T, d]."""
    sizes = Mamba2Sizes.of(spec)
    gate, rows, step = live.ssm_in(x).split((sizes.inner, sizes.channels, sizes.heads), dim=-1)
    made = functional.silu(convolved(rows, live.ssm_conv1d))
    parts = made.split((sizes.inner, sizes.shared, sizes.shared), dim=-1)
    counts = (sizes.heads, sizes.groups, sizes.groups)
    heads, writes, reads = (part.unflatten(-1, (n, -1)) for part, n in zip(parts, counts, strict=True))
    mixed = recurrence(*_RECURRENCE)(
        heads,
        step,
        live.ssm_a.weight[:, 0],
        writes,
        reads,
        chunk_size=_CHUNK,
        D=live.ssm_d.weight[:, 0],
        dt_bias=live.ssm_dt.bias,
        dt_softplus=True,
    )
    groups = (mixed.flatten(2) * functional.silu(gate)).unflatten(-1, (sizes.groups, -1))
    norm = live.ssm_norm
    normed = functional.rms_norm(groups, groups.shape[-1:], eps=norm.eps) * norm.weight
    output: Tensor = live.ssm_out(normed.flatten(2))
    return output
