"""Templates whose calls have no mark, as those of Llama 3: a call is a bare object.

    {"name": "weather", "parameters": {"city": "Oslo"}}

llama.cpp makes a grammar of such calls only where one is required, and fails where an answer has another
brace. Here a brace begins a call only if the name of a function follows. Where a function is strict, the
grammar lets an answer be a call or a text."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from latentkv import _core
from latentkv.chat.streams import ChatParser, ChatStream, StreamParser
from latentkv.chat.untagged import begins_call

_BLANK = " \t\r\n"
_NAME = re.compile(r'\{\s*"name"')
_SECOND_KEY = re.compile(r'\{\s*"name"\s*:\s*"(?:[^"\\]|\\.)*"\s*,\s*"([^"]*)"')
_ROOT = re.compile(r"^(root ::= .*?)until-\d+\? (tool-calls?)$", re.MULTILINE)
_UNTIL = re.compile(r"^until-\d+ ::= \| \[\^\{\] until-\d+$", re.MULTILINE)


def call_or_text(required: str) -> str | None:
    """The grammar of an answer that is either a call or a text, made from the grammar of a required call.
    None: calls do not begin with a brace."""
    if not _UNTIL.search(required) or not _ROOT.search(required):
        return None
    text = _ROOT.sub(r"\1(\2 | free-text)?", required)
    return text.rstrip() + "\nfree-text ::= [^{ \\t\\r\\n] free-character*\nfree-character ::= .\n"


class BareParser(StreamParser):
    """Parses an object that begins like a call of one of `names` with the parser `calls`, and the text before
    it with the parser `text`. required: the grammar of a required call. anywhere: the object may follow text;
    otherwise it must be the whole answer."""

    def __init__(
        self, calls: ChatParser, text: ChatParser, names: Sequence[str], required: str, anywhere: bool
    ) -> None:
        self.calls, self.text, self.anywhere = calls, text, anywhere
        self._names, self._required = frozenset(names), required

    def begins(self, text: str) -> bool | None:
        """Whether a text that starts with a brace is a call as the template writes it; None: too short to
        tell."""
        verdict = begins_call(text, self._names)
        if not verdict or not _NAME.match(text):
            return verdict
        key = _SECOND_KEY.match(text)
        return None if key is None else rf'"\"{key[1]}\""' in self._required

    def stream(self) -> ChatStream:
        return _Stream(self)


class _Stream(ChatStream):
    """Holds back the text from a brace on while it may still become a call."""

    def __init__(self, parser: BareParser) -> None:
        self._parser = parser
        self._text = parser.text.stream()
        self._calls: ChatStream | None = None
        self._held = ""  # of a call, all of it until it is known to be one
        self._may_call = True

    def push(self, text: str, is_partial: bool = True) -> list[str]:
        if self._calls is not None:
            return self._called(text, is_partial)
        self._held += text
        deltas: list[str] = []
        while self._held:
            at = self._held.find("{") if self._may_call else -1
            is_first = at >= 0 and not self._held[:at].strip(_BLANK)
            if at < 0 or not (is_first or self._parser.anywhere):
                self._may_call = self._parser.anywhere or not self._held.strip(_BLANK)
                deltas += self._released(len(self._held))
                break
            verdict = self._parser.begins(self._held[at:])
            if verdict:
                deltas += self._released(at) if not is_first else []
                self._calls = self._parser.calls.stream()
                began, self._held = self._held, ""
                return deltas + self._called(began, is_partial)
            if verdict is None and is_partial:
                return deltas + (self._released(at) if not is_first else [])
            self._may_call = self._parser.anywhere
            deltas += self._released(at + 1)
        return deltas if is_partial else deltas + self._text.push("", False)

    def _called(self, text: str, is_partial: bool) -> list[str]:
        """Shows the text of what began like a call but broke off before its name was known."""
        assert self._calls is not None
        self._held += text
        try:
            deltas = self._calls.push(text) if text else []
            return deltas if is_partial else deltas + self._calls.push("", False)
        except _core.Error:
            if self._calls.has_tool_calls:
                raise
        self._calls, self._may_call = None, False
        deltas = self._released(len(self._held))
        return deltas if is_partial else deltas + self._text.push("", False)

    def _released(self, count: int) -> list[str]:
        shown, self._held = self._held[:count], self._held[count:]
        return self._text.push(shown) if shown else []

    @property
    def message(self) -> str:
        if self._calls is None:
            return self._text.message
        message, called = json.loads(self._text.message), json.loads(self._calls.message)
        found = {
            **message,
            "content": message.get("content") or None,
            "tool_calls": called.get("tool_calls", []),
        }
        return json.dumps(found, ensure_ascii=False)

    @property
    def has_tool_calls(self) -> bool:
        return self._calls is not None and self._calls.has_tool_calls
