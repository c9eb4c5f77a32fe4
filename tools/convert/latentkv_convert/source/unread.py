"""Tensors of a checkpoint that no role reads. Buffers and scales say nothing that is not known, heads that
guess further tokens and what sees or hears are left out and named, and any other would make another model."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from ..errors import ConvertError
from ..ir import ModelSpec
from . import mtp
from .checkpoint import Checkpoint
from .layouts import fp8

# What older versions of transformers saved, and compute from the config
_BUFFERS = re.compile(r"(^|\.)(rotary_emb\.\w+|inv_freq|masked_bias|position_ids)$")
_OUTPUT = re.compile(r"(^|\.)lm_head\.weight$")
_GUESSES = re.compile(r"(model\.)?mtp[._]")
_SENSES = re.compile(
    r"(model\.)?(visual|vision_\w+|embed_vision|multi_modal_projector|audio_\w+|embed_audio)\."
)
_SAMPLED = 16  # columns of the token table
_LISTED = 3  # names in a message


def note(checkpoint: Checkpoint, spec: ModelSpec, config: Mapping[str, Any], read: Collection[str]) -> str:
    """One line about what is left out, or "". read: names of the tensors that roles are read from.

    Raises:
        ConvertError: tensors that nobody knows, which the model would lack.
    """
    unread = [name for name in checkpoint.names() if name not in read and not _says_nothing(name, read)]
    unread = [name for name in unread if not _is_shared(name, spec)]
    if all(role.target != "output.weight" for role in spec.global_tensors):
        unread = [name for name in unread if not _is_tied(checkpoint, spec, name)]
    unread = [name for name in unread if name not in mtp.doubles(spec)]
    guesses = [name for name in unread if _GUESSES.match(name) or _is_behind(name, spec, config)]
    senses = [name for name in unread if _SENSES.match(name)]
    others = [name for name in unread if name not in {*guesses, *senses}]
    if others:
        listed = ", ".join(others[:_LISTED])
        more = f" and {len(others) - _LISTED} more" if len(others) > _LISTED else ""
        raise ConvertError(
            "checkpoint",
            f"tensors that config.json's {config['model_type']} has",
            f"{listed}{more}",
            "merge adapters, and leave out what is no part of the model",
        )
    parts = (("multi-token prediction", guesses), ("pictures and sounds", senses))
    found = [f"{len(names)} tensor{'s' * (len(names) > 1)} of {of}" for of, names in parts if names]
    return f"left out: {' and '.join(found)}" if found else ""


def _says_nothing(name: str, read: Collection[str]) -> bool:
    return _BUFFERS.search(name) is not None or fp8.is_scale(name, read)


def _is_behind(name: str, spec: ModelSpec, config: Mapping[str, Any]) -> bool:
    """In a layer after the decoder's, as many as the config says."""
    _, found, rest = name.partition(f"{spec.layers.rpartition('.')[2]}.")
    layer = rest.partition(".")[0]
    n_more = int(config.get("num_nextn_predict_layers") or 0)
    return bool(found) and layer.isdigit() and spec.n_layer <= int(layer) < spec.n_layer + n_more


def _is_shared(name: str, spec: ModelSpec) -> bool:
    """K or V of a layer that reads an earlier one's, which some checkpoints keep."""
    if not spec.has_shared_kv:
        return False
    of_k_and_v = [spec.projections[side].module for side in "kv"]
    of_k_and_v += [f"{module.removesuffix('_proj')}_norm" for module in of_k_and_v]
    return any(
        f"{spec.layers}.{layer}.{module}." in name
        for layer in range(spec.n_layer)
        if spec.at(layer).shares_kv
        for module in of_k_and_v
    )


def _is_tied(checkpoint: Checkpoint, spec: ModelSpec, name: str) -> bool:
    """Whether it is the token table once more, which is the output too.

    Raises:
        ConvertError: an output of its own.
    """
    if _OUTPUT.search(name) is None:
        return False
    table, part = spec.global_tensors[0].source, slice(0, _SAMPLED)
    is_same = checkpoint.shape(name) == checkpoint.shape(table) and np.array_equal(
        checkpoint.columns(name, part), checkpoint.columns(table, part)
    )
    if not is_same:
        hint = "set it to false to have this output"
        raise ConvertError(name, "the token table, as tie_word_embeddings says", "other numbers", hint)
    return True
