"""Models whose last layers read the K and V of earlier ones, and whose tokens bring numbers to every layer
(Gemma 4 E2B and E4B): one plan serves all that read a cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import torch
from both import core, distance, run, session, token_ids
from gguf_files import rewritten

from conftest import TEXT, Tiny, keys, tensors
from latentkv.plan.master import planned
from latentkv_convert import calibrate
from latentkv_convert.cli import main
from latentkv_convert.plan import forecast
from latentkv_convert.source.open_source import open_source

E: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 3,
    "hidden_size": 128,
    "hidden_size_per_layer_input": 32,
    "use_double_wide_mlp": True,
    "attention_k_eq_v": False,
    "sliding_window": 128,
}
WINDOW = 192


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory, random_checkpoint: Tiny) -> Path:
    directory = tmp_path_factory.mktemp("shared-rows")
    (directory / "calib.txt").write_text(TEXT, encoding="utf-8")
    random_checkpoint(directory / "model", "gemma4", **E)
    return directory


@pytest.fixture(autouse=True)
def shared_cache(own_cache: None, room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(room / "cache"))


def options(room: Path, *more: str) -> list[str]:
    text = ["--calib", str(room / "calib.txt"), "--calib-window", str(WINDOW), "--no-plot"]
    return [*text, "--sink", "2", "--recent", "32", *more]


@pytest.mark.parametrize("prefer", ["size", "speed"])
def test_the_forecast_is_what_decoding_measures(prefer: str, room: Path, tmp_path: Path) -> None:
    """Token by token, over the second half of windows that nothing was fitted to."""
    path = tmp_path / "out.gguf"
    model = run(room / "model", path, *options(room, "--kv-budget", "30%", "--prefer", prefer))
    plain = run(room / "model", tmp_path / "plain.gguf", "--method", "none", "--outtype", "f32")
    encoded = calibrate.encode(TEXT, open_source(room / "model"))
    seen = []
    for window in forecast.held_back(calibrate.Sample.draw(encoded, 32768, WINDOW, 0, deep=2 * WINDOW)):
        logs = []
        for each, kv in ((plain, {"kv": "f32"}), (model, {})):
            live = core.Session(each, n_ctx=2 * WINDOW, n_threads=1, n_ubatch=1, **kv)
            logits = torch.from_numpy(live.decode(window.tolist(), output="all"))
            logs.append(logits[len(window) // 2 : -1].double().log_softmax(-1))
        seen.append(reference.divergence(*logs))
    assert abs(np.mean(seen) / keys(path)["latentkv.predicted_kld"] - 1) < 0.1


def test_a_stock_file_and_a_checkpoint_become_the_same(room: Path, tmp_path: Path) -> None:
    """Layers without K and V of their own have no entries and no tensors; a sidecar holds those of the
    others; a master's plans take the bytes that they are given."""
    ids, stock = token_ids(60), tmp_path / "stock.gguf"
    run(room / "model", tmp_path / "plain.gguf", "--method", "none", "--outtype", "f32")
    rewritten(tmp_path / "plain.gguf", stock)
    logits = []
    for name, source in (("one", room / "model"), ("two", stock)):
        path = tmp_path / f"{name}.gguf"
        model = run(source, path, *options(room, "--kv-budget", "30%", "--outtype", "f32"))
        found = keys(path)
        assert found["latentkv.k.path"] == ["rotated"] * 3 + ["full"] * 3
        assert len(found["latentkv.v.ranks"]) == sum(2 // group for group in found["latentkv.v.group"][:3])
        written = {name for name in tensors(path) if ".attn_k" in name or ".attn_v" in name}
        assert {int(name.split(".")[1]) for name in written} == {0, 1, 2}
        logits.append(session(model, kv="").decode(ids, output="all"))
    assert distance(*logits) < 1e-3
    side = tmp_path / "side.gguf"
    assert main([str(stock), "-o", str(side), "--sidecar", *options(room, "--kv-budget", "30%")]) == 0
    assert {name.split(".")[1] for name in tensors(side)} == {"0", "1", "2"}
    beside = core.Model(str(stock), latent_path=str(side))
    assert distance(session(beside, kv="").decode(ids, output="all"), logits[1]) < 0.05
    master = run(room / "model", tmp_path / "master.gguf", *options(room, "--master", "--kv-budget", "30%"))
    sizes = [master.forecast(8192, **planned(master, {"kv_budget": b})) for b in ("20%", "40%")]
    assert 0.4 < sizes[0]["total"] / sizes[1]["total"] < 0.6


@pytest.mark.parametrize("outtype", ["q8_0", "f16"])
def test_columns_of_a_table(outtype: str, room: Path, tmp_path: Path) -> None:
    """A layer reads its own numbers of every token, and not those of the others."""
    path, role = tmp_path / "plain.gguf", "per_layer_token_embd.weight"
    run(room / "model", path, "--method", "none", "--outtype", outtype)
    for source in (open_source(path), open_source(room / "model")):
        whole = source.tensor(role)
        for part in (slice(0, 32), slice(64, 96), slice(16, 56)):
            assert np.array_equal(source.columns(role, part), whole[:, part])
