"""Every architecture: the runtime on the converted file computes transformers' logits, plain and at full
rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from both import N, distance, expected_logits, expected_states, run, session, step_by_step, token_ids
from tiny_models import TINY
from transformers import AutoModelForCausalLM

from conftest import Tiny, keys, tensors
from latentkv_convert.calibrate.decoder import Decoder
from latentkv_convert.errors import ConvertError
from latentkv_convert.source import archs
from latentkv_convert.source.archs import FULL, LOCAL
from latentkv_convert.source.checkpoint_source import CheckpointSource

LONGROPE = TINY["phi3"]["rope_scaling"]


YARN = TINY["gpt_oss"]["rope_scaling"] | {"truncate": True}
WINDOWS = {"sliding_window": 48, "sliding_window_pattern": 3, "layer_types": None}
MISTRAL3 = TINY["mistral3"]["rope_parameters"]
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def scaled(kind: str, factor: float = 4.0, **extra: Any) -> dict[str, Any]:
    """A RoPE scaling whose original context ends inside the test's sequence."""
    return {"rope_scaling": {"rope_type": kind, "factor": factor, **extra}}


def case(model_type: str, name: str = "", **config: Any) -> Any:
    return pytest.param(model_type, config, id="-".join(filter(None, (model_type, name))))


UNEVEN = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
IN_F16 = ("gelu_tanh",)  # ggml's CPU looks it up in a table of f16 numbers
GROUPS = {"num_experts": 8, "n_group": 4, "topk_group": 2}
NEW = {"new_decoder_architecture": True, "num_kv_heads": 2}
ALL = ["attention"] * 4
DENSE = {"num_local_experts": 0, "num_experts_per_tok": 0}
# Modules with a file of tests of their own.
ELSEWHERE = ("deepseek_v2", "deepseek_v3", "gemma4", "glm4_moe_lite", "laguna")
CASES = [
    *(case(name) for name in archs.names() if name not in ELSEWHERE),
    case("llama", "biases", attention_bias=True, mlp_bias=True),
    case("llama", "llama3", **scaled("llama3", **LLAMA3, original_max_position_embeddings=64)),
    case("llama", "yarn", **scaled("yarn", original_max_position_embeddings=64)),
    case("llama", "linear", **scaled("linear")),
    case("llama", "one-head", num_key_value_heads=1, tie_word_embeddings=True),
    case("llama", "head-80", hidden_size=160, num_attention_heads=4, head_dim=80),
    case("qwen2", "head-96", hidden_size=192, num_attention_heads=2, num_key_value_heads=1),
    case("qwen2", "window", use_sliding_window=True, sliding_window=40, max_window_layers=0),
    case("qwen3", "biases", attention_bias=True, head_dim=80),
    case("qwen3_moe", "one-of-two", num_experts=2, num_experts_per_tok=1, norm_topk_prob=False),
    case("qwen3_5", "equal-heads", linear_num_value_heads=2, linear_conv_kernel_dim=3),
    case("qwen3_5", "one-kv-head", num_key_value_heads=1, head_dim=64, tie_word_embeddings=True),
    case("qwen3_next", "uneven", layer_types=UNEVEN, linear_num_value_heads=8),
    case("granitemoehybrid", "dense", **DENSE, mamba_n_groups=1, mamba_conv_bias=False),
    case("granitemoehybrid", "all-attend", **DENSE, layer_types=ALL, position_embedding_type="rope"),
    case("gpt_oss", "whole-planes", rope_scaling=YARN, layer_types=None, num_hidden_layers=2),
    case("mistral", "no-window", sliding_window=None),
    case("mistral3", "another-mscale", rope_parameters=MISTRAL3 | {"mscale": 0.7, "mscale_all_dim": 0.5}),
    case("seed_oss", attention_out_bias=True),
    case("exaone4", "windows", **WINDOWS),
    case("glm4_moe", "no-norms", use_qk_norm=False, attention_bias=False, n_shared_experts=1),
    case("bailing_moe_v2", "no-groups", n_group=1, topk_group=1, partial_rotary_factor=1.0),
    case("gemma3_text", "erf", hidden_activation="gelu"),
    case("gemma3_text", "query-width", query_pre_attn_scalar=24, final_logit_softcapping=5.0),
    case(
        "gemma3_text",
        "new-fields",
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        },
        rope_scaling=None,
        layer_types=None,
        sliding_window_pattern=3,
    ),
    case("gemma3_text", "head-256", head_dim=256, num_attention_heads=2, num_key_value_heads=1),
    case("gemma2", "erf", hidden_activation="gelu"),
    case(
        "gemma2",
        "no-caps",
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        query_pre_attn_scalar=24,
    ),
    case("granite", "biases", attention_bias=True, mlp_bias=True, tie_word_embeddings=False),
    case("granite_swa", "two-bases", layer_rope_theta=[0, 10000.0, 1000.0, 0], attention_bias=True),
    case("exaone_moe", "groups", **GROUPS, layer_types=[LOCAL, FULL, FULL, LOCAL], norm_topk_prob=False),
    case("ernie4_5_moe", "no-shared", moe_num_shared_experts=0, moe_layer_start_index=0),
    case("kolibri1", "normed", norm_topk_prob=True, num_experts_per_tok=2),
    case("lfm2", "four-tokens", conv_L_cache=4, layer_types=[FULL, "conv", "conv", "conv"]),
    case("lfm2", "width-as-given", block_auto_adjust_ff_dim=False, tie_word_embeddings=False),
    case("lfm2_moe", "no-bias", use_expert_bias=False, norm_topk_prob=False, num_experts_per_tok=6),
    case("lfm2_moe", "all-experts", num_dense_layers=0),
    case("muse_glimmer", "rope-everywhere", layer_rope_theta=[10000.0] * 5, post_norm_eps=1e-2),
    case("apertus1p5", "all-tokens", output_vocab_size=None, vocab_size=320),
    case("smollm3", "some-layers", no_rope_layers=[0, 1, 1, 0]),
    case("glm4", "whole-head", partial_rotary_factor=1.0, attention_bias=False, tie_word_embeddings=True),
    case("olmo2", "every-head-its-own", num_key_value_heads=4, tie_word_embeddings=True),
    case("olmo2", "one-kv-head", num_key_value_heads=1),
    case("olmo2", "scaled", **scaled("yarn", original_max_position_embeddings=64)),
    case(
        "olmo3",
        "new-fields",
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        },
        rope_scaling=None,
        layer_types=None,
    ),
    case("phi3", "long"),
    case("phi3", "short", original_max_position_embeddings=256),
    case("phi3", "window", sliding_window=40, rope_scaling=None),
    case(
        "phi3",
        "partial-rotary-head-96",
        hidden_size=192,
        num_attention_heads=2,
        num_key_value_heads=1,
        partial_rotary_factor=0.5,
        rope_scaling=None,
    ),
    case("falcon", "heads-of-their-own", multi_query=False, bias=True),
    case("falcon", "new", **NEW),
    case("falcon", "new-one-norm", num_ln_in_parallel_attn=1, **NEW),
    case("falcon", "head-80", hidden_size=160, num_attention_heads=2),
    case("opt", "gelu-no-bias", activation_function="gelu", enable_bias=False),
    case("opt", "untied", tie_word_embeddings=False),
    case("opt", "head-80", hidden_size=160, num_attention_heads=2, word_embed_proj_dim=160),
    case("mpt", "power-of-two", d_model=128, n_heads=4),
    case("mpt", "clip", attn_config={"clip_qkv": 1.5}),
    case("mpt", "head-96", d_model=192, n_heads=2),
]


