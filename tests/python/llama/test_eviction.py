"""Eviction where people meet it: commands, `Llama`, and the server's parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

WORDS = ("--evict", "h2o", "--keep-tokens", "96", "--sink", 4, "--recent", 0)


def test_info_shows_bytes_before_anything_is_allocated(run: Any, latent_gguf: Path) -> None:
    def forecast(*words: Any) -> dict[str, Any]:
        report = json.loads(run("info", latent_gguf, "-c", 1024, "--kv", "q4", "--json", *words).stdout)
        last: dict[str, Any] = report["forecast"][-1]
        return last

    whole, part = forecast("--sink", 4, "--recent", 0), forecast(*WORDS)
    assert part["n_ctx"] == whole["n_ctx"] == 1024
    assert part["total"] < 0.5 * whole["total"]
    shown = run("info", latent_gguf, "-c", 1024, *WORDS).stdout
    assert "a layer keeps 128 of 1024 tokens beside its exact ones" in shown


def test_commands_take_it(run: Any, latent_gguf: Path, tmp_path: Path, demo: Path) -> None:
    text = demo / "sample-val.txt"
    words = ("perplexity", latent_gguf, "-f", text, "-c", 256, "--chunks", 2, "--json")
    whole, part = (json.loads(run(*words, *more).stdout) for more in ((), WORDS))
    assert part["ppl"] != whole["ppl"]
    assert part["kv_bytes"] < 0.6 * whole["kv_bytes"]
    measured = json.loads(
        run("bench", latent_gguf, "-p", 64, "-n", 8, "-r", 1, "-d", 200, "--json", *WORDS).stdout
    )
    assert measured


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--evict", "h2o"), "[keep_tokens] expected a number of tokens"),
        (("--keep-tokens", "50%"), "[keep_tokens] expected a policy beside it"),
        (("--evict", "fifo", "--keep-tokens", "99"), "[evict] expected one of h2o keyformer snapkv none"),
        (("--evict", "h2o", "--keep-tokens", "66", "--sink", 4), "[keep_tokens] expected at least 68 tokens"),
    ],
)
def test_bad_options_are_one_line(run: Any, latent_gguf: Path, words: tuple[Any, ...], said: str) -> None:
    for command in (("info", latent_gguf), ("chat", latent_gguf, "-p", "x", "-n", 1)):
        done = run(*command, *words)
        assert done.returncode == 2
        assert done.stderr.strip().splitlines()[-1].startswith(f"error: {said}")


def test_llama_goes_on_or_starts_anew(latent_gguf: Path) -> None:
    from latentkv import Llama, LlamaPromptLookupDecoding

    options: dict[str, Any] = {
        "evict": "h2o",
        "keep_tokens": 96,
        "sink": 4,
        "recent": 0,
        "n_ctx": 512,
        "logits_all": True,
    }
    llm = Llama(str(latent_gguf), **options)
    prompt = [1 + i * 7 % 500 for i in range(200)]
    llm.eval(prompt)
    first = llm.scores[-1].copy()
    llm.eval([5, 6])
    llm.reset()
    llm.eval(prompt)
    assert (llm.scores[-1] == first).all()
    with pytest.raises(ValueError, match=r"\[draft_model\] expected none beside eviction"):
        Llama(str(latent_gguf), draft_model=LlamaPromptLookupDecoding(), **options)


def test_moves_are_refused_in_the_server(latent_gguf: Path) -> None:
    from latentkv import _core
    from latentkv.engine.reuse import Reuse
    from latentkv.engine.shift import require_all_tokens

    model = _core.Model(str(latent_gguf))
    session = _core.Session(model, n_ctx=512, evict="h2o", keep_tokens="100", sink=4, recent=0)
    assert (session.evict, session.rewinds) == ("h2o", False)
    with pytest.raises(
        ValueError, match=r"\[--context-shift\] expected all tokens in the cache; got --evict h2o"
    ):
        require_all_tokens("--context-shift", session)
    with pytest.raises(ValueError, match=r"\[--cache-reuse\] expected"):
        Reuse.of(model, session, 32, 4)
