"""RoPE scaling in the words of older files, and sizes that are given for every layer: read as libllama reads
them (llama-model.cpp), by the runtime and as a source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from both import core, distance, expected_logits, session, token_ids
from gguf_files import plain, rewritten

from conftest import Tiny
from latentkv_convert.cli import main
from latentkv_convert.source.frequencies import frequencies
from latentkv_convert.source.gguf_source import GgufSource

IDS = token_ids(60)
ROPE = "llama.rope."
# What a file says, and by how much its positions are divided.
SCALINGS: list[tuple[dict[str, Any], float]] = [
    ({"scaling.type": "linear", "scaling.factor": 4.0}, 4.0),
    ({"scale_linear": 4.0}, 4.0),
    ({"scaling.factor": 4.0}, 4.0),
    ({"scaling.type": "linear", "scale_linear": 4.0}, 4.0),
    ({"scaling.factor": 4.0, "scale_linear": 2.0}, 4.0),
    ({"scaling.factor": 0.0, "scale_linear": 2.0}, 1.0),
    ({"scale_linear": 0.0}, 1.0),
    ({"scale_linear": 1.0}, 1.0),
    ({"scaling.type": "linear"}, 1.0),
    ({"scaling.type": "none", "scaling.factor": 4.0}, 1.0),
    ({"scaling.type": "none", "scale_linear": 4.0}, 1.0),
    ({"scaling.type": "longrope", "scaling.factor": 4.0}, 4.0),
    ({"scaling.yarn_beta_fast": 16.0, "scaling.factor": 4.0}, 4.0),
    ({"scaling.original_context_length": 64, "scaling.factor": 4.0}, 4.0),
    ({"scaling.finetuned": True}, 1.0),
]


@pytest.fixture(scope="module")
def stock(random_checkpoint: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stock")
    return plain(random_checkpoint(folder / "tiny", "llama"), folder / "stock.gguf")


@pytest.fixture(scope="module")
def theirs(random_checkpoint: Tiny, tmp_path_factory: pytest.TempPathFactory) -> dict[float, np.ndarray]:
    """Logits of transformers by factor."""
    folder = tmp_path_factory.mktemp("theirs")
    scaled = {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    return {
        1.0: expected_logits(random_checkpoint(folder / "1", "llama"), IDS),
        4.0: expected_logits(random_checkpoint(folder / "4", "llama", **scaled), IDS),
    }


def native(path: Path) -> np.ndarray:
    return np.asarray(session(core.Model(str(path))).decode(IDS, output="all"))


@pytest.mark.parametrize(("keys", "factor"), SCALINGS, ids=str)
def test_scaling_as_libllama_reads_it(
    keys: dict[str, Any], factor: float, stock: Path, theirs: dict[float, np.ndarray], tmp_path: Path
) -> None:
    path = rewritten(stock, tmp_path / "s.gguf", keys={ROPE + name: value for name, value in keys.items()})
    assert distance(native(path), theirs[factor]) < 1e-4
    assert distance(native(path), theirs[5.0 - factor]) > 1e-2
    plain, ours = (frequencies(GgufSource(file).spec, 64, 0) for file in (stock, path))
    assert np.allclose(ours, plain / factor, rtol=1e-6)
    out = tmp_path / "out.gguf"
    assert main([str(path), "-o", str(out), "--method", "none"]) == 0
    assert distance(native(out), theirs[factor]) < 1e-4


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"scaling.type": "ntk"}, r"expected rope.scaling.type none, linear, yarn or longrope; got 'ntk'"),
        (
            {"scale_linear": -4.0},
            r"\[llama.rope.scale_linear\] expected a number from 0.001 to 1e\+06; got -4",
        ),
        ({"scaling.factor": float("nan")}, r"\[llama.rope.scaling.factor\] expected a number from"),
        ({"scaling.factor": "4"}, "expected a float in 'llama.rope.scaling.factor'"),
    ],
)
def test_scaling_that_nobody_reads(keys: dict[str, Any], message: str, stock: Path, tmp_path: Path) -> None:
    path = rewritten(stock, tmp_path / "s.gguf", keys={ROPE + name: value for name, value in keys.items()})
    with pytest.raises(core.Error, match=message):
        native(path)
    assert main([str(path), "-o", str(tmp_path / "out.gguf"), "--method", "none"]) == 2


SIZES = {
    "feed_forward_length": [128] * 3,
    "attention.head_count": [4] * 3,
    "attention.head_count_kv": [2] * 3,
    "attention.key_length": [32] * 3,
    "attention.value_length": [32] * 3,
    "rope.dimension_count": [32] * 3,
    "attention.sliding_window": [0] * 3,
}


def test_sizes_of_every_layer(stock: Path, theirs: dict[float, np.ndarray], tmp_path: Path) -> None:
    """Equal ones are the size of all layers."""
    for name, values in SIZES.items():
        path = rewritten(stock, tmp_path / "s.gguf", keys={f"llama.{name}": values})
        assert distance(native(path), theirs[1.0]) < 1e-4, name
    path = rewritten(stock, tmp_path / "s.gguf", keys={f"llama.{name}": each for name, each in SIZES.items()})
    assert distance(native(path), theirs[1.0]) < 1e-4
    out = tmp_path / "out.gguf"
    assert main([str(path), "-o", str(out), "--method", "none"]) == 0
    assert distance(native(out), theirs[1.0]) < 1e-4


# Layers may have heads and a width of their own, which then contradict another size or the tensors.
DIFFER = {
    "feed_forward_length": r"expected blk.1.ffn_gate.weight with ne \[96, 160\]; got \[96, 128\]",
    "attention.head_count": r"expected blk.1.attn_q.weight with ne \[96, 1152\]; got \[96, 128\]",
    "attention.head_count_kv": "expected a divisor of the query heads 4; got 34",
    "attention.key_length": "expected the key length 64; got 32",
    "attention.value_length": "expected the key length 32; got 64",
    "rope.dimension_count": "expected a value from 2 to 32; got 64",
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_that_differ(
    name: str, stock: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = SIZES[name][0]
    for values, message in (
        (
            [usual, usual + 32, usual],
            DIFFER.get(name, f"the same number for every layer; got {usual} and, in"),
        ),
        ([usual] * 2, "expected one number, or 3, one a layer; got 2"),
        ([usual] * 4, "expected one number, or 3, one a layer; got 4"),
    ):
        path = rewritten(stock, tmp_path / "s.gguf", keys={f"llama.{name}": values})
        with pytest.raises(core.Error, match=message):
            core.Model(str(path))
        capsys.readouterr()
        assert main([str(path), "-o", str(tmp_path / "out.gguf"), "--method", "none"]) == 2
        said = capsys.readouterr().err
        assert name in said
        assert said.count("\n") == 1
