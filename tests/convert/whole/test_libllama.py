"""Every architecture: llama.cpp itself reads the plain file, and computes the logits that we do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import libllama
import numpy as np
import pytest
import torch
from both import core, distance, session, token_ids
from gguf_files import older_mla, rewritten
from tiny_models import TINY

from conftest import Tiny
from latentkv_convert.calibrate.decoder import Decoder
from latentkv_convert.cli import parse
from latentkv_convert.pipeline import convert
from latentkv_convert.source import archs
from latentkv_convert.source.checkpoint_source import CheckpointSource
from latentkv_convert.source.gguf_file import GgufFile

N = 120
HYBRIDS = ("lfm2", "lfm2_moe", "qwen3_5", "qwen3_5_moe", "qwen3_next")
UNKNOWN = ("kolibri1", "opt")  # to llama.cpp


def case(model_type: str, name: str = "", **config: Any) -> Any:
    return pytest.param(model_type, config, id="-".join(filter(None, (model_type, name))))


# What llama.cpp does otherwise: it reads no window in a llama file, makes OLMo's heads as wide as
# their share of the hidden states, and lets YaRN's ramp begin and end at whole planes.
AS_STOCK: dict[str, dict[str, Any]] = {
    "gpt_oss": {"rope_scaling": TINY["gpt_oss"]["rope_scaling"] | {"truncate": True}},
    "mistral": {"sliding_window": None},
    "olmo2": {"head_dim": 24},
    "olmo3": {"head_dim": 24},
    "phi3": {"original_max_position_embeddings": 64},
}
GEMMA_EXPERTS = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 64}
GEMMA_E = {
    "attention_k_eq_v": False,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 32,
    "use_double_wide_mlp": True,
}
CASES = [
    *(case(name, **AS_STOCK.get(name, {})) for name in archs.names() if name not in UNKNOWN),
    case("gemma4", "experts", **GEMMA_EXPERTS),
    case("gemma4", "its-own-v", attention_k_eq_v=False),
    case("gemma4", "shared-k-and-v", **GEMMA_E),
    case("falcon", "new", new_decoder_architecture=True, num_kv_heads=2),
    case("qwen3_5", "equal-heads", linear_num_value_heads=2, linear_conv_kernel_dim=3),
    case("qwen3_5", "three-a-key-head", linear_num_key_heads=4, linear_num_value_heads=12),
    case("qwen3_5", "stock-pattern", layer_types=None, num_hidden_layers=4, tie_word_embeddings=True),
    case("qwen3_5_moe", "one-in-two", layer_types=None, full_attention_interval=2),
    case("qwen3_next", "four-a-key-head", linear_num_key_heads=2, linear_num_value_heads=8),
    case("lfm2", "four-tokens", conv_L_cache=4, layer_types=["full_attention", "conv", "conv", "conv"]),
    case("lfm2_moe", "all-experts", num_dense_layers=0),
    case("granite_swa", "rope-everywhere", layer_rope_theta=None),
]


@pytest.fixture(scope="module", autouse=True)
def oracle() -> None:
    if why_not := libllama.why_not():
        pytest.skip(why_not)


@pytest.mark.parametrize(("model_type", "config"), CASES)
def test_llama_cpp_computes_the_same_logits(
    model_type: str, config: dict[str, Any], tiny: Tiny, tmp_path: Path
) -> None:
    checkpoint, path, ids = tiny(model_type, **config), tmp_path / "plain.gguf", token_ids(N)
    convert(parse([str(checkpoint), "-o", str(path), "--method", "none", "--outtype", "f32"], "test"))
    expected = libllama.logits(path, ids)
    # both look Gemma's activation up in f16 numbers, between other operations
    near = 2e-3 if model_type == "gemma4" else 1e-3
    with torch.no_grad():
        streamed = Decoder(CheckpointSource(checkpoint))(torch.tensor([ids]))[0].numpy()
    assert distance(streamed, expected) < near
    live = session(core.Model(str(path)))
    assert distance(live.decode(ids, output="all"), expected) < near
    if model_type in HYBRIDS:
        assert distance(libllama.logits(path, ids, chunk=7), expected) < 1e-4
        live = session(core.Model(str(path)))
        parts = [live.decode(ids[at : at + 7], output="all") for at in range(0, N, 7)]
        assert distance(np.concatenate(parts), expected) < 1e-3


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3"])
def test_older_files_with_multi_head_latent_attention(model_type: str, tiny: Tiny, tmp_path: Path) -> None:
    """Which llama.cpp reads without absorbing a factor, with K and V of every head."""
    checkpoint, path, ids = tiny(model_type), tmp_path / "plain.gguf", token_ids(N)
    convert(parse([str(checkpoint), "-o", str(path), "--method", "none", "--outtype", "f32"], "test"))
    old = older_mla(path, tmp_path / "old.gguf")
    assert distance(session(core.Model(str(old))).decode(ids, output="all"), libllama.logits(old, ids)) < 1e-3


@pytest.mark.parametrize("model_type", ["afmoe", "bailing_moe_v2", "dots1", "glm4_moe"])
def test_experts_without_the_key_of_their_weights(model_type: str, tiny: Tiny, tmp_path: Path) -> None:
    """llama.cpp does not divide the weights of the chosen experts by their sum then."""
    checkpoint, path, ids = tiny(model_type), tmp_path / "plain.gguf", token_ids(N)
    convert(parse([str(checkpoint), "-o", str(path), "--method", "none", "--outtype", "f32"], "test"))
    keys = GgufFile(path).values
    without = [k for k in keys if k.endswith(".expert_weights_norm") or k.startswith("latentkv.")]
    stock = rewritten(path, tmp_path / "stock.gguf", without=tuple(without))
    expected = libllama.logits(stock, ids)
    assert distance(expected, libllama.logits(path, ids)) > 1e-2
    assert distance(session(core.Model(str(stock))).decode(ids, output="all"), expected) < 1e-3
    plain = tmp_path / "converted.gguf"
    convert(parse([str(stock), "-o", str(plain), "--method", "none"], "test"))
    assert distance(session(core.Model(str(plain))).decode(ids, output="all"), expected) < 1e-3
