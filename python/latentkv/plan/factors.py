"""Bytes of a latent's factors, and what the weights grow by (docs/gguf.md, Tensors).

A file and the memory grow by its factors less the projections that they stand for. In form E the projection
stays, so E and the matrix back come on top; in form A they replace it, and are together smaller than it at a
small rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from latentkv._core import Model

_FULL = "latentkv.full_bytes"


def added_bytes(model: Model) -> int | None:
    """What the weights grow by over full K and V, below 0 where they shrink. None: projections are gone from
    the file, and it does not say what the model would weigh with them."""
    full = model.metadata.get(_FULL)
    if full is not None:
        return int(model.size_bytes - full)
    sides = [layer[side] for layer in model.layers for side in ("k", "v")]
    return None if any(side["form"] == "a" for side in sides) else model.factor_bytes
