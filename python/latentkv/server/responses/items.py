"""Turns input items into messages. Everything that the assistant thought, said and called between two other
messages becomes one message, as templates expect."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from latentkv.errors import expected
from latentkv.server.left_out import MEDIA, say_left_out
from latentkv.server.responses.tools import arguments_of, function_name

Message = dict[str, Any]
Item = Mapping[str, Any]
_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
# what a service ran, searched or drew; no chat has it
_LEFT_OUT = (
    "code_interpreter_call",
    "computer_call",
    "computer_call_output",
    "file_search_call",
    "image_generation_call",
    "mcp_approval_request",
    "mcp_approval_response",
    "mcp_list_tools",
    "web_search_call",
)


def messages_of(given: str | Sequence[Item], instructions: str | None) -> list[Message]:
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
                "input", "items themselves, or previous_response_id", f"a reference to {item.get('id')!r}"
            )
        if kind in _LEFT_OUT:
            say_left_out("input", kind)
        elif isinstance(kind, str) and kind in _READERS:
            _READERS[kind](item, messages)
        else:
            raise expected("input", f"items of the types {', '.join(_READERS)}", repr(kind))
    if not messages:
        raise expected(
            "input", "an item that a chat has", ", ".join({str(item.get("type")) for item in given})
        )
    return messages


def tools_in(given: str | Sequence[Item]) -> list[Any]:
    """The tools that a client found with a search, or adds on its way."""
    if isinstance(given, str):
        return []
    lists = [item.get("tools") for item in given if item.get("type") in _WITH_TOOLS]
    return [tool for tools in lists if isinstance(tools, list) for tool in tools]


def _message(item: Item, messages: list[Message]) -> None:
    role, parts = item.get("role"), _parts(item.get("content"))
    if role not in ("user", "assistant", "system", "developer"):
        raise expected("input", "a message of user, assistant, system or developer", repr(role))
    if role == "assistant":
        _assistant(messages)["content"] += parts
    else:
        messages.append({"role": role, "content": parts})


def _reasoning(item: Item, messages: list[Message]) -> None:
    """The reasoning text, or its summary if the text is encrypted."""
    found = item.get("content") or item.get("summary") or ()
    if not isinstance(found, Sequence) or isinstance(found, str):
        raise expected("input", "reasoning with a list of parts", repr(found))
    text = "\n".join([_text(part, "text") for part in found])
    message = _assistant(messages)
    before = message.get("reasoning_content")
    if text:
        message["reasoning_content"] = text if before is None else f"{before}\n{text}"


def _call(item: Item, messages: list[Message]) -> None:
    _called(item, messages, function_name(item.get("name"), item.get("namespace")), item.get("arguments"))


def _custom_call(item: Item, messages: list[Message]) -> None:
    name = function_name(item.get("name"), item.get("namespace"))
    _called(item, messages, name, arguments_of(input=item.get("input")))


def _shell_call(item: Item, messages: list[Message]) -> None:
    action = item.get("action")
    if not isinstance(action, Mapping):
        raise expected("input", f"a {item['type']} with an action", repr(action))
    given = {name: action[name] for name in _ACTION if action.get(name) is not None}
    _called(item, messages, item["type"].removesuffix("_call"), arguments_of(**given))


def _patch_call(item: Item, messages: list[Message]) -> None:
    _called(item, messages, "apply_patch", arguments_of(operation=item.get("operation")))


def _search_call(item: Item, messages: list[Message]) -> None:
    _called(item, messages, "tool_search", item.get("arguments"))


def _service_call(item: Item, messages: list[Message]) -> None:
    """A call that a service ran, with what came of it."""
    _called(item, messages, function_name(item.get("name"), item.get("server_label")), item.get("arguments"))
    _result(item, messages, str(item.get("output") or item.get("error") or ""))


def _called(item: Item, messages: list[Message], name: Any, arguments: Any) -> None:
    function = {"name": name, "arguments": arguments}
    call = {"type": "function", "id": item.get("call_id") or item.get("id"), "function": function}
    _assistant(messages).setdefault("tool_calls", []).append(call)


def _output(item: Item, messages: list[Message]) -> None:
    _result(item, messages, item.get("output"))


def _shell_output(item: Item, messages: list[Message]) -> None:
    """What each command wrote, and how it ended."""
    found = item.get("output")
    if not isinstance(found, Sequence) or isinstance(found, str):
        _output(item, messages)
        return
    lines = []
    for each in found:
        if not isinstance(each, Mapping):
            raise expected("input", "outputs with stdout and stderr", repr(each))
        ended = each.get("outcome")
        code = ended.get("exit_code") if isinstance(ended, Mapping) else None
        said = (
            "timed out"
            if isinstance(ended, Mapping) and ended.get("type") == "timeout"
            else f"exit code {code}"
        )
        lines += [str(each[name]) for name in ("stdout", "stderr") if each.get(name)] + [f"({said})"]
    _result(item, messages, "\n".join(lines))


def _patch_output(item: Item, messages: list[Message]) -> None:
    _result(item, messages, item.get("output") or item.get("status"))


def _search_output(item: Item, messages: list[Message]) -> None:
    """The names of what was found; the prompt shows the tools beside the others."""
    found = [tool.get("name") for tool in tools_in([item]) if isinstance(tool, Mapping)]
    _result(item, messages, ", ".join(str(name) for name in found) or "none")


def _result(item: Item, messages: list[Message], output: Any) -> None:
    called = item.get("call_id") or item.get("id")
    messages.append({"role": "tool", "tool_call_id": called, "content": _parts(output)})


def _no_message(item: Item, messages: list[Message]) -> None:
    pass


_ACTION = ("command", "commands", "working_directory", "timeout_ms", "max_output_length")
_WITH_TOOLS = ("tool_search_output", "additional_tools")
_READERS: dict[str, Callable[[Item, list[Message]], None]] = {
    "message": _message,
    "reasoning": _reasoning,
    "function_call": _call,
    "function_call_output": _output,
    "custom_tool_call": _custom_call,
    "custom_tool_call_output": _output,
    "local_shell_call": _shell_call,
    "local_shell_call_output": _output,
    "shell_call": _shell_call,
    "shell_call_output": _shell_output,
    "apply_patch_call": _patch_call,
    "apply_patch_call_output": _patch_output,
    "tool_search_call": _search_call,
    "tool_search_output": _search_output,
    "additional_tools": _no_message,
    "mcp_call": _service_call,
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
        if isinstance(kind, str) and kind in MEDIA:
            parts.append({"type": kind})
            continue
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
