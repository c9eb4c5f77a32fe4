"""Texts in, vectors out: what Llama.embed() and create_embedding() do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from latentkv.errors import expected
from latentkv.generate.caller import Caller
from latentkv.session.pool import Pool, as_lists, normalized
from latentkv.session.pooling import POOLINGS
from latentkv.text import utf8

_EUCLIDEAN, _NONE = 2, -1  # norms


def vectors_of(
    caller: Caller, texts: Sequence[str], *, normalize: bool = False, truncate: bool = True
) -> tuple[list[Any], int]:
    """An embedding of each text, and the number of tokens of all."""
    pooling = POOLINGS[caller.pooling_type()]
    norm = _EUCLIDEAN if normalize else _NONE
    found, n_tokens = [], 0
    with caller.evaluator.lock:
        for text in texts:
            tokens = _tokens(caller, text, truncate)
            n_tokens += len(tokens)
            pool = Pool(pooling, len(tokens))
            caller.evaluator.compute_states(tokens, pool.wanted(0, len(tokens)), pool.add)
            found.append(as_lists(normalized(pool.result(), norm), pooling))
    return found, n_tokens


def embedded(embeddings: Sequence[Any], n_tokens: int, model: str) -> dict[str, Any]:
    """OpenAI's answer."""
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "embedding": each, "index": index}
            for index, each in enumerate(embeddings)
        ],
        "model": model,
        "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
    }


def _tokens(caller: Caller, text: str, truncate: bool) -> list[int]:
    if not isinstance(text, str):
        raise expected("embed", "a text, or a list of them", type(text).__name__)
    tokens = list(caller.model.tokenize(utf8(text, "input"), True, False))
    if not tokens:
        raise expected("embed", "a text of at least one token", repr(text))
    return tokens[: caller.n_ctx()] if truncate else tokens
