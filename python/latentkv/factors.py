"""Bytes of a latent's factors, and of the projections that they replace (docs/gguf.md, Tensors).

A latent costs weights: what a file and the memory grow by is its factors less the projections that they stand
for. `rotated` keys keep their projection, so E_k and E_q come on top; all other paths replace it by A and one
matrix back, which together are smaller than it at a small rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# general.file_type -> bytes of an element of A and of a projection, of an element of the other factors
_TYPES = {0: (4.0, 4.0), 1: (2.0, 2.0), 2: (18 / 32, 2.0), 7: (34 / 32, 2.0), 32: (2.0, 2.0)}
_F16 = 1


def channel_bytes(path: str, width: int, n_embd: int, file_type: int) -> float:
    """Of one channel of a group `width` = group · head_dim wide: its row of A (or E_k), and its column of B
    (or E_q)."""
    weight, factor = _TYPES.get(file_type, _TYPES[_F16])
    first = width * factor if path == "rotated" else n_embd * weight
    return 0.0 if path == "full" else first + width * factor


def replaced_bytes(path: str, width: int, n_embd: int, file_type: int) -> float:
    """Of a projection's rows for a group `width` wide that are not in the file."""
    weight, _ = _TYPES.get(file_type, _TYPES[_F16])
    return 0.0 if path in ("full", "rotated") else width * n_embd * weight


def added_bytes(
    layers: Sequence[Mapping[str, Any]], n_kv: int, head_dim: int, n_embd: int, file_type: int
) -> int:
    """What the weights grow by over full K and V; below 0 where they shrink. layers: per layer and side
    "path", "group" and "ranks", as Model.layers. Ragged groups are padded to the layer's largest."""
    total = 0.0
    for side in (layer[name] for layer in layers for name in ("k", "v")):
        path, width, ranks = side["path"], side["group"] * head_dim, side["ranks"]
        if path == "full":
            continue
        weight, factor = _TYPES.get(file_type, _TYPES[_F16])
        first = sum(ranks) * (width * factor if path == "rotated" else n_embd * weight)
        total += first + max(ranks) * n_kv * head_dim * factor
        total -= replaced_bytes(path, n_kv * head_dim, n_embd, file_type)
    return round(total)
