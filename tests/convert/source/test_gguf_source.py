"""A GGUF is a source: the model of its checkpoint, the same conversion, and its weights byte for byte."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from both import core, distance, session, token_ids
from gguf_files import plain, rewritten

from conftest import Tiny, keys
from latentkv.plan import factors
from latentkv_convert.calibrate.decoder import Decoder
from latentkv_convert.cli import main
from latentkv_convert.errors import ConvertError
from latentkv_convert.recover import lora
from latentkv_convert.source import archs
from latentkv_convert.source.checkpoint_source import CheckpointSource
from latentkv_convert.source.frequencies import frequencies, magnitude
from latentkv_convert.source.gguf_file import GgufFile, paths
from latentkv_convert.source.gguf_source import GgufSource
from latentkv_convert.source.source import Source

# Modules whose files are read in test_hybrids, test_mla and test_gemma4.
ELSEWHERE = ("deepseek_v2", "deepseek_v3", "gemma4", "glm4_moe_lite", "granitemoehybrid", "nemotron_h")
ELSEWHERE += ("lfm2", "lfm2_moe", "nemotron_h_moe", "qwen3_5", "qwen3_5_moe", "qwen3_next")
CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in archs.names() if name not in ELSEWHERE),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}),
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    ("exaone4", {"sliding_window": 48, "sliding_window_pattern": 3, "layer_types": None}),
    ("laguna", {"gating": "per-element", "layer_types": None, "num_attention_heads_per_layer": None}),
    ("gemma3_text", {"layer_types": ["full_attention"] * 3}),
    ("gemma3_text", {"layer_types": None, "num_hidden_layers": 7, "final_logit_softcapping": 5.0}),
    ("olmo2", {"num_key_value_heads": 1}),
    (
        "phi3",
        {
            "partial_rotary_factor": 0.75,
            "rope_scaling": {"type": "longrope", "short_factor": [1.5] * 12, "long_factor": [4.0] * 12},
        },
    ),
    ("phi3", {"sliding_window": 40, "rope_scaling": None, "partial_rotary_factor": 0.5}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    ("falcon", {"multi_query": False, "bias": True}),
    ("opt", {"enable_bias": False, "tie_word_embeddings": False}),
    ("mpt", {"attn_config": {"clip_qkv": 1.5}}),
    ("granite_swa", {"layer_rope_theta": None, "layer_types": None}),
    ("ernie4_5_moe", {"moe_num_shared_experts": 0, "moe_layer_start_index": 0}),
]
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
K_QUANTS = {
    "attn_q.weight": "q4_k",
    "attn_k.weight": "q4_k",
    "attn_v.weight": "q6_k",
    "ffn_down.weight": "q6_k",
    "ffn_up.weight": "q4_1",
    "token_embd.weight": "q8_0",
    "output.weight": "q6_k",
}
CALIBRATED = ["--calib-tokens", "1024", "--fisher-tokens", "512", "--calib-window", "128", "--no-plot"]
WATERFILL = ["--kv-budget", "40%", "--recent", "32", *CALIBRATED]


def converted(source: Path, out: Path, calib: Path, *options: str) -> Path:
    assert main([str(source), "-o", str(out), "--calib", str(calib), *options]) == 0
    return out


def tensor_bytes(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Name -> type, shape and bytes, over all parts."""
    parts = GgufFile(path)
    infos = {name: parts.info(name) for name in parts.names()}
    return {name: (info.type, info.shape, parts.raw(name).tobytes()) for name, info in infos.items()}


NATIVE = Path(__file__).parents[3] / "build/make/native/tests/emulated_gpu/test_gpu_session_emulated"


