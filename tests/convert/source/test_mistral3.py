"""mistral3: queries grow with their position; the text part of models that see pictures has two kinds of
names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from both import core, distance, expected_logits, run, session, token_ids
from gguf_files import plain, rewritten
from safetensors.torch import load_file, save_file
from tiny_models import TINY

from conftest import Tiny, keys, tensors
from latentkv_convert.errors import ConvertError
from latentkv_convert.source import archs, tokenizer
from latentkv_convert.source.checkpoint_source import CheckpointSource
from latentkv_convert.source.gguf_source import GgufSource

IDS = token_ids(200)
FACTOR, ORIGINAL = "mistral3.attention.temperature_scale", "mistral3.rope.scaling.original_context_length"


def test_the_growth_is_what_transformers_computes(tiny: Tiny, tmp_path: Path, calib: Path) -> None:
    """The original context ends three times within these tokens; a reader without growth is far off."""
    rope = TINY["mistral3"]["rope_parameters"] | {"llama_4_scaling_beta": 0.7}
    directory = tiny("mistral3", rope_parameters=rope)
    expected = expected_logits(directory, IDS)
    options = ("--kv-budget", "100%", "--calib", str(calib), "--calib-tokens", "512", "--calib-window", "128")
    for path, how in (("rotated", "speed"), ("rebuild", "size")):
        latent = run(
            directory, tmp_path / f"{path}.gguf", "--prefer", how, "--sink", "0", "--recent", "0", *options
        )
        assert {layer["k"]["path"] for layer in latent.layers} == {path}
        live = session(latent)
        parts = [live.decode(IDS[at : at + 50], output="all") for at in range(0, 200, 50)]
        assert distance(np.concatenate(parts), expected) < 1e-3
    stock = rewritten(plain(directory, tmp_path / "plain.gguf"), tmp_path / "flat.gguf", keys={FACTOR: 0.0})
    assert distance(session(core.Model(str(stock))).decode(IDS, output="all"), expected) > 0.03


@pytest.mark.parametrize("older", [True, False])
def test_the_text_part_of_a_model_that_sees_pictures(older: bool, tiny: Tiny, tmp_path: Path) -> None:
    directory = tiny("mistral3")
    whole = tensors(plain(directory, tmp_path / "text.gguf"))
    text = json.loads((directory / "config.json").read_text())
    config = {
        "model_type": "mistral3",
        "text_config": text,
        "vision_config": {},
        "tie_word_embeddings": False,
    }
    (directory / "config.json").write_text(json.dumps(config))
    file = directory / "model.safetensors"

    def renamed(name: str) -> str:
        if older:
            return f"language_model.{name}"
        return name.replace("model.", "model.language_model.", 1)

    save_file({renamed(name): each for name, each in load_file(file).items()}, file, {"format": "pt"})
    again = tensors(plain(directory, tmp_path / "again.gguf"))
    assert whole.keys() == again.keys()
    assert all(np.array_equal(whole[name], again[name]) for name in whole)


def test_mistral_small_has_no_scaling(tiny: Tiny, tmp_path: Path) -> None:
    """Its text part is of type mistral, with its own defaults."""
    text: dict[str, Any] = TINY["mistral"] | {"sliding_window": None, "rope_theta": 1e6}
    spec = archs.model_spec({"model_type": "mistral3", "text_config": text, "vision_config": {}})
    assert spec.gguf_arch == "mistral3"
    assert not {key for key in spec.keys if "scal" in key or "window" in key}
    assert spec.layers == "model.language_model.layers"


def test_keys_are_the_stock_ones(tiny: Tiny, tmp_path: Path) -> None:
    found = keys(plain(tiny("mistral3"), tmp_path / "plain.gguf"))
    assert found["general.architecture"] == "mistral3"
    assert found["mistral3.rope.scaling.type"] == "yarn"
    assert found["mistral3.rope.scaling.yarn_log_multiplier"] == 1.0
    assert np.isclose(found[FACTOR], 0.1)
    assert found[ORIGINAL] == 64
    assert "mistral3.rope.scaling.attn_factor" not in found


@pytest.mark.parametrize(
    ("key", "value", "ours", "theirs"),
    [
        (
            FACTOR,
            -1.0,
            "expected a number from 0 to 1000; got -1",
            "temperature_scale from 0 to 1000; got -1.0",
        ),
        (ORIGINAL, 0, "expected a value from 1 to 1073741824; got 0", "original_context_length from 1 to"),
        (
            "mistral3.rope.scaling.yarn_log_multiplier",
            -1.0,
            "expected a number from 0 to 1000; got -1",
            "yarn_log_multiplier from 0 to 1000; got -1.0",
        ),
    ],
)
def test_numbers_out_of_range(
    key: str, value: Any, ours: str, theirs: str, tiny: Tiny, tmp_path: Path
) -> None:
    path = rewritten(
        plain(tiny("mistral3"), tmp_path / "plain.gguf"), tmp_path / "bad.gguf", keys={key: value}
    )
    with pytest.raises(core.Error) as refused:
        core.Session(core.Model(str(path)), n_ctx=64)
    assert str(refused.value) == f"[{key}] {ours}"
    with pytest.raises(ConvertError) as unread:
        GgufSource(path)
    assert theirs in str(unread.value)


def test_growth_needs_a_context_to_grow_from(tiny: Tiny, tmp_path: Path) -> None:
    path = plain(tiny("mistral3"), tmp_path / "plain.gguf")
    bad = rewritten(path, tmp_path / "bad.gguf", without=(ORIGINAL,))
    with pytest.raises(core.Error, match="original_context_length"):
        core.Model(str(bad))
    with pytest.raises(ConvertError, match="original_context_length from 1 to 1073741824; got none"):
        GgufSource(bad)
    rope = {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.1}
    with pytest.raises(ConvertError, match="rope_type yarn beside llama_4_scaling_beta; got default"):
        CheckpointSource(tiny("mistral3", name="other", rope_parameters=rope))


def test_published_split_rules_are_mended(
    tiny: Tiny, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Tokenizers of 2025 have Llama 3's; the vocabularies of older models keep what they say."""
    directory = tiny("mistral3", vocab_size=321)
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    config = json.loads((directory / "config.json").read_text())
    assert tokenizer.keys(directory, config, 321)["tokenizer.ggml.pre"] == "llama-bpe"
    content["added_tokens"].append(content["added_tokens"][0] | {"id": 320, "content": "[INST]"})
    path.write_text(json.dumps(content), encoding="utf-8")
    assert tokenizer.keys(directory, config, 321)["tokenizer.ggml.pre"] == "tekken"
    assert "expected Mistral's split rules; got those of llama-bpe" in capsys.readouterr().err
    other = config | {"model_type": "llama"}
    assert tokenizer.keys(directory, other, 321)["tokenizer.ggml.pre"] == "llama-bpe"
