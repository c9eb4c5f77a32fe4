"""Messages as OpenAI's clients send them, made plain: what llama.cpp's reader of messages takes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from latentkv.errors import expected
from latentkv.text import utf8

Message = Mapping[str, Any]
_TEXTS = {"text": "text", "refusal": "refusal"}  # types of parts that hold a text, and where


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """{"role", "content"} with whatever else a template reads: reasoning_content, tool_calls, tool_call_id,
    name. Null is as if left out. Lists of parts become one text; a refusal is what the assistant said. The
    shapes that tools replaced (function_call, the role function) become the newer ones."""
    if not messages:
        raise expected("messages", "at least one message", "none")
    return [_plain(message) for message in messages]


def _plain(message: Message) -> dict[str, Any]:
    if not isinstance(message, Mapping) or message.get("role") is None:
        raise expected("messages", 'dicts like {"role": "user", "content": "…"}', repr(message))
    if message.get("audio") is not None:
        raise expected("messages", "text only", "a message with audio")
    role = _text(message, "role")
    if "content" not in message and role != "assistant":
        raise expected("messages", f"a message of {role} with content", "one without")
    calls = _calls(message)
    content = message.get("content")
    if content is None and message.get("refusal") is not None:
        content = _text(message, "refusal")
    text = None if content is None and calls else content_text(content)
    utf8(text or "", "prompt")
    plain: dict[str, Any] = {"role": "tool" if role == "function" else role, "content": text}
    for name in ("reasoning_content", "name", "tool_call_id"):
        if message.get(name) is not None:
            plain[name] = _text(message, name)
    return plain | {"tool_calls": calls} if calls else plain


def content_text(content: Any) -> str:
    """A message's content as text; OpenAI's list of parts is joined, anything but text is refused."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence) or not all(isinstance(part, Mapping) for part in content):
        raise expected("messages", "content as text or a list of parts", type(content).__name__)
    return "".join([_part_text(part) for part in content])


def _part_text(part: Mapping[str, Any]) -> str:
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in _TEXTS:
        raise expected("messages", "text parts only", f"a part of type {kind}")
    text = part.get(_TEXTS[kind])
    if not isinstance(text, str):
        raise expected("messages", f"a part of type {kind} with a text in {_TEXTS[kind]!r}", repr(text))
    return text


def _calls(message: Message) -> list[dict[str, Any]]:
    found = message.get("tool_calls")
    if found is None:
        older = message.get("function_call")
        found = [] if older is None else [{"function": older}]
    if not isinstance(found, Sequence) or isinstance(found, str):
        raise expected("messages", "tool_calls as a list", repr(found))
    return [_call(call) for call in found]


def _call(call: Any) -> dict[str, Any]:
    if not isinstance(call, Mapping) or call.get("type") not in (None, "function"):
        kind = call.get("type") if isinstance(call, Mapping) else call
        raise expected("messages", "tool_calls of the type function", repr(kind))
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise expected("messages", "tool_calls with a function that has a name", repr(function))
    plain = {"name": function["name"], "arguments": _arguments(function.get("arguments"))}
    shown = {"type": "function", "function": plain}
    return shown if call.get("id") is None else shown | {"id": _text(call, "id")}


def _arguments(given: Any) -> Any:
    """A JSON object, as templates read them. An agent sends back what a model wrote, also what broke off: the
    model then sees it, beside what the agent says of it."""
    if given is None or (isinstance(given, str) and not given.strip()):
        return {}
    if not isinstance(given, str):
        return given
    try:
        found = json.loads(given)
    except (ValueError, RecursionError):
        found = None
    return given if isinstance(found, dict) else {"invalid_arguments": given}


def _text(owner: Mapping[str, Any], name: str) -> str:
    found = owner[name]
    if not isinstance(found, str):
        raise expected("messages", f"{name} as text", repr(found))
    return found
