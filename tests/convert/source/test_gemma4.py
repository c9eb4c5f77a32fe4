"""Gemma 4: global layers with wider heads, V of the key projection, a norm of V, scaled layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from both import (
    N,
    core,
    distance,
    equals_transformers,
    expected_logits,
    run,
    session,
    step_by_step,
    token_ids,
)
from gguf_files import rewritten
from tiny_models import TINY

from conftest import Tiny, keys, tensors
from latentkv.cli._info_page import _kv_heads
from latentkv_convert.cli import parse
from latentkv_convert.errors import ConvertError
from latentkv_convert.pipeline import convert
from latentkv_convert.source import archs
from latentkv_convert.source.gguf_source import GgufSource

TEXT = ["--calib-window", "128", "--calib-tokens", "1024"]
ALL = [
    "--factor-type",
    "f32",
    "--kv-budget",
    "99%",
    "--recent",
    "32",
    "--sink",
    "4",
    *TEXT,
]  # every channel in q8
ERF: dict[str, Any] = {"hidden_activation": "gelu"}  # ggml's CPU looks the other one up in f16
EXPERTS = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 64}
OWN_V = {"attention_k_eq_v": False}
BY_LAYER: dict[str, Any] = {"global_head_dim": None, "num_global_key_value_heads": None}
BY_LAYER["per_layer_config"] = {str(n): {"head_dim": 48, "num_key_value_heads": 4} for n in (1, 2)}
E: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 3,
    "hidden_size_per_layer_input": 32,
    "use_double_wide_mlp": True,
    **OWN_V,
}
VARIANTS = [{}, OWN_V, EXPERTS, {"final_logit_softcapping": None}, BY_LAYER]


@pytest.mark.parametrize("config", VARIANTS, ids=lambda config: "-".join(config) or "dense")
def test_logits_equal_transformers(config: dict[str, Any], tiny: Tiny, tmp_path: Path) -> None:
    equals_transformers(tiny("gemma4", **ERF, **config), tmp_path / "plain.gguf")


@pytest.mark.parametrize(
    "config",
    [E, E | {"num_kv_shared_layers": 0}],
    ids=["E", "no-shared-layers"],
)
def test_layers_that_embed_tokens_and_share_k_and_v(
    config: dict[str, Any], tiny: Tiny, calib: Path, tmp_path: Path
) -> None:
    """E2B and E4B: from a checkpoint, and from a stock file."""
    checkpoint, ids = tiny("gemma4", **ERF, **config), token_ids()
    expected = expected_logits(checkpoint, ids)
    path = tmp_path / "plain.gguf"
    model = run(checkpoint, path, "--method", "none")
    assert distance(session(model).decode(ids, output="all"), expected) < 1e-4
    assert distance(session(model, implementation="reference").decode(ids, output="all"), expected) < 1e-4
    assert distance(step_by_step(model, ids, N - 20), expected[N - 21 :]) < 1e-4
    live = session(model)
    live.decode(ids[:100], output="last")
    held = core.Session(model, n_ctx=256, n_threads=1, kv="f32")
    held.set_state(live.state_bytes())
    assert distance(held.decode(ids[100:], output="all"), expected[100:]) < 1e-4
    exact = core.Session(model, n_ctx=256, n_threads=1, kv="q8", sink=4, recent=32)
    assert 1e-5 < distance(exact.decode(ids, output="all"), expected) < 0.1
    n_own = 6 - config["num_kv_shared_layers"]
    assert [layer["rows_of"] for layer in model.layers] == [
        0,
        1,
        2,
        *((1, 2, 1) if n_own == 3 else (3, 4, 5)),
    ]
    widths = [64, 128, 64, 128, 64, 128][:n_own]
    sizes = session(model, kv="f16").kv_bytes()
    assert sizes["k"] == sizes["v"] == 2 * 256 * sum(widths)
    again = run(rewritten(path, tmp_path / "stock.gguf"), tmp_path / "again.gguf", "--method", "none")
    described = keys(tmp_path / "again.gguf")
    assert described["gemma4.attention.shared_kv_layers"] == config["num_kv_shared_layers"]
    assert again.n_params == model.n_params


@pytest.mark.parametrize("prefer", ["size", "speed"])
@pytest.mark.parametrize("n_shared", [3, 0])
def test_latents_that_several_layers_read(
    n_shared: int, prefer: str, tiny: Tiny, calib: Path, tmp_path: Path
) -> None:
    """With all channels the logits are the original's, prompts whole or in steps, after a state and in
    several sequences; layers that share K and V have none of their own."""
    checkpoint, ids = tiny("gemma4", **ERF, **E | {"num_kv_shared_layers": n_shared}), token_ids()
    expected = expected_logits(checkpoint, ids)
    model = run(checkpoint, tmp_path / "out.gguf", *ALL, "--prefer", prefer, "--calib", str(calib))
    own = model.layers[: 6 - n_shared]
    assert {layer["k"]["path"] for layer in own} == {"rebuild" if prefer == "size" else "rotated"}
    assert {layer["v"]["path"] for layer in own} == {"latent"}
    for options in ({}, {"implementation": "reference"}, {"sink": 0, "recent": 0}):
        live = core.Session(model, n_ctx=256, n_threads=1, kv="f32", kv_recent="f32", **options)
        assert distance(live.decode(ids, output="all"), expected) < 1e-4, options
    assert distance(step_by_step(model, ids, N - 80), expected[N - 81 :]) < 1e-4
    live = core.Session(model, n_ctx=512, n_threads=1, n_seq_max=3, kv="f32", kv_recent="f32")
    live.decode(ids[:100], output="last")
    held = core.Session(model, n_ctx=512, n_threads=1, n_seq_max=3, kv="f32", kv_recent="f32")
    held.set_state(live.state_bytes())
    assert distance(held.decode(ids[100:], output="all"), expected[100:]) < 1e-4
    live.seq_cp(0, 2)
    for seq in (0, 2):
        n = len(ids) - 100
        got = live.decode(ids[100:], pos=list(range(100, 100 + n)), seq=[seq] * n, output="all")
        assert distance(got, expected[100:]) < 1e-4
    quantized = session(model, kv="").decode(ids, output="all")
    assert 1e-4 < distance(quantized, expected) < 0.1


@pytest.mark.parametrize("prefer", ["size", "speed"])
@pytest.mark.parametrize("config", [{}, OWN_V, EXPERTS], ids=lambda config: "-".join(config) or "dense")
def test_all_channels_in_latents_are_the_original(
    config: dict[str, Any], prefer: str, tiny: Tiny, calib: Path, tmp_path: Path
) -> None:
    checkpoint, ids = tiny("gemma4", **ERF, **config), token_ids()
    expected = expected_logits(checkpoint, ids)
    model = run(checkpoint, tmp_path / "out.gguf", *ALL, "--prefer", prefer, "--calib", str(calib))
    assert {layer["k"]["path"] for layer in model.layers} == {"rebuild" if prefer == "size" else "rotated"}
    assert {(layer["v"]["path"], layer["v"]["form"]) for layer in model.layers} == {("latent", "e")}
    for options in ({}, {"prefill": "lazy"}, {"implementation": "reference"}, {"sink": 0, "recent": 0}):
        live = core.Session(model, n_ctx=256, n_threads=1, kv="f32", kv_recent="f32", **options)
        assert distance(live.decode(ids, output="all"), expected) < 1e-4, options
    assert distance(step_by_step(model, ids, N - 80), expected[N - 81 :]) < 1e-4
    quantized = session(model, kv="").decode(ids, output="all")
    assert 1e-4 < distance(quantized, expected) < 0.1


@pytest.mark.parametrize("prefer", ["size", "speed"])
def test_one_row_for_k_and_v(prefer: str, tiny: Tiny, calib: Path, tmp_path: Path) -> None:
    """Keys of global layers are made of V's rows: all channels are the original, K has no bytes there."""
    checkpoint, ids = tiny("gemma4", **ERF), token_ids()
    expected = expected_logits(checkpoint, ids)
    options = [*ALL, "--one-row", "--prefer", prefer, "--calib", str(calib)]
    model = run(checkpoint, tmp_path / "out.gguf", *options)
    path = {"size": "rebuild", "speed": "rotated"}[prefer]
    assert [layer["k"]["path"] for layer in model.layers] == [path, "value", "value"]
    assert [layer["k"]["ranks"] for layer in model.layers[1:]] == [[], []]
    for words in ({}, {"prefill": "lazy"}, {"implementation": "reference"}, {"sink": 0, "recent": 0}):
        live = core.Session(model, n_ctx=256, n_threads=1, kv="f32", kv_recent="f32", **words)
        assert distance(live.decode(ids, output="all"), expected) < 1e-4, words
    assert distance(step_by_step(model, ids, N - 80), expected[N - 81 :]) < 1e-4
    live, other = (core.Session(model, n_ctx=256, n_threads=1, kv="q8") for _ in range(2))
    live.decode(ids[:100], output="last")
    other.set_state(live.state_bytes())
    assert np.array_equal(other.decode(ids[100:], output="all"), live.decode(ids[100:], output="all"))
    whole = core.Session(model, n_ctx=256, n_threads=1, kv="f32", sink=0, recent=0).kv_bytes()
    assert (whole["k"], whole["v"]) == (4 * 256 * 64, 4 * 256 * (64 + 64 + 64))


