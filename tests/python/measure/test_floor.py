"""How much of a divergence is rounding, measured beside it, and a measurement without it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
TEXT = ROOT / "models/demo/sample-val.txt"
WORDS = ("-f", TEXT, "-c", 96, "--chunks", 3, "-t", 1, "--decode", "--parallel", 3)


@pytest.fixture(scope="module")
def quantized(converted: Callable[..., Path]) -> Path:
    return converted("--method", "none", "--outtype", "q4_0")


def measured(run: Any, file: Path, *options: Any) -> dict[str, Any]:
    done = run("perplexity", file, *WORDS, "--json", *options)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_f32_rows_equal_f16_ones_where_products_do_not_round(run: Any, quantized: Path) -> None:
    f32 = measured(run, quantized, "--kv", "f32", "--kld-against", "f16", "--weights", "f32")
    assert f32["weights"] == "f32"
    assert f32["kld"]["mean"] < 1e-5
    assert f32["floor"]["kld"]["mean"] < 1e-5
    stored = measured(run, quantized, "--kv", "f32", "--kld-against", "f16")
    assert stored["weights"] == "stored"
    assert stored["kld"]["mean"] > 5e-5  # the test can tell
    assert stored["floor"] | {"chunks": 3, "tokens": stored["tokens"]} == stored["floor"]
    for name in ("mean", "median"):
        assert stored["floor"]["kld"][name] == pytest.approx(stored["kld"][name], rel=0.3)
    assert stored["floor"]["same_top"] == pytest.approx(stored["same_top"], abs=0.03)


def test_a_position_later_moves_the_last_bit_of_rows(quantized: Path) -> None:
    """What f32 rows do not on a GPU, whose products take them as f16."""
    from latentkv import _core
    from latentkv.measure.perplexity import Cache

    model = _core.Model(str(quantized))
    assert model.has_rope
    (moved,) = Cache(model, {"kv": "f16"}).beside()
    assert (moved.first_position, moved.options["kv"]) == (1, "f16")
    kept, moved = Cache(model, {"kv": "q8_0"}).beside()
    assert (kept.first_position, kept.options["kv"]) == (0, "f16")
    assert (moved.first_position, moved.options["kv"]) == (1, "f16")


def test_the_floor_is_of_the_references_weights(run: Any, quantized: Path, plain_gguf: Path) -> None:
    """It does not depend on the measured cache, nor on which rows the reference has."""
    q4, f32, q8 = (
        measured(run, quantized, "--kv", kv, "--kld-against", reference)["floor"]
        for kv, reference in (("q4", "f16"), ("f16", "f32"), ("q4", "q8_0"))
    )
    assert q4 == q8 == f32
    other = measured(run, quantized, "--kv", "q4", "--kld-against", f"{plain_gguf}:f16")
    assert other["floor"]["kld"]["mean"] < 0.1 * q4["kld"]["mean"]


def test_people_read_how_much_is_rounding(run: Any, quantized: Path) -> None:
    words = ("perplexity", quantized, *WORDS, "--kld-against", "f16")
    said = run(*words, "--kv", "q8_0").stdout
    assert "is rounding of these weights" in said
    assert "weights as stored" in said
    assert "% with rounding alone" in said
    assert "--weights f32, where memory allows" in said
    said = run(*words, "--kv", "q4", "--weights", "f32").stdout
    assert ", weights in f32\n" in said
    assert "where memory allows" not in said
    said = run(*words, "--kv", "q4", "--no-floor").stdout
    assert "rounding" not in said
    assert measured(run, quantized, "--kld-against", "f16", "--no-floor")["floor"] is None


def test_the_floor_is_of_the_first_windows(quantized: Path) -> None:
    from latentkv import _core
    from latentkv.measure.perplexity import FLOOR_WINDOWS, Cache, perplexity

    cache = Cache(_core.Model(str(quantized)), {"kv": "f16", "n_threads": 1})
    found = perplexity(
        cache, TEXT.read_text(), n_ctx=32, chunks=FLOOR_WINDOWS + 4, parallel=3, against=cache, floor=True
    )
    assert found["floor"]["chunks"] == FLOOR_WINDOWS + 1  # whole groups
    assert found["chunks"] == FLOOR_WINDOWS + 4


def test_memory_counts_weights_as_they_are_held(
    run: Any, quantized: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from latentkv import LatentKVError, Llama, _core
    from latentkv.plan import fit

    def weights(kind: str) -> int:
        found: int = _core.Model(str(quantized), describe_only=True, weights=kind).forecast(64)["weights"]
        return found

    n_params = _core.Model(str(quantized), describe_only=True).n_params
    assert weights("f32") == 4 * n_params
    assert 2 * n_params < weights("f16") < 2.1 * n_params
    assert weights("stored") < n_params
    info = json.loads(run("info", quantized, "--weights", "f32", "--json").stdout)
    assert {row["weights"] for row in info["forecast"]} == {4 * n_params}
    with Llama(str(quantized), weights="f32", n_ctx=64) as llama:
        assert llama.model.weights == "f32"
    monkeypatch.setattr(fit, "free_on_host", lambda: 4 * n_params - 1)
    with pytest.raises(
        LatentKVError, match=r"\[--weights\] expected .* free on the host.*; use --weights f16 or"
    ):
        Llama(str(quantized), weights="f32", n_ctx=64)
    Llama(str(quantized), weights="f16", n_ctx=64).close()
    with pytest.raises(LatentKVError, match=r"expected stored, f32 or f16; got 'half'"):
        Llama(str(quantized), weights="half", n_ctx=64)
