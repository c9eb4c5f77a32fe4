"""`--kv-read`, where there is no GPU whose kernels choose: all rows are read, or it is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from latentkv.errors import LatentKVError


def test_all_is_what_is_read_anyway(run: Any, latent_gguf: Path) -> None:
    words = ("bench", latent_gguf, "-p", 0, "-n", 4, "-r", 1, "-d", 100, "--json")
    for more in ((), ("--kv-read", "all"), ("--kv-read", 0)):
        (row,) = json.loads(run(*words, *more).stdout)["results"]
        assert row["rows_read"] == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("--kv-read", 4096),
            "[kv_read] expected all where layers are on the CPU, which reads every row; got 4096",
        ),
        (("--kv-read", 100), "[--kv-read] expected 512 … 1048576, or 0 (all); got 100"),
        (("--kv-read", "half"), "[--kv-read] expected 512 … 1048576, or 0 (all); got half"),
        (
            ("--kv-read", 4096, "--evict", "h2o", "--keep-tokens", "50%"),
            "[kv_read] expected all beside --evict, which has chosen already; got 4096",
        ),
        (
            ("--kv-read", 600, "--recent", 700, "-c", 2048),
            "[kv_read] expected all (0), or at least 700 tokens, as many as the exact window has; got 600",
        ),
    ],
)
def test_bad_options_are_one_line(run: Any, latent_gguf: Path, words: tuple[Any, ...], said: str) -> None:
    done = run("chat", latent_gguf, "-p", "x", "-n", 1, *words)
    assert done.returncode == 2
    assert said in done.stderr.strip().splitlines()[-1]


def test_llama_says_so_too(latent_gguf: Path) -> None:
    from latentkv import Llama

    assert Llama(str(latent_gguf), n_ctx=64, kv_read=0, verbose=False).session.rows_read() == 0
    for wrong in (4096, 5, -1, "all"):
        with pytest.raises(LatentKVError, match=r"^\[kv_read\] expected "):
            Llama(str(latent_gguf), n_ctx=64, kv_read=wrong, verbose=False)  # type: ignore[arg-type]
