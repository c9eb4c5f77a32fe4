"""Caches by name: what a preset is on a plain file, wherever a cache is named; and what is no cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from latentkv import LatentKVError, Llama, _core
from latentkv.plan import formats, presets
from latentkv.plan.options import SessionOptions
from latentkv.plan.presets import PRESETS, resolved

ROOT = Path(__file__).resolve().parents[3]
NAMES = [name for name, _, _ in presets.choices()]
CHOICES = f"{', '.join(NAMES)}, or row formats such as q4 or c4/q4 (docs/cache.md)"


@pytest.fixture(scope="module")
def plain(plain_gguf: Path) -> Any:
    return _core.Model(str(plain_gguf), describe_only=True)


@pytest.fixture(scope="module")
def latent(latent_gguf: Path) -> Any:
    return _core.Model(str(latent_gguf), describe_only=True)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_formats_and_exact_tokens(plain: Any, name: str) -> None:
    preset = PRESETS[name]
    cache = {"kv": "", "kv_k": preset.k, "kv_v": preset.v, "sink": preset.sink, "recent": preset.recent}
    assert resolved(plain, {"kv": name}) == SessionOptions.of(cache)
    asked = resolved(plain, {"kv": name, "sink": 0, "recent": 64})
    assert asked == SessionOptions.of(cache | {"sink": 0, "recent": 64})
    assert resolved(plain, {"kv": name, "recent_ratio": 0.1}).recent == -1


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_takes_the_share_that_it_says(plain: Any, name: str) -> None:
    cache = plain.forecast(presets.SHARES_AT, **resolved(plain, {"kv": name}))
    share = 100 * cache["total"] / plain.forecast(presets.SHARES_AT, kv="f16")["total"]
    assert share == pytest.approx(float(PRESETS[name].share.split()[0]), abs=1.0)


@pytest.mark.parametrize(
    ("options", "cache"),
    [
        ({"kv": "c4/q4"}, {"kv": "", "kv_k": "c4", "kv_v": "q4", "sink": 4, "recent": 128}),
        ({"kv": "c4"}, {"kv": "", "kv_k": "c4", "kv_v": "q4", "sink": 4, "recent": 128}),
        ({"kv_k": "c2", "sink": 0, "recent": -1}, {"kv_k": "c2", "sink": 0, "recent": 128}),
        ({"kv_k": "c2", "recent": 0}, {"kv_k": "c2", "recent": 0}),
        ({"kv_k": "c2", "recent_ratio": 0.5}, {"kv_k": "c2", "recent_ratio": 0.5}),
        ({"kv": "Q5_1", "kv_v": "bf16"}, {"kv": "q5_1", "kv_k": "", "kv_v": "bf16"}),
        ({"kv": "q4_1/iq4_nl"}, {"kv": "", "kv_k": "q4_1", "kv_v": "iq4_nl"}),
        ({"kv": "q8_0"}, {"kv": "q8_0", "kv_k": "", "kv_v": ""}),
        ({"kv": "", "kv_k": ""}, {"kv": "", "kv_k": ""}),
    ],
)
def test_names_become_row_formats(plain: Any, options: dict[str, Any], cache: dict[str, Any]) -> None:
    assert resolved(plain, options) == SessionOptions.of(cache)


def test_help_says_from_which_length_and_of_which_models() -> None:
    rows = json.loads((ROOT / "bench/results/sizes-by-length.json").read_text(encoding="utf-8"))["rows"]
    for row in rows:
        if row["cache"] in PRESETS:
            said = float(PRESETS[row["cache"]].share.split()[0])
            assert row[f"share_{presets.SHARES_AT}"] == pytest.approx(said, abs=1.5)
    shorter = [f"{row['share_8192']:.0f}" for row in rows if row["cache"] == "small"]
    assert f"small: {' to '.join(shorter)} % at 8192" == presets.SHORTER
    page = (ROOT / "docs/cache.md").read_text(encoding="utf-8")
    assert all(name in page for name in presets.MODELS.split(", weights")[0].replace(" and", ",").split(", "))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv": "q7"}, rf"[kv] expected {CHOICES}; got 'q7'"),
        ({"kv": "smal"}, rf"[kv] expected {CHOICES}; got 'smal'"),
        ({"kv_v": "none"}, "[kv_v] expected a row format such as q8_0 or q4 (docs/cache.md); got 'none'"),
        ({"kv": "q4/"}, "[kv] expected one format, or K/V as in q8/q4; got 'q4/'"),
        (
            {"kv_k": "small"},
            "[kv_k] expected a row format such as c4; got small; kv small is for K and V together",
        ),
        (
            {"kv": "small/q4"},
            "[kv] expected a row format such as c4; got small; kv small is for K and V together",
        ),
        (
            {"kv": "small", "kv_v": "q8"},
            "[kv] expected no format of K or V beside small; got kv_v q8; leave one out",
        ),
    ],
)
def test_what_is_no_cache(plain: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(LatentKVError) as refusal:
        resolved(plain, options)
    assert str(refusal.value) == message


def test_a_latent_file_has_a_better_plan(latent: Any) -> None:
    with pytest.raises(
        LatentKVError, match=r"^\[kv\] expected a row format such as q4; got small for a file with a"
    ):
        resolved(latent, {"kv": "small"})


def test_llama_allocates_what_info_says(run: Any, plain_gguf: Path) -> None:
    report = json.loads(run("info", plain_gguf, "-c", 2048, "--kv", "small", "--json").stdout)
    assert report["file"]["regions"]["recent"] == PRESETS["small"].recent
    with Llama(str(plain_gguf), n_ctx=2048, kv="small") as llm:
        assert llm.kv_bytes()["total"] == report["forecast"][-1]["total"]
        assert llm("Q: What is a cache? A:", max_tokens=4)["usage"]["completion_tokens"] > 0
    with Llama(str(plain_gguf), n_ctx=512, type_k=7, type_v="q4_1") as llm:
        (rows,) = (region for region in llm.kv_bytes()["regions"] if region["name"] == "middle")
        assert rows["k"] > rows["v"] > 0


def test_info_offers_every_preset(run: Any, plain_gguf: Path) -> None:
    shown = run("info", plain_gguf).stdout
    assert [
        line.split()[0] for line in shown.splitlines() if line.split()[:1] in [[n] for n in NAMES]
    ] == NAMES
    said = run("info", plain_gguf, "--kv", "c4").stdout
    assert "the latest 128 tokens in f16" in said
    assert "keep K in blocks of 32 tokens" in said


@pytest.mark.parametrize(
    "words",
    [
        ["chat", "-p", "x", "-n", 2, "-c", 512, "--kv", "small"],
        ["bench", "-p", 8, "-n", 2, "-r", 1, "--kv", "small,c4"],
        ["bench", "-p", 8, "-n", 2, "-r", 1, "-ctk", "q8_0,q4_0", "-ctv", "q8_0"],
        ["perplexity", "-f", "TEXT", "-c", 512, "--chunks", 1, "--kv", "smallest", "--kld-against", "small"],
    ],
    ids=str,
)
def test_every_command_takes_them(run: Any, plain_gguf: Path, words: list[Any]) -> None:
    text = ROOT / "models/demo/sample-val.txt"
    done = run(words[0], plain_gguf, *(text if word == "TEXT" else word for word in words[1:]))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", ["chat", "serve", "bench", "perplexity", "info"])
def test_help_has_a_line_for_each(run: Any, command: str) -> None:
    lines = [line.split() for line in run(command, "--help").stdout.splitlines()]
    for name, share, about in presets.choices():
        assert [name, *share.split(), *about.split()] in lines


def test_a_wrong_cache_is_one_line_that_names_them(run: Any, plain_gguf: Path) -> None:
    done = run("chat", plain_gguf, "-p", "x", "--kv", "tiny")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: [kv] expected {CHOICES}; got 'tiny'\n"


def test_every_cache_type_of_llama_cpp_is_a_row_format(plain_gguf: Path) -> None:
    from latentkv import Llama, _core

    assert set(formats.GGML_TYPES.values()) <= set(_core.build_info()["formats"])
    sizes = {}
    for name in formats.GGML_TYPES.values():
        with Llama(str(plain_gguf), n_ctx=64, kv=name, n_threads=1) as llm:
            assert llm("The clerk", max_tokens=2)["usage"]["completion_tokens"] > 0
            sizes[name] = llm.kv_bytes()["per_token"]
    order = ["f32", "f16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]
    assert sorted(order, key=lambda name: -sizes[name]) == order
    assert (sizes["bf16"], sizes["iq4_nl"]) == (sizes["f16"], sizes["q4_0"])


def test_pages_have_every_preset() -> None:
    for page in ("README.md", "GLOSSARY.md", "docs/cache.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert all(f"`{name}`" in text for name in PRESETS), page


def test_every_format_is_in_the_page() -> None:
    text = (ROOT / "docs/cache.md").read_text(encoding="utf-8")
    table = text.split("## Row formats")[1].split("\n## ")[0]
    assert all(f"`{name}`" in table for name in _core.build_info()["formats"])
