"""A checkpoint's layer for further tokens (multi-token prediction), as stock files have it: the block after
the decoder's own, whose further tensors are named `nextn.…`.

The first of several such layers is written, which was trained for the token after the next one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ..ir import SIDES, ModelSpec, TensorRole
from .checkpoint import Checkpoint

# What makes the layer's input and output, beside its own tensors. Qwen keeps it apart, others in the layer.
_APART = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc"}
_APART |= {"shared_head_norm": "norm"}
_WITHIN = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "shared_head_norm": "shared_head.norm"}
_TABLES = {"embed_tokens": ("embed_tokens", 0), "shared_head_head": ("shared_head.head", -1)}
_SAMPLED = slice(0, 16)  # columns


def with_layer(spec: ModelSpec, checkpoint: Checkpoint) -> ModelSpec:
    """The model with its layer for further tokens, or as it is where the checkpoint has not all of one."""
    found = _place(spec, checkpoint)
    if found is None or spec.packed_qkv or spec.heads:
        return spec
    layer, apart, names = found
    block = f"blk.{spec.n_layer}."
    norm = next(role for role in spec.layer_tensors if role.target == "attn_norm.weight")
    roles = [_moved(role, f"{layer}.", block) for role in spec.layer_tensors]
    roles += _projections(spec, checkpoint, layer, block)
    for target, source in names.items():
        source, target = f"{apart}.{source}.weight", f"{block}nextn.{target}.weight"
        if target.endswith("norm.weight"):
            roles.append(replace(norm, source=source, target=target))
        else:
            roles.append(TensorRole(source, target))
    if not all(_is_there(role, checkpoint) for role in roles):
        return spec
    for target, (source, shared) in _TABLES.items():
        own = f"{layer}.{source}.weight"
        if own in checkpoint and not _is_same(checkpoint, own, spec.global_tensors[shared].source):
            roles.append(TensorRole(own, f"{block}nextn.{target}.weight", "table"))
    keys = {**spec.keys, "block_count": spec.n_layer + 1, "nextn_predict_layers": 1}
    return replace(spec, global_tensors=(*spec.global_tensors, *roles), keys=keys)


def doubles(spec: ModelSpec) -> tuple[str, ...]:
    """Tensors of the layer that may be the model's own once more."""
    return tuple(f"{spec.layers}.{spec.n_layer}.{source}.weight" for source, _ in _TABLES.values())


def _place(spec: ModelSpec, checkpoint: Checkpoint) -> tuple[str, str, Mapping[str, str]] | None:
    """The layer, and where its further tensors are, by their names in a stock file."""
    if "mtp.fc.weight" in checkpoint:
        return "mtp.layers.0", "mtp", _APART
    layer = f"{spec.layers}.{spec.n_layer}"
    return (layer, layer, _WITHIN) if f"{layer}.eh_proj.weight" in checkpoint else None


def _projections(spec: ModelSpec, checkpoint: Checkpoint, layer: str, block: str) -> list[TensorRole]:
    """K and V, which are no roles of other layers as these may have latents."""
    roles = []
    for side in SIDES if spec.projections else ():
        projection = spec.projections[side]
        for leaf, kind in (("weight", "weight"), ("bias", "vector")):
            source = f"{layer}.{projection.module}.{leaf}"
            if source in checkpoint:
                heads = spec.n_kv if side == "k" else 0
                target = f"{block}attn_{side}.{leaf}"
                roles.append(TensorRole(source, target, kind, rope_heads=heads, rows=projection.rows))
    return roles


def _moved(role: TensorRole, layer: str, block: str) -> TensorRole:
    otherwise = None if role.otherwise is None else _moved(role.otherwise, layer, block)
    return replace(role, source=layer + role.source, target=block + role.target, otherwise=otherwise)


def _is_there(role: TensorRole, checkpoint: Checkpoint) -> bool:
    if role.otherwise is not None and _is_there(role.otherwise, checkpoint):
        return True
    return role.source.format(0) in checkpoint


def _is_same(checkpoint: Checkpoint, name: str, table: str) -> bool:
    if checkpoint.shape(name) != checkpoint.shape(table):
        return False
    return np.array_equal(checkpoint.columns(name, _SAMPLED), checkpoint.columns(table, _SAMPLED))
