"""RoPE keys and factors against transformers' own tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tiny_models import TINY
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from latentkv_convert.errors import ConvertError
from latentkv_convert.source import archs, rope

N = 32


def config(**scaling: Any) -> dict[str, Any]:
    return TINY["llama"] | {
        "max_position_embeddings": 4096,
        "rope_theta": 500000.0,
        "rope_scaling": scaling,
    }


def theirs(settings: dict[str, Any], seq_len: int | None = None) -> tuple[np.ndarray, float]:
    parsed = AutoConfig.for_model(**settings)
    kind = settings["rope_scaling"]["rope_type"]
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](parsed, "cpu", seq_len=seq_len)
    return frequencies.double().numpy(), float(factor)


def stock(keys: dict[str, Any]) -> np.ndarray:
    return float(keys["rope.freq_base"]) ** -(np.arange(0, N, 2) / N)


def test_linear() -> None:
    settings = config(rope_type="linear", factor=4.0)
    keys = rope.describe(settings, N).keys
    assert keys["rope.scaling.type"] == "linear"
    assert np.allclose(theirs(settings)[0], stock(keys) / keys["rope.scaling.factor"], rtol=1e-5)


def test_llama3() -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    }
    settings = config(rope_type="llama3", **scaling)
    found = rope.describe(settings, N)
    assert found.freq_factors is not None
    assert np.allclose(theirs(settings)[0], stock(found.keys) / found.freq_factors, rtol=1e-5)
    assert found.freq_factors[0] == 1
    assert found.freq_factors[-1] == 8
    assert ((found.freq_factors > 1) & (found.freq_factors < 8)).any()


def test_dynamic_is_the_stock_table_until_the_trained_context() -> None:
    settings = config(rope_type="dynamic", factor=2.0)
    found = rope.describe(settings, N)
    assert found.latentkv_keys == {"rope_dynamic_factor": 2.0}
    assert np.allclose(theirs(settings)[0], stock(found.keys), rtol=1e-5)
    served, trained = 8192, 4096  # the reader's rule for a longer context (docs/gguf.md)
    base = 500000.0 * (2.0 * served / trained - 1.0) ** (N / (N - 2))
    assert np.allclose(theirs(settings, served)[0], base ** -(np.arange(0, N, 2) / N), rtol=1e-5)


@pytest.mark.parametrize("extra", [{}, {"beta_fast": 16.0, "beta_slow": 2.0}], ids=str)
def test_yarn(extra: dict[str, Any]) -> None:
    settings = config(rope_type="yarn", factor=4.0, original_max_position_embeddings=1024, **extra)
    keys = rope.describe(settings, N).keys
    assert keys["rope.scaling.original_context_length"] == 1024
    assert np.allclose(theirs(settings)[0], yarn_frequencies(keys), rtol=1e-5)
    assert "rope.scaling.attn_factor" not in keys


@pytest.mark.parametrize("beta", [float("nan"), -1.0, 1e9, "fast"], ids=str)
def test_a_yarn_beta_that_no_reader_takes(beta: Any) -> None:
    settings = config(rope_type="yarn", factor=4.0, original_max_position_embeddings=1024, beta_fast=beta)
    with pytest.raises(ConvertError, match=rf"\[rope\] expected beta_fast from 0.001 to 1e\+06; got {beta}"):
        rope.describe(settings, N)


def yarn_frequencies(keys: dict[str, Any]) -> np.ndarray:
    """As a reader of the stock keys computes them (ggml's ramp between whole correction dimensions)."""
    base, context = keys["rope.freq_base"], keys["rope.scaling.original_context_length"]

    def dimension(beta: float) -> float:
        return N * np.log(context / (beta * 2 * np.pi)) / (2 * np.log(base))

    low = max(0, np.floor(dimension(keys.get("rope.scaling.yarn_beta_fast", 32.0))))
    high = min(N - 1, np.ceil(dimension(keys.get("rope.scaling.yarn_beta_slow", 1.0))))
    ramp = 1 - np.clip((np.arange(N // 2) - low) / max(0.001, high - low), 0, 1)
    plain = stock(keys)
    return plain / keys["rope.scaling.factor"] * (1 - ramp) + plain * ramp


@pytest.mark.parametrize(
    "extra", [{"attention_factor": 1.3}, {"mscale": 1.0, "mscale_all_dim": 0.7}], ids=str
)
def test_yarn_attention_factor(extra: dict[str, Any]) -> None:
    settings = config(rope_type="yarn", factor=4.0, original_max_position_embeddings=1024, **extra)
    keys = rope.describe(settings, N).keys
    assert np.isclose(
        keys["rope.scaling.attn_factor"] * (1 + 0.1 * np.log(4.0)), theirs(settings)[1], rtol=1e-6
    )


@pytest.mark.parametrize("extra", [{}, {"attention_factor": 1.3}, {"factor": 8.0}], ids=str)
def test_longrope(extra: dict[str, Any]) -> None:
    scaling = {
        "rope_type": "longrope",
        "long_factor": [1.0 + 0.5 * i for i in range(N // 2)],
        "short_factor": [1.0 + 0.1 * i for i in range(N // 2)],
        "original_max_position_embeddings": 1024,
    }
    settings = config(**scaling, **extra)
    found = rope.describe(settings, N)
    for factors, length in ((found.long_factors, 4096), (found.short_factors, 1024)):
        frequencies, attention = theirs(settings, length)
        assert np.allclose(frequencies, stock(found.keys) / factors, rtol=1e-5)
        assert np.isclose(found.keys["rope.scaling.attn_factor"], attention, rtol=1e-6)
    assert set(found.tensors) == {"rope_factors_long.weight", "rope_factors_short.weight"}


def test_longrope_needs_a_factor_per_frequency() -> None:
    settings = config(rope_type="longrope", long_factor=[1.0] * 16, short_factor=[1.0] * 15)
    with pytest.raises(ConvertError, match=r"\[rope\] expected 16 values of short_factor; got 15"):
        rope.describe(settings, N)


def test_parameters_of_transformers_5_and_before_are_the_same() -> None:
    old = TINY["llama"] | {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = TINY["llama"] | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}}
    assert rope.describe(old, N) == rope.describe(new, N)


def test_unknown_scaling_is_refused() -> None:
    with pytest.raises(ConvertError, match=r"\[rope\] expected rope_type .*; got ntk"):
        rope.describe(config(rope_type="ntk", factor=2.0), N)
    with pytest.raises(ConvertError, match="expected a factor for rope_type linear"):
        rope.describe(config(rope_type="linear"), N)


NESTED = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}


@pytest.mark.parametrize("field", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("kinds", [None, ["full_attention"] * 3, ["full_attention", "sliding_attention"]])
def test_rope_by_kind_of_layer_that_is_the_same(field: str, kinds: list[str] | None) -> None:
    """transformers 5 nests it by kind of layer."""
    flat = TINY["llama"] | {"rope_parameters": NESTED}
    nested = {"full_attention": dict(NESTED), "sliding_attention": dict(NESTED)}
    found = TINY["llama"] | {field: nested, "layer_types": kinds}
    assert rope.describe(found, 32) == rope.describe(flat, 32)


@pytest.mark.parametrize(
    ("model_type", "given", "message"),
    [
        (
            "llama",
            {"full_attention": NESTED, "sliding_attention": {"rope_theta": 1e4}},
            "the same rope_parameters",
        ),
        ("llama", {"full_attention": NESTED, "layer_types": 1}, "expected RoPE parameters"),
        ("llama", NESTED | {"mrope_section": [8, 12, 12]}, "expected RoPE parameters .*; got mrope_section"),
        ("llama", NESTED | {"llama_4_scaling_beta": 0.1}, "got llama_4_scaling_beta"),
        ("llama", [1.0], "expected rope_parameters with names and values"),
        (
            "gemma3_text",
            NESTED,
            "expected rope_parameters of full_attention and sliding_attention; got factor",
        ),
        ("olmo3", NESTED, "expected rope_parameters of full_attention and sliding_attention; got factor"),
    ],
)
def test_rope_parameters_that_are_not_followed(model_type: str, given: Any, message: str) -> None:
    config = TINY[model_type] | {"rope_parameters": given, "rope_scaling": None}
    with pytest.raises(ConvertError, match=message):
        archs.model_spec(config)


def test_a_kind_of_layer_without_parameters() -> None:
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    given = {"rope_parameters": {"full_attention": NESTED}, "layer_types": kinds}
    with pytest.raises(ConvertError, match="of every kind of layer; got none of sliding_attention"):
        rope.describe(TINY["llama"] | given, 32)
