"""A gated short convolution in torch, f32, on tensors as the file has them: what mixes tokens in a layer of
LFM2 that does not attend."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...ir import ModelSpec
from .recurrence import convolved


def mixed(live: Any, spec: ModelSpec, x: Tensor) -> Tensor:
    """live: a layer with the modules shortconv_* of its tensors. x [n, T, d] -> [n, T, d]."""
    before, after, rows = live.shortconv_in_proj(x).chunk(3, dim=-1)
    output: Tensor = live.shortconv_out_proj(after * convolved(before * rows, live.shortconv_conv))
    return output
