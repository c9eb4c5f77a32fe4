"""Prompts that fill a gap in the middle of a file, as vocabularies trained for it mark them:

repo myproject                            where the vocabulary has these two
file name, text                           for each chunk of input_extra
file filename
prefix input_prefix prompt  suffix input_suffix  middle
"""

from __future__ import annotations

from collections.abc import Sequence

from latentkv import _core
from latentkv.server.errors import Refused
from latentkv.server.llama_cpp.body import InfillBody, InfillChunk
from latentkv.server.serving import Serving
from latentkv.text import utf8

_SNIPPET = "\n\n--- snippet ---\n\n"  # before a chunk, in a vocabulary without files


def infill_prompt(serving: Serving, body: InfillBody) -> list[int]:
    """Tokens. What is nearest to the gap stays where not all fits: as in llama.cpp's server three quarters of
    a batch are the prefix's and a quarter the suffix's, and chunks take what the context has left."""
    model = serving.model
    require_marks(model)
    n_ctx, asked = serving.scheduler.n_ctx_seq, max(0, body.limit(serving.n_predict))
    n_batch = min(serving.scheduler.n_batch, n_ctx - asked)

    longest = serving.longest_piece  # so that only the usable part of a large file is tokenized
    prompt = _tokens(model, body.prompt[-n_batch * longest :], special=True)
    n_prefix, n_suffix = 3 * (n_batch // 4), max(0, n_batch // 4 - (2 + len(prompt)))
    prefix = _last(_tokens(model, body.input_prefix[-n_prefix * longest :]), n_prefix)
    suffix = _tokens(model, body.input_suffix[: n_suffix * longest])[:n_suffix]
    n_extra = max(0, n_ctx - n_batch - 2 * asked)
    extra = _last(_chunks(model, body.input_extra), n_extra) if n_extra else []
    start = [model.token_bos()] if model.add_bos() else []
    return [
        *extra,
        *start,
        model.token_prefix(),
        *prefix,
        *prompt,
        model.token_suffix(),
        *suffix,
        model.token_middle(),
    ]


def require_marks(model: _core.Model) -> None:
    """Raises Refused if the vocabulary has no infill tokens."""
    marks = {"prefix": model.token_prefix(), "suffix": model.token_suffix(), "middle": model.token_middle()}
    absent = ", ".join(name for name, token in marks.items() if token < 0)
    if absent:
        raise Refused(
            501, f"[infill] expected a model that fills in the middle; got one without {absent} token"
        )


def _chunks(model: _core.Model, chunks: Sequence[InfillChunk]) -> list[int]:
    repo, file = model.token_repo(), model.token_file()
    found = [repo, *_tokens(model, "myproject\n")] if repo >= 0 else []
    for chunk in chunks:
        name = [file, *_tokens(model, f"{chunk.filename}\n")]
        found += name if file >= 0 else _tokens(model, _SNIPPET)
        found += _tokens(model, chunk.text)
    return found + ([file, *_tokens(model, "filename\n")] if file >= 0 else [])


def _tokens(model: _core.Model, text: str, special: bool = False) -> list[int]:
    return list(model.tokenize(utf8(text, "infill"), False, special))


def _last(tokens: list[int], count: int) -> list[int]:
    return tokens[max(0, len(tokens) - count) :]
