"""An answer as a sequence of blocks: reasoning, text and tool calls. The Responses and the Messages interface
are two ways to write them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from latentkv.generate.chat import MessageStream
from latentkv.generate.writer import Piece
from latentkv.sampling.logprobs import TokenScore

if TYPE_CHECKING:
    from latentkv._core import ChatParser

Kind = Literal["reasoning", "text", "call"]


@dataclass
class Block:
    """A text (a call's: its arguments, as JSON) that grows until it is closed."""

    kind: Kind
    index: int
    call_id: str = ""
    name: str = ""
    is_cut: bool = False  # the answer had no room for the rest
    tokens: list[TokenScore] = field(default_factory=list)
    _parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        self._parts = ["".join(self._parts)]
        return self._parts[0]

    def grow(self, text: str, tokens: Sequence[TokenScore]) -> None:
        self._parts.append(text)
        self.tokens += tokens


@dataclass(frozen=True)
class Change:
    block: Block
    what: Literal["opened", "grew", "closed"]
    text: str = ""
    tokens: Sequence[TokenScore] = ()


class Blocks:
    """Takes an answer's pieces. A block is closed when another begins, but a call that is followed by text
    stays open, because its arguments may go on."""

    def __init__(
        self, parser: ChatParser, on_message: Callable[[dict[str, Any]], None] = lambda message: None
    ) -> None:
        """on_message takes the whole message at its end."""
        self._on_message = on_message
        self.all: list[Block] = []
        self._message = MessageStream(parser)
        self._open: list[Block] = []
        self._calls: dict[int, Block] = {}
        self._waiting: list[TokenScore] = []  # tokens whose text no delta has shown yet

    def push(self, piece: Piece) -> Iterator[Change]:
        """The changes that a piece makes. After the last piece all blocks are closed."""
        self._waiting += piece.tokens
        deltas = self._message.push(piece.text) if piece.text else []
        if piece.finish_reason is not None:
            deltas += self._message.end(piece.finish_reason)
        for delta in deltas:
            yield from self._delta(json.loads(delta))
        if piece.finish_reason is not None:
            self._on_message(self._message.message)
            yield from self._close(self._open, is_cut=piece.finish_reason == "length")

    def open_text(self) -> Iterator[Change]:
        """An empty text block, for shapes that need one if the answer has none."""
        yield from self._opened(Block("text", len(self.all)))
        yield from self._close(self._open)

    def finish_reason(self, reason: str) -> str:
        """The finish reason as in a chat: stop, length or tool_calls."""
        return self._message.finish_reason(reason)

    def _delta(self, delta: dict[str, Any]) -> Iterator[Change]:
        if "reasoning_content" in delta:
            yield from self._grown("reasoning", delta["reasoning_content"])
        if "content" in delta:
            yield from self._grown("text", delta["content"])
        for part in delta.get("tool_calls", ()):
            yield from self._called(part)

    def _grown(self, kind: Kind, text: str) -> Iterator[Change]:
        block = next((block for block in self._open if block.kind == kind), None)
        if block is None:
            block = Block(kind, len(self.all))
            yield from self._close([each for each in self._open if each.kind != "call"])
            yield from self._opened(block)
        yield self._more(block, text)

    def _called(self, part: dict[str, Any]) -> Iterator[Change]:
        index, function = part["index"], part["function"]
        block = self._calls.get(index)
        if block is None:
            block = Block("call", len(self.all), part.get("id", ""), function.get("name", ""))
            self._calls[index] = block
            yield from self._close(self._open)
            yield from self._opened(block)
        if text := function.get("arguments"):
            yield self._more(block, text)

    def _more(self, block: Block, text: str) -> Change:
        tokens, self._waiting = self._waiting, []
        block.grow(text, tokens)
        return Change(block, "grew", text, tokens)

    def _opened(self, block: Block) -> Iterator[Change]:
        self.all.append(block)
        self._open.append(block)
        yield Change(block, "opened")

    def _close(self, blocks: Sequence[Block], is_cut: bool = False) -> Iterator[Change]:
        for block in list(blocks):
            self._open.remove(block)
            block.is_cut = is_cut
            yield Change(block, "closed")
