"""What the server reports about its model and cache: sizes, and the plan layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from latentkv import _core


def about(model: _core.Model, session: _core.Session, cache: Mapping[str, Any]) -> dict[str, Any]:
    """JSON values. cache: the keywords that the session was made with. "cache": bytes as allocated, beside
    those of an f16 cache of as many tokens; "states" and "snapshots" of recurrent layers are beside both.
    "plan": a row of {"mixer", "k", "v"} for each layer: path and, of every group, widths and formats of its
    segments, as they are in use."""
    sizes = session.kv_bytes()
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
            "f16_total": sizes["f16_total"],
            "states": sizes["states"],
            "snapshots": sizes["snapshots"],
            "snapshots_most": sizes["snapshots_most"],
            "per_token": sizes["per_token"],
            "f16_per_token": sizes["f16_per_token"],
            "regions": sizes["regions"],
            "all_exact": sizes["all_exact"],
            "exact_at": sizes["exact_at"],
            "implementation": session.implementations["latent_attn"],
        },
        "plan": plan_in_use(model.layers, cache),
    }


def plan_in_use(layers: Sequence[Mapping[str, Any]], cache: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Model.layers with the formats of a session with these keywords: its plan's, else its format, else
    the file's own, else f16. What the file drops stays dropped."""
    plans = {side: iter(cache.get(f"{side}_plan", ())) for side in ("k", "v")}

    def format_of(side: str, own: str | None) -> str:
        asked = cache.get(f"kv_{side}") or cache.get("kv")
        dropped = own if own == "none" else None
        return next(plans[side], None) or dropped or asked or own or "f16"

    def tensor(side: str, layer: Mapping[str, Any]) -> dict[str, Any]:
        found = layer[side]
        own = found["formats"] or [[None] * len(widths) for widths in found["segments"]]
        return found | {"formats": [[format_of(side, each) for each in group] for group in own]}

    return [{**layer, **{side: tensor(side, layer) for side in plans}} for layer in layers]
