"""embed and create_embedding: texts in, vectors out, in llama-cpp-python's shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from latentkv.errors import expected
from latentkv.session.pool import Pool, as_lists, normalized
from latentkv.session.pooling import POOLINGS
from latentkv.text import utf8

if TYPE_CHECKING:
    from latentkv.open_model import OpenModel

_EUCLIDEAN, _NONE = 2, -1  # norms


def embed(
    self: OpenModel,
    input: str | Sequence[str],
    normalize: bool = False,
    truncate: bool = True,
    return_count: bool = False,
) -> Any:
    """The embedding of a text, or of each of several: a vector [n_embd], or where `pooling_type` is none a
    vector for every token.

    They are made of the hidden states behind the last norm. The text passes through the cache, whatever its
    row formats, and what the cache held before is forgotten. `normalize` divides each vector by its
    Euclidean norm. A text longer than `n_ctx` is cut there, or raises LatentKVError with `truncate` False.
    `return_count` returns a pair: the embeddings, and the number of tokens.
    """
    texts = [input] if isinstance(input, str) else list(input)
    pooling = POOLINGS[self.pooling_type()]
    norm = _EUCLIDEAN if normalize else _NONE
    found, n_tokens = [], 0
    with self.lock:
        for text in texts:
            tokens = _tokens(self, text, truncate)
            n_tokens += len(tokens)
            pool = Pool(pooling, len(tokens))
            self.compute_states(tokens, pool.wanted(0, len(tokens)), pool.add)
            found.append(as_lists(normalized(pool.result(), norm), pooling))
    embeddings = found[0] if isinstance(input, str) else found
    return (embeddings, n_tokens) if return_count else embeddings


def create_embedding(self: OpenModel, input: str | Sequence[str], model: str | None = None) -> dict[str, Any]:
    """Embeddings in the shape of OpenAI's call, not normalized, as llama-cpp-python has them. `input`: a text
    or several, as embed() takes them; `model`: the name that the answer bears (None: the file's path)."""
    texts = [input] if isinstance(input, str) else list(input)
    embeddings, n_tokens = embed(self, texts, return_count=True)
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "embedding": each, "index": index}
            for index, each in enumerate(embeddings)
        ],
        "model": model or self.model_path,
        "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
    }


def _tokens(llama: OpenModel, text: str, truncate: bool) -> list[int]:
    if not isinstance(text, str):
        raise expected("embed", "a text, or a list of them", type(text).__name__)
    tokens = llama.tokenize(utf8(text, "input"))
    if not tokens:
        raise expected("embed", "a text of at least one token", repr(text))
    return tokens[: llama.n_ctx()] if truncate else tokens
