"""ggml's floats of a GGUF's blocks are those of the gguf package, and what is no block is refused."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from both import core

from latentkv_convert.errors import ConvertError
from latentkv_convert.source.gguf_blocks import dequantized

TYPES = ["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k"]
TYPES += ["iq4_nl", "iq4_xs", "mxfp4"]


@pytest.mark.parametrize("kind", TYPES)
def test_floats_are_those_of_the_gguf_package(kind: str) -> None:
    rows = np.random.default_rng(0).standard_normal((3, 700, 512)).astype(np.float32)
    if kind in ("f32", "f16", "bf16"):
        raw = gguf.quants.quantize(rows, gguf.GGMLQuantizationType[kind.upper()])
    else:
        blocks = core.quantize(rows.reshape(-1, 512), kind, np.ones(512, dtype=np.float32))
        raw = blocks.reshape(3, 700, -1)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind.upper()])
    found = dequantized(raw, kind, "blk.0.ffn_up.weight")
    assert found.shape == (2100, 512)
    assert np.abs(found - expected.reshape(2100, 512)).max() <= 1e-6 * np.abs(expected).max()


@pytest.mark.parametrize(("kind", "width"), [("i32", 64), ("q4_k", 100), ("nothing", 64)])
def test_what_is_no_block(kind: str, width: int) -> None:
    with pytest.raises(ConvertError, match=r"^\[a\] expected a type that ggml can dequantize; got "):
        dequantized(np.zeros((2, width), dtype=np.uint8), kind, "a")
