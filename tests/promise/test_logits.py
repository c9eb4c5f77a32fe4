"""The file computes what the checkpoint computes; the fused op, what the stock-ggml expression computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runtime import Logits, distance, model, session, tokens

N = 200


@pytest.fixture(scope="module")
def plain(converted: Any) -> Any:
    return model(converted("--method", "none", "--outtype", "f32"))


@pytest.fixture(scope="module")
def full_rank(converted: Any) -> Any:
    return model(converted("--method", "palu", "--keep", "1.0", "--group", "all", "--outtype", "f32"))


@pytest.fixture(scope="module")
def half_rank(converted: Any) -> Any:
    return model(converted("--method", "palu", "--keep", "0.5", "--group", "2", "--outtype", "f32"))


@pytest.fixture(scope="module")
def reference(demo: Path, plain: Any) -> Logits:
    """transformers' logits of the same tokens, f32."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.set_num_threads(1)
    checkpoint = transformers.AutoModelForCausalLM.from_pretrained(demo, dtype=torch.float32)
    with torch.no_grad():
        return np.asarray(checkpoint(torch.tensor([tokens(plain, N)])).logits[0].numpy())


def test_plain_file_equals_transformers(plain: Any, reference: Logits) -> None:
    logits = session(plain, kv="f32").decode(tokens(plain, N), output="all")
    assert distance(logits, reference) < 1e-4
    # the comparison sees a 1 % error in one row
    logits[N // 2] *= 1.01
    assert distance(logits, reference) > 1e-4


def test_f16_cache_costs_what_f16_costs(plain: Any, reference: Logits) -> None:
    error = distance(session(plain).decode(tokens(plain, N), output="all"), reference)
    assert 1e-6 < error < 1e-3


def test_full_rank_latents_equal_the_original(full_rank: Any, reference: Logits) -> None:
    assert not full_rank.is_plain
    assert {layer["k"]["path"] for layer in full_rank.layers} == {"rebuild"}
    assert distance(session(full_rank, kv="f32").decode(tokens(full_rank, N), output="all"), reference) < 1e-4
    assert distance(session(full_rank, kv="f16").decode(tokens(full_rank, N), output="all"), reference) < 1e-3


def test_half_rank_is_not_the_original(half_rank: Any, reference: Logits) -> None:
    assert distance(session(half_rank, kv="f32").decode(tokens(half_rank, N), output="all"), reference) > 1e-2


@pytest.mark.parametrize(
    ("file", "kv"),
    [("plain", kv) for kv in ("f32", "f16", "q4", "q2", "q8_0", "q4_0", "n4")]
    + [("half_rank", kv) for kv in ("f32", "f16", "q8", "q4", "q3", "q2", "n8", "n4", "n3", "n2")],
)
def test_fused_equals_the_reference_expression(file: str, kv: str, request: pytest.FixtureRequest) -> None:
    """The first layer writes the same rows in both; later layers differ by roundings that flip a code."""
    m = request.getfixturevalue(file)
    ids = tokens(m, 70)
    fused, stock = (
        session(m, kv=kv, implementation=name).decode(ids, output="all") for name in ("fused", "reference")
    )
    assert distance(fused, stock) < {"f32": 1e-5, "f16": 1e-3, "q8": 5e-3, "q8_0": 5e-3, "n8": 1e-2}.get(
        kv, 5e-2
    )


def test_what_ran_is_said(plain: Any) -> None:
    assert "fused cpu" in session(plain).implementations["latent_attn"]
    assert "not asked for" in session(plain, implementation="reference").implementations["latent_attn"]


def test_fused_can_be_required(converted: Any, plain: Any) -> None:
    from latentkv import _core

    assert "fused cpu" in session(plain, require_fused=True).implementations["latent_attn"]
    with pytest.raises(ValueError, match=r"^\[require_fused\] expected fused attention on the CPU; got"):
        session(plain, implementation="reference", require_fused=True)
    if _core.build_info()["cuda"]:
        pytest.skip("a build with CUDA: the GPU that is asked for may be there")
    asked = _core.Model(str(converted("--method", "none", "--outtype", "f32")), n_gpu_layers=99)
    with pytest.raises(
        ValueError, match=r"^\[require_fused\] expected fused attention on the GPU.*got the CPU"
    ):
        session(asked, require_fused=True)
    session(asked)
