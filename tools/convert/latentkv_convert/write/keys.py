"""The keys that a file says of itself (docs/gguf.md), and how each is written."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..calibrate.sample import Sample
from ..errors import ConvertError, need
from ..ir import OF_VALUE, SIDES, Master, Plan
from ..recipe import Recipe
from ..schema import BLOCK_KEYS, KEYS, VERSION
from ..source.gguf_file import Value
from ..source.source import Source
from ..weights.tensor import FILE_TYPES
from ..work import Work
from . import mla

FILE_TYPE = "general.file_type"


def of_model(recipe: Recipe, source: Source, outtype: str) -> dict[str, Any]:
    """general.*, the architecture's own keys, the vocabulary and latentkv.block.*."""
    keys = dict(source.keys())
    if recipe.outtype is not None or FILE_TYPE not in keys:
        keys[FILE_TYPE] = FILE_TYPES[outtype]
    keys |= {
        KEYS["version"]: VERSION,
        KEYS["source_method"]: recipe.method,
        KEYS["source_recipe"]: recipe.text(),
    }
    keys |= {BLOCK_KEYS[name]: value for name, value in source.spec.block.said().items()}
    return keys | {KEYS[name]: value for name, value in source.spec.latentkv_keys.items()}


def of_cache(plan: Plan, work: Work) -> dict[str, Any]:
    """latentkv.k.*, latentkv.v.* and the regions; nothing for a plan that is full everywhere."""
    keys = region_keys(plan)
    if plan.is_full:
        return keys
    stored = mla.in_one_row(plan) if work.spec.mla is not None else plan
    for side in SIDES:
        every = [layer.side(side) for layer in stored.layers]
        keys[KEYS[f"{side}_path"]] = [layer.path for layer in every]
        keys[KEYS[f"{side}_group"]] = [layer.group for layer in every]
        layers = [every[layer] for layer in work.spec.row_layers]
        shapes = [work.spec.at(layer) for layer in work.spec.row_layers]
        heads = [
            () if layer == OF_VALUE else (own.head_dim,) * own.n_kv
            for layer, own in zip(layers, shapes, strict=True)
        ]
        ranks = [layer.ranks or widths for layer, widths in zip(layers, heads, strict=True)]
        if any(ranks):
            keys[KEYS[f"{side}_ranks"]] = [rank for layer in ranks for rank in layer]
        segments = [
            layer.segments or tuple((width,) for width in widths)
            for layer, widths in zip(layers, heads, strict=True)
        ]
        if any(len(widths) > 1 for layer in segments for widths in layer):
            keys[KEYS[f"{side}_segment_counts"]] = [len(widths) for layer in segments for widths in layer]
            keys[KEYS[f"{side}_segment_widths"]] = [
                w for layer in segments for widths in layer for w in widths
            ]
        if any(layer.formats for layer in layers):
            formats = [
                layer.formats or tuple(("f16",) * len(widths) for widths in group)
                for layer, group in zip(layers, segments, strict=True)
            ]
            keys[KEYS[f"{side}_segment_formats"]] = [f for layer in formats for group in layer for f in group]
        energy = [work.energy(plan, layer, side) for layer in range(work.spec.n_layer)]
        keys[KEYS[f"{side}_energy"]] = np.array(energy, dtype=np.float32)
    keys[KEYS["prefill"]] = plan.prefill
    if plan.fitted_context is not None:
        keys[KEYS["fitted_context"]] = plan.fitted_context
    if plan.forecast is not None:
        keys[KEYS["predicted_kld"]] = plan.forecast.kld
    return keys if plan.master is None else keys | master_keys(plan.master)


def of_sample(sample: Sample | None) -> dict[str, Any]:
    """Keys of the calibration text."""
    if sample is None:
        return {}
    return {KEYS["calibration_hash"]: sample.digest, KEYS["calibration_tokens"]: int(sample.tokens.size)}


def of_size(full: int) -> dict[str, Any]:
    """The key of the model's size. full: its bytes with full K and V."""
    return {KEYS["full_bytes"]: full}


def master_keys(master: Master) -> dict[str, Any]:
    """latentkv.budget.* and the distortions of segments."""
    arrays = {f"{side}_segment_distortions": master.distortions[side].ravel() for side in SIDES}
    arrays |= {"budget_predicted": master.predicted, "budget_kld": master.kld}
    arrays["budget_exact_kld"] = np.array(list(master.exact.values()))
    return {
        KEYS["budget_formats"]: list(master.formats),
        KEYS["budget_context"]: master.context,
        KEYS["budget_drop_penalty"]: master.drop_penalty,
        KEYS["budget_exact_formats"]: list(master.exact),
        **{KEYS[name]: array.astype(np.float32) for name, array in arrays.items() if array.size},
    }


def region_keys(plan: Plan) -> dict[str, Any]:
    """latentkv.regions.*, what differs from the defaults."""
    keys: dict[str, Any] = {}
    if plan.sink or plan.recent:
        keys |= {KEYS["sink"]: plan.sink, KEYS["recent"]: plan.recent}
    if plan.recent_ratio:
        keys[KEYS["recent_ratio"]] = plan.recent_ratio
    for name, chosen in (("sink_format", plan.sink_format), ("recent_format", plan.recent_format)):
        if chosen != "f16":
            keys[KEYS[name]] = chosen
    return keys


def add_key(writer: Any, key: str, value: Any) -> None:
    """One key-value pair: as it was read, or its GGUF type from the Python type: u32 for int (i32 when
    negative), f32 for float."""
    if isinstance(value, Value):
        types = need("gguf").GGUFValueType
        sub_type = None if value.sub_type is None else types(value.sub_type)
        writer.add_key_value(key, value.data, types(value.type), sub_type=sub_type)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        if value < 0:
            writer.add_int32(key, value)
        elif value < 2**32:
            writer.add_uint32(key, value)
        else:
            writer.add_uint64(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, np.ndarray):
        _add_array(writer, key, value)
    elif isinstance(value, (list, tuple)):
        if not value or any(type(item) is not type(value[0]) for item in value):
            raise ConvertError(key, "an array of one type with at least one value", repr(value)[:60])
        writer.add_array(key, value)
    else:
        raise ConvertError(key, "a bool, int, float, string or array", type(value).__name__)


def _add_array(writer: Any, key: str, value: np.ndarray) -> None:
    """Numeric arrays keep their width: i32, u8 or f32."""
    gguf = need("gguf")
    types = {"int32": "INT32", "uint8": "UINT8", "float32": "FLOAT32"}
    if value.dtype.name not in types or value.size == 0:
        raise ConvertError(
            key, f"a non-empty array of {', '.join(types)}", f"{value.dtype.name} x {value.size}"
        )
    sub_type = gguf.GGUFValueType[types[value.dtype.name]]
    writer.add_key_value(key, value.tolist(), gguf.GGUFValueType.ARRAY, sub_type=sub_type)
