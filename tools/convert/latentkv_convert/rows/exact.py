"""Row formats of sink and recent tokens, where a plan is free to choose."""

from __future__ import annotations

from ..ir import ModelSpec

# Row formats of exact tokens, the widest first. q8 has one scale for a head: with the 256 channels of
# Gemma 3 270M it costs 0.003 nats, q8_0 on all rows 0.0005.
FORMATS = ("f16", "q8_0")
BLOCK = 32  # channels of q8_0


def formats(spec: ModelSpec) -> tuple[str, ...]:
    """Those of FORMATS that take a head, whose channels are one segment."""
    taken = all(spec.at(layer).head_dim % BLOCK == 0 for layer in range(spec.n_layer))
    return FORMATS if taken else FORMATS[:1]
