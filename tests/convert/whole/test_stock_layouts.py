"""What llama.cpp reads alike, this runtime and converter read alike; what they do not read, they refuse."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from both import core, distance, session, token_ids
from gguf_files import plain, rewritten

from conftest import Tiny
from latentkv_convert.cli import main
from latentkv_convert.source.gguf_file import GgufFile

N = 60
FUSED = "ffn_gate_up_exps.weight"
GEMMA = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 64}


def logits(path: Path) -> np.ndarray:
    found: np.ndarray = session(core.Model(str(path))).decode(token_ids(N), output="all")
    return found


def tensor(file: GgufFile, name: str) -> np.ndarray:
    return file.raw(name).view(np.float32).reshape(file.tensors[name].shape)


def with_experts_otherwise(path: Path, out: Path) -> Path:
    """Gates and ups in one tensor where they were in two, and in two where they were in one."""
    file = GgufFile(path)
    without: list[str] = []
    extra: dict[str, np.ndarray] = {}
    for name in file.tensors:
        if name.endswith(FUSED):
            without.append(name)
            gate, up = np.split(tensor(file, name), 2, axis=1)
            extra |= {name.replace("gate_up", "gate"): gate.copy(), name.replace("gate_up", "up"): up.copy()}
        elif name.endswith("ffn_gate_exps.weight"):
            up_name = name.replace("gate", "up")
            without += [name, up_name]
            both = [tensor(file, name), tensor(file, up_name)]
            extra[name.replace("gate", "gate_up")] = np.concatenate(both, axis=1)
    assert extra
    return rewritten(path, out, without=tuple(without), extra=extra)


@pytest.mark.parametrize("model_type", ["qwen3_5_moe", "qwen3_next", "glm4_moe_lite", "gemma4"])
def test_gates_and_ups_of_experts_are_in_one_tensor_or_in_two(
    model_type: str, tiny: Tiny, tmp_path: Path
) -> None:
    config = GEMMA if model_type == "gemma4" else {}
    usual = plain(tiny(model_type, **config), tmp_path / "usual.gguf")
    other = with_experts_otherwise(usual, tmp_path / "other.gguf")
    expected = logits(usual)
    assert distance(logits(other), expected) < 1e-5
    converted = tmp_path / "converted.gguf"
    assert main([str(other), "-o", str(converted), "--method", "none"]) == 0
    assert distance(logits(converted), expected) < 1e-5


def test_nemotron_with_a_block_that_predicts_more_tokens(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The arrays of sizes have a value for it too."""
    usual = plain(tiny("nemotron_h_moe"), tmp_path / "usual.gguf")
    file, of = GgufFile(usual), "nemotron_h_moe."
    n_layer = file.values[f"{of}block_count"].data
    arrays = {"attention.head_count_kv": 2, "feed_forward_length": 48}
    keys: dict[str, Any] = {
        f"{of}{name}": [*file.values[f"{of}{name}"].data, n] for name, n in arrays.items()
    }
    keys |= {f"{of}block_count": n_layer + 1, f"{of}nextn_predict_layers": 1}
    extra = {
        f"blk.{n_layer}.{name}": tensor(file, f"blk.2.{name}")
        for name in ("attn_norm.weight", "attn_q.weight")
    }
    extra |= {f"blk.{n_layer}.nextn.eh_proj.weight": np.ones((96, 192), dtype=np.float32)}
    more = rewritten(usual, tmp_path / "more.gguf", keys=keys, extra=extra)
    converted = tmp_path / "converted.gguf"
    assert main([str(more), "-o", str(converted), "--method", "none"]) == 0
    assert "1 block behind the 5 layers" in capsys.readouterr().err
    for path in (more, converted):
        assert distance(logits(path), logits(usual)) < 1e-5


@pytest.mark.parametrize("role", ["attn_q.scale", "ffn_up.scale", "attn_k.scale"])
def test_factors_of_weights_are_not_left_out(
    role: str, tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """llama.cpp multiplies products with NVFP4 weights by such factors."""
    usual = plain(tiny("qwen3"), tmp_path / "usual.gguf")
    scaled = rewritten(usual, tmp_path / "scaled.gguf", extra={f"blk.1.{role}": np.full(1, 2, np.float32)})
    with pytest.raises(core.Error, match=rf"of the qwen3 architecture; got blk\.1\.{role}.*NVFP4"):
        core.Model(str(scaled))
    assert main([str(scaled), "-o", str(tmp_path / "out.gguf"), "--method", "none"]) == 2
    assert f"got blk.1.{role}; use a file of another quantization" in capsys.readouterr().err


def test_a_plain_config_may_give_sizes_of_experts_once_a_layer(tiny: Tiny, tmp_path: Path) -> None:
    once = tiny("hunyuan_v1_moe", name="once", moe_intermediate_size=64, moe_topk=3)
    each = tiny("hunyuan_v1_moe", name="each")
    shutil.copy(once / "model.safetensors", each / "model.safetensors")
    paths = [plain(checkpoint, tmp_path / f"{checkpoint.name}.gguf") for checkpoint in (once, each)]
    assert distance(logits(paths[1]), logits(paths[0])) == 0