def test_one_row_loses_less_at_the_same_budget(tiny: Tiny, calib: Path, tmp_path: Path) -> None:
    checkpoint, ids = tiny("gemma4", **ERF), token_ids()
    expected = expected_logits(checkpoint, ids)
    found = {}
    cases = {"two": [], "one": ["--one-row"], "scaled": ["--one-row", "--scales", "row"]}
    for name, words in cases.items():
        options = ["--kv-budget", "30%", "--prefer", "size", *words, *TEXT, "--recent", "0", "--sink", "0"]
        model = run(checkpoint, tmp_path / f"{name}.gguf", *options, "--calib", str(calib))
        live = session(model, kv="")
        found[name] = distance(live.decode(ids, output="all"), expected), live.kv_bytes()["total"]
    for name in ("one", "scaled"):
        assert found[name][1] < 1.1 * found["two"][1]  # of one budget
        assert found[name][0] < found["two"][0]


def test_keys_of_rows_that_hold_no_v(tiny: Tiny, calib: Path, tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match="a model that makes V of keys in some layer; got gemma4"):
        run(tiny("gemma4", **OWN_V), tmp_path / "x.gguf", "--one-row", "--calib", str(calib))
    latent = tmp_path / "latent.gguf"
    run(tiny("gemma4", name="other"), latent, *ALL, "--one-row", "--calib", str(calib))
    own = {key: value for key, value in keys(latent).items() if key.startswith("latentkv.")}
    bad = rewritten(latent, tmp_path / "bad.gguf", keys=own | {"latentkv.block.value_of_key": False})
    with pytest.raises(core.Error, match="expected value_of_key, value_norm and a latent V"):
        core.Model(str(bad))
    extra = {"blk.1.attn_v.weight": np.ones((64, 96), np.float32)}
    bad = rewritten(latent, tmp_path / "bad.gguf", keys=own, extra=extra)
    with pytest.raises(
        core.Error, match=r"no blk\.1\.attn_v\.weight beside keys of the rows of V; got others"
    ):
        core.Model(str(bad))


