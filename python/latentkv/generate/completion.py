"""create_completion: text in, text out, in the shapes of OpenAI's completion call."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from json.encoder import encode_basestring
from typing import TYPE_CHECKING, Any, Protocol

from latentkv import ranges
from latentkv.errors import expected
from latentkv.generate.answer import Answer, AnswerOptions
from latentkv.generate.caller import Caller
from latentkv.generate.writer import Piece
from latentkv.sampling.logprobs import completion_shape
from latentkv.sampling.options import SamplingOptions
from latentkv.text import utf8

if TYPE_CHECKING:
    from latentkv import _core


def complete(
    llama: Caller,
    prompt: str | Sequence[int],
    suffix: str | None,
    sampling: SamplingOptions,
    options: AnswerOptions,
    *,
    echo: bool = False,
    stream: bool = False,
    name: str | None = None,
) -> Any:
    """Continues `prompt`, or fills the gap between it and `suffix`. echo: the answer begins with the prompt;
    name: of the model, where the answer says it. Returns a dict, or with `stream` an iterator of dicts."""
    tokens = _prompt_tokens(llama, prompt) if suffix is None else _infill_tokens(llama, prompt, suffix)
    if isinstance(prompt, str):
        text = prompt
    else:
        text = llama.model.detokenize(tokens).decode("utf-8", errors="replace")
    answer = Answer(llama, tokens, sampling, replace(options, echo=text if echo else None))
    shape = CompletionShape(name or llama.model_path, len(text), options.logprobs is not None)
    if stream:
        return shape.stream(iter(answer))
    with llama.evaluator.lock:
        return shape.whole(list(answer), answer)


def _prompt_tokens(llama: Caller, prompt: str | Sequence[int]) -> list[int]:
    model = llama.model
    if isinstance(prompt, str):
        tokens = list(model.tokenize(utf8(prompt, "prompt"), True, True))
    else:
        tokens = ranges.token_ids("prompt", prompt)
    return prompt_tokens(model, tokens)


def prompt_tokens(model: _core.Model, tokens: list[int]) -> list[int]:
    """The tokens of a prompt; of an empty one in a vocabulary without a start token the end token.

    Raises:
        LatentKVError: a token that the vocabulary does not have.
    """
    outside = next((token for token in tokens if not 0 <= token < model.n_vocab), None)
    if outside is not None:
        raise expected("prompt", f"token ids below {model.n_vocab}", outside)
    return tokens or [model.token_bos() if model.token_bos() >= 0 else model.token_eos()]


def _infill_tokens(llama: Caller, prompt: str | Sequence[int], suffix: str) -> list[int]:
    """What stands before a gap and after it, as vocabularies trained for it mark them."""
    model = llama.model
    before, behind, gap = model.token_prefix(), model.token_suffix(), model.token_middle()
    if min(before, behind, gap) < 0:
        raise expected(
            "suffix", "a vocabulary with tokens to fill in the middle", "one without", "pass suffix=None"
        )
    text = (
        model.tokenize(utf8(prompt, "prompt"), False, False)
        if isinstance(prompt, str)
        else _prompt_tokens(llama, prompt)
    )
    prefix_part = [before, *text]
    suffix_part = [behind, *model.tokenize(utf8(suffix, "suffix"), False, False)]
    parts = suffix_part + prefix_part if llama.spm_infill else prefix_part + suffix_part
    return [*([model.token_bos()] if model.add_bos() else []), *parts, gap]


class Counted(Protocol):
    """What usage() counts: generated tokens without the end token."""

    @property
    def prompt_tokens(self) -> int: ...
    @property
    def completion_tokens(self) -> int: ...


class CompletionShape:
    """One choice in the shapes of OpenAI's completion call. text_start: characters before the answer, which
    offsets of tokens count from."""

    def __init__(self, model: str, text_start: int, logprobs: bool, index: int = 0) -> None:
        self._index = index
        self.head = {
            "id": f"cmpl-{uuid.uuid4()}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._text_start = text_start
        self._frame: tuple[str, str] | None = None  # of a chunk that is a text and nothing else
        self._logprobs = logprobs

    def stream(self, pieces: Iterator[Piece]) -> Iterator[dict[str, Any]]:
        for piece in pieces:
            yield self.chunk(piece)

    def chunk(self, piece: Piece) -> dict[str, Any]:
        return {**self.head, "choices": [self.choice(piece)]}

    def lines(self, piece: Piece) -> list[str]:
        """chunk() as JSON."""
        if self._logprobs or piece.finish_reason is not None:
            return [json.dumps(self.chunk(piece), ensure_ascii=False)]
        if self._frame is None:
            self._frame = framed(self.chunk(Piece("")), '""')
        before, behind = self._frame
        return [f"{before}{encode_basestring(piece.text)}{behind}"]

    def whole(self, pieces: Sequence[Piece], counted: Counted) -> dict[str, Any]:
        return {**self.head, "choices": [self.choice(joined(pieces))], "usage": usage(counted)}

    def choice(self, piece: Piece) -> dict[str, Any]:
        return {
            "text": piece.text,
            "index": self._index,
            "logprobs": completion_shape(piece.tokens, self._text_start) if self._logprobs else None,
            "finish_reason": piece.finish_reason,
        }


def framed(chunk: dict[str, Any], empty: str) -> tuple[str, str]:
    """The JSON of a chunk before and after what is empty in it. Every token of an answer comes in the same
    frame."""
    before, _, behind = json.dumps(chunk, ensure_ascii=False).rpartition(empty)
    return before, behind


def joined(pieces: Sequence[Piece]) -> Piece:
    """All of an answer as one."""
    tokens = tuple(token for piece in pieces for token in piece.tokens)
    text = "".join(piece.text for piece in pieces)
    return Piece(text, tokens, pieces[-1].finish_reason, pieces[-1].stopping_word)


def usage(counted: Counted) -> dict[str, int]:
    """Token counts; the end token is not counted."""
    return {
        "prompt_tokens": counted.prompt_tokens,
        "completion_tokens": counted.completion_tokens,
        "total_tokens": counted.prompt_tokens + counted.completion_tokens,
    }
