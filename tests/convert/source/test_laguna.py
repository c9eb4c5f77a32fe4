"""laguna: query heads, windows and RoPE that differ between layers, gated attention, routed experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from both import core, distance, expected_logits, run, session, step_by_step, token_ids
from gguf_files import plain, rewritten
from tiny_models import TINY

from conftest import Tiny, keys, tensors
from latentkv_convert.errors import ConvertError
from latentkv_convert.source import archs
from latentkv_convert.source.gguf_source import GgufSource

IDS = token_ids(120)  # longer than the window
UNIFORM = {"layer_types": None, "num_attention_heads_per_layer": None}


@pytest.mark.parametrize(
    ("config", "path", "how"),
    [
        ({}, "rotated", "speed"),
        ({"gating": "per-element", "mlp_layer_types": ["sparse"] * 5, **UNIFORM}, "rebuild", "size"),
    ],
    ids=["XS", "M"],
)
def test_logits_equal_transformers(
    config: dict[str, Any], path: str, how: str, tiny: Tiny, tmp_path: Path, calib: Path
) -> None:
    directory = tiny("laguna", **config)
    expected = expected_logits(directory, IDS)
    model = run(directory, tmp_path / "plain.gguf", "--method", "none")
    assert distance(session(model).decode(IDS, output="all"), expected) < 1e-4
    assert distance(session(model, implementation="reference").decode(IDS, output="all"), expected) < 1e-4
    assert distance(step_by_step(model, IDS, 100), expected[99:]) < 1e-4
    options = (
        "--kv-budget",
        "100%",
        "--calib",
        str(calib),
        "--calib-tokens",
        "256",
        "--calib-window",
        "64",
        "--quick",
    )
    latent = run(
        directory, tmp_path / "latent.gguf", "--prefer", how, "--sink", "0", "--recent", "0", *options
    )
    assert {layer["k"]["path"] for layer in latent.layers} == {path}
    live = session(latent)
    parts = [live.decode(IDS[at : at + 40], output="all") for at in range(0, 120, 40)]
    assert distance(np.concatenate(parts), expected) < 1e-3
    assert distance(step_by_step(latent, IDS, 100), expected[99:]) < 1e-3


def test_keys_and_tensors_are_the_stock_ones(tiny: Tiny, tmp_path: Path) -> None:
    path = plain(tiny("laguna"), tmp_path / "plain.gguf")
    found, shapes = keys(path), {name: each.shape for name, each in tensors(path).items()}
    assert found["laguna.attention.head_count"] == [4, 6, 6, 6, 4]
    assert (found["laguna.rope.dimension_count"], found["laguna.rope.dimension_count_swa"]) == (16, 32)
    assert (found["laguna.expert_gating_func"], found["laguna.leading_dense_block_count"]) == (2, 1)
    assert "laguna.attention.sliding_window_pattern" not in found
    assert shapes["blk.0.attn_gate.weight"] == (4, 96)
    assert shapes["blk.1.exp_probs_b.bias"] == (6,)
    assert shapes["blk.0.ffn_up.weight"] == (128, 96)
    assert shapes["blk.1.ffn_up_shexp.weight"] == (48, 96)
    stock = session(core.Model(str(path))).decode(IDS, output="all")
    said = session(run(tiny("laguna", name="again"), tmp_path / "said.gguf", "--method", "none"))
    assert distance(stock, said.decode(IDS, output="all")) < 1e-6


@pytest.mark.parametrize(
    ("without", "changed", "message"),
    [
        (("blk.2.attn_gate.weight",), {}, "blk.2.attn_gate.weight"),
        (("blk.1.ffn_gate_inp.weight",), {}, "blk.1.ffn_gate_inp.weight"),
        (("blk.0.ffn_up.weight",), {}, "blk.0.ffn_up.weight"),
        ((), {"laguna.attention.head_count": [4, 6, 6, 6]}, "5"),
        ((), {"laguna.attention.head_count": [4, 6, 6, 6, 5]}, "head"),
        ((), {"laguna.leading_dense_block_count": 2}, "blk.1"),
        ((), {"laguna.expert_used_count": 7}, "expert"),
    ],
    ids=str,
)
def test_a_file_that_contradicts_itself(
    without: tuple[str, ...], changed: dict[str, Any], message: str, tiny: Tiny, tmp_path: Path
) -> None:
    path = plain(tiny("laguna"), tmp_path / "plain.gguf")
    bad = rewritten(path, tmp_path / "bad.gguf", without=without, keys=changed)
    with pytest.raises(core.Error, match=message):
        core.Model(str(bad))
    with pytest.raises(ConvertError, match=message):
        GgufSource(bad)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"gating": False}, "gating True or per-head or per_head or per-element or per_element; got False"),
        ({"num_attention_heads_per_layer": [4, 6]}, "5 values of num_attention_heads_per_layer; got 2"),
        ({"num_attention_heads_per_layer": [4, 6, 6, 6, 5]}, "query heads divisible by 2 KV heads; got 5"),
        ({"mlp_layer_types": ["sparse", "dense"] * 2 + ["sparse"]}, "layers without experts before"),
        ({"moe_router_logit_softcapping": 3.0}, "moe_router_logit_softcapping 0.0"),
    ],
    ids=str,
)
def test_a_config_that_no_reader_follows(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConvertError, match=message):
        archs.model_spec(TINY["laguna"] | config)
