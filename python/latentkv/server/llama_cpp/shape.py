"""An answer in the shape of llama.cpp's /completion: chunks of `content`, and a summary at the end."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from latentkv.engine.request import Request
from latentkv.generate.completion import joined
from latentkv.generate.writer import Piece
from latentkv.sampling.logprobs import TokenScore, show
from latentkv.server.answering import Answering
from latentkv.server.llama_cpp.body import NativeBody
from latentkv.server.llama_cpp.settings import number, settings_of
from latentkv.server.serving import Serving


class NativeShape:
    """One answer."""

    def __init__(self, answer: Answering, body: NativeBody, serving: Serving, index: int) -> None:
        self._answer, self._body, self._serving, self._index = answer, body, serving, index
        self._has_new_line = False

    def lines(self, piece: Piece) -> list[str]:
        """The chunks of a stream. The last one has no text, because the earlier ones contain it."""
        self._has_new_line = self._has_new_line or "\n" in piece.text
        chunks = [self._chunk(piece)] if piece.text or piece.tokens else []
        if piece.finish_reason is not None:
            chunks.append(self._end(Piece("", (), piece.finish_reason, piece.stopping_word), streamed=True))
        return [json.dumps(chunk, ensure_ascii=False) for chunk in chunks]

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        piece = joined(pieces)
        self._has_new_line = "\n" in piece.text
        return self._end(piece, streamed=False)

    def _chunk(self, piece: Piece) -> dict[str, Any]:
        progress = self._answer.ticket.progress
        chunk = {
            "index": self._index,
            "content": piece.text,
            "tokens": [score.token for score in piece.tokens],
            "stop": False,
            "id_slot": progress.slot,
            "tokens_predicted": progress.completion_tokens,
            "tokens_evaluated": progress.prompt_tokens,
        }
        if self._body.timings_per_token:
            chunk["timings"] = progress.timings.as_dict()
        return chunk | self._probabilities(piece.tokens)

    def _end(self, piece: Piece, streamed: bool) -> dict[str, Any]:
        ticket, body = self._answer.ticket, self._body
        progress = ticket.progress
        is_limit = piece.finish_reason == "length"
        is_eos = not is_limit and not piece.stopping_word
        said = progress.completion_tokens
        told = {
            "index": self._index,
            "content": piece.text,
            "tokens": [score.token for score in piece.tokens] if body.return_tokens else [],
            "id_slot": progress.slot,
            "stop": True,
            "model": self._serving.name,
            "tokens_predicted": said,
            "tokens_evaluated": progress.prompt_tokens,
            "generation_settings": self._settings(ticket.request),
            "prompt": self._serving.text(ticket.request.prompt),
            "has_new_line": self._has_new_line,
            "truncated": is_limit and self._is_full(progress.prompt_tokens + said),
            "stop_type": "limit" if is_limit else "eos" if is_eos else "word",
            "stopping_word": piece.stopping_word or "",
            "tokens_cached": progress.prompt_tokens + max(0, said - (not is_eos)),
            "timings": progress.timings.as_dict(),
        }
        if not streamed:
            told |= self._probabilities(piece.tokens)
        return picked(told, body.response_fields) if body.response_fields else told

    def _is_full(self, count: int) -> bool:
        scheduler = self._serving.scheduler
        return count >= scheduler.n_ctx_seq + (scheduler.sequences.shift is not None)

    def _settings(self, request: Request) -> dict[str, Any]:
        body, shift = self._body, self._serving.scheduler.sequences.shift
        return settings_of(
            request.sampling,
            self._serving.scheduler.n_ctx_seq,
            request.max_tokens,
            request.stop,
            n_keep=0 if shift is None else shift.n_keep,
            ignore_eos=request.ignore_eos,
            stream=body.stream,
            n_probs=request.logprobs or 0,
            timings_per_token=body.timings_per_token,
            post_sampling_probs=body.post_sampling_probs,
        )

    def _probabilities(self, tokens: Iterable[TokenScore]) -> dict[str, Any]:
        found = [
            probability(each, self._body.post_sampling_probs) for each in tokens if each.logprob is not None
        ]
        return {"completion_probabilities": found} if found else {}


def probability(score: TokenScore, behind_samplers: bool) -> dict[str, Any]:
    """A token and its alternatives, with log-probabilities from the raw logits, or with the probabilities
    that were sampled from."""

    def entry(token: int, piece: bytes, logprob: float) -> dict[str, Any]:
        named = {"id": token, "token": show(piece), "bytes": list(piece)}
        return named | ({"prob": math.exp(logprob)} if behind_samplers else {"logprob": number(logprob)})

    assert score.logprob is not None
    rivals = [
        entry(token, piece, logprob)
        for token, (piece, logprob) in zip(score.top_tokens, score.top, strict=True)
    ]
    own = entry(score.token, score.piece, score.logprob)
    return own | {"top_probs" if behind_samplers else "top_logprobs": rivals}


def picked(told: Mapping[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    """The requested `response_fields` that exist, under the requested names. A slash leads into an object.

    >>> picked({"content": "a", "timings": {"prompt_n": 3}}, ["timings/prompt_n", "cheese"])
    {'timings/prompt_n': 3}
    """
    found: dict[str, Any] = {}
    for field in fields:
        value: Any = told
        for name in field.split("/"):
            value = value.get(name, _ABSENT) if isinstance(value, Mapping) else _ABSENT
        if value is not _ABSENT:
            found[field] = value
    return found


_ABSENT = object()
