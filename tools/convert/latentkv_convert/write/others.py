"""All tensors except those of K and V."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ..ir import TensorRole
from ..source.source import Source
from ..weights.tensor import OutTensor
from .paths import head_rows


def tensors(source: Source) -> list[OutTensor]:
    spec = source.spec
    tensors = [copied(source, role, None) for role in spec.global_tensors]
    for layer in range(spec.n_layer):
        tensors += [copied(source, role, layer) for role in spec.tensors_of(layer)]
    tensors += [_beside(source, name) for name in source.beside]
    for name, array in spec.extra_tensors.items():
        tensors.append(OutTensor(name, array.shape, "vector", partial(np.asarray, array)))
    return tensors


def _beside(source: Source, name: str) -> OutTensor:
    kind = "weight" if len(source.shape(name)) > 1 else "vector"
    return OutTensor(name, source.shape(name), kind, partial(source.tensor, name), source.stored(name))


def copied(source: Source, role: TensorRole, layer: int | None) -> OutTensor:
    """The tensor's rows in the file's RoPE order."""
    spec = source.spec if layer is None else source.spec.at(layer)
    rows = head_rows(spec, role.rope_heads) if role.rope_heads else None

    def load() -> Any:
        array = source.tensor(role.target, layer)
        return array if rows is None else array[rows]

    name = role.target if layer is None else f"blk.{layer}.{role.target}"
    stored = source.stored(role.target, layer)
    return OutTensor(name, source.shape(role.target, layer), role.kind, load, stored)