def test_layers_keep_rows_of_their_own_widths(tiny: Tiny, calib: Path, tmp_path: Path) -> None:
    model = run(tiny("gemma4"), tmp_path / "out.gguf", *ALL, "--calib", str(calib))
    shapes = [(layer["n_head_kv"], layer["head_dim"], sum(layer["k"]["ranks"])) for layer in model.layers]
    assert shapes == [(2, 32, 64), (1, 64, 64), (1, 64, 64)]
    assert _kv_heads(model.layers) == "1 KV head of 64 in 2 layers, 2 of 32 in 1"
    other = run(tiny("gemma4", name="own", **OWN_V), tmp_path / "own.gguf", "--method", "none")
    shapes = [(layer["n_head_kv"], layer["head_dim"], sum(layer["k"]["ranks"])) for layer in other.layers]
    assert shapes == [(2, 32, 64), (2, 64, 128), (2, 64, 128)]
    sizes = core.Session(other, n_ctx=256, n_threads=1, kv="f16").kv_bytes()
    assert sizes["k"] == sizes["v"] == 2 * 256 * (64 + 128 + 128)
    assert sizes["f16_per_token"] == 2 * 2 * (64 + 128 + 128)


def test_the_file_is_llama_cpps(tiny: Tiny, tmp_path: Path) -> None:
    path = tmp_path / "plain.gguf"
    run(tiny("gemma4", **EXPERTS), path, "--method", "none")
    described, found = keys(path), tensors(path)
    stock = {
        "attention.head_count_kv": [2, 1, 1],
        "attention.key_length": 64,
        "attention.value_length": 64,
        "attention.key_length_swa": 32,
        "attention.value_length_swa": 32,
        "attention.sliding_window_pattern": [True, False, False],
        "attention.shared_kv_layers": 0,
        "embedding_length_per_layer_input": 0,
        "rope.dimension_count": 64,
        "rope.dimension_count_swa": 32,
        "expert_count": 6,
        "expert_used_count": 2,
        "expert_feed_forward_length": 64,
    }
    assert {name: described[f"gemma4.{name}"] for name in stock} == stock
    assert np.array_equal(found["rope_freqs.weight"], [1.0] * 8 + [np.float32(1e30)] * 24)
    assert "blk.0.attn_v.weight" in found
    assert "blk.1.attn_v.weight" not in found
    shapes = {
        "layer_output_scale.weight": (1,),
        "ffn_gate_inp.weight": (6, 96),
        "ffn_gate_inp.scale": (96,),
        "ffn_down_exps.scale": (6,),
        "ffn_gate_up_exps.weight": (6, 128, 96),
        "ffn_down_exps.weight": (6, 96, 64),
        "pre_ffw_norm_2.weight": (96,),
        "post_ffw_norm_1.weight": (96,),
        "post_ffw_norm_2.weight": (96,),
    }
    assert {name: found[f"blk.2.{name}"].shape for name in shapes} == shapes


