"""Multi-head latent attention: DeepSeek V2 and V3, GLM-4.7-Flash."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from both import (
    core,
    distance,
    equals_transformers,
    expected_logits,
    run,
    session,
    token_ids,
)
from gguf_files import older_mla, plain, rewritten
from tiny_models import TINY

from conftest import Tiny, tensors
from latentkv.plan import presets
from latentkv_convert.calibrate.decoder import Decoder
from latentkv_convert.errors import ConvertError
from latentkv_convert.source import archs
from latentkv_convert.source.checkpoint_source import CheckpointSource
from latentkv_convert.source.gguf_source import GgufSource

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
YARN |= {"beta_fast": 32, "beta_slow": 1}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("deepseek_v2", {}),
    (
        "deepseek_v2",
        {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "q_lora_rank": 48},
    ),
    ("deepseek_v2", {"rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}}),
    ("deepseek_v3", {}),
    (
        "deepseek_v3",
        {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, "n_group": 1, "topk_group": 1},
    ),
    (
        "deepseek_v3",
        {"rope_parameters": YARN | {"mscale": 0.5, "mscale_all_dim": 0.8}, "norm_topk_prob": False},
    ),
    ("deepseek_v3", {"rope_parameters": YARN, "q_lora_rank": None, "first_k_dense_replace": 2}),
    ("deepseek_v3", {"first_k_dense_replace": 3}),
    ("deepseek_v3", {"kv_lora_rank": 256, "qk_rope_head_dim": 64, "first_k_dense_replace": 2}),
    ("glm4_moe_lite", {}),
    ("glm4_moe_lite", {"tie_word_embeddings": True, "mlp_layer_types": ["sparse"] * 3}),
]


@pytest.mark.parametrize(("model_type", "config"), VARIANTS, ids=str)
def test_logits_equal_transformers(
    model_type: str, config: dict[str, Any], tiny: Tiny, tmp_path: Path
) -> None:
    equals_transformers(tiny(model_type, **config), tmp_path / "plain.gguf")


MODELS = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")


@pytest.fixture(scope="module")
def stock(random_checkpoint: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file as llama.cpp's converter writes it."""
    folder = tmp_path_factory.mktemp("stock")
    return plain(random_checkpoint(folder / "tiny", "deepseek_v3"), folder / "stock.gguf")


