"""Bytes of the model with full K and V, in the types of the written file. The key latentkv.full_bytes holds
them, so that a reader knows what a latent cache adds to the weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..ir import SIDES
from ..source.source import Source
from ..weights.encoding import Encoding
from ..weights.tensor import OutTensor, unread


def total(source: Source, encoding: Encoding, others: Iterable[OutTensor]) -> int:
    """others: all tensors but those of K and V, and of packed Q."""
    tensors = [*others, *_projections(source)]
    return sum(encoding.n_bytes(encoding.settled(tensor)) for tensor in tensors)


def _projections(source: Source) -> Iterator[OutTensor]:
    sides = ("q", *SIDES) if source.spec.packed_qkv else SIDES
    for layer in source.spec.attention_layers if source.spec.mla is None else ():
        spec = source.spec.at(layer)
        stem = f"blk.{layer}.attn_"
        rows = {side: spec.q_width if side == "q" else spec.kv_width for side in sides}
        if spec.value_of_key:
            del rows["v"]
        if spec.shares_kv:
            rows = {}
        biases = {side: n for side, n in rows.items() if source.has(f"attn_{side}.bias", layer)}
        if spec.packed_qkv:
            rows, biases = {"qkv": sum(rows.values())}, {"qkv": sum(rows.values())} if biases else {}
        for side, n in rows.items():
            stored = source.stored(f"attn_{side}.weight", layer)
            yield OutTensor(f"{stem}{side}.weight", (n, spec.n_embd), "weight", unread, stored)
        for side, n in biases.items():
            yield OutTensor(f"{stem}{side}.bias", (n,), "vector", unread)
