"""Checkpoints that see pictures are read as their text models, under the names of published ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_files import plain
from safetensors.torch import load_file, save_file
from tiny_models import TINY

from conftest import Tiny, keys, tensors
from latentkv_convert.errors import ConvertError
from latentkv_convert.source import archs

Tensors = dict[str, torch.Tensor]


def under(prefix: str) -> Callable[[Tensors], Tensors]:
    """The prefix of an older checkpoint: a whole text model of this name."""
    return lambda found: {f"{prefix}{name}": each for name, each in found.items()}


def inside(found: Tensors) -> Tensors:
    """The text model is a part of `model`."""
    return {name.replace("model.", "model.language_model.", 1): each for name, each in found.items()}


def stacked(found: Tensors) -> Tensors:
    """Qwen3-VL keeps the experts of a layer in one tensor, inputs before outputs."""
    kept = {name: each for name, each in inside(found).items() if ".experts." not in name}
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts"
        made = {
            name: torch.stack([found[f"{prefix}.{i}.{name}_proj.weight"].T for i in range(6)])
            for name in ("gate", "up", "down")
        }
        ours = prefix.replace("model.", "model.language_model.", 1)
        kept[f"{ours}.gate_up_proj"] = torch.cat([made["gate"], made["up"]], dim=-1)
        kept[f"{ours}.down_proj"] = made["down"].contiguous()
    return kept


@pytest.mark.parametrize(
    ("model_type", "text_type", "renamed"),
    [
        ("qwen2_5_vl", "qwen2_vl", inside),
        ("qwen2_5_vl", "qwen2_vl", under("")),
        ("qwen3_vl", "qwen3_vl", inside),
        ("qwen3_vl_moe", "qwen3_vl_moe", stacked),
        ("gemma3", "gemma3_text", under("language_model.")),
        ("gemma3", "gemma3_text", inside),
        ("apertus1p5", "apertus1p5", inside),
    ],
)
def test_the_text_part(
    model_type: str,
    text_type: str,
    renamed: Callable[[Tensors], Tensors],
    tiny: Tiny,
    tmp_path: Path,
) -> None:
    directory = tiny(text_type)
    whole = tensors(plain(directory, tmp_path / "text.gguf"))
    path, file = directory / "config.json", directory / "model.safetensors"
    text = json.loads(path.read_text())
    path.write_text(json.dumps({"model_type": model_type, "text_config": text, "vision_config": {}}))
    seen = {"model.visual.patch_embed.proj.weight": torch.zeros(2, 2)}
    save_file(renamed(load_file(file)) | seen, file, {"format": "pt"})
    again = tensors(plain(directory, tmp_path / "again.gguf"))
    assert whole.keys() == again.keys()
    assert all(np.array_equal(whole[name], again[name]) for name in whole)


def test_tokens_that_the_output_cannot_make(tiny: Tiny, tmp_path: Path) -> None:
    """Apertus 1.5 has an embedding of tokens of pictures and sounds alone: they come last, and are left
    out."""
    directory = tiny("apertus1p5")
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    seen = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer["added_tokens"] += [
        {"id": 320 + n, "content": f"<|visual token {n}|>", **seen} for n in range(32)
    ]
    path.write_text(json.dumps(tokenizer))
    made = plain(directory, tmp_path / "plain.gguf")
    table = load_file(directory / "model.safetensors")["model.embed_tokens.weight"].numpy()
    assert table.shape[0] == 352
    assert np.array_equal(tensors(made)["token_embd.weight"], table[:320])
    assert tensors(made)["output.weight"].shape[0] == 320
    tokens = keys(made)["tokenizer.ggml.tokens"]
    assert len(tokens) == 320
    assert not [token for token in tokens if "visual" in token]


def test_a_config_without_a_text_part(tiny: Tiny, tmp_path: Path) -> None:
    """Qwen2.5-VL was published with the text's fields beside vision_config."""
    text: dict[str, Any] = TINY["qwen2_vl"] | {"model_type": "qwen2_5_vl", "vision_config": {}}
    spec = archs.model_spec(text)
    assert (spec.gguf_arch, spec.layers) == ("qwen2vl", "model.layers")
    assert spec.keys["rope.dimension_sections"] == [2, 3, 3, 0]


def test_gemma_leaves_sizes_out() -> None:
    """What google/gemma-3-4b-it says of its text."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    spec = archs.model_spec({"model_type": "gemma3", "text_config": text, "vision_config": {}})
    assert (spec.n_head, spec.n_kv, spec.head_dim, spec.n_vocab) == (8, 4, 256, 262208)
    assert [spec.window(layer) for layer in range(6)] == [1024] * 5 + [0]


def test_sections_that_do_not_add_up() -> None:
    config = TINY["qwen3_vl"] | {"rope_scaling": {"rope_type": "default", "mrope_section": [6, 5, 4]}}
    with pytest.raises(ConvertError, match="mrope_section, three numbers that add up to 16; got"):
        archs.model_spec(config)
