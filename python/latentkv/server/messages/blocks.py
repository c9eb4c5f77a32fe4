"""Turns messages with content blocks into a chat's messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from latentkv.errors import expected

Message = dict[str, Any]
# Claude Code's first system block. It has another hash in every request, which would end what a prompt has in
# common with the one before at its first line.
_BILLING = "x-anthropic-billing-header:"


def messages_of(given: Sequence[Mapping[str, Any]], system: str | Sequence[Any] | None) -> list[Message]:
    """Raises LatentKVError for a block that no chat has."""
    messages: list[Message] = []
    if system is not None:
        texts = [_text(block, "system") for block in _blocks(system)]
        text = "\n\n".join(text for text in texts if not text.startswith(_BILLING))
        messages += [{"role": "system", "content": text}] if text else []
    for message in given:
        messages += _READERS[_role(message)](_blocks(message.get("content")))
    return messages


def _role(message: Mapping[str, Any]) -> str:
    role = message.get("role")
    if not isinstance(role, str) or role not in _READERS:
        raise expected("messages", f"a message of {', '.join(_READERS)}", repr(role))
    return role


def _blocks(content: Any) -> Sequence[Mapping[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, Sequence) or not all(isinstance(block, Mapping) for block in content):
        raise expected("messages", "content as text or a list of blocks", repr(content))
    return content


def _user(blocks: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The user's message. Tool results become messages of their own, in their place."""
    messages: list[Message] = []
    for block in blocks:
        if block.get("type") == "tool_result":
            messages.append(_result(block))
        else:
            text = _text(block, "user")
            if messages and messages[-1]["role"] == "user":
                messages[-1]["content"] += f"\n{text}"
            else:
                messages.append({"role": "user", "content": text})
    return messages or [{"role": "user", "content": ""}]


def _assistant(blocks: Sequence[Mapping[str, Any]]) -> list[Message]:
    texts, thoughts, calls = [], [], []
    for block in blocks:
        kind = block.get("type")
        if kind == "thinking":
            thoughts.append(_field(block, "thinking"))
        elif kind == "tool_use":
            calls.append(_call(block))
        elif kind != "redacted_thinking":  # which only Anthropic's service can read
            texts.append(_text(block, "assistant"))
    message: Message = {"role": "assistant", "content": "\n".join(texts)}
    if any(thoughts):
        message["reasoning_content"] = "\n".join(thoughts)
    return [message | {"tool_calls": calls} if calls else message]


def _system(blocks: Sequence[Mapping[str, Any]]) -> list[Message]:
    return [{"role": "system", "content": "\n".join(_text(block, "system") for block in blocks)}]


_READERS = {"user": _user, "assistant": _assistant, "system": _system}


def _call(block: Mapping[str, Any]) -> dict[str, Any]:
    given = block.get("input")
    if not isinstance(given, Mapping):
        raise expected("messages", "a tool_use block whose input is a JSON object", repr(given))
    arguments = json.dumps(given, ensure_ascii=False)
    function = {"name": _field(block, "name"), "arguments": arguments}
    return {"type": "function", "id": block.get("id"), "function": function}


def _result(block: Mapping[str, Any]) -> Message:
    """A tool result. If the call failed its text says so, because a chat has no is_error."""
    content = block.get("content")
    text = "" if content is None else "\n".join(_text(each, "tool_result") for each in _blocks(content))
    if block.get("is_error") is True and not text.lower().startswith("error"):
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text}


def _text(block: Mapping[str, Any], where: str) -> str:
    if block.get("type") != "text":
        raise expected("messages", f"blocks of text in {where}", f"one of the type {block.get('type')}")
    return _field(block, "text")


def _field(block: Mapping[str, Any], name: str) -> str:
    found = block.get(name)
    if not isinstance(found, str):
        raise expected("messages", f"a {block.get('type')} block with a text in {name!r}", repr(found))
    return found
