"""A tensor of the file to be written: which type it gets where types are not mixed (mixes.py), its bytes, and
its values in that type."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .. import native
from ..compute import floats
from ..errors import ConvertError, need
from ..ir import F32, Array
from ..source.gguf_blocks import block_of, qtype
from ..source.source import Stored

# general.file_type of each
PLAIN = {"f32": 0, "f16": 1, "bf16": 32, "q8_0": 7, "q4_0": 2}
FILE_TYPES = {**PLAIN, "q4_k_m": 15, "q5_k_m": 17, "q6_k": 18, "iq4_xs": 30}
OUTTYPES, FACTOR_TYPES = tuple(FILE_TYPES), tuple(PLAIN)
BLOCK = 32  # elements that share a scale in q8_0 and q4_0


@dataclass(frozen=True)
class OutTensor:
    """`shape` is NumPy's order (the reverse of GGUF's ne); `load` computes the values when their turn
    comes."""

    name: str
    shape: tuple[int, ...]
    kind: str  # weight · table · vector · down (A) · factor (B, E)
    load: Callable[[], F32]
    stored: Stored | None = None  # to be copied, byte for byte, in place of what `load` computes


def unread() -> F32:
    """`load` of a tensor whose size alone is needed."""
    raise AssertionError("a tensor that is only weighed")


def choose(outtype: str, kind: str, shape: tuple[int, ...]) -> str:
    """Type of one tensor, `outtype` where it can be: vectors are f32; factors f32 or f16; tables of a q4_0
    file are q8_0 (4 bits there cost more quality than they save); a row that is not a multiple of 32 cannot
    be quantized and stays f16."""
    if kind == "vector":
        return "f32"
    if kind == "factor":
        return "f32" if outtype == "f32" else "f16"
    if outtype == "q4_0" and kind == "table":
        outtype = "q8_0"
    if outtype.startswith("q") and shape[-1] % BLOCK:
        return "f16"
    return outtype


def n_bytes(kind: str, shape: tuple[int, ...]) -> int:
    """Size of a tensor in this type."""
    block, size = block_of(kind)
    return int(np.prod(shape, dtype=np.int64)) // block * size


def encode(array: F32, kind: str, where: str, importance: F32 | None = None) -> Array:
    """`array` in type `kind`: float arrays in their shape, blocks as bytes [..., row bytes]. importance: of
    the columns' errors, for types with a search for scales.

    Raises:
        ConvertError: a value that f16 cannot hold, or no code that can write the type.
    """
    gguf = need("gguf")
    if kind == "f32":
        return np.ascontiguousarray(array, dtype=np.float32)
    if kind == "f16":
        peak = floats.peak(array)
        if peak > 65504:
            raise ConvertError(
                where, "values up to 65504 for f16", f"{peak:.6g}", "use --outtype f32 or bf16"
            )
        return floats.f16(array)
    if kind not in PLAIN:
        return _native_quantize(array, kind, where, importance)
    return np.asarray(gguf.quants.quantize(np.ascontiguousarray(array, dtype=np.float32), qtype(kind)))


def _native_quantize(array: F32, kind: str, where: str, importance: F32 | None) -> Array:
    core = native.core(where, f"ggml's quantizer for {kind}")
    rows = np.ascontiguousarray(array.reshape(-1, array.shape[-1]), dtype=np.float32)
    return np.asarray(core.quantize(rows, kind, importance))