@pytest.mark.parametrize(("model_type", "config"), CASES)
def test_logits_equal_transformers(
    model_type: str, config: dict[str, Any], tiny: Tiny, tmp_path: Path, calib: Path
) -> None:
    checkpoint = tiny(model_type, **config)
    ids = token_ids()
    expected = expected_logits(checkpoint, ids)
    source = CheckpointSource(checkpoint)
    with torch.no_grad():
        streamed = Decoder(source)(torch.tensor([ids]))[0].numpy()
    assert distance(streamed, expected) < (1e-4 if source.spec.block.mixers else 1e-5)

    plain = run(checkpoint, tmp_path / "plain.gguf", "--method", "none")
    near = 1e-3 if keys(tmp_path / "plain.gguf")["latentkv.block.activation"] in IN_F16 else 1e-4
    got = session(plain).decode(ids, output="all")
    assert distance(got, expected) < near
    assert distance(session(plain, implementation="reference").decode(ids, output="all"), expected) < near
    assert distance(step_by_step(plain, ids, N - 20), expected[N - 21 :]) < near
    states = session(plain).decode(ids, output="all", states=True)
    assert distance(states, expected_states(checkpoint, ids)) < near

    if (config.get("attn_config") or {}).get("clip_qkv"):
        return  # test_clipped_qkv_has_no_latent
    options = [
        "--method",
        "palu",
        "--keep",
        "1.0",
        "--group",
        "1",
        "--allocate",
        "uniform",
        "--calib",
        str(calib),
    ]
    latent = run(checkpoint, tmp_path / "latent.gguf", *options, "--calib-window", "128")
    attending = [latent.layers[index] for index in source.spec.attention_layers]
    assert {layer["k"]["path"] for layer in attending} <= {"rebuild", "absorbed"}
    assert distance(session(latent).decode(ids, output="all"), expected) < 1e-3
    assert distance(step_by_step(latent, ids, N - 20), expected[N - 21 :]) < 1e-3
    rounded = session(latent, kv="f16").decode(ids, output="all")
    if source.spec.block.ffn in ("experts", "plain_experts"):
        # rounding chooses another of two experts with about the same score: in 11 of 200 tokens with AVX-512
        assert np.median([distance(*pair) for pair in zip(rounded, expected, strict=True)]) < 5e-3
    else:
        assert distance(rounded, expected) < 1e-2


