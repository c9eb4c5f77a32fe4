"""Checkpoints in FP8, as they are published: a weight of eight bits a number, and beside it a scale of the
whole tensor, of each row, or of each block of rows and columns.

    quantization_config                  scales
    fp8 (DeepSeek V3, Qwen3-FP8)         NAME_scale_inv, of blocks as weight_block_size says
    fp8 (Ministral 3, Devstral 2)        NAME_scale_inv, one number
    compressed-tensors, modelopt         NAME_scale: one number, of rows or of blocks

A weight is its numbers times its scales, whatever the tensor of scales is called. Scales of activations and
of the cache are left out: nothing here computes in FP8.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from ...compute import floats
from ...errors import ConvertError
from ...ir import F32

_ENDS = ("_scale_inv", "_scale")
_UNUSED = re.compile(r"\.(input|activation|output|prob_output|kv_cache|[qkv])_scale(_inv|_ub)?$")
_EXPECTED = "a checkpoint in floating point or FP8, or a GGUF of it, whose weights are copied as they are"
_LARGEST = 1 << 20  # rows or columns of a block


def block_size(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns that share a scale, where the config says.

    Raises:
        ConvertError: weights in another format than floating point or FP8.
    """
    text = config.get("text_config")
    places = (config, text if isinstance(text, Mapping) else {})
    found = (of.get(name) for of in places for name in ("quantization_config", "compression_config"))
    given = next(filter(None, found), None)
    if not given:
        return None
    if not isinstance(given, Mapping):
        raise ConvertError("config.json", "a quantization_config with a quant_method", type(given).__name__)
    method = str(given.get("quant_method"))
    if method == "compressed-tensors":
        size = _compressed(given)
    elif method in ("fp8", "fbgemm_fp8") or (method == "modelopt" and given.get("quant_algo") == "FP8"):
        size = given.get("weight_block_size")
    else:
        details = (given.get("quant_algo"), given.get("bits") and f"{given['bits']} bits")
        raise ConvertError("config.json", _EXPECTED, " of ".join(map(str, [method, *filter(None, details)])))
    if size is None:
        return None
    is_pair = isinstance(size, list) and len(size) == 2
    if not is_pair or not all(type(n) is int and 1 <= n <= _LARGEST for n in size):
        raise ConvertError("config.json", "weight_block_size as two whole numbers", str(size)[:40])
    return size[0], size[1]


def _compressed(given: Mapping[str, Any]) -> Any:
    """The blocks of compressed-tensors, whose groups are all in FP8."""
    groups = given.get("config_groups")
    found = [group.get("weights") for group in groups.values()] if isinstance(groups, Mapping) else []
    for weights in found or [None]:
        of = weights if isinstance(weights, Mapping) else {}
        if of.get("type") != "float" or of.get("num_bits") != 8:
            got = f"compressed-tensors of {of.get('num_bits', '?')} bits, {given.get('format')}"
            raise ConvertError("config.json", _EXPECTED, got)
    sizes = [weights.get("block_structure") for weights in found]
    if any(size != sizes[0] for size in sizes):
        raise ConvertError("config.json", "one block_structure of all config_groups", str(sizes)[:60])
    return sizes[0]


def is_scale(name: str, weights: Collection[str]) -> bool:
    """Whether a tensor has scales of one of these weights, or of activations or the cache."""
    stems = (name.removesuffix(end) for end in _ENDS if name.endswith(end))
    return _UNUSED.search(name) is not None or any(stem in weights for stem in stems)


def scaled(
    name: str,
    weight: F32,
    block: tuple[int, int] | None,
    read: Callable[[str], F32],
    has: Callable[[str], bool],
) -> F32:
    """weight: FP8 numbers as float32 [..., out, in], which are changed. read, has: tensors of the file.

    Raises:
        ConvertError: no scale, or one whose shape fits no layout.
    """
    names = [name + end for end in _ENDS]
    found = next(filter(has, names), None)
    if found is None:
        raise ConvertError(name, f"a scale of these FP8 weights, {' or '.join(names)}", "none")
    scale = read(found)
    if scale.size == 1:
        weight *= scale.reshape(())
        return weight
    *outer, rows, columns = weight.shape if weight.ndim > 1 else (1, *weight.shape)
    of_rows = (*outer, rows)
    if scale.shape in (of_rows, (*of_rows, 1)):
        weight *= scale.reshape(*of_rows, 1)
        return weight
    if scale.shape in (tuple(outer), (*outer, 1, 1)):
        weight *= scale.reshape(*outer, 1, 1)
        return weight
    if block is None:
        expected = f"one scale, or {list(of_rows)}, without a weight_block_size in config.json"
        raise ConvertError(found, expected, f"shape {list(scale.shape)}")
    grid = (*outer, math.ceil(rows / block[0]), math.ceil(columns / block[1]))
    if scale.shape != grid:
        raise ConvertError(found, f"shape {list(grid)} of blocks of {block}", f"{list(scale.shape)}")
    of_columns = floats.tensor(np.repeat(scale, block[1], axis=-1)[..., :columns])
    numbers = floats.tensor(weight)
    for at in range(grid[-2]):
        numbers[..., at * block[0] : (at + 1) * block[0], :] *= of_columns[..., at : at + 1, :]
    return np.asarray(numbers.numpy())
