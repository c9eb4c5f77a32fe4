"""Turns messages with content blocks into a chat's messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from latentkv.errors import expected
from latentkv.server.left_out import MEDIA, say_left_out

Message = dict[str, Any]
Block = Mapping[str, Any]
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


def _blocks(content: Any) -> Sequence[Block]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, Sequence) or not all(isinstance(block, Mapping) for block in content):
        raise expected("messages", "content as text or a list of blocks", repr(content))
    return content


def _user(blocks: Sequence[Block]) -> list[Message]:
    """The user's message. Tool results become messages of their own, in their place."""
    messages: list[Message] = []
    for block in blocks:
        if block.get("type") == "tool_result":
            messages.append(_result(block))
            continue
        if not messages or messages[-1]["role"] != "user":
            messages.append({"role": "user", "content": []})
        messages[-1]["content"] += _lines([block], "user", before=messages[-1]["content"])
    return messages or [{"role": "user", "content": ""}]


def _assistant(blocks: Sequence[Block]) -> list[Message]:
    """The assistant's message. What a service's tools brought stands between two of them."""
    messages: list[Message] = []
    said: list[Block] = []
    for block in blocks:
        if _is_service_result(block):
            messages += [*_said(said), _service_result(block)]
            said = []
        else:
            said.append(block)
    return messages + _said(said) if said or not messages else messages


def _said(blocks: Sequence[Block]) -> list[Message]:
    texts, thoughts, calls = [], [], []
    for block in blocks:
        kind = block.get("type")
        if kind == "thinking":
            thoughts.append(_field(block, "thinking"))
        elif kind in ("tool_use", "server_tool_use", "mcp_tool_use"):
            calls.append(_call(block))
        elif kind == "fallback":
            say_left_out("messages", kind)
        elif kind != "redacted_thinking":  # which only Anthropic's service can read
            texts.append(_text(block, "assistant"))
    message: Message = {"role": "assistant", "content": "\n".join(texts)}
    if any(thoughts):
        message["reasoning_content"] = "\n".join(thoughts)
    return [message | {"tool_calls": calls} if calls else message]


def _system(blocks: Sequence[Block]) -> list[Message]:
    return [{"role": "system", "content": "\n".join(_text(block, "system") for block in blocks)}]


_READERS = {"user": _user, "assistant": _assistant, "system": _system}


def _call(block: Block) -> dict[str, Any]:
    given = block.get("input")
    if not isinstance(given, Mapping):
        raise expected("messages", f"a {block['type']} block whose input is a JSON object", repr(given))
    arguments = json.dumps(given, ensure_ascii=False)
    function = {"name": _field(block, "name"), "arguments": arguments}
    return {"type": "function", "id": block.get("id"), "function": function}


def _result(block: Block) -> Message:
    """A tool result. If the call failed its text says so, because a chat has no is_error."""
    content = block.get("content")
    parts = [] if content is None else _lines(_blocks(content), "tool_result")
    said = next((part["text"] for part in parts if part["type"] == "text"), "")
    if block.get("is_error") is True and not said.lower().startswith("error"):
        parts.insert(0, {"type": "text", "text": "Error: "})
    return {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": parts}


def _is_service_result(block: Block) -> bool:
    kind = block.get("type")
    return isinstance(kind, str) and kind.endswith("_tool_result")


def _service_result(block: Block) -> Message:
    """What a tool of a service brought in an earlier turn: blocks of text, or an object as JSON."""
    content = block.get("content")
    is_text = isinstance(content, str) or (
        isinstance(content, list)
        and all(isinstance(each, Mapping) and each.get("type") == "text" for each in content)
    )
    text = content if is_text else json.dumps(content, ensure_ascii=False)
    return _result({**block, "content": text})


def _lines(blocks: Sequence[Block], where: str, before: Sequence[Any] = ()) -> list[dict[str, Any]]:
    """Blocks as parts of a chat's message, each on a line of its own. Media stay, for who reads the
    message."""
    parts: list[dict[str, Any]] = []
    for block in blocks:
        if before or parts:
            parts.append({"type": "text", "text": "\n"})
        kind = block.get("type")
        if isinstance(kind, str) and kind in MEDIA and not _is_text_document(block):
            parts.append({"type": kind})
        else:
            parts.append({"type": "text", "text": _text(block, where)})
    return parts


def _is_text_document(block: Block) -> bool:
    source = block.get("source")
    return isinstance(source, Mapping) and source.get("type") in ("text", "content")


def _text(block: Block, where: str) -> str:
    kind = block.get("type")
    if kind == "document" and _is_text_document(block):
        source = block["source"]
        return _titled(block, _field(source, "data") if source["type"] == "text" else source.get("content"))
    if kind == "search_result":
        return _titled(block, block.get("content"))
    if kind == "tool_reference":
        return _field(block, "tool_name")
    if kind == "compaction":
        return _field(block, "content")
    if kind != "text":
        raise expected("messages", f"blocks of text in {where}", f"one of the type {kind}")
    return _field(block, "text")


def _titled(block: Block, content: Any) -> str:
    lines = [block[name] for name in ("title", "source") if isinstance(block.get(name), str)]
    return "\n".join([*lines, *(_field(each, "text") for each in _blocks(content))])


def _field(block: Block, name: str) -> str:
    found = block.get(name)
    if not isinstance(found, str):
        raise expected("messages", f"a {block.get('type')} block with a text in {name!r}", repr(found))
    return found
