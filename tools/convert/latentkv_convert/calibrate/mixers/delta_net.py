"""A gated delta net in torch, f32, on tensors as the file has them: what mixes tokens in a layer that does
not attend. The recurrence is transformers' own."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional

from ...ir import ModelSpec
from ...source.recurrent import DeltaNetSizes
from .recurrence import convolved, recurrence

_RECURRENCE = ("qwen3_next.modeling_qwen3_next", "torch_chunk_gated_delta_rule")


def mixed(live: Any, spec: ModelSpec, x: Tensor) -> Tensor:
    """live: a layer with the modules attn_qkv, attn_gate, ssm_* of its tensors. x [n, T, d] -> [n, T, d]."""
    sizes = DeltaNetSizes.of(spec)
    n_k, width, keys = sizes.n_k, sizes.width, sizes.n_k * sizes.width
    rows = functional.silu(convolved(live.attn_qkv(x), live.ssm_conv1d))
    q, k, v = rows.split((keys, keys, sizes.inner), dim=-1)
    q, k, v = (part.unflatten(-1, (-1, width)) for part in (q, k, v))
    beta, alpha = _gates(live, x, n_k)
    shared = sizes.n_v // n_k
    if "ssm_ba" in live._modules:  # value heads that share keys are side by side
        q, k = (part.repeat_interleave(shared, dim=2) for part in (q, k))
    else:
        q, k = (part.repeat(1, 1, shared, 1) for part in (q, k))
    decay = live.ssm_a.weight * functional.softplus(alpha + live.ssm_dt.bias)
    mixed = recurrence(*_RECURRENCE)(q, k, v, g=decay, beta=beta.sigmoid(), use_qk_l2norm_in_kernel=True)[0]
    gate = live.attn_gate(x).unflatten(-1, (-1, width))
    output: Tensor = live.ssm_out((live.ssm_norm(mixed) * functional.silu(gate)).flatten(2))
    return output


def _gates(live: Any, x: Tensor, n_k: int) -> tuple[Tensor, Tensor]:
    """beta and alpha [n, T, value heads] before what bounds them."""
    if "ssm_ba" not in live._modules:
        return live.ssm_beta(x), live.ssm_alpha(x)
    beta, alpha = live.ssm_ba(x).unflatten(-1, (n_k, -1)).chunk(2, dim=-1)
    return beta.flatten(2), alpha.flatten(2)
