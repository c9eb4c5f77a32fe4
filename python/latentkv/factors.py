"""Bytes of a latent's factors, and of the projections that they replace (docs/gguf.md, Tensors).

A latent costs weights: what a file and the memory grow by is its factors less the projections that they stand
for. In form E the projection stays, so E and the matrix back come on top; in form A they replace it, and are
together smaller than it at a small rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# general.file_type -> bytes of an element of A and of a projection, of an element of the other factors
_TYPES = {0: (4.0, 4.0), 1: (2.0, 2.0), 2: (18 / 32, 2.0), 7: (34 / 32, 2.0), 32: (2.0, 2.0)}
_F16 = 1


def channel_bytes(form: str, width: int, n_embd: int, file_type: int) -> float:
    """Of one channel of a group `width` = group · head_dim wide: its row of A or E, and its column of B (or
    E_q)."""
    weight, factor = _TYPES.get(file_type, _TYPES[_F16])
    return _first(form, width, n_embd, weight, factor) + width * factor


def replaced_bytes(form: str, width: int, n_embd: int, file_type: int) -> float:
    """Of a projection's rows for a group `width` wide that are not in the file."""
    weight, _ = _TYPES.get(file_type, _TYPES[_F16])
    return width * n_embd * weight if form == "a" else 0.0


def added_bytes(
    layers: Sequence[Mapping[str, Any]], n_kv: int, head_dim: int, n_embd: int, file_type: int
) -> int:
    """What the weights grow by over full K and V; below 0 where they shrink. layers: per layer and side
    "path", "form", "group" and "ranks", as Model.layers. Ragged groups are padded to the layer's largest."""
    weight, factor = _TYPES.get(file_type, _TYPES[_F16])
    total = 0.0
    for side in (layer[name] for layer in layers for name in ("k", "v")):
        if side["path"] == "full":
            continue
        form = side.get("form", "e" if side["path"] == "rotated" else "a")
        width, ranks = side["group"] * head_dim, side["ranks"]
        total += sum(ranks) * _first(form, width, n_embd, weight, factor)
        total += max(ranks) * n_kv * head_dim * factor
        total -= replaced_bytes(form, n_kv * head_dim, n_embd, file_type)
    return round(total)


def _first(form: str, width: int, n_embd: int, weight: float, factor: float) -> float:
    """Of a channel's row of A or E."""
    return n_embd * weight if form == "a" else width * factor
