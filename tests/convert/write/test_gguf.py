"""What is written is what docs/gguf.md says, and stands for the same model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import keys, tensors
from latentkv_convert.cli import main
from latentkv_convert.source.checkpoint import Checkpoint
from latentkv_convert.source.frequencies import paired_rows

Tiny = Callable[..., Path]
PALU = [
    "--method",
    "palu",
    "--calib-tokens",
    "1024",
    "--fisher-tokens",
    "512",
    "--calib-window",
    "128",
    "--no-plot",
]


def run(directory: Path, out: Path, calib: Path, *options: str) -> dict[str, Any]:
    assert main([str(directory), "-o", str(out), "--calib", str(calib), *PALU, *options]) == 0
    report: dict[str, Any] = json.loads(out.with_suffix(".report.json").read_text())
    return report


def test_none_keeps_every_weight(tiny: Tiny, tmp_path: Path) -> None:
    directory = tiny(attention_bias=True, mlp_bias=True)
    out = tmp_path / "out.gguf"
    assert main([str(directory), "-o", str(out), "--method", "none", "--outtype", "f32"]) == 0
    written, checkpoint = tensors(out), Checkpoint(directory)
    q_rows, k_rows = paired_rows(4, 32, 32), paired_rows(2, 32, 32)
    for layer in range(3):
        source = f"model.layers.{layer}.self_attn"
        for kind in ("weight", "bias"):
            assert np.array_equal(
                written[f"blk.{layer}.attn_q.{kind}"], checkpoint.read(f"{source}.q_proj.{kind}")[q_rows]
            )
            assert np.array_equal(
                written[f"blk.{layer}.attn_k.{kind}"], checkpoint.read(f"{source}.k_proj.{kind}")[k_rows]
            )
            assert np.array_equal(
                written[f"blk.{layer}.attn_v.{kind}"], checkpoint.read(f"{source}.v_proj.{kind}")
            )
            assert np.array_equal(
                written[f"blk.{layer}.attn_output.{kind}"], checkpoint.read(f"{source}.o_proj.{kind}")
            )
            assert np.array_equal(
                written[f"blk.{layer}.ffn_gate.{kind}"],
                checkpoint.read(f"model.layers.{layer}.mlp.gate_proj.{kind}"),
            )
    assert np.array_equal(written["token_embd.weight"], checkpoint.read("model.embed_tokens.weight"))
    assert np.array_equal(written["output.weight"], checkpoint.read("lm_head.weight"))
    assert len(written) == 3 + 3 * (2 + 4 * 2 + 3 * 2)
    assert not [name for name in keys(out) if name.startswith(("latentkv.k.", "latentkv.v."))]


@pytest.mark.parametrize("variant", [{}, {"attention_bias": True}, {"num_key_value_heads": 4}], ids=str)
@pytest.mark.parametrize("group", ["1", "all"])
@pytest.mark.parametrize("rotate", ["--rotate", "--no-rotate"])
def test_full_rank_rebuilds_the_projections(
    tiny: Tiny, tmp_path: Path, calib: Path, variant: dict[str, Any], group: str, rotate: str
) -> None:
    """B·A of every group = the permuted W_k and the W_v of the checkpoint, on inputs, in float32."""
    directory = tiny(**variant)
    options = ["--keep", "1.0", "--group", group, "--allocate", "uniform", "--outtype", "f32", rotate]
    report = run(directory, tmp_path / "out.gguf", calib, *options)
    assert report["keep"] == 1.0
    written, checkpoint = tensors(tmp_path / "out.gguf"), Checkpoint(directory)
    n_kv = variant.get("num_key_value_heads", 2)
    x = np.random.default_rng(0).normal(size=(96, 10))
    for layer in range(3):
        for side in "kv":
            weight = checkpoint.read(f"model.layers.{layer}.self_attn.{side}_proj.weight")
            expected = (weight[paired_rows(n_kv, 32, 32)] if side == "k" else weight) @ x
            got = rebuilt(written, layer, side, n_kv, n_kv if group == "all" else 1, [])
            assert np.linalg.norm(got @ x - expected) < 2e-6 * np.linalg.norm(expected)
            assert f"blk.{layer}.attn_{side}.weight" not in written
            assert (f"blk.{layer}.attn_{side}.bias" in written) == ("attention_bias" in variant)


def rebuilt(
    written: dict[str, np.ndarray], layer: int, side: str, n_kv: int, group: int, ranks: list[int]
) -> np.ndarray:
    """[w, d] as a reader of docs/gguf.md computes it."""
    a, b = written[f"blk.{layer}.attn_{side}_a.weight"], written[f"blk.{layer}.attn_{side}_b.weight"]
    head_dim, r_max = b.shape[0] // n_kv, b.shape[1]
    ranks = ranks or [r_max] * (n_kv // group)
    assert a.shape[0] == sum(ranks)
    starts = np.concatenate([[0], np.cumsum(ranks)])
    rows = []
    for head in range(n_kv):
        g = head // group
        block = b[head * head_dim : (head + 1) * head_dim]
        assert not block[:, ranks[g] :].any()  # zero past the group's rank
        rows.append(block[:, : ranks[g]] @ a[starts[g] : starts[g + 1]])
    return np.concatenate(rows)


def test_ragged_ranks_follow_the_file_description(tiny: Tiny, tmp_path: Path, calib: Path) -> None:
    directory = tiny(num_key_value_heads=4)
    report = run(
        directory, tmp_path / "out.gguf", calib, "--keep", "0.65", "--group", "1", "--outtype", "f32"
    )
    written, described = tensors(tmp_path / "out.gguf"), keys(tmp_path / "out.gguf")
    assert described["latentkv.version"] == 1
    assert described["latentkv.k.path"] == ["rebuild"] * 3
    assert described["latentkv.v.path"] == ["latent"] * 3
    assert described["latentkv.k.group"] == [1] * 3
    checkpoint = Checkpoint(directory)
    kept = 0
    for side in "kv":
        ranks = np.array(described[f"latentkv.{side}.ranks"]).reshape(3, 4)
        kept += ranks.sum()
        for layer in range(3):
            got = rebuilt(written, layer, side, 4, 1, ranks[layer].tolist())
            weight = checkpoint.read(f"model.layers.{layer}.self_attn.{side}_proj.weight")
            expected = weight[paired_rows(4, 32, 32)] if side == "k" else weight
            error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
            assert 0 < error < 0.9
            assert report["layers"][layer][side]["ranks"] == ranks[layer].tolist()
    assert len({*described["latentkv.k.ranks"], *described["latentkv.v.ranks"]}) > 1
    assert kept == round(0.65 * 3 * 2 * 4 * 32 / 16) * 16
    assert np.isclose(report["keep"], kept / (3 * 2 * 128))


def test_block_and_stock_keys(tiny: Tiny, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    assert main([str(tiny()), "-o", str(out), "--method", "none"]) == 0
    found = keys(out)
    assert found["general.architecture"] == "llama"
    assert {name.removeprefix("latentkv.block."): v for name, v in found.items() if ".block." in name} == {
        "norm": "rms",
        "activation": "silu",
        "ffn": "gated",
        "parallel": False,
        "position": "rope",
        "rope_pairing": "norm",
    }
    assert found["llama.attention.key_length"] == 32
    assert found["llama.embedding_length"] == 96
    assert found["llama.rope.dimension_count"] == 32
    assert found["tokenizer.ggml.bos_token_id"] == 0


@pytest.mark.parametrize("outtype", ["f32", "f16", "bf16", "q8_0", "q4_0"])
def test_weight_types(tiny: Tiny, tmp_path: Path, calib: Path, outtype: str) -> None:
    from gguf import GGUFReader

    directory = tiny()
    run(directory, tmp_path / "out.gguf", calib, "--group", "2", "--outtype", outtype)
    types = {t.name: t.tensor_type.name.lower() for t in GGUFReader(tmp_path / "out.gguf").tensors}
    assert types["blk.0.attn_q.weight"] == outtype
    assert types["blk.0.attn_k_a.weight"] == outtype
    assert types["token_embd.weight"] == {"q4_0": "q8_0"}.get(outtype, outtype)
    assert types["blk.0.attn_norm.weight"] == "f32"
    assert types["blk.0.attn_k_b.weight"] == ("f32" if outtype == "f32" else "f16")
    close = {"f32": 1e-7, "f16": 1e-3, "bf16": 4e-3, "q8_0": 1e-2, "q4_0": 0.12}[outtype]
    weight = Checkpoint(directory).read("model.layers.1.mlp.up_proj.weight")
    error = np.linalg.norm(tensors(tmp_path / "out.gguf")["blk.1.ffn_up.weight"] - weight) / np.linalg.norm(
        weight
    )
    assert error <= close


def test_same_seed_same_file(tiny: Tiny, tmp_path: Path, calib: Path) -> None:
    directory = tiny()
    for name, seed in (("a", "3"), ("b", "3"), ("c", "4")):
        run(directory, tmp_path / f"{name}.gguf", calib, "--group", "all", "--seed", seed, "--no-cache")
    first, again, other = (tensors(tmp_path / f"{name}.gguf")["blk.0.attn_v_a.weight"] for name in "abc")
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_report_counts_true_bytes(tiny: Tiny, tmp_path: Path, calib: Path) -> None:
    report = run(tiny(), tmp_path / "out.gguf", calib, "--keep", "0.5", "--group", "all")
    rows = [layer[side]["ranks"] for layer in report["layers"] for side in "kv"]
    assert report["bytes_per_token_f16_full"] == 2 * 2 * 3 * 64
    assert report["bytes_per_token"]["f16"] == sum(2 * r for (r,) in rows)
    # scale and minimum (4 bytes) and 3 bits a channel, the row rounded up to 4
    assert report["bytes_per_token"]["q3"] == sum(-(-(4 + 6 * r // 16) // 4) * 4 for (r,) in rows)
    for layer in report["layers"]:
        assert 0 < layer["k"]["energy"] <= 1
        assert 0 < layer["v"]["energy"] <= 1


METHODS = ("palu", "zack", "lorc", "eigen", "tale", "waterfill")


@pytest.mark.parametrize("method", METHODS)
def test_picture_of_the_plan_is_drawn(tiny: Tiny, tmp_path: Path, calib: Path, method: str) -> None:
    amount = ["--kv-budget", "40%", "--recent", "32"] if method == "waterfill" else ["--keep", "0.75"]
    arguments = [str(tiny()), "-o", str(tmp_path / "out.gguf"), "--calib", str(calib), "--method", method]
    assert main([*arguments, *amount, *PALU[2:-1]]) == 0
    assert (tmp_path / "out.ranks.png").read_bytes().startswith(b"\x89PNG")
