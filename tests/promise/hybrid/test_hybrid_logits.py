"""A model whose layers are delta nets, Mamba-2 or short convolutions, but for some that attend, computes what
transformers computes: whole, in pieces, token by token, and beside other sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hybrid_files import ARCHITECTURES, Hybrid, random_model, write
from runtime import Logits, distance, model, session

N = 100
IDS = [int(i) for i in np.random.default_rng(3).integers(0, 256, 2 * N)]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Hybrid:
    pytest.importorskip("torch")
    return write(tmp_path_factory.mktemp("hybrid") / "model.gguf", request.param)


@pytest.fixture(scope="module")
def opened(hybrid: Hybrid) -> Any:
    return model(hybrid.path)


@pytest.fixture(scope="module")
def expected(hybrid: Hybrid) -> Logits:
    return hybrid.logits(IDS[:N])


def exact(opened: Any, **options: Any) -> Any:
    return session(opened, kv="f32", **options)


def test_a_stock_file_equals_transformers(opened: Any, expected: Logits) -> None:
    got = exact(opened).decode(IDS[:N], output="all")
    assert distance(got, expected) < 1e-4
    got[N // 2] *= 1.01
    assert distance(got, expected) > 1e-4


@pytest.mark.parametrize("architecture", ARCHITECTURES[:3])
def test_queries_and_keys_that_are_short(architecture: str, tmp_path: Path) -> None:
    """With weights as small as a model begins with, what is added to a squared length counts."""
    pytest.importorskip("torch")
    hybrid = write(tmp_path / "small.gguf", architecture, deviation=0.02)
    got = exact(model(hybrid.path)).decode(IDS[:N], output="all")
    assert distance(got, hybrid.logits(IDS[:N])) < 1e-5


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("n_ubatch", [7, 64])
def test_a_prompt_in_pieces(opened: Any, expected: Logits, n_ubatch: int, threads: int) -> None:
    one = exact(opened, n_ubatch=n_ubatch, n_threads=threads, n_threads_batch=threads)
    assert distance(one.decode(IDS[:N], output="all"), expected) < 1e-4


def test_token_by_token(opened: Any, expected: Logits) -> None:
    one = exact(opened)
    assert distance(np.concatenate([one.decode([i]) for i in IDS[:N]]), expected) < 1e-4


def test_the_reference_expression(opened: Any, expected: Logits) -> None:
    assert distance(exact(opened, implementation="reference").decode(IDS[:N], output="all"), expected) < 1e-4


def test_sequences_in_one_batch(hybrid: Hybrid, opened: Any, expected: Logits) -> None:
    """Of other lengths, interleaved, in one ubatch and in several."""
    other = hybrid.logits(IDS[N:])
    two = exact(opened, n_seq_max=3, n_ubatch=48)
    rows: dict[int, list[Logits]] = {0: [], 2: []}
    texts, done = {0: IDS[:N], 2: IDS[N:]}, {0: 0, 2: 0}
    for lengths in ((40, 40), (1, 1), (1, 1), (5, 20), (30, 2), (1, 1), (22, 35)):
        batch = [(s, i) for s, n in zip(rows, lengths, strict=True) for i in texts[s][done[s] : done[s] + n]]
        if lengths == (1, 1):
            batch.reverse()
        got = two.decode([i for _, i in batch], seq=[s for s, _ in batch], output="all")
        for s, n in zip(rows, lengths, strict=True):
            rows[s].append(got[[at for at, (of, _) in enumerate(batch) if of == s]])
            done[s] += n
    assert done == {0: N, 2: N}
    assert distance(np.concatenate(rows[0]), expected) < 1e-4
    assert distance(np.concatenate(rows[2]), other) < 1e-4


def test_tokens_of_two_sequences_in_turns(opened: Any, expected: Logits) -> None:
    two = exact(opened, n_seq_max=2)
    tokens = [i for each in IDS[:N] for i in (each, each)]
    got = two.decode(tokens, seq=[0, 1] * N, output="all")
    assert distance(got[0::2], expected) < 1e-4
    assert distance(got[1::2], expected) < 1e-4


@pytest.mark.parametrize("kv", ["f16", "q8_0"])
def test_compressed_rows_cost_what_they_cost(opened: Any, expected: Logits, kv: str) -> None:
    error = distance(session(opened, kv=kv, sink=4, recent=8).decode(IDS[:N], output="all"), expected)
    assert 1e-7 < error < 0.05


def test_a_plan_is_of_the_layers_that_have_rows(opened: Any, expected: Logits) -> None:
    """Two KV heads of one layer, a segment each; K in blocks of tokens beside exact windows."""
    plans = ({"k_plan": ["q8"] * 2, "v_plan": ["q8"] * 2}, {"kv_k": "c8", "kv_v": "q8", "recent": 32})
    for plan in plans:
        error = distance(session(opened, **plan).decode(IDS[:N], output="all"), expected)
        assert 1e-6 < error < 0.1
    with pytest.raises(ValueError, match=r"^\[k_plan\] expected an array of 2 entries; got 8$"):
        session(opened, k_plan=["q8"] * 8, v_plan=["q8"] * 8)


def test_only_attending_layers_have_rows(opened: Any) -> None:
    """A quarter of a cache that would have rows of all layers; states are counted by themselves."""
    one = exact(opened, n_seq_max=2)
    sizes = one.kv_bytes()
    width = 2 * opened.n_head_kv * opened.head_dim
    mixers = [layer["mixer"] for layer in opened.layers]
    assert mixers == [mixers[0]] * 3 + ["attention"]
    assert sizes["k"] + sizes["v"] == 512 * width * 4
    assert sizes["f16_per_token"] == width * 2
    state = {  # convolution and matrices of a layer
        "delta_net": 4 * (3 * (2 * 2 * 16 + 4 * 16) + 4 * 16 * 16),
        "mamba2": 4 * (3 * (2 * 2 * 16 + 8 * 32) + 8 * 32 * 16),
        "short_conv": 4 * 2 * 128,
    }[mixers[0]]
    assert sizes["states"] == 2 * 2 * 3 * state
    assert sizes["total"] == sum(sizes[part] for part in ("k", "v", "cells", "states"))
    assert (sizes["snapshots"], sizes["snapshots_most"]) == (0, 2 * 4 * 3 * state)
    forecast = opened.forecast(512, kv="f32", n_seq_max=2)
    assert {name: forecast[name] for name in sizes if name != "regions"} == {
        name: size for name, size in sizes.items() if name != "regions"
    }
    one.decode(list(range(40)), output="last")  # keeps a copy before a prompt's end and one behind it
    one.seq_cp(0, 1)
    grown = one.kv_bytes()
    assert grown["snapshots"] == 2 * 3 * state
    assert grown["total"] == sizes["total"] + grown["snapshots"]
    more = opened.forecast(512, kv="f32", n_seq_max=2, n_guesses=5)
    assert more["states"] == (2 + 5) * 2 * 3 * state


def test_layers_that_guess_further_tokens_are_left_alone(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    mtp = {
        "blk.4.nextn.eh_proj.weight": np.ones((64, 128), np.float32),
        "blk.4.attn_norm.weight": np.ones(64),
    }
    given = {"qwen35.block_count": 5, "qwen35.nextn_predict_layers": 1}
    hybrid = write(tmp_path / "mtp.gguf", given=given | mtp)
    opened = model(hybrid.path)
    assert (opened.n_layer, opened.n_mtp) == (4, 1)
    assert distance(exact(opened).decode(IDS[:N], output="all"), hybrid.logits(IDS[:N])) < 1e-4


def test_an_older_layout_of_a_delta_nets_inputs(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    checkpoint = random_model("qwen3next", 4, 0)
    given: dict[str, Any] = {}
    for il in range(3):
        weight = checkpoint.state_dict()[f"model.layers.{il}.linear_attn.in_proj_qkvz.weight"].numpy()
        given |= {f"blk.{il}.attn_qkv.weight": None, f"blk.{il}.attn_gate.weight": None}
        given[f"blk.{il}.ssm_in.weight"] = weight
    hybrid = write(tmp_path / "old.gguf", "qwen3next", given=given)
    got = exact(model(hybrid.path)).decode(IDS[:N], output="all")
    assert distance(got, hybrid.logits(IDS[:N])) < 1e-4


def test_layers_are_listed_where_the_file_lists_them(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    listed = {
        "qwen35.full_attention_interval": 2,
        "qwen35.attention.recurrent_layers": [True, True, True, False],
    }
    hybrid = write(tmp_path / "listed.gguf", given=listed)
    got = exact(model(hybrid.path)).decode(IDS[:N], output="all")
    assert distance(got, hybrid.logits(IDS[:N])) < 1e-4
