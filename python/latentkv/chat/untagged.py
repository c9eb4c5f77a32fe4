"""Tool calls that a model writes without the tags of its template: a JSON object by itself, in a fence, or
between other tags. They count only if the answer contains nothing else.

    {"name": "weather", "arguments": {"city": "Oslo"}}

The braces may be doubled, because the template of Qwen2.5-Coder doubles them by mistake.

No grammar binds such a call. Where the function is strict and the arguments do not obey its schema, the
answer stays a text: whoever asks for strict functions may rely on the arguments of every call.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from latentkv import _core
from latentkv.chat.obeys import obeys
from latentkv.chat.streams import ChatParser, ChatStream, StreamParser

_FRAMES = {
    "```json": "```",
    "```": "```",
    "<tools>": "</tools>",
    "<tool_call>": "</tool_call>",
    "<function_call>": "</function_call>",
}
_OPENERS = sorted(_FRAMES, key=len, reverse=True)
_BLANK = " \t\r\n"


class UntaggedParser(StreamParser):
    """Parses answers as the template's parser does, and also calls without tags. names: of the offered tools.
    several: whether an answer may have more than one call. strict: schemas that the arguments of strict
    functions must obey."""

    def __init__(
        self,
        native: ChatParser,
        names: Sequence[str],
        several: bool = True,
        strict: Mapping[str, Any] | None = None,
    ) -> None:
        self._native, self._names, self._several = native, frozenset(names), several
        self._strict = dict(strict or {})

    def stream(self) -> ChatStream:
        return _Stream(self._native.stream(), self._names, self._several, self._strict)


class _Stream(ChatStream):
    """Holds text back while the answer may still turn out to be such a call."""

    def __init__(
        self, native: ChatStream, names: frozenset[str], several: bool, strict: Mapping[str, Any]
    ) -> None:
        self._native, self._names, self._several, self._strict = native, names, several, strict
        self._held: str | None = ""  # None: the answer is text, or has calls in the template's own form
        self._is_likely = False  # the held text begins like a call; its end decides
        self._calls: list[dict[str, Any]] = []

    def push(self, text: str, is_partial: bool = True) -> list[str]:
        if self._held is None:
            return self._native.push(text, is_partial)
        try:
            deltas = self._native.push(text, is_partial)
        except _core.Error:
            if text:
                raise
            deltas = []  # the end of what is no call in the template's form either
        shown = [line for delta in deltas for line in self._sorted(delta)]
        if not text:
            return shown + self._ended(is_partial)
        if self._held is not None and not self._is_likely:
            verdict = begins_call(self._held, self._names)
            if verdict is False:
                return shown + self._released()
            self._is_likely = verdict is True
        return shown

    @property
    def message(self) -> str:
        if not self._calls:
            return self._native.message
        message = json.loads(self._native.message)
        calls = [{key: each[key] for key in ("type", "id", "function")} for each in self._calls]
        return json.dumps(message | {"content": None, "tool_calls": calls}, ensure_ascii=False)

    @property
    def has_tool_calls(self) -> bool:
        return bool(self._calls) or self._native.has_tool_calls

    def _sorted(self, delta: str) -> Iterator[str]:
        """The part of a delta that may be shown although its text is held back."""
        if self._held is None:
            yield delta
            return
        rest = json.loads(delta)
        self._held += rest.pop("content", "")
        if "tool_calls" in rest:
            yield from self._released()
        if rest:
            yield json.dumps(rest, ensure_ascii=False)

    def _released(self) -> list[str]:
        held, self._held = self._held, None
        return [json.dumps({"content": held}, ensure_ascii=False)] if held else []

    def _ended(self, is_cut: bool) -> list[str]:
        calls = [] if is_cut or not self._held else calls_in(self._held, self._names)
        if not calls or (len(calls) > 1 and not self._several) or not all(map(self._obeys, calls)):
            return self._released()
        self._held = None
        self._calls = [
            {"index": at, "id": f"call_{secrets.token_hex(12)}", "type": "function", "function": call}
            for at, call in enumerate(calls)
        ]
        return [json.dumps({"tool_calls": [call]}, ensure_ascii=False) for call in self._calls]

    def _obeys(self, call: Mapping[str, str]) -> bool:
        schema = self._strict.get(call["name"])
        return schema is None or obeys(schema, json.loads(call["arguments"]))


def begins_call(text: str, names: frozenset[str]) -> bool | None:
    """Whether an answer with this beginning may be a call; None if it is too short to tell.

    >>> [begins_call(text, frozenset({"a"})) for text in ('{"na', '{"name": "a"', '{"name": "b"', "Well")]
    [None, True, False, False]
    """
    rest = text.lstrip(_BLANK)
    if any(opener.startswith(rest) for opener in _OPENERS if len(opener) > len(rest)):
        return None
    opener = next((each for each in _OPENERS if rest.startswith(each)), "")
    rest = rest[len(opener) :].lstrip(_BLANK)
    if rest.startswith("["):
        rest = rest[1:].lstrip(_BLANK)
    if not rest:
        return None
    if not rest.startswith("{"):
        return False
    rest = rest[1:].lstrip(_BLANK).removeprefix("{")
    return _begins_fields(rest.lstrip(_BLANK), names)


def _begins_fields(text: str, names: frozenset[str]) -> bool | None:
    values = {
        '"name"': {json.dumps(name, ensure_ascii=False) for name in names},
        '"arguments"': {"{"},
        '"type"': {'"function"'},
        '"function"': {"{"},
    }
    for key, wanted in values.items():
        if text.startswith(key):
            value = text[len(key) :].lstrip(_BLANK)
            if not value.startswith(":"):
                return None if not value else False
            value = value[1:].lstrip(_BLANK)
            if any(value.startswith(each) for each in wanted):
                return True
            return None if any(each.startswith(value) for each in wanted) else False
    return None if any(key.startswith(text) for key in values) else False


def calls_in(text: str, names: frozenset[str]) -> list[dict[str, str]]:
    """The calls that a text consists of, each {"name", "arguments": JSON}; none if it contains anything else.

    >>> calls_in('{"name": "a", "arguments": {"b": 1}}', frozenset({"a"}))
    [{'name': 'a', 'arguments': '{"b": 1}'}]
    """
    found = []
    try:
        for value in _values(text):
            for each in value if isinstance(value, list) else [value]:
                call = _call(each, names)
                if call is None:
                    return []
                found.append(call)
    except (ValueError, RecursionError):
        return []
    return found


def _values(text: str) -> Iterator[Any]:
    """The consecutive JSON values of a text, framed or not. Raises ValueError for other text."""
    read, at = json.JSONDecoder().raw_decode, 0
    while at < len(text):
        if text[at] in _BLANK:
            at += 1
            continue
        opener = next((each for each in _OPENERS if text.startswith(each, at)), None)
        if opener is None:
            is_doubled = text.startswith("{{", at)
            value, at = read(text, at + is_doubled)
            yield value
            if is_doubled:
                at = len(text) - len(text[at:].lstrip(_BLANK))
                if not text.startswith("}", at):
                    raise ValueError("the second brace is not closed")
                at += 1
            continue
        end = text.index(_FRAMES[opener], at + len(opener))
        yield from _values(text[at + len(opener) : end])
        at = end + len(_FRAMES[opener])


def _call(value: Any, names: frozenset[str]) -> dict[str, str] | None:
    if isinstance(value, dict) and isinstance(value.get("function"), dict):  # the shape of OpenAI's messages
        if set(value) - {"type", "id", "function"}:
            return None
        value = value["function"]
    if not isinstance(value, dict) or set(value) - {"name", "arguments", "type", "id"}:
        return None
    if value.get("name") not in names or not isinstance(value.get("arguments"), dict):
        return None
    return {"name": value["name"], "arguments": json.dumps(value["arguments"], ensure_ascii=False)}
