"""Latents in the layers of a hybrid that attend: the whole rank is the original model, and files say nothing
of K and V in the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from both import N, core, distance, expected_logits, run, session, step_by_step, token_ids

from conftest import TEXT, Tiny, keys, tensors
from latentkv.plan.master import planned
from latentkv_convert.cli import main
from latentkv_convert.rows import sizes

MODELS = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
WINDOWS = ["--sink", "2", "--recent", "8"]


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory, random_checkpoint: Tiny) -> Path:
    directory = tmp_path_factory.mktemp("hybrids")
    (directory / "calib.txt").write_text(TEXT, encoding="utf-8")
    for model in MODELS:
        random_checkpoint(directory / model, model)
    return directory


@pytest.fixture(autouse=True)
def shared_cache(own_cache: None, room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(room / "cache"))


def text(room: Path) -> list[str]:
    return ["--calib", str(room / "calib.txt"), "--calib-window", "128", "--no-plot"]


@pytest.mark.parametrize(
    ("model", "prefer"), [("qwen3_5", "size"), ("qwen3_5", "speed"), ("qwen3_next", "speed")]
)
def test_waterfill_at_full_rank_is_the_original(model: str, prefer: str, room: Path, tmp_path: Path) -> None:
    """With and without exact windows; prompts whole and step by step."""
    ids, path = token_ids(), tmp_path / "whole.gguf"
    expected = expected_logits(room / model, ids)
    for windows in (["--sink", "0", "--recent", "0"], WINDOWS):
        options = ["--prefer", prefer, "--kv-budget", "16MiB@256", *windows, *text(room)]
        whole = run(room / model, path, *options)
        ranks = keys(path)["latentkv.k.ranks"]
        assert sum(ranks) == 2 * 64  # two layers, two heads of 32
        assert distance(session(whole).decode(ids, output="all"), expected) < 1e-4
        assert distance(step_by_step(whole, ids, N - 20), expected[N - 21 :]) < 1e-4


@pytest.mark.parametrize("model", MODELS)
def test_arrays_of_a_file(model: str, room: Path, tmp_path: Path) -> None:
    """One value a layer, and none of a layer without K and V where groups and segments are counted."""
    path = tmp_path / "master.gguf"
    run(room / model, path, "--master", "--kv-budget", "20%", *WINDOWS, *text(room))
    found = keys(path)
    assert found["latentkv.block.mixers"] == ["delta_net", "attention"] * 2
    for side, name in (("k", "rotated"), ("v", "latent")):
        own = {end: found[f"latentkv.{side}.{end}"] for end in ("path", "group", "ranks", "segment_formats")}
        assert own["path"] == ["full", name] * 2
        assert own["group"][0] == own["group"][2] == 1
        n_groups = [2 // own["group"][layer] for layer in (1, 3)]
        assert len(own["ranks"]) == sum(n_groups)
        counts = found.get(f"latentkv.{side}.segment_counts", [1] * sum(n_groups))
        assert len(counts) == sum(n_groups)
        assert len(own["segment_formats"]) == sum(counts)
        options = len(found["latentkv.budget.formats"])
        assert len(found[f"latentkv.{side}.segment_distortions"]) == options * sum(counts)
    written = {name for name in tensors(path) if ".attn_k" in name or ".attn_v" in name}
    assert {int(name.split(".")[1]) for name in written} == {1, 3}


def test_budgets_in_bytes_pay_for_states(room: Path, tmp_path: Path) -> None:
    """When a file is planned and when it is opened; a share is one of rows."""
    from latentkv_convert.source.open_source import open_source

    path, n_ctx = tmp_path / "master.gguf", 4096
    master = run(room / "qwen3_5", path, "--master", "--kv-budget", "30%", *WINDOWS, *text(room))
    share = master.forecast(n_ctx, **planned(master, {"kv_budget": "30%"}))
    spec = open_source(room / "qwen3_5").spec
    assert share["states"] == sizes.state_bytes(spec) > 0
    for size in (share["total"], share["total"] + 20000):
        budget = f"{size}@{n_ctx}"
        found = master.forecast(n_ctx, **planned(master, {"kv_budget": budget}))
        assert 0.9 * size < found["total"] <= size
        own = run(room / "qwen3_5", tmp_path / "own.gguf", "--kv-budget", budget, *WINDOWS, *text(room))
        assert 0.8 * size < own.forecast(n_ctx)["total"] <= size
    with pytest.raises(ValueError, match=r"of recurrent states\); got 1000 bytes"):
        planned(master, {"kv_budget": f"1000@{n_ctx}"})


def test_a_sidecar_is_the_file_in_one_piece(room: Path, tmp_path: Path) -> None:
    base, ids = tmp_path / "base.gguf", token_ids(60)
    assert main([str(room / "qwen3_5"), "-o", str(base), "--method", "none", "--no-plot"]) == 0
    options = [*WINDOWS, *text(room)]
    assert main([str(base), "-o", str(tmp_path / "one.gguf"), *options]) == 0
    assert main([str(base), "-o", str(tmp_path / "side.gguf"), "--sidecar", *options]) == 0
    held = tensors(tmp_path / "side.gguf")
    assert not [name for name in held if not name.startswith(("blk.1.attn_", "blk.3.attn_"))]
    one = core.Model(str(tmp_path / "one.gguf"))
    beside = core.Model(str(base), latent_path=str(tmp_path / "side.gguf"))
    found = [logits_of(model, ids) for model in (one, beside)]
    assert np.array_equal(*found)


def logits_of(model: Any, ids: list[int]) -> np.ndarray:
    return np.asarray(session(model).decode(ids, output="all"))
