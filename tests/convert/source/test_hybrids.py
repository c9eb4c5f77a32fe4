"""Models of which most layers are gated delta nets or short convolutions: their tensors, whichever way a
model is stored, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from both import distance, expected_logits, token_ids
from gguf_files import plain, rewritten
from safetensors.torch import load_file, save_file
from test_cli import refused

from conftest import Tiny, keys, tensors
from latentkv_convert.calibrate.decoder import Decoder
from latentkv_convert.cli import main
from latentkv_convert.errors import ConvertError
from latentkv_convert.source.checkpoint_source import CheckpointSource
from latentkv_convert.source.gguf_source import GgufSource
from latentkv_convert.source.source import Source

NAMES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
NONE = ["--method", "none", "--no-plot"]


def logits(source: Source, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        return np.asarray(Decoder(source)(torch.tensor([ids]))[0].numpy())


def changed(directory: Path, config: dict[str, Any], change: Any) -> Path:
    """The checkpoint with these fields of its config, and change(its tensors)."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    file = directory / "model.safetensors"
    save_file({name: each.contiguous() for name, each in change(load_file(file)).items()}, file)
    return directory


@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        *((name, {}) for name in NAMES),
        ("qwen3_5", {"linear_num_value_heads": 2}),
        ("qwen3_5", {"linear_num_key_heads": 1, "linear_num_value_heads": 6, "linear_conv_kernel_dim": 2}),
        ("qwen3_5_moe", {"layer_types": None, "full_attention_interval": 2, "tie_word_embeddings": True}),
        ("qwen3_next", {"linear_num_value_heads": 8, "head_dim": 64, "num_key_value_heads": 1}),
        ("lfm2", {}),
        ("lfm2", {"layer_types": None, "full_attn_idxs": [1, 3], "tie_word_embeddings": False}),
        ("lfm2_moe", {}),
        ("lfm2_moe", {"num_dense_layers": 0}),
    ],
    ids=str,
)
def test_torch_computes_transformers_logits(
    model_type: str, config: dict[str, Any], tiny: Tiny, tmp_path: Path
) -> None:
    """Over more tokens than a chunk of the delta rule has, from a checkpoint and from a GGUF."""
    directory, ids = tiny(model_type, **config), token_ids(150)
    expected = expected_logits(directory, ids)
    source = CheckpointSource(directory)
    assert distance(logits(source, ids), expected) < 1e-4
    other = GgufSource(plain(directory, tmp_path / "plain.gguf"))
    assert distance(logits(other, ids), expected) < 1e-4
    assert other.spec.attention_layers == source.spec.attention_layers != ()
    assert other.spec.block == source.spec.block
    with torch.no_grad():
        decoder = Decoder(source)
        first = next(iter(decoder.layers))
        (first.shortconv_conv if model_type.startswith("lfm2") else first.ssm_a).weight.mul_(1.1)
        assert distance(decoder(torch.tensor([ids]))[0].numpy(), expected) > 1e-3


def test_value_heads_are_tiled_over_key_heads(tiny: Tiny, tmp_path: Path) -> None:
    """Value heads 0 1 2 of key head 0 and 3 4 5 of key head 1 -> 0 3 1 4 2 5, wherever they are rows or
    columns."""
    directory = tiny("qwen3_5", linear_num_value_heads=6)
    found = tensors(plain(directory, tmp_path / "plain.gguf"))
    source = {name: each.numpy() for name, each in load_file(directory / "model.safetensors").items()}
    layer, order = "model.layers.0.linear_attn.", [0, 3, 1, 4, 2, 5]
    wide = np.concatenate([np.arange(16 * head, 16 * head + 16) for head in order])
    assert np.array_equal(found["blk.0.attn_gate.weight"], source[f"{layer}in_proj_z.weight"][wide])
    assert np.array_equal(
        found["blk.0.attn_qkv.weight"][64:], source[f"{layer}in_proj_qkv.weight"][64:][wide]
    )
    assert np.array_equal(found["blk.0.attn_qkv.weight"][:64], source[f"{layer}in_proj_qkv.weight"][:64])
    assert np.array_equal(
        found["blk.0.ssm_conv1d.weight"][64:], source[f"{layer}conv1d.weight"][64:, 0][wide]
    )
    assert np.array_equal(found["blk.0.ssm_out.weight"], source[f"{layer}out_proj.weight"][:, wide])
    for target, name in (("ssm_beta.weight", "in_proj_b.weight"), ("ssm_alpha.weight", "in_proj_a.weight")):
        assert np.array_equal(found[f"blk.0.{target}"], source[layer + name][order])
    assert np.array_equal(found["blk.0.ssm_dt.bias"], source[f"{layer}dt_bias"][order])
    assert np.allclose(found["blk.0.ssm_a"], -np.exp(source[f"{layer}A_log"][order]), rtol=1e-6)
    norm = source["model.layers.0.input_layernorm.weight"] + np.float32(1)
    assert np.array_equal(found["blk.0.attn_norm.weight"], norm)
    assert np.array_equal(found["blk.0.ssm_norm.weight"], source[f"{layer}norm.weight"])


