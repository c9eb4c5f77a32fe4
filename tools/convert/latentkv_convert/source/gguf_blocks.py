"""A GGUF's weights as float32, by ggml's own code on all cores: a conversion reads a model three times, and
NumPy (the gguf package) takes 5 to 14 seconds of a core for a billion weights in q4_k."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import native
from ..errors import ConvertError, need
from ..ir import F32, Array


def dequantized(raw: Array, kind: str, where: str) -> F32:
    """raw: bytes [..., row bytes] in a type of ggml's; [rows, n], flat over leading dimensions.

    Raises:
        ConvertError: no native module, or a type that ggml has no floats for.
    """
    rows = np.ascontiguousarray(raw.reshape(-1, raw.shape[-1])).view(np.uint8)
    if kind == "f32":
        return rows.view(np.float32)
    core = native.core(where, f"ggml's code for {kind}")
    try:
        return np.asarray(core.dequantize(rows, kind))
    except core.Error as error:
        raise ConvertError(where, "a type that ggml can dequantize", str(error)) from None


def qtype(kind: str) -> Any:
    """ggml's number of a type.

    Raises:
        ConvertError: the gguf package, which writes it, is older.
    """
    types = need("gguf").GGMLQuantizationType
    if kind.upper() not in types.__members__:
        known = ", ".join(types.__members__).lower()
        raise ConvertError("gguf", f"a tensor type of the gguf package ({known})", kind)
    return types[kind.upper()]


def block_of(kind: str) -> tuple[int, int]:
    """Values and bytes of a block."""
    n, size = need("gguf").GGML_QUANT_SIZES[qtype(kind)]
    return int(n), int(size)