FILES_OF = {"gpt_oss": "gpt-oss", "qwen3_moe": "qwen3moe", "mistral": "llama", "gemma3_text": "gemma3"}
FILES_OF |= {"exaone_moe": "exaone-moe", "ernie4_5_moe": "ernie4_5-moe", "muse_glimmer": "muse-glimmer"}
FILES_OF |= {"glm4_moe": "glm4moe", "qwen2_vl": "qwen2vl", "qwen3_vl": "qwen3vl"}
FILES_OF |= {"olmo3": "olmo2", "qwen3_5": "qwen35", "qwen3_5_moe": "qwen35moe", "qwen3_next": "qwen3next"}
STOCK = {
    "qwen2": {"attn_q.weight", "attn_k.weight", "attn_v.weight", "attn_q.bias", "attn_k.bias", "attn_v.bias"},
    "qwen3": {"attn_q.weight", "attn_k.weight", "attn_v.weight", "attn_q_norm.weight", "attn_k_norm.weight"},
    "qwen3_moe": {
        "attn_q.weight",
        "attn_k.weight",
        "attn_v.weight",
        "attn_q_norm.weight",
        "attn_k_norm.weight",
    },
    "gpt_oss": {
        "attn_q.weight",
        "attn_k.weight",
        "attn_v.weight",
        "attn_q.bias",
        "attn_k.bias",
        "attn_v.bias",
    }
    | {"attn_output.bias", "attn_sinks.weight"},
    "mistral": {"attn_q.weight", "attn_k.weight", "attn_v.weight"},
    "mistral3": {"attn_q.weight", "attn_k.weight", "attn_v.weight"},
    "ernie4_5": {"attn_q.weight", "attn_k.weight", "attn_v.weight"},
    "gemma3_text": {
        "attn_q.weight",
        "attn_k.weight",
        "attn_v.weight",
        "attn_q_norm.weight",
        "attn_k_norm.weight",
    },
    "gemma2": {"attn_q.weight", "attn_k.weight", "attn_v.weight"},
    "granite": {"attn_q.weight", "attn_k.weight", "attn_v.weight"},
    "granite_swa": {"attn_q.weight", "attn_k.weight", "attn_v.weight", "attn_sinks.weight"},
    "exaone_moe": {
        "attn_q.weight",
        "attn_k.weight",
        "attn_v.weight",
        "attn_q_norm.weight",
        "attn_k_norm.weight",
    },
    "ernie4_5_moe": {"attn_q.weight", "attn_k.weight", "attn_v.weight"},
    "muse_glimmer": {
        "attn_q.weight",
        "attn_k.weight",
        "attn_v.weight",
        "attn_q_norm.weight",
        "attn_k_norm.weight",
        "attn_gate.weight",
    },
    "smollm3": {"attn_q.weight", "attn_k.weight", "attn_v.weight"},
    "glm4": {"attn_q.weight", "attn_k.weight", "attn_v.weight", "attn_q.bias", "attn_k.bias", "attn_v.bias"},
    "olmo2": {"attn_q.weight", "attn_k.weight", "attn_v.weight", "attn_q_norm.weight", "attn_k_norm.weight"},
    "olmo3": {"attn_q.weight", "attn_k.weight", "attn_v.weight", "attn_q_norm.weight", "attn_k_norm.weight"},
    "phi3": {"attn_qkv.weight"},
    "falcon": {"attn_qkv.weight"},
    "mpt": {"attn_qkv.weight"},
}


@pytest.mark.parametrize("model_type", STOCK)
def test_plain_files_have_the_stock_layout(model_type: str, tiny: Tiny, tmp_path: Path) -> None:
    path = tmp_path / "plain.gguf"
    run(tiny(model_type), path, "--method", "none")
    found = {name.removeprefix("blk.0.") for name in tensors(path) if name.startswith("blk.0.attn_")}
    assert found - {"attn_norm.weight", "attn_norm.bias", "attn_output.weight"} == STOCK[model_type]
    assert keys(path)["general.architecture"] == FILES_OF.get(model_type, model_type)


