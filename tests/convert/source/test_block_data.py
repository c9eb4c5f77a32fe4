"""What a file says of its block beside the six words: stock files mean it without saying, and a reader
refuses what it cannot follow."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from both import core, distance, run, session, token_ids
from gguf_files import plain, rewritten
from tiny_models import TINY

from conftest import Tiny, keys
from latentkv_convert.errors import ConvertError
from latentkv_convert.ir import BlockSpec, ModelSpec
from latentkv_convert.schema import BLOCK_KEYS, BLOCK_OPTIONS, ENUMS
from latentkv_convert.source import archs, gguf_block
from latentkv_convert.source.gguf_source import GgufSource

IDS = token_ids(120)
SAID = "latentkv.block."


@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        ("llama", {}),
        ("mistral3", {}),
        ("exaone4", {"sliding_window": 48, "sliding_window_pattern": 3, "layer_types": None}),
        ("gemma3_text", {}),
        ("gemma3_text", {"layer_types": None, "num_hidden_layers": 7, "final_logit_softcapping": 5.0}),
        ("gemma3_text", {"layer_types": ["full_attention"] * 3}),
        ("qwen3_moe", {}),
        ("gpt_oss", {}),
        ("gemma2", {}),
        ("granite", {}),
        ("smollm3", {}),
        ("glm4", {}),
        ("olmo2", {}),
        ("olmo3", {}),
        ("olmo3", {"num_hidden_layers": 4, "layer_types": None}),
    ],
    ids=str,
)
def test_stock_files_mean_what_converted_ones_say(
    model_type: str, config: dict[str, Any], tiny: Tiny, tmp_path: Path
) -> None:
    directory = tiny(model_type, **config)
    said = session(run(directory, tmp_path / "said.gguf", "--method", "none")).decode(IDS, output="all")
    stock = core.Model(str(plain(directory, tmp_path / "stock.gguf")))
    assert not any(key.startswith(SAID) for key in keys(tmp_path / "stock.gguf"))
    assert distance(session(stock).decode(IDS, output="all"), said) < 1e-6


@pytest.fixture
def said(tiny: Tiny, tmp_path: Path) -> Any:
    """said(**changed): a file whose block keys are gemma3's, but for these (None: without)."""
    run(tiny("gemma3_text"), tmp_path / "said.gguf", "--method", "none")
    own = {key: value for key, value in keys(tmp_path / "said.gguf").items() if key.startswith("latentkv.")}

    def make(**changed: Any) -> Path:
        found = own | {SAID + name: value for name, value in changed.items()}
        found = {key: value for key, value in found.items() if value is not None}
        return rewritten(tmp_path / "said.gguf", tmp_path / "changed.gguf", keys=found)

    return make


@pytest.mark.parametrize(
    ("changed", "ours", "theirs"),
    [
        (
            {"windows": [48, 0]},
            "expected 3 values, one a layer; got 2",
            "3 values of latentkv.block.windows, one a layer; got 2",
        ),
        (
            {"rope_bases": [0.5, 1e4, 1e4]},
            "expected 0 or numbers from 1 to 1e+15; got 0.5",
            "latentkv.block.rope_bases from 1 to 1e+15; got 0.5",
        ),
        (
            {"rope_scaled": [True]},
            "expected 3 values, one a layer; got 1",
            "3 values of latentkv.block.rope_scaled, one a layer; got 1",
        ),
        (
            {"attention_scale": 0.0},
            "expected a number from 1e-06 to 1e+06; got 0",
            "latentkv.block.attention_scale from 1e-06 to 1e+06; got 0.0",
        ),
        (
            {"logit_softcap": -1.0},
            "expected a number from 0 to 1e+06; got -1",
            "latentkv.block.logit_softcap from 0 to 1e+06; got -1.0",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_data_out_of_range(changed: dict[str, Any], ours: str, theirs: str, said: Any) -> None:
    path = said(**changed)
    with pytest.raises(core.Error) as refused:
        core.Model(str(path))
    assert str(refused.value) == f"[{SAID}{next(iter(changed))}] {ours}"
    with pytest.raises(ConvertError) as unread:
        GgufSource(path)
    assert theirs in str(unread.value)


def test_data_without_words(said: Any) -> None:
    words = ("norm", "activation", "ffn", "parallel", "position", "rope_pairing")
    path = said(**dict.fromkeys(words))
    with pytest.raises(core.Error, match=r"expected latentkv\.block\.norm beside it; got none"):
        core.Model(str(path))


def test_layers_without_a_turn(said: Any) -> None:
    """A base of 0, in the runtime as in the calibration's decoder."""
    import torch

    from latentkv_convert.calibrate.decoder import Decoder

    path = said(rope_bases=[10000.0, 0.0, 10000.0], windows=[0, 48, 0], activation="gelu")
    with torch.no_grad():
        expected = Decoder(GgufSource(path))(torch.tensor([IDS]))[0].numpy()
    model = core.Model(str(path))
    for options in ({}, {"implementation": "reference"}, {"prefill": "lazy"}):
        live = core.Session(model, n_ctx=256, n_threads=1, kv="f32", **options)
        assert distance(live.decode(IDS, output="all"), expected) < 1e-4


DEFAULTS = {field.name: field.default for field in fields(BlockSpec)}


def block_again(spec: ModelSpec) -> BlockSpec:
    said = spec.block.said()
    values = {
        BLOCK_KEYS[name]: list(value) if isinstance(value, tuple) else value for name, value in said.items()
    }
    return gguf_block.block(values, spec, "x.gguf")


@pytest.mark.parametrize("model_type", archs.names())
def test_a_source_of_ours_means_what_its_file_said(model_type: str) -> None:
    spec = archs.model_spec(TINY[model_type])
    assert block_again(spec) == spec.block


def another(name: str, value: Any) -> Any:
    """A value that is not the default."""
    if isinstance(value, bool):
        return not value
    return ENUMS[name][-1] if isinstance(value, str) else 0.5


@pytest.mark.parametrize("name", BLOCK_OPTIONS)
def test_a_source_of_ours_has_every_option(name: str) -> None:
    spec = archs.model_spec(TINY["llama"])
    changed = replace(spec.block, **{name: another(name, BLOCK_OPTIONS[name])})
    assert getattr(block_again(replace(spec, block=changed)), name) == another(name, BLOCK_OPTIONS[name])


def test_the_schema_and_the_converter_have_the_same_fields_and_defaults() -> None:
    assert set(DEFAULTS) == set(BLOCK_KEYS)
    for name, value in BLOCK_OPTIONS.items():
        assert value == (DEFAULTS[name] or value), name
