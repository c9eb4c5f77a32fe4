"""Bytes of the model with full K and V, in the types of the written file. The key latentkv.full_bytes holds
them, so that a reader knows what a latent cache adds to the weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..ir import SIDES
from ..source.gguf_file import Value
from ..source.source import Source
from ..weights.encoding import Encoding
from ..weights.tensor import OutTensor, unread

_NAMED = 256  # bytes of a tensor's name, shape and padding, at most
_CHANNEL = 8  # of a channel's part of a plan's keys


def total(source: Source, encoding: Encoding, others: Iterable[OutTensor]) -> int:
    """others: all tensors but those of K and V, and of packed Q."""
    tensors = [*others, *_projections(source)]
    return sum(encoding.n_bytes(encoding.settled(tensor)) for tensor in tensors)


def most(
    source: Source, encoding: Encoding, others: Sequence[OutTensor], entries: Mapping[str, Any], group: int
) -> int:
    """Bytes that a file has at most: that of a plan which keeps every channel in groups of `group` KV heads.
    Without `others` a sidecar's. entries: its keys."""
    spec, full = source.spec, total(source, encoding, others) if others else 0
    factors = 0.0
    for layer in spec.row_layers if group else ():
        for side in SIDES:
            own = spec.at(layer).of_side(side)
            width = min(group * spec.head_dim, own.kv_width)
            channel = max(encoding.channel_bytes(form, width, spec.n_embd) for form in "ae")
            factors += own.kv_width * (channel + _CHANNEL)
    if spec.mla is not None and not others:
        factors += sum(map(encoding.n_bytes, _of_heads(source)))
    named = (len(others) + 8 * spec.n_layer) * _NAMED
    return math.ceil(full + factors) + named + sum(len(key) + _size(value) for key, value in entries.items())


def _of_heads(source: Source) -> Iterator[OutTensor]:
    """What MLA's plan makes anew."""
    for layer in source.spec.row_layers:
        for role in ("attn_k_b.weight", "attn_v_b.weight"):
            yield OutTensor(f"blk.{layer}.{role}", source.shape(role, layer), "weight", unread)


def _size(value: Any) -> int:
    """Of a key's value, at most."""
    data = value.data if isinstance(value, Value) else value
    if isinstance(data, str | bytes):
        return 16 + len(data.encode() if isinstance(data, str) else data)
    if isinstance(data, np.ndarray):
        return 16 + data.nbytes
    return 16 + (sum(map(_size, data)) if isinstance(data, list | tuple) else 0)


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