def test_packed_qkv_is_q_then_k_then_v(tiny: Tiny, tmp_path: Path) -> None:
    """Falcon's checkpoints keep the query heads of a KV head beside it."""
    path = tmp_path / "plain.gguf"
    checkpoint = tiny("falcon", **NEW)
    run(checkpoint, path, "--method", "none")
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    weight = model.transformer.h[1].self_attention.query_key_value.weight
    source = weight.detach().numpy().reshape(2, 4, 32, 128)  # KV head, its heads q q k v, head_dim, n_embd
    q, k, v = source[:, :2].reshape(-1, 128), source[:, 2].reshape(-1, 128), source[:, 3].reshape(-1, 128)
    assert np.array_equal(tensors(path)["blk.1.attn_qkv.weight"], np.concatenate([q, k, v]))


@pytest.mark.parametrize(
    ("model_type", "config", "message"),
    [
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before True; got False"),
        ("opt", {"word_embed_proj_dim": 64}, "word_embed_proj_dim 96 or None; got 64"),
        ("opt", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm False; got True"),
        ("falcon", {"alibi": True}, "alibi False or None; got True"),
        ("falcon", {"parallel_attn": False}, "parallel_attn true; got false"),
        ("mpt", {"no_bias": False}, "no_bias True; got False"),
        ("mpt", {"attn_config": {"alibi": False}}, "alibi True; got False"),
        ("mpt", {"attn_config": {"qk_ln": True}}, "qk_ln False; got True"),
        ("mpt", {"attn_config": {"clip_qkv": -1.0}}, r"clip_qkv from 0 to 1e\+06; got -1.0"),
        ("mpt", {"attn_config": {"softmax_scale": 0.5}}, r"softmax_scale 1/sqrt\(32\); got 0.5"),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
            "a sliding window in all layers or in none; got 1 of 2",
        ),
        ("olmo2", {"attention_bias": True}, "attention_bias False; got True"),
        ("phi3", {"rope_scaling": LONGROPE | {"long_factor": [1.0]}}, "16 values of long_factor; got 1"),
    ],
)
def test_what_the_block_cannot_do_is_refused(model_type: str, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConvertError, match=f"expected {message}$"):
        archs.model_spec(TINY[model_type] | config)


def test_letters_of_a_window_pattern() -> None:
    """As EXAONE 4.0 32B has them; layers without a window have no RoPE."""
    config = TINY["exaone4"] | {"num_hidden_layers": 9, "layer_types": None, "sliding_window": 48}
    spec = archs.model_spec(config | {"sliding_window_pattern": "LLLG"})
    assert [spec.window(layer) for layer in range(9)] == [48, 48, 48, 0, 48, 48, 48, 0, 0]
    assert [spec.rope(layer).base > 0 for layer in range(9)] == [spec.window(layer) > 0 for layer in range(9)]


def test_dynamic_ntk_serves_the_context_it_is_opened_with(tiny: Tiny, tmp_path: Path) -> None:
    """transformers scales for the sequence it is given, the runtime for n_ctx."""
    config = scaled("dynamic", 3.0) | {"max_position_embeddings": 64}
    checkpoint = tiny("llama", **config)
    expected = expected_logits(checkpoint, token_ids())
    model = run(checkpoint, tmp_path / "plain.gguf", "--method", "none")
    assert distance(session(model, n_ctx=N).decode(token_ids(), output="all"), expected) < 1e-4
    assert distance(session(model, n_ctx=N + 56).decode(token_ids(), output="all"), expected) > 1e-3


def test_clipped_qkv_has_no_latent(tiny: Tiny, tmp_path: Path, calib: Path) -> None:
    checkpoint = tiny("mpt", attn_config={"clip_qkv": 2.5})
    with pytest.raises(ConvertError, match=r"expected none: the checkpoint clips K and V to ±2\.5"):
        run(checkpoint, tmp_path / "out.gguf", "--method", "palu", "--calib", str(calib))


def test_learned_positions_end(tiny: Tiny, tmp_path: Path) -> None:
    model = run(tiny("opt", max_position_embeddings=64), tmp_path / "plain.gguf", "--method", "none")
    live = session(model)
    live.decode(token_ids(64), output="none")
    with pytest.raises(ValueError, match="expected positions below 64, the learned ones; got 64"):
        live.decode([5])
