"""An answer as Anthropic's Message: an object, or the events that build it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic_core import from_json

from latentkv.engine.request import Progress
from latentkv.generate.writer import Piece
from latentkv.server import errors
from latentkv.server.blocks import Block, Blocks, Change
from latentkv.server.events import named

Event = dict[str, Any]
PING = f"event: {named({'type': 'ping'})}\n\n"
_DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


class MessageShape:
    """One answer. stops: the strings that the request named. omits_thoughts: blocks of thoughts are empty."""

    def __init__(
        self, model: str, blocks: Blocks, progress: Progress, stops: Sequence[str], omits_thoughts: bool
    ) -> None:
        self._blocks, self._progress, self._stops = blocks, progress, stops
        self._omits_thoughts = omits_thoughts
        self._has_begun = False
        self._head = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": model}

    def lines(self, piece: Piece) -> list[str]:
        return [named(event) for event in self.events(piece)]

    def events(self, piece: Piece) -> Iterator[Event]:
        """The events. The message begins with its first piece, when the number of cached prompt tokens is
        known."""
        if not self._has_begun:
            self._has_begun = True
            yield {"type": "message_start", "message": self._message([], None, None, self._usage(0))}
            yield {"type": "ping"}
        for change in self._blocks.push(piece):
            yield from self._changed(change)
        if piece.finish_reason is not None:
            reason, word = self._ended(piece)
            delta = {"stop_reason": reason, "stop_sequence": word}
            usage = self._usage(self._progress.completion_tokens)
            yield {"type": "message_delta", "delta": delta, "usage": usage}
            yield {"type": "message_stop"}

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        last = pieces[-1]
        text = "".join(piece.text for piece in pieces)
        for _ in self._blocks.push(Piece(text, (), last.finish_reason or "stop")):
            pass
        content = [self._content(block) for block in self._blocks.all]
        return self._message(content, *self._ended(last), self._usage(self._progress.completion_tokens))

    @staticmethod
    def failed(error: errors.Refused) -> list[str]:
        return [named(errors.anthropic_body(error))]

    def _message(
        self, content: list[Any], reason: str | None, word: str | None, usage: dict[str, int]
    ) -> dict[str, Any]:
        ended = {"stop_reason": reason, "stop_sequence": word}
        return self._head | {"content": content} | ended | {"usage": usage}

    def _ended(self, piece: Piece) -> tuple[str, str | None]:
        """stop_reason and stop_sequence. Texts at which the template stops count as the end of a turn."""
        reason = self._blocks.finish_reason(piece.finish_reason or "stop")
        if reason in ("length", "tool_calls"):
            return "max_tokens" if reason == "length" else "tool_use", None
        if piece.stopping_word in self._stops:
            return "stop_sequence", piece.stopping_word
        return "end_turn", None

    def _usage(self, n_written: int) -> dict[str, int]:
        """The usage. input_tokens excludes prompt tokens that were read from the cache."""
        cached = self._progress.timings.cached_n
        return {
            "input_tokens": self._progress.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": n_written,
        }

    def _changed(self, change: Change) -> Iterator[Event]:
        block = change.block
        at = {"index": block.index}
        if change.what == "opened":
            yield {"type": "content_block_start"} | at | {"content_block": self._content(block)}
        elif change.what == "grew":
            if not (block.kind == "reasoning" and self._omits_thoughts):
                kind, name = _DELTAS[block.kind]
                yield {"type": "content_block_delta"} | at | {"delta": {"type": kind, name: change.text}}
        else:
            if block.kind == "reasoning":
                signature = {"type": "signature_delta", "signature": ""}
                yield {"type": "content_block_delta"} | at | {"delta": signature}
            yield {"type": "content_block_stop"} | at

    def _content(self, block: Block) -> dict[str, Any]:
        """The block so far. If a call was cut, its input is what arrived."""
        if block.kind == "text":
            return {"type": "text", "text": block.text}
        if block.kind == "reasoning":
            return {
                "type": "thinking",
                "thinking": "" if self._omits_thoughts else block.text,
                "signature": "",
            }
        try:
            given = from_json(block.text or "{}", allow_partial="trailing-strings")
        except ValueError:
            given = {}
        shown = {"type": "tool_use", "id": block.call_id, "name": block.name}
        return shown | {"input": given if isinstance(given, dict) else {}}
