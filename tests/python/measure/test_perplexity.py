"""Perplexity on the demo model, against a calculation that shares nothing with it but the logits."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from latentkv.cli.perplexity import split_reference

ROOT = Path(__file__).resolve().parents[3]
TEXT = ROOT / "models/demo/sample-val.txt"
N_CTX = 128


@pytest.fixture(scope="module")
def cache(latent_gguf: Path) -> Any:
    from latentkv import _core
    from latentkv.measure.perplexity import Cache

    # f16: a coarser cache amplifies the last bits, and the order of work changes those
    return Cache(_core.Model(str(latent_gguf)), {"kv": "f16", "n_threads": 1})


def measure(cache: Any, **options: Any) -> dict[str, Any]:
    from latentkv.measure.perplexity import perplexity

    return perplexity(cache, TEXT.read_text(encoding="utf-8"), **({"n_ctx": N_CTX, "chunks": 4} | options))


def test_equals_the_definition(cache: Any, latent_gguf: Path) -> None:
    from latentkv import Llama

    nll = []
    with Llama(str(latent_gguf), n_ctx=N_CTX, kv="f16", n_threads=1) as llama:
        tokens = llama.tokenize(TEXT.read_bytes())
        for start in range(0, 4 * N_CTX, N_CTX):
            window = tokens[start : start + N_CTX]
            if llama.model.add_bos():
                window[0] = llama.token_bos()
            llama.reset()
            logprobs = llama.logits_to_logprobs(llama.eval_all(window))
            nll += [-logprobs[i, window[i + 1]] for i in range(N_CTX // 2, N_CTX - 1)]
    # one window at a time, as above: products of four at once round otherwise, on one processor by 1.0e-4
    result = measure(cache, parallel=1)
    assert result["tokens"] == len(nll) == 4 * 63
    assert result["ppl"] == pytest.approx(math.exp(np.mean(nll)), rel=1e-7)


def test_order_of_work_changes_nothing(cache: Any) -> None:
    whole = measure(cache)
    for options in (
        {"parallel": 1},
        {"parallel": 3},
        {"n_ubatch": 48},
        {"decode": True},
        {"decode": True, "parallel": 1},
    ):
        assert measure(cache, **options)["ppl"] == pytest.approx(whole["ppl"], rel=2e-3), options
    assert abs(measure(cache, chunks=3)["ppl"] / whole["ppl"] - 1) > 2e-3  # the tolerance can tell


def test_plain_scores_every_position(cache: Any) -> None:
    assert measure(cache, window="plain")["tokens"] == 4 * (N_CTX - 1)


def test_against_itself_is_zero_and_finer_is_closer(cache: Any) -> None:
    from latentkv.measure.perplexity import Cache

    same = measure(cache, against=cache)
    assert same["kld"]["max"] == 0
    assert same["same_top"] == 1
    q4, q8 = (measure(Cache(cache.model, {"kv": kv, "n_threads": 1}), against=cache) for kv in ("q4", "q8"))
    assert 0 < q8["kld"]["mean"] < 0.1 * q4["kld"]["mean"]
    assert q8["kv_bytes_per_token"] > q4["kv_bytes_per_token"]
    recent = measure(Cache(cache.model, {"kv": "q4", "recent": 64, "n_threads": 1}))
    assert recent["kv_bytes_per_token"] == q4["kv_bytes_per_token"]
    assert recent["kv_bytes"] > 1.5 * q4["kv_bytes"]


def test_command_writes_json(run: Any, latent_gguf: Path, plain_gguf: Path) -> None:
    done = run(
        *("perplexity", latent_gguf, "-f", TEXT, "-c", N_CTX, "--chunks", 3, "--kv", "q8/q4", "-t", 1),
        *("--kld-against", f"{plain_gguf}:f16", "--depth-buckets", "--json"),
    )
    assert done.returncode == 0, done.stderr
    assert all(line.startswith("perplexity: ") for line in done.stderr.splitlines())  # where it takes long
    result = json.loads(done.stdout)
    keys = {"ppl", "ppl_se", "nll", "tokens", "kv_bytes_per_token", "kld", "same_top", "rms_dp", "ppl_ratio"}
    assert keys | {"depth", "command", "version", "kv"} <= result.keys()
    assert {"mean", "median", "p99", "p999", "max"} <= result["kld"].keys()
    assert result["kld"]["mean"] > 0.01  # half of the dimensions are gone
    assert result["kv"] == "q8/q4"
    assert sum(row["tokens"] for row in result["depth"]) == result["tokens"]


def test_a_reference_keeps_what_the_measured_cache_evicts(run: Any, plain_gguf: Path) -> None:
    words = ("perplexity", plain_gguf, "-f", TEXT, "-c", 192, "--chunks", 1, "-t", 1, "--decode", "--json")
    evicting = ("--evict", "h2o", "--keep-tokens", 80, "--sink", 4)
    result = json.loads(run(*words, *evicting, "--kld-against", "f16").stdout)
    assert result["kld"]["mean"] > 1e-4
    same = json.loads(run(*words, "--sink", 4, "--recent", 32, "--kld-against", "f16").stdout)
    assert same["kld"]["mean"] < 1e-6


def test_command_reports_to_people(run: Any, latent_gguf: Path) -> None:
    done = run(
        "perplexity",
        latent_gguf,
        "-f",
        TEXT,
        "-c",
        N_CTX,
        "--chunks",
        2,
        "-t",
        1,
        "--kld-against",
        "f16",
        "--kv",
        "q4",
    )
    assert done.stderr.startswith(
        "warning: [--kld-against] expected GGUF:f16, the file before its conversion"
    )
    assert done.stdout.startswith("perplexity  ")
    assert "bytes per token" in done.stdout
    assert "KL divergence" in done.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-f", "none.txt"], "error: [file] expected to open none.txt; got no such file or directory"),
        (["-f", TEXT, "-c", 100_000], "error: [text] expected at least one window of 100000 tokens; got "),
        (["-f", TEXT, "-c", 2], "error: [-c] expected windows of at least 4 tokens; got 2"),
        (["-f", TEXT, "--chunks", 0], "error: [--chunks] expected 1 … 2147483647; got 0"),
        (["-f", TEXT, "--kv", "q9"], "error: [kv] expected f16, q8_0, "),
        (
            ["-f", TEXT, "--kld-against", "none.gguf"],
            "error: [file] expected a readable file; got 'none.gguf'",
        ),
        (
            ["-f", TEXT, "--window", "half"],
            "error: [--window] expected one of ",
        ),
        ([], "error: [latentkv perplexity] expected -f/--file; got none"),
    ],
)
def test_command_errors(run: Any, latent_gguf: Path, options: list[object], message: str) -> None:
    done = run("perplexity", latent_gguf, *options)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == 1


def test_empty_text(run: Any, latent_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    done = run("perplexity", latent_gguf, "-f", tmp_path / "empty.txt")
    assert done.returncode == 2
    assert done.stderr.startswith("error: [text] expected at least one window of 1024 tokens; got ")


def test_reference_forms(tmp_path: Path) -> None:
    assert split_reference("q8_0") == (None, "q8_0")
    assert split_reference("a/b.gguf") == ("a/b.gguf", "")
    assert split_reference("a/b.gguf:q4") == ("a/b.gguf", "q4")