def test_key_heads_are_unpacked(tiny: Tiny, tmp_path: Path) -> None:
    """Qwen3-Next has q, k, two value heads and two gates of a key head side by side."""
    directory = tiny("qwen3_next")
    found = tensors(plain(directory, tmp_path / "plain.gguf"))
    packed = load_file(directory / "model.safetensors")["model.layers.0.linear_attn.in_proj_qkvz.weight"]
    heads = packed.numpy().reshape(2, 6, 16, 96)
    parts = heads[:, 0], heads[:, 1], heads[:, 2:4], heads[:, 4:]
    q, k, v, gate = (part.reshape(-1, 96) for part in parts)
    assert np.array_equal(found["blk.0.attn_qkv.weight"], np.concatenate([q, k, v]))
    assert np.array_equal(found["blk.0.attn_gate.weight"], gate)


def test_keys_are_the_stock_ones(tiny: Tiny, tmp_path: Path) -> None:
    found = keys(plain(tiny("qwen3_5"), tmp_path / "plain.gguf"))
    own = {name: found[f"qwen35.{name}"] for name in ("ssm.conv_kernel", "ssm.state_size", "ssm.group_count")}
    assert own == {"ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2}
    assert found["qwen35.ssm.time_step_rank"] == 4
    assert found["qwen35.ssm.inner_size"] == 64
    assert found["qwen35.full_attention_interval"] == 2
    assert found["qwen35.rope.dimension_count"] == 8
    assert found["qwen35.rope.dimension_sections"] == [11, 11, 10, 0]
    uneven = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    path = plain(tiny("qwen3_5", name="uneven", layer_types=uneven), tmp_path / "uneven.gguf")
    assert keys(path)["qwen35.attention.recurrent_layers"] == [False, True, True, False]
    assert GgufSource(path).spec.attention_layers == (0, 3)


def test_the_text_part_of_a_model_that_sees_pictures(tiny: Tiny, tmp_path: Path) -> None:
    """Under other names, beside tensors that are left alone."""
    directory = tiny("qwen3_5")
    whole = tensors(plain(directory, tmp_path / "text.gguf"))
    text = json.loads((directory / "config.json").read_text())

    def renamed(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        own = {name.replace("model.", "model.language_model.", 1): each for name, each in found.items()}
        return own | {
            "model.visual.patch_embed.proj.weight": torch.zeros(2, 2),
            "mtp.fc.weight": torch.zeros(2),
        }

    config = {"model_type": "qwen3_5", "text_config": text, "vision_config": {}, "hidden_size": None}
    source = CheckpointSource(changed(directory, config, renamed))
    assert source.note == "left out: 1 tensor of multi-token prediction and 1 tensor of pictures and sounds"
    again = tensors(plain(directory, tmp_path / "again.gguf"))
    assert whole.keys() == again.keys()
    assert all(np.array_equal(whole[name], again[name]) for name in whole)


@pytest.mark.parametrize("model_type", ["qwen3_5_moe", "qwen3_next"])
def test_experts_in_one_tensor_are_those_in_many(model_type: str, tiny: Tiny) -> None:
    directory = tiny(model_type)
    source = CheckpointSource(directory)
    roles = [f"ffn_{name}_exps.weight" for name in ("gate", "up", "down")]
    expected = [source.tensor(role, 1) for role in roles]

    def stacked(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        kept = {name: each for name, each in found.items() if ".experts." not in name}
        for layer in range(4):
            stem = f"model.layers.{layer}.mlp.experts"
            gate, up, down = (
                torch.stack([found[f"{stem}.{expert}.{name}_proj.weight"] for expert in range(6)])
                for name in ("gate", "up", "down")
            )
            kept |= {f"{stem}.gate_up_proj": torch.cat([gate, up], dim=1), f"{stem}.down_proj": down}
        return kept

    other = CheckpointSource(changed(directory, {}, stacked))
    for role, array in zip(roles, expected, strict=True):
        assert other.shape(role, 1) == array.shape
        assert np.array_equal(other.tensor(role, 1), array)


def test_blocks_behind_the_layers_are_copied(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stock = plain(tiny("qwen3_5"), tmp_path / "stock.gguf")
    own = {
        "blk.4.nextn.eh_proj.weight": np.ones((96, 192), np.float32),
        "blk.4.attn_k.weight": np.ones((64, 96), np.float32),
    }
    with_more = rewritten(
        stock,
        tmp_path / "more.gguf",
        keys={"qwen35.block_count": 5, "qwen35.nextn_predict_layers": 1},
        extra=own,
    )
    assert GgufSource(with_more).spec.n_layer == 4
    assert main([str(with_more), "-o", str(tmp_path / "out.gguf"), *NONE]) == 0
    assert "1 block behind the 4 layers (multi-token prediction): kept as they are" in capsys.readouterr().err
    found = tensors(tmp_path / "out.gguf")
    assert all(np.array_equal(found[name], array) for name, array in own.items())
    assert keys(tmp_path / "out.gguf")["qwen35.block_count"] == 5


SWAPPED = ["full_attention", "linear_attention", "linear_attention", "full_attention"]


@pytest.mark.parametrize(
    ("config", "dropped", "message"),
    [
        (
            {"layer_types": SWAPPED},
            "",
            "expected attention in layer 0, as the pattern of layers says; got no tensor attn_q.weight",
        ),
        (
            {"layer_types": ["linear_attention"] * 4},
            "",
            "[config.json] expected a layer that attends, whose K and V are cached; got none",
        ),
        ({"layer_types": SWAPPED[:3]}, "", "[config.json] expected 4 layer_types, one a layer; got 3"),
        ({"linear_num_value_heads": 3}, "", "expected linear_num_value_heads a multiple of 2; got 3"),
        ({"linear_value_head_dim": 32}, "", "expected linear_value_head_dim 16; got 32"),
        ({"linear_num_value_heads": 8}, "", "got shape [128, 96]"),
        ({"attn_output_gate": False}, "", "expected attn_output_gate True; got False"),
        ({}, "layers.2.linear_attn.A_log", "expected a tensor model.layers.2.linear_attn.A_log; got none"),
        ({}, "layers.3.self_attn.q_norm.weight", "model.layers.3.self_attn.q_norm.weight; got none"),
    ],
)
def test_a_checkpoint_that_contradicts_itself(
    config: dict[str, Any], dropped: str, message: str, tiny: Tiny, tmp_path: Path, capsys: Any
) -> None:
    def without(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: each for name, each in found.items() if not dropped or dropped not in name}

    directory = changed(tiny("qwen3_5"), config, without)
    assert message in refused(capsys, [str(directory), *NONE], tmp_path / "out.gguf")


@pytest.fixture(scope="module")
def stock(random_checkpoint: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stock")
    return plain(random_checkpoint(folder / "tiny", "qwen3_5"), folder / "stock.gguf")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": {"qwen35.full_attention_interval": 4}}, "expected a delta net in layer 1"),
        ({"keys": {"qwen35.full_attention_interval": 1}}, "expected attention in layer 0"),
        ({"keys": {"qwen35.full_attention_interval": 0}}, "a layer that attends, whose K and V are cached"),
        (
            {"keys": {"qwen35.attention.recurrent_layers": [True, False]}},
            "4 values of attention.recurrent_layers",
        ),
        ({"keys": {"qwen35.ssm.inner_size": 32}}, "expected ssm.inner_size 64, 4 heads of 16"),
        ({"keys": {"qwen35.ssm.group_count": 4}}, "blk.0.attn_qkv.weight] expected shape [192, 96]"),
        ({"without": ("qwen35.ssm.state_size",)}, "ssm.state_size from 1 to 4096; got none"),
        ({"without": ("blk.2.ssm_a",)}, "expected a tensor blk.2.ssm_a; got none"),
        ({"without": ("blk.3.attn_q_norm.weight",)}, "a tensor blk.3.attn_q_norm.weight; got none"),
        ({"extra": {"blk.0.ssm_in.weight": np.ones(4, np.float32)}}, "got ssm_in, which older converters"),
        ({"extra": {"blk.0.ssm_d.weight": np.ones(4, np.float32)}}, "tensors of the qwen35 architecture"),
        ({"extra": {"blk.4.attn_k.weight": np.ones(4, np.float32)}}, "tensors of the qwen35 architecture"),
        ({"keys": {"qwen35.nextn_predict_layers": 4}}, "nextn_predict_layers from 0 to 3; got 4"),
    ],
)
def test_a_gguf_that_contradicts_itself(
    change: dict[str, Any], message: str, stock: Path, tmp_path: Path, capsys: Any
) -> None:
    path = rewritten(stock, tmp_path / "x.gguf", **change)
    assert message in refused(capsys, [str(path), *NONE], tmp_path / "out.gguf")


def test_only_rows_of_attention_are_counted(stock: Path, tmp_path: Path) -> None:
    """Two of four layers attend, with two heads of 32. In the others a sequence has its state and an earlier
    one."""
    assert main([str(stock), "-o", str(tmp_path / "out.gguf"), *NONE]) == 0
    report = json.loads((tmp_path / "out.report.json").read_text())
    assert report["bytes_per_token_f16_full"] == report["bytes_per_token"]["f16"] == 2 * 2 * 2 * 2 * 32
    assert report["state_bytes"] == 2 * 2 * 4 * (3 * (64 + 64) + 4 * 16 * 16)
    assert [layer.get("mixer") for layer in report["layers"]] == ["delta_net", None, "delta_net", None]


def test_a_pattern_of_ours_has_attention(stock: Path, tmp_path: Path) -> None:
    block = {f"latentkv.block.{name}": value for name, value in GgufSource(stock).spec.block.said().items()}
    block["latentkv.block.mixers"] = ["delta_net"] * 4
    with pytest.raises(ConvertError, match=r"latentkv\.block\.mixers with a layer of attention; got none"):
        GgufSource(rewritten(stock, tmp_path / "x.gguf", keys=block))