def logits(source: Source, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        return np.asarray(Decoder(source)(torch.tensor([ids]))[0].numpy())


@pytest.mark.parametrize(("model_type", "config"), CASES, ids=str)
def test_the_same_model_as_its_checkpoint(
    model_type: str, config: dict[str, Any], tiny: Tiny, tmp_path: Path
) -> None:
    directory = tiny(model_type, **config)
    ours = GgufSource(plain(directory, tmp_path / "plain.gguf"))
    theirs: Source = CheckpointSource(directory)
    roles = [(role.target, None) for role in theirs.spec.global_tensors]
    layered = [role.target for role in theirs.spec.layer_tensors]
    layered += [f"attn_{side}.{leaf}" for side in "qkv" for leaf in ("weight", "bias")]
    roles += [(role, layer) for role in layered for layer in range(theirs.spec.n_layer)]
    for role, layer in roles:
        assert ours.has(role, layer) == theirs.has(role, layer), role
        if theirs.has(role, layer):
            assert ours.shape(role, layer) == theirs.shape(role, layer), role
            assert np.array_equal(ours.tensor(role, layer), theirs.tensor(role, layer)), role
    for name in ("n_layer", "n_head", "n_kv", "head_dim", "n_rot", "n_vocab", "n_ctx", "packed_qkv"):
        assert getattr(ours.spec, name) == getattr(theirs.spec, name), name
    assert ours.spec.before_scores == theirs.spec.before_scores
    if ours.spec.block.position == "rope":
        for context, layer in itertools.product((64, 512), range(ours.spec.n_layer)):
            found, expected = (frequencies(spec, context, layer) for spec in (ours.spec, theirs.spec))
            assert np.allclose(found, expected, rtol=1e-6)
            assert np.isclose(magnitude(ours.spec, layer), magnitude(theirs.spec, layer), rtol=1e-6)
    assert distance(logits(ours, token_ids(60)), logits(theirs, token_ids(60))) < 1e-6
    assert_a_gpu_finds_its_branches(tmp_path / "plain.gguf")


def assert_a_gpu_finds_its_branches(file: Path) -> None:
    """K, V and the queries of every layer can be computed beside each other, as the graph says which nodes
    lead to them."""
    if NATIVE.exists():  # built by `make test`
        done = subprocess.run([NATIVE, "roles", file], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-500:]


@pytest.mark.parametrize(
    ("model_type", "config"),
    [("llama", {}), ("qwen3", {}), ("olmo2", {}), ("phi3", {"rope_scaling": None}), ("opt", {})],
    ids=["llama", "qwen3", "olmo2", "phi3", "opt"],
)
def test_the_same_conversion_as_from_its_checkpoint(
    model_type: str, config: dict[str, Any], tiny: Tiny, calib: Path, tmp_path: Path
) -> None:
    """Weights in f32: the same calibration, the same plan, the same tensors and keys."""
    directory = tiny(model_type, **config)
    source = plain(directory, tmp_path / "plain.gguf")
    theirs = converted(directory, tmp_path / "theirs.gguf", calib, *WATERFILL, "--outtype", "f32")
    ours = converted(source, tmp_path / "ours.gguf", calib, *WATERFILL)
    assert tensor_bytes(ours) == tensor_bytes(theirs)
    assert any(".attn_k_e." in name or ".attn_q_e." in name for name in tensor_bytes(ours))
    found, expected = keys(ours), keys(theirs)
    changed = {key for key in expected if found.get(key) != expected[key]}
    assert changed <= {"GGUF.kv_count"}


@pytest.mark.parametrize("name", ["whole", "in two parts"])
def test_weights_that_stay_are_copied_byte_for_byte(
    name: str, tiny: Tiny, calib: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever their type, keys and vocabulary too, and the result opens in the runtime. Packages for
    checkpoints alone are not needed."""
    whole = plain(tiny(**WIDE), tmp_path / "plain.gguf")
    per_part = 20 if name == "in two parts" else 0
    source = rewritten(whole, tmp_path / "mixed.gguf", K_QUANTS, per_part=per_part)
    assert len(paths(source)) == (2 if per_part else 1)
    for package in ("transformers", "safetensors", "tokenizers"):
        monkeypatch.setitem(sys.modules, package, None)
    out = converted(source, tmp_path / "out.gguf", calib, *WATERFILL)
    before, after = tensor_bytes(source), tensor_bytes(out)
    assert {kind for kind, _, _ in before.values()} == {"f32", "q4_k", "q6_k", "q4_1", "q8_0"}
    assert before.items() <= after.items()  # exact tokens need the projections, so that these stay too
    assert {kind for name, (kind, _, _) in after.items() if name not in before} == {"f16"}
    was, now = GgufFile(source).values, GgufFile(out).values
    kept = {key: value for key, value in was.items() if not key.startswith("split.")}
    assert kept.items() <= now.items()
    assert all(key.startswith("latentkv.") for key in now.keys() - kept.keys())
    model = core.Model(str(out))
    assert np.isfinite(session(model, kv="").decode(token_ids(40), output="all")).all()


@pytest.mark.parametrize(
    ("model_type", "gate", "down"), [("qwen3_moe", "q4_k", "q6_k"), ("gpt_oss", "mxfp4", "mxfp4")]
)
def test_experts_are_copied_byte_for_byte(
    model_type: str, gate: str, down: str, tiny: Tiny, calib: Path, tmp_path: Path
) -> None:
    """Stacked, in a type that is never written anew; and calibration runs them."""
    size = {"intermediate_size": 256} if model_type == "gpt_oss" else {"moe_intermediate_size": 256}
    directory = tiny(model_type, **{**WIDE, **size})
    kinds = {"ffn_gate_exps.weight": gate, "ffn_up_exps.weight": gate, "ffn_down_exps.weight": down}
    source = rewritten(plain(directory, tmp_path / "plain.gguf"), tmp_path / "mixed.gguf", kinds)
    out = converted(source, tmp_path / "out.gguf", calib, *WATERFILL)
    before, after = tensor_bytes(source), tensor_bytes(out)
    n_expert = 6 if model_type == "qwen3_moe" else 4
    assert before["blk.1.ffn_down_exps.weight"][:2] == (down, (n_expert, 256, 256))
    biases = {f"blk.{layer}.attn_{side}.bias" for layer in range(3) for side in "kv"}  # take in rows' means
    assert {name: before[name] for name in before.keys() - biases}.items() <= after.items()
    whole, ids = tmp_path / "whole.gguf", token_ids(60)
    assert main([str(source), "-o", str(whole), "--method", "none", "--outtype", "f32"]) == 0
    expected = logits(GgufSource(source), ids)
    assert distance(session(core.Model(str(whole))).decode(ids, output="all"), expected) < 1e-4


def test_experts_that_are_missing(tiny: Tiny, tmp_path: Path) -> None:
    """One line, of the converter and of the runtime."""
    whole = plain(tiny("qwen3_moe"), tmp_path / "plain.gguf")
    for name in ("ffn_gate_inp", "ffn_up_exps", "ffn_down_exps"):
        path = rewritten(whole, tmp_path / "cut.gguf", without=(f"blk.1.{name}.weight",))
        with pytest.raises(ConvertError, match=rf"expected a tensor blk\.1\.{name}\.weight; got none"):
            GgufSource(path)
        with pytest.raises(core.Error, match=rf"expected a tensor blk\.1\.{name}\.weight; got none$"):
            core.Model(str(path))
    for key, value, message in [
        ("expert_count", 0, "expected a value from 2 to 4096; got 0"),
        ("expert_used_count", 7, "expected a value from 1 to 6; got 7"),
    ]:
        path = rewritten(whole, tmp_path / "cut.gguf", keys={f"qwen3moe.{key}": value})
        with pytest.raises(core.Error, match=message):
            core.Model(str(path))
        with pytest.raises(
            ConvertError, match=r"expert_count from 2 to 4096; got 0|up to 6, all experts; got 7"
        ):
            GgufSource(path)


def test_factors_in_place_of_projections(tiny: Tiny, calib: Path, tmp_path: Path) -> None:
    """Form A: K and V's own tensors go, all others are copied."""
    source = rewritten(plain(tiny(**WIDE), tmp_path / "plain.gguf"), tmp_path / "mixed.gguf", K_QUANTS)
    out = converted(source, tmp_path / "out.gguf", calib, "--method", "palu", *CALIBRATED)
    before, after = tensor_bytes(source), tensor_bytes(out)
    gone = {name for name in before if name not in after}
    assert gone == {f"blk.{layer}.attn_{side}.weight" for layer in range(3) for side in "kv"}
    assert {name: before[name] for name in before.keys() - gone}.items() <= after.items()
    made = {name.split(".", 2)[2]: after[name][0] for name in after.keys() - before.keys()}
    assert made == {f"attn_{side}_{letter}.weight": kind for side in "kv" for letter, kind in MADE.items()}
    core.Model(str(out))


def test_factors_of_a_gguf_can_be_trained(
    tiny: Tiny, calib: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lora, "WINDOW", 64)
    source = plain(tiny(), tmp_path / "plain.gguf")
    training = ["--finetune", str(calib), "--steps", "1", "--lora-rank", "4"]
    palu = ["--method", "palu", *CALIBRATED]
    trained = tensor_bytes(converted(source, tmp_path / "trained.gguf", calib, *palu, *training))
    untrained = tensor_bytes(converted(source, tmp_path / "untrained.gguf", calib, *palu))
    assert trained.keys() == untrained.keys()
    changed = {name for name in trained if trained[name] != untrained[name]}
    assert {name.split(".")[2] for name in changed} == {
        f"attn_{side}_{letter}" for side in "kv" for letter in "ab"
    }


MADE = {"a": "q8_0", "b": "f16"}  # of blocks of any kind


def test_packed_query_rows_are_copied(tiny: Tiny, calib: Path, tmp_path: Path) -> None:
    """Phi-3's attn_qkv: the rows of Q as they are, in their own type."""
    source = rewritten(
        plain(tiny("phi3"), tmp_path / "plain.gguf"), tmp_path / "mixed.gguf", {"attn_qkv.weight": "q8_0"}
    )
    out = converted(source, tmp_path / "out.gguf", calib, "--method", "palu", *CALIBRATED)
    packed, query = tensor_bytes(source)["blk.1.attn_qkv.weight"], tensor_bytes(out)["blk.1.attn_q.weight"]
    assert query[0] == "q8_0"
    assert query[2] == packed[2][: len(query[2])]
    assert len(packed[2]) == len(query[2]) // query[1][0] * packed[1][0]


def test_the_same_tokens_of_a_chat(tiny: Tiny, tmp_path: Path) -> None:
    """Special tokens that a text spells out are tokens, of a checkpoint and of its GGUF; none is added."""
    directory = tiny()
    ours, theirs = GgufSource(plain(directory, tmp_path / "plain.gguf")), CheckpointSource(directory)
    text = "<|begin|>What is the sea?<|end|>\nThe sea is water.<|end|>\n"
    ids = list(ours.encode(text))
    assert ids == list(theirs.encode(text))
    assert [ids.count(special) for special in (0, 1)] == [1, 2]
    assert 0 not in ours.encode("the sea")


def test_outtype_encodes_the_rest_anew(tiny: Tiny, tmp_path: Path) -> None:
    source = rewritten(plain(tiny(**WIDE), tmp_path / "plain.gguf"), tmp_path / "mixed.gguf", K_QUANTS)
    out = tmp_path / "out.gguf"
    assert main([str(source), "-o", str(out), "--method", "none", "--outtype", "f32"]) == 0
    assert {kind for kind, _, _ in tensor_bytes(out).values()} == {"f32"}
    assert keys(out)["general.file_type"] == 0
    ids = token_ids(60)
    assert distance(logits(GgufSource(out), ids), logits(GgufSource(source), ids)) == 0


def test_the_calibration_runs_what_the_runtime_reads(tiny: Tiny, tmp_path: Path) -> None:
    source = rewritten(plain(tiny(**WIDE), tmp_path / "plain.gguf"), tmp_path / "mixed.gguf", K_QUANTS)
    whole, ids = tmp_path / "whole.gguf", token_ids(60)
    assert main([str(source), "-o", str(whole), "--method", "none", "--outtype", "f32"]) == 0
    expected = logits(GgufSource(source), ids)
    assert distance(session(core.Model(str(whole))).decode(ids, output="all"), expected) < 1e-4
    got = session(core.Model(str(source))).decode(ids, output="all")
    assert distance(got, expected) < 0.1  # ggml quantizes activations beside quantized weights


@pytest.mark.parametrize(
    ("model_type", "config", "types"),
    [
        ("llama", WIDE, K_QUANTS),
        ("qwen2", {}, {"attn_k.weight": "q8_0"}),
        ("olmo2", {}, {"attn_v.weight": "q8_0"}),
        ("phi3", {"rope_scaling": None}, {"attn_qkv.weight": "q8_0"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("method", [["--method", "palu"], ["--kv-budget", "40%", "--recent", "32"]], ids=str)
def test_a_file_says_exactly_what_its_factors_add(
    method: list[str],
    model_type: str,
    config: dict[str, Any],
    types: dict[str, str],
    tiny: Tiny,
    calib: Path,
    tmp_path: Path,
) -> None:
    """By the types that projections have in the source, form A and form E."""
    stock = plain(tiny(model_type, **config), tmp_path / "plain.gguf")
    source = rewritten(stock, tmp_path / "source.gguf", types)
    out = converted(source, tmp_path / "out.gguf", calib, *method, *CALIBRATED)
    before, after = (
        {name: len(data) for name, (_, _, data) in tensor_bytes(path).items()} for path in (source, out)
    )
    model = core.Model(str(out))
    made = {name for name in after if name not in before and "attn_q." not in name}
    if model_type != "phi3":  # whose Q, K and V are apart beside a latent
        assert model.factor_bytes == sum(after[name] for name in made)
    added = sum(after.values()) - sum(before.values())
    assert factors.added_bytes(model) == added
    assert json.loads(out.with_suffix(".report.json").read_text())["added_weight_bytes"] == added