@pytest.fixture(scope="module")
def dense(random_checkpoint: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One without experts: small differences choose others."""
    folder = tmp_path_factory.mktemp("dense")
    made = random_checkpoint(folder / "tiny", "deepseek_v3", first_k_dense_replace=3)
    return plain(made, folder / "dense.gguf")


@pytest.mark.parametrize("model_type", MODELS)
def test_a_gguf_is_the_checkpoint(model_type: str, tiny: Tiny, tmp_path: Path) -> None:
    checkpoint, ids = tiny(model_type), token_ids()
    path = plain(checkpoint, tmp_path / "stock.gguf")
    ours, theirs = GgufSource(path).spec, CheckpointSource(checkpoint).spec
    assert (ours.block, ours.mla, ours.keys) == (theirs.block, theirs.mla, theirs.keys | ours.keys)
    with torch.no_grad():
        streamed = Decoder(GgufSource(path))(torch.tensor([ids]))[0].numpy()
    expected = expected_logits(checkpoint, ids)
    assert distance(streamed, expected) < 2e-5
    again = run(path, tmp_path / "again.gguf", "--method", "none")
    assert distance(session(core.Model(str(path))).decode(ids, output="all"), expected) < 1e-4
    assert np.array_equal(*(session(m).decode(ids[:60]) for m in (again, core.Model(str(path)))))
    own = {name: (data.shape, data.tobytes()) for name, data in tensors(path).items()}
    assert own == {
        name: (data.shape, data.tobytes()) for name, data in tensors(tmp_path / "again.gguf").items()
    }


def test_keys_that_older_files_do_without(stock: Path, tmp_path: Path) -> None:
    """Scores are named by the bias that is added to them; extra layers behind the trunk are left alone."""
    expected = session(core.Model(str(stock))).decode(token_ids(60), output="all")
    other = rewritten(stock, tmp_path / "other.gguf", without=("deepseek2.expert_gating_func",))
    assert np.array_equal(session(core.Model(str(other))).decode(token_ids(60), output="all"), expected)
    assert GgufSource(other).spec.keys["expert_gating_func"] == 2
    found = {f"blk.3.{name}.weight": np.ones(96, np.float32) for name in ("attn_norm", "nextn.enorm")}
    keys = {"deepseek2.block_count": 4, "deepseek2.nextn_predict_layers": 1}
    other = rewritten(stock, tmp_path / "mtp.gguf", keys=keys, extra=found)
    model = core.Model(str(other))
    assert (model.n_layer, model.n_mtp) == (3, 1)
    assert np.array_equal(session(model).decode(token_ids(60), output="all"), expected)
    assert "1 block behind the 3 layers" in GgufSource(other).note


def test_rows_are_stored_once(dense: Path) -> None:
    model, ids = core.Model(str(dense)), token_ids()
    expected = session(model).decode(ids, output="all")
    assert [layer["k"]["path"] for layer in model.layers] == ["value"] * 3
    row = 32 + 64  # turned channels, and the latent
    bytes_of = {"f16": 2 * row, "q8_0": 34 * row // 32, "q4_0": 18 * row // 32}
    near = {"f16": (1e-6, 2e-3), "q8_0": (1e-4, 3e-2), "q4_0": (1e-3, 0.3)}
    for kv, size in bytes_of.items():
        live = session(model, kv=kv)
        assert near[kv][0] < distance(live.decode(ids, output="all"), expected) < near[kv][1], kv
        sizes = live.kv_bytes()
        assert (sizes["k"], sizes["v"]) == (0, 3 * 256 * (-(-size // 4) * 4))
        assert sizes["f16_per_token"] == 3 * 2 * row
    exact = core.Session(model, n_ctx=256, n_threads=1, kv="q8", sink=4, recent=32)
    assert 1e-5 < distance(exact.decode(ids, output="all"), expected) < 0.05
    for kv, bound in (("f16", 3e-5), ("q4_0", 2e-3)):  # a code of q4_0 that is rounded the other way: 7e-4
        reference = session(model, kv=kv, implementation="reference").decode(ids, output="all")
        assert distance(session(model, kv=kv).decode(ids, output="all"), reference) < bound


def test_sequences_and_states(dense: Path) -> None:
    model, ids = core.Model(str(dense)), token_ids()
    expected = session(model).decode(ids, output="all")
    live = core.Session(model, n_ctx=1024, n_threads=1, kv="f32", n_seq_max=3)
    others = ids[::-1]
    pairs = [(token, seq) for at in range(80) for seq, token in enumerate((ids[at], others[at]))]
    live.decode([token for token, _ in pairs], seq=[seq for _, seq in pairs], output="none")
    assert distance(live.decode(ids[80:], seq=[0] * 120, output="all"), expected[80:]) < 1e-5
    assert live.seq_rm(0, 100, -1)
    live.seq_cp(0, 2)
    assert distance(live.decode(ids[100:], seq=[2] * 100, output="all"), expected[100:]) < 1e-5
    assert distance(live.decode(ids[100:], seq=[0] * 100, output="all"), expected[100:]) < 1e-5
    for kv in ("f32", "q8_0"):
        first, second = (session(model, kv=kv) for _ in range(2))
        first.decode(ids[:100], output="none")
        second.set_state(first.state_bytes())
        assert np.array_equal(second.decode(ids[100:], output="all"), first.decode(ids[100:], output="all"))
    first, other = session(model), session(model, kv="q8_0")
    first.decode(ids[:100], output="none")
    other.set_state(first.state_bytes(), accept="any")
    assert 1e-5 < distance(other.decode(ids[100:], output="all"), expected[100:]) < 3e-2
    evicts = core.Session(model, n_ctx=256, n_threads=1, kv="f32", evict="h2o", keep_tokens="128", recent=16)
    assert distance(evicts.decode(ids, output="all")[:100], expected[:100]) < 1e-5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_k": "c4"}, r"\[kv k\] expected a format of single tokens, .* choose --kv q4; got c4"),
        ({"kv": "n4"}, r"\[kv\] expected a format whose segments have scales of their own, as q4"),
        ({"kv_k": "q8_0", "kv_v": "q4_0"}, r"\[kv v\] expected K's format, q8_0, .*; got q4_0"),
        ({"prefill": "lazy"}, r"\[prefill\] expected eager, as keys and values are one row; got lazy"),
    ],
)
def test_options_for_rows_of_their_own(options: dict[str, Any], message: str, stock: Path) -> None:
    with pytest.raises(core.Error, match=message):
        core.Session(core.Model(str(stock)), n_ctx=64, recent=32, **options)


def test_presets_have_one_format(stock: Path) -> None:
    model = core.Model(str(stock))
    found = presets.resolved(model, {"kv": "small"})
    assert (found.kv_k, found.kv_v) == ("q6", "q6")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"attention.kv_lora_rank": 48}, r"attention\.key_length\] expected 80; got 96"),
        ({"attention.key_length_mla": 32}, r"key_length_mla\] expected a value from 33 to 8192; got 32"),
        ({"attention.value_length": 32}, r"attention\.value_length\] expected 64; got 32"),
        ({"attention.head_count_kv": 4}, r"attention\.head_count_kv\] expected 1; got 4"),
        ({"attention.value_length_mla": 20}, r"expected blk\.0\.attn_v_b\.weight with ne \[64, 20, 4\]"),
        ({"attention.q_lora_rank": 40}, r"expected blk\.0\.attn_q_a\.weight with ne \[96, 40\]"),
        (
            {"leading_dense_block_count": 4},
            r"leading_dense_block_count\] expected a value from 0 to 3; got 4",
        ),
        ({"leading_dense_block_count": 2}, r"expected a tensor blk\.1\.ffn_up\.weight; got none"),
        ({"expert_group_count": 3}, r"expert_group_count\] expected groups of as many of the 8 experts each"),
        ({"expert_group_used_count": 5}, r"expert_group_used_count\] expected a number up to 4; got 5"),
        ({"expert_gating_func": 4}, r"expert_gating_func\] expected 1 \(softmax\), 2 \(sigmoid\) or 3"),
        ({"expert_shared_count": 1}, r"expected blk\.1\.ffn_gate_shexp\.weight with ne \[96, 64\]"),
        ({"expert_weights_scale": -1.0}, r"expert_weights_scale\] expected a number from 0 to"),
    ],
    ids=str,
)
def test_keys_that_contradict_the_tensors(
    changed: dict[str, Any], message: str, stock: Path, tmp_path: Path
) -> None:
    keys = {f"deepseek2.{name}": value for name, value in changed.items()}
    bad = rewritten(stock, tmp_path / "bad.gguf", keys=keys)
    with pytest.raises(core.Error, match=message):
        core.Model(str(bad))
    with pytest.raises(ConvertError):
        GgufSource(bad)


def test_queries_that_grow_with_their_positions(dense: Path, tmp_path: Path) -> None:
    """Mistral Large 3: by a key of their own they do so after so many tokens."""
    keys = {"deepseek2.attention.temperature_scale": 0.5, "deepseek2.attention.temperature_length": 64}
    grows = core.Model(str(rewritten(dense, tmp_path / "grows.gguf", keys=keys)))
    expected = session(core.Model(str(dense))).decode(token_ids(), output="all")
    for implementation in ("fused", "reference"):
        found = session(grows, implementation=implementation).decode(token_ids(), output="all")
        assert distance(found[:64], expected[:64]) < 1e-5
        assert distance(found[64:], expected[64:]) > 1e-2


def test_older_files(dense: Path, tmp_path: Path) -> None:
    """One tensor with both factors, and heads as wide as they are without absorbing them."""
    ids, old = token_ids(), older_mla(dense, tmp_path / "old.gguf")
    expected = session(core.Model(str(dense))).decode(ids, output="all")
    assert np.array_equal(session(core.Model(str(old))).decode(ids, output="all"), expected)
    ours, later = GgufSource(old).spec, GgufSource(dense).spec
    assert (ours.block, ours.mla, ours.keys) == (later.block, later.mla, later.keys)
    run(old, tmp_path / "again.gguf", "--method", "none")
    run(dense, tmp_path / "later.gguf", "--method", "none")
    again, known = (tensors(tmp_path / f"{name}.gguf") for name in ("again", "later"))
    assert again.keys() == known.keys()
    assert all(np.array_equal(again[name], known[name]) for name in known)


def test_older_files_of_blocks(dense: Path, tmp_path: Path) -> None:
    """Blocks of weights lie along the latent: those of values stay, those of keys become f16."""
    ids, old = token_ids(), older_mla(dense, tmp_path / "old.gguf", "q8_0")
    found = session(core.Model(str(old))).decode(ids, output="all")
    expected = session(core.Model(str(dense))).decode(ids, output="all")
    assert 1e-4 < distance(found, expected) < 5e-2
    with torch.no_grad():
        streamed = Decoder(GgufSource(old))(torch.tensor([ids]))[0].numpy()
    assert distance(found, streamed) < 5e-2  # the CPU rounds what meets q8_0
    again = run(old, tmp_path / "again.gguf", "--method", "none")  # in f32
    assert distance(session(again).decode(ids, output="all"), streamed) < 2e-3


def test_older_files_that_contradict_themselves(dense: Path, tmp_path: Path) -> None:
    old = older_mla(dense, tmp_path / "old.gguf")
    bad = rewritten(old, tmp_path / "bad.gguf", keys={"deepseek2.attention.value_length": 20})
    with pytest.raises(core.Error, match=r"attn_kv_b\.weight with ne \[64, 208\]; got \[64, 224\]"):
        core.Model(str(bad))
    with pytest.raises(
        ConvertError, match=r"attn_kv_b\.weight\] expected shape \[208, 64\]; got \[224, 64\]"
    ):
        GgufSource(bad)


@pytest.mark.parametrize("name", ["attn_k_b", "attn_kv_a_norm", "attn_q_b", "attn_output"])
def test_tensors_that_are_missing(name: str, stock: Path, tmp_path: Path) -> None:
    bad = rewritten(stock, tmp_path / "bad.gguf", without=(f"blk.1.{name}.weight",))
    with pytest.raises(core.Error, match=rf"expected a tensor blk\.1\.{name}\.weight; got none"):
        core.Model(str(bad))
    with pytest.raises(ConvertError, match=name):
        GgufSource(bad)


@pytest.mark.parametrize(
    ("model_type", "config", "message"),
    [
        ("deepseek_v3", {"attention_bias": True}, "attention_bias False or None; got True"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave True; got False"),
        (
            "deepseek_v3",
            {"n_group": 3},
            "n_group that divides 8 experts, and a topk_group below it; got 3 and 2",
        ),
        ("deepseek_v3", {"kv_lora_rank": 0}, "kv_lora_rank from 1 to 4096; got 0"),
        (
            "deepseek_v2",
            {"topk_method": "noaux_tc"},
            "topk_method greedy or group_limited_greedy; got noaux_tc",
        ),
        (
            "glm4_moe_lite",
            {"mlp_layer_types": ["sparse", "dense", "sparse"]},
            "layers without experts before all that have them; got others",
        ),
    ],
)
def test_what_is_refused(model_type: str, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConvertError, match=f"expected {message}$"):
        archs.model_spec(TINY[model_type] | config)
