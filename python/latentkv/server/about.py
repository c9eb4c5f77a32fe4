"""What the server tells of its model and cache: sizes, and the plan layer by layer."""

from __future__ import annotations

from typing import Any

from latentkv import _core


def about(model: _core.Model, session: _core.Session) -> dict[str, Any]:
    """JSON values. "cache": bytes as allocated, beside those of an f16 cache of as many tokens. "plan": a row
    of {"k", "v"} for each layer: path and, of every group, widths and formats of its segments."""
    sizes = session.kv_bytes()
    f16_total = sizes["f16_per_token"] * session.n_ctx + sizes["cells"]
    return {
        "n_ctx": session.n_ctx,
        "n_ctx_train": model.n_ctx_train,
        "n_vocab": model.n_vocab,
        "n_embd": model.n_embd,
        "n_layer": model.n_layer,
        "n_head": model.n_head,
        "n_head_kv": model.n_head_kv,
        "head_dim": model.head_dim,
        "n_params": model.n_params,
        "size": model.size_bytes,
        "architecture": model.metadata.get("general.architecture"),
        "cache": {
            "total": sizes["total"],
            "f16_total": int(f16_total),
            "per_token": sizes["per_token"],
            "f16_per_token": sizes["f16_per_token"],
            "regions": sizes["regions"],
            "implementation": session.implementations["latent_attn"],
        },
        "plan": model.layers,
    }
