"""A GGUF that cannot be converted: one line that says why, exit status 2, and no file."""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_files import offset, plain, rewritten
from test_cli import refused

from conftest import DEMO, TEXT, Tiny
from latentkv.errors import LatentKVError
from latentkv_convert.cli import main
from latentkv_convert.errors import ConvertError
from latentkv_convert.source.gguf_source import GgufSource

NONE = ["--method", "none"]


@pytest.fixture(scope="module")
def stock(random_checkpoint: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain GGUF of the llama architecture, 3 layers."""
    folder = tmp_path_factory.mktemp("stock")
    return plain(random_checkpoint(folder / "tiny", "llama"), folder / "stock.gguf")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"keys": {"general.architecture": "plamo"}},
            "qwen3moe, qwen3next, qwen3vl, qwen3vlmoe, seed_oss, smollm3; got plamo",
        ),
        ({"without": ("tokenizer.ggml.model",)}, "expected a vocabulary (tokenizer.ggml.model); got none"),
        ({"without": ("llama.block_count",)}, "[x.gguf] expected block_count from 1 to 4096; got none"),
        (
            {"keys": {"llama.attention.head_count_kv": 3}},
            "[x.gguf] expected query heads divisible by KV heads; got 4 and 3",
        ),
        (
            {"keys": {"llama.rope.scaling.attn_factor": "x"}},
            "rope.scaling.attn_factor from 0.001 to 1000; got x",
        ),
        (
            {"keys": {"llama.attention.sliding_window": -1}},
            "attention.sliding_window from 0 to 4294967295; got -1",
        ),
        ({"keys": {"llama.expert_count": 8}}, "[x.gguf] expected expert_count 0; got 8"),
        ({"keys": {"llama.block_count": 0}}, "expected block_count from 1 to 4096; got 0"),
        (
            {"keys": {"llama.attention.head_count": [4, 4, 2]}},
            "expected attention.head_count the same in every layer; got 4 and, in layer 2, 2",
        ),
        (
            {"keys": {"llama.attention.head_count": [4, 4]}},
            "expected attention.head_count once, or 3 times, for every layer; got 2",
        ),
        ({"keys": {"llama.rope.scale_linear": -2.0}}, "rope.scale_linear from 0.001 to 1e+06; got -2.0"),
        (
            {"keys": {"llama.rope.scaling.type": "ntk"}},
            "rope.scaling.type none, linear, yarn, longrope; got ntk",
        ),
        (
            {"keys": {"llama.feed_forward_length": 64}},
            "blk.0.ffn_gate.weight] expected shape [64, 96]; got [128, 96]",
        ),
        ({"without": ("blk.1.ffn_up.weight",)}, "expected a tensor blk.1.ffn_up.weight; got none among"),
        ({"without": ("token_embd.weight",)}, "expected a tensor token_embd.weight; got none among"),
        (
            {"extra": {"blk.0.attn_sinks.weight": np.ones(4, dtype=np.float32)}},
            "expected tensors of the llama architecture; got blk.0.attn_sinks.weight",
        ),
        (
            {"extra": {"rope_freqs.weight": np.zeros(16, dtype=np.float32)}},
            "[rope_freqs.weight] expected finite divisors above 0; got others",
        ),
    ],
    ids=lambda value: value[-30:] if isinstance(value, str) else "",
)
def test_models_that_are_not_understood(
    change: dict[str, Any], message: str, stock: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = rewritten(stock, tmp_path / "x.gguf", **change)
    assert message in refused(capsys, [str(path), *NONE], tmp_path / "out.gguf")


def test_files_that_are_cut_short_or_damaged(stock: Path, tmp_path: Path) -> None:
    """Wherever they end, and whatever their head says."""
    whole, path = stock.read_bytes(), tmp_path / "x.gguf"
    rng = np.random.default_rng(0)
    for end in [0, 3, 8, 20, 24, *rng.integers(25, len(whole), 40).tolist(), len(whole) - 1]:
        path.write_bytes(whole[:end])
        with pytest.raises(
            LatentKVError, match=r"^\[gguf\] expected .*; got .*\(truncated\?\) in '.*x.gguf'$"
        ):
            GgufSource(path)
    outcomes = set()
    for _ in range(200):
        damaged = bytearray(whole)
        damaged[int(rng.integers(0, 400))] = int(rng.integers(0, 256))
        path.write_bytes(bytes(damaged))
        try:
            GgufSource(path)
            outcomes.add("read")
        except (ConvertError, LatentKVError) as error:
            outcomes.add(f"refused in {len(str(error).splitlines())} line")
    assert outcomes == {"read", "refused in 1 line"}


def test_tensors_over_one_another(stock: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, name = tmp_path / "x.gguf", b"blk.1.attn_k.weight"
    data = bytearray(stock.read_bytes())
    at = data.index(name) + len(name) + 4 + 2 * 8 + 4  # behind dimensions and type
    data[at : at + 8] = bytes(8)
    path.write_bytes(data)
    line = refused(capsys, [str(path), *NONE], tmp_path / "out.gguf")
    assert "[gguf] expected tensors that do not overlap; got " in line
    assert "'blk.1.attn_k.weight'" in line


def test_a_type_that_only_the_runtime_knows(stock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older gguf package: said before hours of work, not after them."""
    monkeypatch.setattr(gguf, "GGMLQuantizationType", IntEnum("Few", {"F16": 1, "Q4_K": 12}))
    wanted = r"^\[gguf\] expected a tensor type of the gguf package \(f16, q4_k\); got f32$"
    with pytest.raises(ConvertError, match=wanted):
        GgufSource(stock)


def test_a_weight_that_is_not_finite(stock: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, text = tmp_path / "x.gguf", tmp_path / "calib.txt"
    path.write_bytes(stock.read_bytes())
    text.write_text(TEXT, encoding="utf-8")
    weight = np.memmap(path, dtype=np.float32, mode="r+", offset=offset(path, "blk.2.attn_k.weight"))
    weight[7] = np.nan
    weight.flush()
    line = refused(capsys, [str(path), "--kv-budget", "50%", "--calib", str(text)], tmp_path / "out.gguf")
    assert "[blk.2.attn_k.weight] expected finite weights; got 1 that are not" in line


def test_a_latent_cache_is_not_converted_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    latent = tmp_path / "latent.gguf"
    assert main([str(DEMO), "-o", str(latent), "--method", "lorc", "--no-plot"]) == 0
    line = refused(capsys, [str(latent), *NONE], tmp_path / "out.gguf")
    assert "[latent.gguf] expected full K and V; got a latent cache (latentkv." in line


def test_parts(stock: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = rewritten(stock, tmp_path / "x.gguf", per_part=20)
    out = tmp_path / "out.gguf"
    second = first.with_name(first.name.replace("-00001-", "-00002-"))
    assert main([str(second), "-o", str(out), *NONE]) == 0  # any of them names all
    out.unlink()

    capsys.readouterr()
    for path in (first, second):
        assert main([str(first), *NONE, "-o", str(path)]) == 2
        line = f"[--output] expected a file that this conversion does not read; got {path}"
        assert line in capsys.readouterr().err
    alone = tmp_path / "alone.gguf"
    alone.write_bytes(first.read_bytes())
    line = refused(capsys, [str(alone), *NONE], out)
    assert "[gguf] expected 2 parts, as split.count says" in line
    assert "; got 1 in '" in line
    assert "alone.gguf'" in line
    second.write_bytes(first.read_bytes())
    line = refused(capsys, [str(first), *NONE], out)
    assert f"[gguf] expected split.no 1; got 0 in '{second}'" in line
    second.unlink()
    line = refused(capsys, [str(first), *NONE], out)
    assert f"[gguf] expected all 2 parts of '{first}'; got no '{second}'" in line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--pre", "gpt-2"],
            "[--pre] expected a checkpoint directory, as a GGUF has the key; got stock.gguf",
        ),
        (["--outtype", "q4_k"], "[--outtype] expected one of"),
    ],
)
def test_options_that_do_not_fit(
    options: list[str], message: str, stock: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, [str(stock), *NONE, *options], tmp_path / "out.gguf")
