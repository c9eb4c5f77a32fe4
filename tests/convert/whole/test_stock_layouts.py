"""What llama.cpp reads alike, this runtime and converter read alike; what they do not read, they refuse."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from both import core, distance, equals_transformers, session, token_ids
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


def test_ernie_as_llama_cpp_writes_it(tiny: Tiny, tmp_path: Path) -> None:
    """No key says that scores are a softmax, and biases of experts are matrices of one row."""
    usual = plain(tiny("ernie4_5_moe"), tmp_path / "usual.gguf")
    file = GgufFile(usual)
    biases = [name for name in file.tensors if name.endswith("exp_probs_b.bias")]
    unsaid = [f"ernie4_5-moe.expert_{name}" for name in ("gating_func", "weights_norm", "weights_scale")]
    assert biases
    assert file.values.keys() >= set(unsaid)
    rows = {name: tensor(file, name)[None] for name in biases}
    stock = rewritten(usual, tmp_path / "stock.gguf", without=(*unsaid, *biases), extra=rows)
    converted = tmp_path / "converted.gguf"
    assert main([str(stock), "-o", str(converted), "--method", "none"]) == 0
    for path in (stock, converted):
        assert distance(logits(path), logits(usual)) < 1e-5


FACTORS = ("attn_", "ffn_", "ssm_in", "ssm_out", "ssm_alpha", "ssm_beta")
NONE = ("norm", "gate_inp", "conv1d", "output_scale")


def with_factors(path: Path, out: Path) -> tuple[Path, Path]:
    """A file whose weights have factors as NVFP4's have, and one whose weights are multiplied with them."""
    file, rng = GgufFile(path), np.random.default_rng(0)
    factors: dict[str, np.ndarray] = {}
    scaled: dict[str, np.ndarray] = {}
    for name, info in file.tensors.items():
        role = name.split(".")[2] if name.startswith("blk.") else ""
        if name.endswith(".weight") and role.startswith(FACTORS) and not any(end in role for end in NONE):
            n = info.shape[0] if len(info.shape) > 2 else 1
            factor = rng.uniform(0.5, 1.5, n).astype(np.float32)
            factors[name.replace(".weight", ".scale")] = factor
            factors[name.replace(".weight", ".input_scale")] = np.ones(n, np.float32)
            scaled[name] = tensor(file, name) * factor.reshape(-1, *[1] * (len(info.shape) - 1))
    rewritten(path, out, extra=factors)
    return out, rewritten(path, out.with_suffix(".scaled"), without=tuple(scaled), extra=scaled)


@pytest.mark.parametrize(
    "model_type", ["qwen3", "qwen3_5", "qwen3_5_moe", "granitemoehybrid", "nemotron_h_moe"]
)
def test_products_are_multiplied_with_the_factors_of_their_weights(
    model_type: str, tiny: Tiny, tmp_path: Path
) -> None:
    """Direct, copied by the converter, and encoded anew."""
    usual = plain(tiny(model_type), tmp_path / "usual.gguf")
    stock, scaled = with_factors(usual, tmp_path / "stock.gguf")
    expected = logits(scaled)
    assert distance(logits(usual), expected) > 1e-2
    assert distance(logits(stock), expected) < 1e-4
    for options in ((), ("--outtype", "f32")):
        out = tmp_path / "converted.gguf"
        assert main([str(stock), "-o", str(out), "--method", "none", *options]) == 0
        assert distance(logits(out), expected) < 1e-4


def test_factors_of_another_shape_and_sidecars_of_factors_are_refused(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = plain(tiny("qwen3"), tmp_path / "usual.gguf")
    stock, _ = with_factors(usual, tmp_path / "stock.gguf")
    assert main([str(stock), "-o", str(tmp_path / "side.gguf"), "--sidecar"]) == 2
    assert "[--sidecar] expected a GGUF whose weights have no factors" in capsys.readouterr().err
    wrong = rewritten(usual, tmp_path / "wrong.gguf", extra={"blk.1.attn_q.scale": np.ones(2, np.float32)})
    with pytest.raises(core.Error, match=r"blk\.1\.attn_q\.scale with ne \[1\]; got \[2\]"):
        core.Model(str(wrong))
    assert main([str(wrong), "-o", str(tmp_path / "out.gguf"), "--method", "none"]) == 2
    assert "expected a factor of blk.1.attn_q.weight in f32" in capsys.readouterr().err


@pytest.mark.parametrize("latent", [0, 64])
def test_experts_that_read_less_than_the_hidden_state(latent: int, tiny: Tiny, tmp_path: Path) -> None:
    """Nemotron 3 Super."""
    checkpoint = tiny("nemotron_h_moe", moe_latent_size=latent or None)
    equals_transformers(checkpoint, tmp_path / "plain.gguf")


def test_a_plain_config_may_give_sizes_of_experts_once_a_layer(tiny: Tiny, tmp_path: Path) -> None:
    once = tiny("hunyuan_v1_moe", name="once", moe_intermediate_size=64, moe_topk=3)
    each = tiny("hunyuan_v1_moe", name="each")
    shutil.copy(once / "model.safetensors", each / "model.safetensors")
    paths = [plain(checkpoint, tmp_path / f"{checkpoint.name}.gguf") for checkpoint in (once, each)]
    assert distance(logits(paths[1]), logits(paths[0])) == 0