@pytest.mark.parametrize("config", [{}, OWN_V, EXPERTS], ids=lambda config: "-".join(config) or "dense")
def test_a_stock_file_is_opened_and_converted(
    config: dict[str, Any], tiny: Tiny, calib: Path, tmp_path: Path
) -> None:
    """Without a key of ours; a sidecar beside it is the same conversion."""
    checkpoint, ids = tiny("gemma4", **config), token_ids()
    run(checkpoint, tmp_path / "plain.gguf", "--method", "none")
    stock = rewritten(tmp_path / "plain.gguf", tmp_path / "stock.gguf")
    ours = session(core.Model(str(tmp_path / "plain.gguf"))).decode(ids, output="all")
    theirs = session(core.Model(str(stock))).decode(ids, output="all")
    assert np.array_equal(theirs, ours)
    options = ["--kv-budget", "30%", "--recent", "32", *TEXT, "--calib", str(calib)]
    whole = run(stock, tmp_path / "whole.gguf", *options)
    words = [str(stock), "-o", str(tmp_path / "beside.gguf"), "--no-plot", "--sidecar", *options]
    convert(parse(words, "test"))
    beside = core.Model(str(stock), latent_path=str(tmp_path / "beside.gguf"))
    assert beside.layers == whole.layers
    got = session(beside, kv="").decode(ids, output="all")
    assert distance(got, session(whole, kv="").decode(ids, output="all")) < 1e-5
    assert 1e-4 < distance(got, theirs) < 0.6


def test_the_unified_model(tiny: Tiny, tmp_path: Path) -> None:
    """Gemma 4 12B: text as in the others, with defaults of its own."""
    named = {"model_type": "gemma4_unified_text", "architectures": ["Gemma4UnifiedForCausalLM"]}
    checkpoint = tiny("gemma4", **ERF)
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    (checkpoint / "config.json").write_text(json.dumps(config | named), encoding="utf-8")
    equals_transformers(checkpoint, tmp_path / "plain.gguf")
    less = TINY["gemma4"] | named
    for name in ("hidden_size_per_layer_input", "vocab_size_per_layer_input", "sliding_window"):
        del less[name]
    spec = archs.model_spec({"model_type": "gemma4_unified", "text_config": less, "vision_config": {}})
    assert spec.keys["embedding_length_per_layer_input"] == 0
    assert spec.block.windows == (1024, 0, 0)
    assert spec.layers == "model.language_model.layers"


