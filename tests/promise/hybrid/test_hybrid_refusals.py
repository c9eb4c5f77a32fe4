"""What a file or an option asks of recurrent layers that they cannot do: one line, and nothing is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hybrid_files import Hybrid, write
from runtime import distance, model, session

DT, A = "blk.0.ssm_dt.bias", "blk.1.ssm_a"


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Hybrid:
    pytest.importorskip("torch")
    return write(tmp_path_factory.mktemp("hybrid") / "model.gguf")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({DT: None}, rf"^\[gguf\] expected a tensor {DT}; got none$"),
        ({A: np.ones(3, np.float32)}, rf"^\[gguf\] expected {A} with ne \[4\]; got \[3\]$"),
        ({"blk.2.attn_gate.weight": None}, r"^\[gguf\] expected a tensor blk.2.attn_gate.weight; got none$"),
        ({"blk.3.attn_q.weight": np.ones((128, 64), np.float32)}, r"blk.3.attn_q.weight with ne \[64, 256\]"),
        (
            {"qwen35.ssm.group_count": 3},
            r"^\[qwen35.ssm.time_step_rank\] expected a multiple of the key heads 3",
        ),
        ({"qwen35.ssm.inner_size": 32}, r"^\[qwen35.ssm.inner_size\] expected 64"),
        ({"qwen35.ssm.state_size": None}, r"qwen35.ssm.state_size"),
        (
            {"qwen35.full_attention_interval": 2},
            r"^\[gguf\] expected a tensor blk.1.attn_q.weight; got none$",
        ),
        ({"qwen35.attention.recurrent_layers": [True, False]}, r"expected 4 values, one a layer; got 2$"),
        ({"qwen35.nextn_predict_layers": 4}, r"expected fewer than the layers 4; got 4$"),
    ],
)
def test_a_file_that_contradicts_itself(given: dict[str, Any], told: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path = write(tmp_path / "bad.gguf", given=given).path
    with pytest.raises(ValueError, match=told) as raised:
        model(path)
    assert "\n" not in str(raised.value)


def test_options(hybrid: Hybrid) -> None:
    opened = model(hybrid.path)
    with pytest.raises(ValueError, match=r"^\[evict\] expected a model whose layers all attend"):
        session(opened, evict="h2o", keep_tokens="256", recent=8, prefill="eager")
    with pytest.raises(
        ValueError, match=r"^\[prefill\] expected eager, as some layers are recurrent; got lazy"
    ):
        session(opened, prefill="lazy")


def test_positions_do_not_move(hybrid: Hybrid) -> None:
    one = session(model(hybrid.path), kv="f32")
    ids = list(range(40))
    one.decode(ids)
    with pytest.raises(ValueError, match=r"^\[context shift\] expected a model whose layers all attend"):
        one.seq_add(0, 10, -1, -5)
    assert not one.seq_rm(0, 3, 10)
    got = one.decode([1, 2, 3], output="all")
    assert distance(got, hybrid.logits([*ids, 1, 2, 3])[-3:]) < 1e-4


def test_states_of_other_models(hybrid: Hybrid, tmp_path: Path) -> None:
    """Of another mixer, and of the same sizes with other weights."""
    one = session(model(hybrid.path), kv="f32")
    one.decode(list(range(20)))
    for given in ({"qwen35.full_attention_interval": 4, A: np.full(4, -2.0, np.float32)},):
        other = session(model(write(tmp_path / "other.gguf", given=given).path), kv="f32")
        with pytest.raises(ValueError, match=r"^\[state\] expected a state of .*; got one of another model$"):
            other.set_state(one.state_bytes(), "any")


def test_a_cut_state(hybrid: Hybrid) -> None:
    one = session(model(hybrid.path), kv="f32")
    one.decode(list(range(20)))
    state = one.state_bytes()
    for cut in (4, 400, len(state) // 2):
        other = session(model(hybrid.path), kv="f32")
        other.decode([5, 6])
        with pytest.raises(ValueError, match=r"^\[state\] expected"):
            other.set_state(state[:-cut])
        assert other.seq_pos_max(0) == -1
        assert distance(other.decode([5, 6]), hybrid.logits([5, 6])[-1:]) < 1e-4
