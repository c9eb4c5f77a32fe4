"""Templates whose calls have no mark: an answer that begins with a brace is a call, any other is text.

    {"name": "weather", "parameters": {"city": "Oslo"}}

llama.cpp makes a grammar of such calls only where one is required. For a strict function this one binds them
where they are optional."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from latentkv._core import ChatParser, ChatStream
else:  # the native classes are not derived from, their places are taken
    ChatParser = ChatStream = object

_BLANK = " \t\r\n"
_ROOT = re.compile(r"^(root ::= .*?)until-\d+\? (tool-calls?)$", re.MULTILINE)
_UNTIL = re.compile(r"^until-\d+ ::= \| \[\^(\\?.)\] until-\d+$", re.MULTILINE)


def call_or_text(required: str) -> tuple[str, str] | None:
    """required: the grammar of a required call. Returns that of an answer that is a call or a text, and the
    character that calls begin with. None: the grammar has another form."""
    begin = _UNTIL.search(required)
    if begin is None or not _ROOT.search(required):
        return None
    text = _ROOT.sub(r"\1(\2 | free-text)?", required)
    free = f"free-text ::= [^{begin[1]} \\t\\r\\n] free-character*\nfree-character ::= .\n"
    return f"{text.rstrip()}\n{free}", begin[1].removeprefix("\\")


class BareParser(ChatParser):
    """Reads an answer by `calls`, if its first character that is no blank is `begin`, else by `text`."""

    def __init__(self, calls: ChatParser, text: ChatParser, begin: str) -> None:
        self._calls, self._text, self._begin = calls, text, begin

    def parse(self, text: str, is_partial: bool) -> str:
        return self.of(text).parse(text, is_partial)

    def stream(self) -> ChatStream:
        return _Stream(self)

    def of(self, text: str) -> ChatParser:
        return self._calls if text.lstrip(_BLANK).startswith(self._begin) else self._text


class _Stream(ChatStream):
    """Waits for the first character that is no blank."""

    def __init__(self, parser: BareParser) -> None:
        self._parser, self._begun = parser, ""
        self._native: ChatStream | None = None

    def push(self, text: str, is_partial: bool = True) -> list[str]:
        if self._native is None:
            self._begun += text
            if is_partial and not self._begun.strip(_BLANK):
                return []
            self._native, text = self._parser.of(self._begun).stream(), self._begun
            if not is_partial:
                return self._native.push(text) + self._native.push("", False) if text else []
        return self._native.push(text, is_partial)

    @property
    def message(self) -> str:
        if self._native is None:
            return json.dumps({"role": "assistant", "content": self._begun})
        return self._native.message

    @property
    def has_tool_calls(self) -> bool:
        return self._native is not None and self._native.has_tool_calls
