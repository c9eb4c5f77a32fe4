"""qwen2_vl: Qwen2-VL and Qwen2.5-VL (3B to 72B), text.

Qwen 2's block: tokens of text have the same number in all three of their positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ....errors import ConvertError
from ....ir import ModelSpec
from ...stock import Stock
from .. import qwen2

OTHER_TYPES = ("qwen2_5_vl",)
ARCHITECTURE = "qwen2vl"
TEXT_PREFIX = "model.language_model"
_OF_PICTURES = ("mrope_section", "mrope_interleaved")


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    return with_sections(config, qwen2.model_spec(of_text(config)), "qwen2vl")


def of_text(config: Mapping[str, Any]) -> dict[str, Any]:
    """With RoPE as it is for text."""
    found = dict(config)
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(config.get(name), Mapping):
            given = {key: value for key, value in config[name].items() if key not in _OF_PICTURES}
            found[name] = {key: "default" if value == "mrope" else value for key, value in given.items()}
    return found


def with_sections(config: Mapping[str, Any], spec: ModelSpec, architecture: str) -> ModelSpec:
    """spec: of the text model. Readers want to know how many planes turn by each position."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    sections = rope.get("mrope_section")
    if not isinstance(sections, list) or sum(map(int, sections)) != spec.n_rot // 2 or len(sections) != 3:
        expected = f"mrope_section, three numbers that add up to {spec.n_rot // 2}"
        raise ConvertError("config.json", expected, str(sections)[:40])
    keys = {**spec.keys, "rope.dimension_sections": [*map(int, sections), 0]}
    return replace(spec, gguf_arch=architecture, keys=keys)


def config_of(stock: Stock) -> dict[str, Any]:
    """config.json, as far as the file's tensors depend on it."""
    return qwen2.config_of(stock) | sections_of(stock)


def sections_of(stock: Stock) -> dict[str, Any]:
    sections = stock.values.get("rope.dimension_sections")
    if not isinstance(sections, list) or len(sections) != 4 or not all(isinstance(n, int) for n in sections):
        raise ConvertError(stock.where, "four numbers of rope.dimension_sections", str(sections)[:40])
    return {"rope_parameters": {"rope_type": "default", "mrope_section": sections[:3]}}
