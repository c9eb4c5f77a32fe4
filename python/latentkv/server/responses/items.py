"""Turns input items into messages. Everything that the assistant thought, said and called between two other
messages becomes one message, as templates expect."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from latentkv.errors import expected

Message = dict[str, Any]
_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


def messages_of(given: str | Sequence[Mapping[str, Any]], instructions: str | None) -> list[Message]:
    """A chat's messages. Raises LatentKVError for an item that no chat has."""
    messages: list[Message] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not given:
        raise expected("input", "a text, or at least one item", "an empty list")
    for item in given:
        kind = item.get("type") or ("message" if "role" in item else "item_reference")
        if kind == "item_reference":
            raise expected(
                "input", "items themselves, as none is stored here", f"a reference to {item.get('id')!r}"
            )
        if not isinstance(kind, str) or kind not in _READERS:
            raise expected("input", f"items of the types {', '.join(_READERS)}", repr(kind))
        _READERS[kind](item, messages)
    return messages


def _message(item: Mapping[str, Any], messages: list[Message]) -> None:
    role, parts = item.get("role"), _parts(item.get("content"))
    if role not in ("user", "assistant", "system", "developer"):
        raise expected("input", "a message of user, assistant, system or developer", repr(role))
    if role == "assistant":
        _assistant(messages)["content"] += parts
    else:
        messages.append({"role": role, "content": parts})


def _reasoning(item: Mapping[str, Any], messages: list[Message]) -> None:
    """The reasoning text, or its summary if the text is encrypted."""
    found = item.get("content") or item.get("summary") or ()
    if not isinstance(found, Sequence) or isinstance(found, str):
        raise expected("input", "reasoning with a list of parts", repr(found))
    text = "\n".join([_text(part, "text") for part in found])
    message = _assistant(messages)
    before = message.get("reasoning_content")
    if text:
        message["reasoning_content"] = text if before is None else f"{before}\n{text}"


def _call(item: Mapping[str, Any], messages: list[Message]) -> None:
    function = {"name": item.get("name"), "arguments": item.get("arguments")}
    call = {"type": "function", "id": item.get("call_id"), "function": function}
    _assistant(messages).setdefault("tool_calls", []).append(call)


def _output(item: Mapping[str, Any], messages: list[Message]) -> None:
    content = _parts(item.get("output"))
    messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})


_READERS: dict[str, Callable[[Mapping[str, Any], list[Message]], None]] = {
    "message": _message,
    "reasoning": _reasoning,
    "function_call": _call,
    "function_call_output": _output,
}


def _assistant(messages: list[Message]) -> Message:
    """The assistant's current message, or a new one."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": []})
    return messages[-1]


def _parts(content: Any) -> list[dict[str, Any]]:
    """The content parts in the shape of a chat."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, Sequence):
        raise expected("input", "content as text or a list of parts", repr(content))
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else part
        if not isinstance(kind, str) or kind not in _PARTS:
            raise expected("input", f"parts of the types {', '.join(_PARTS)}", repr(kind))
        name = _PARTS[kind]
        parts.append({"type": name, name: _text(part, name)})
    return parts


def _text(part: Any, name: str) -> str:
    text = part.get(name) if isinstance(part, Mapping) else None
    if not isinstance(text, str):
        raise expected("input", f"a part with a text in {name!r}", repr(part))
    return text
