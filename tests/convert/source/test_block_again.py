"""A file of ours, read again as a source, means what it said of its block."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from latentkv_convert.ir import BlockSpec, ModelSpec
from latentkv_convert.schema import BLOCK_KEYS, BLOCK_OPTIONS, ENUMS
from latentkv_convert.source import archs, gguf_block

DEFAULTS = {field.name: field.default for field in fields(BlockSpec)}


def read_again(spec: ModelSpec) -> BlockSpec:
    said = spec.block.said()
    values = {
        BLOCK_KEYS[name]: list(value) if isinstance(value, tuple) else value for name, value in said.items()
    }
    return gguf_block.block(values, spec, "x.gguf")


@pytest.mark.parametrize("model_type", archs.names())
def test_of_every_architecture(model_type: str) -> None:
    spec = archs.model_spec(archs.tiny(model_type))
    assert read_again(spec) == spec.block


def another(name: str, value: Any) -> Any:
    """A value that is not the default."""
    if isinstance(value, bool):
        return not value
    return ENUMS[name][-1] if isinstance(value, str) else 0.5


@pytest.mark.parametrize("name", BLOCK_OPTIONS)
def test_of_every_option(name: str) -> None:
    spec = archs.model_spec(archs.tiny("llama"))
    changed = replace(spec.block, **{name: another(name, BLOCK_OPTIONS[name])})
    assert getattr(read_again(replace(spec, block=changed)), name) == another(name, BLOCK_OPTIONS[name])


def test_the_schema_and_the_converter_have_the_same_fields_and_defaults() -> None:
    assert set(DEFAULTS) == set(BLOCK_KEYS)
    for name, value in BLOCK_OPTIONS.items():
        assert value == (DEFAULTS[name] or value), name