def test_the_text_part_of_a_model_that_sees_pictures(tiny: Tiny, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    checkpoint, ids = tiny("gemma4"), token_ids()
    expected = session(run(checkpoint, tmp_path / "text.gguf", "--method", "none")).decode(ids, output="all")
    text = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    whole = {"model_type": "gemma4", "architectures": ["Gemma4ForConditionalGeneration"]}
    whole |= {"text_config": text, "vision_config": {"hidden_size": 8}, "tie_word_embeddings": True}
    (checkpoint / "config.json").write_text(json.dumps(whole), encoding="utf-8")
    held = load_file(checkpoint / "model.safetensors")
    named = {name.replace("model.", "model.language_model.", 1): value for name, value in held.items()}
    save_file(named | {"model.vision_tower.x": np.ones((8, 8), np.float32)}, checkpoint / "model.safetensors")
    got = session(run(checkpoint, tmp_path / "whole.gguf", "--method", "none")).decode(ids, output="all")
    assert np.array_equal(got, expected)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_kv_shared_layers": 3}, "num_kv_shared_layers below 3; got 3"),
        ({"num_kv_shared_layers": 2}, "a layer of every kind with K and V of its own; got 1 layers"),
        (
            {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 9},
            "vocab_size_per_layer_input 320; got 9",
        ),
        ({"attention_bias": True}, "attention_bias False; got True"),
        (
            {"use_bidirectional_attention": "all"},
            "use_bidirectional_attention None or False or vision; got all",
        ),
        (
            {"num_global_key_value_heads": 3},
            "layer 1 with a divisor of 4 KV heads of an even width; got 3 of 64",
        ),
        ({"global_head_dim": 63}, "layer 1 with a divisor of 4 KV heads of an even width; got 1 of 63"),
        (EXPERTS | {"top_k_experts": 7}, "num_experts_per_tok up to 6, all experts; got 7"),
    ],
)
def test_what_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConvertError, match=f"expected {message}$"):
        archs.model_spec(TINY["gemma4"] | config)


@pytest.mark.parametrize("method", ["palu", "zack", "eigen", "lorc", "tale"])
def test_methods_that_take_all_layers_for_alike(method: str, tiny: Tiny, calib: Path, tmp_path: Path) -> None:
    message = rf"waterfill or none, as KV heads differ between layers \(1 x 64 and 2 x 32\); got {method}$"
    with pytest.raises(ConvertError, match=message):
        run(tiny("gemma4"), tmp_path / "out.gguf", "--method", method, "--calib", str(calib))


def test_tensors_that_contradict_the_keys(tiny: Tiny, calib: Path, tmp_path: Path) -> None:
    path = tmp_path / "plain.gguf"
    run(tiny("gemma4"), path, "--method", "none")
    for name, message in (
        ("blk.1.attn_k.weight", r"blk\.1\.attn_k\.weight"),
        ("blk.0.attn_k.weight", r"blk\.0\.attn_k\.weight"),
    ):
        bad = rewritten(path, tmp_path / "bad.gguf", without=(name,))
        with pytest.raises(core.Error, match=message):
            core.Model(str(bad))
        with pytest.raises(ConvertError, match=message):
            GgufSource(bad)
    wide = {"blk.1.attn_k.weight": np.ones((128, 96), np.float32)}
    bad = rewritten(path, tmp_path / "bad.gguf", without=tuple(wide), extra=wide)
    with pytest.raises(
        core.Error, match=r"expected blk\.1\.attn_k\.weight with ne \[96, 64\]; got \[96, 128\]"
    ):
        core.Model(str(bad))
    bad = rewritten(path, tmp_path / "bad.gguf", keys={"gemma4.attention.head_count_kv": [2, 3, 1]})
    with pytest.raises(core.Error, match=r"expected a divisor of the query heads 4; got 3"):
        core.Model(str(bad))
    for key, value, message in (
        ("attention.shared_kv_layers", 3, "expected fewer than the layers 3; got 3"),
        ("attention.shared_kv_layers", 2, "expected a layer of the same window before layer 1"),
        ("embedding_length_per_layer_input", 32, r"expected a tensor per_layer_token_embd\.weight"),
        ("attention.key_length_swa", 0, "expected a value from 1 to 4096; got 0"),
        ("rope.dimension_count", 63, "expected an even number; got 63"),
        ("expert_count", 4, "expert_used_count"),
    ):
        bad = rewritten(path, tmp_path / "bad.gguf", keys={f"gemma4.{key}": value})
        with pytest.raises(core.Error, match=message):
            core.Model(str(bad))
    latent = tmp_path / "latent.gguf"
    run(tiny("gemma4", name="other"), latent, *ALL, "--calib", str(calib))
    own = {key: value for key, value in keys(latent).items() if key.startswith("latentkv.")}
    without = ("blk.1.attn_v_e.weight", "blk.1.attn_v_e.bias")
    bad = rewritten(latent, tmp_path / "bad.gguf", keys=own, without=without)
    with pytest.raises(
        core.Error, match=r"expected blk\.1\.attn_v_e\.weight, latents of V after its norm; got none"
    ):
        core.Model(str(bad))
