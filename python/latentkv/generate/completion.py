"""create_completion: text in, text out, in the shapes of OpenAI's completion call."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from json.encoder import encode_basestring
from typing import TYPE_CHECKING, Any, Protocol

from latentkv.errors import expected
from latentkv.generate.answer import Answer, AnswerOptions, Piece
from latentkv.generate.loop import LogitsProcessor, StoppingCriteria
from latentkv.sampling.grammar import LlamaGrammar
from latentkv.sampling.logprobs import completion_shape
from latentkv.sampling.options import SamplingOptions, require_tfs_off, server_options, token_bias
from latentkv.text import stop_list, utf8

if TYPE_CHECKING:
    from latentkv.open_model import OpenModel


def create_completion(
    self: OpenModel,
    prompt: str | Sequence[int],
    suffix: str | None = None,
    max_tokens: int | None = 16,
    temperature: float = 0.8,
    top_p: float = 0.95,
    min_p: float = 0.05,
    typical_p: float = 1.0,
    logprobs: int | None = None,
    echo: bool = False,
    stop: str | Sequence[str] | None = None,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
    repeat_penalty: float = 1.0,
    top_k: int = 40,
    stream: bool = False,
    seed: int | None = None,
    tfs_z: float = 1.0,
    mirostat_mode: int = 0,
    mirostat_tau: float = 5.0,
    mirostat_eta: float = 0.1,
    model: str | None = None,
    stopping_criteria: StoppingCriteria | None = None,
    logits_processor: LogitsProcessor | None = None,
    grammar: LlamaGrammar | None = None,
    logit_bias: Mapping[int, float] | Mapping[str, float] | None = None,
    **server: Any,
) -> Any:
    """Continues `prompt`, or fills the gap between it and `suffix`, where the vocabulary has tokens for that.

    `max_tokens` None or below 1: until the context is full. `seed` None: the object's; -1: a new one. A
    call repeated with its seed gives the same text; after other calls, and where `recent` tokens are kept
    exact, reset() first makes that exact (a reused prefix may differ in the last bits). `logprobs` counts
    rivals per token and needs no logits_all here. `server`: sampling options under llama.cpp's server's
    names (dry_multiplier, xtc_probability, top_n_sigma, …: sampling/options.py). Returns a dict (`id`,
    `object`, `created`, `model`, `choices`, `usage`); with `stream`, an iterator of such dicts whose texts
    add up to the same, `finish_reason` in the last one. Raises LatentKVError when the prompt does not fit.
    """
    require_tfs_off(tfs_z)
    tokens = _prompt_tokens(self, prompt) if suffix is None else _infill_tokens(self, prompt, suffix)
    text = prompt if isinstance(prompt, str) else self.detokenize(tokens).decode("utf-8", errors="replace")
    answer = Answer(
        self,
        tokens,
        SamplingOptions(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            typical_p=typical_p,
            repeat_penalty=repeat_penalty,
            frequency_penalty=frequency_penalty,
            presence_penalty=presence_penalty,
            **server_options("create_completion", server, self.last_n_tokens_size, self.n_ctx()),
            mirostat_mode=mirostat_mode,
            mirostat_tau=mirostat_tau,
            mirostat_eta=mirostat_eta,
            seed=self.seed if seed is None else seed,
            logit_bias=token_bias(logit_bias),
            grammar=grammar,
        ),
        AnswerOptions(
            max_tokens=max_tokens,
            stop=stop_list(stop),
            logprobs=logprobs,
            processor=logits_processor,
            stopping=stopping_criteria,
            echo=text if echo else None,
        ),
    )
    shape = CompletionShape(model or self.model_path, len(text), logprobs is not None)
    if stream:
        return shape.stream(iter(answer))
    with self.lock:
        return shape.whole(list(answer), answer)


def _prompt_tokens(llama: OpenModel, prompt: str | Sequence[int]) -> list[int]:
    tokens = (
        llama.tokenize(utf8(prompt, "prompt"), special=True)
        if isinstance(prompt, str)
        else [int(t) for t in prompt]
    )
    if not tokens:  # an empty text in a vocabulary without a start token
        tokens = [llama.token_bos() if llama.token_bos() >= 0 else llama.token_eos()]
    outside = [token for token in tokens if not 0 <= token < llama.n_vocab()]
    if outside:
        raise expected("prompt", f"token ids below {llama.n_vocab()}", outside[0])
    return tokens


def _infill_tokens(llama: OpenModel, prompt: str | Sequence[int], suffix: str) -> list[int]:
    """What stands before a gap and behind it, as vocabularies trained for it mark them."""
    model = llama.model
    before, behind, gap = model.token_prefix(), model.token_suffix(), model.token_middle()
    if min(before, behind, gap) < 0:
        raise expected(
            "suffix", "a vocabulary with tokens to fill in the middle", "one without", "pass suffix=None"
        )
    text = (
        llama.tokenize(utf8(prompt, "prompt"), add_bos=False)
        if isinstance(prompt, str)
        else _prompt_tokens(llama, prompt)
    )
    prefix_part = [before, *text]
    suffix_part = [behind, *llama.tokenize(utf8(suffix, "suffix"), add_bos=False)]
    parts = suffix_part + prefix_part if llama.spm_infill else prefix_part + suffix_part
    return [*([model.token_bos()] if model.add_bos() else []), *parts, gap]


class Counted(Protocol):
    """What usage() counts: generated tokens without the end token."""

    prompt_tokens: int
    completion_tokens: int


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
    """The JSON of a chunk before and behind what is empty in it. Every token of an answer comes in the same
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
