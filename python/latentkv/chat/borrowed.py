"""Tools for templates that say nothing of them. The system message tells the model of them, it calls them as
Hermes and Qwen do, and results come as a user's message:

    <tool_call>
    {"name": "weather", "arguments": {"city": "Oslo"}}
    </tool_call>

The template chatml-function-calling has this form. llama.cpp's code makes the grammar for it, and reads the
answers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from latentkv import _core
from latentkv.chat.formats import CHATML_TOOLS
from latentkv.chat.tools import Tools

_TOLD = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> \
XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


@cache
def caller() -> _core.ChatTemplates:
    """The template whose calls are borrowed."""
    return _core.ChatTemplates(None, CHATML_TOOLS)


def has_calls(messages: Sequence[Mapping[str, Any]]) -> bool:
    return any(message["role"] == "tool" or message.get("tool_calls") for message in messages)


def as_text(messages: Sequence[Mapping[str, Any]], tools: Tools) -> list[dict[str, Any]]:
    """Messages (plain_messages()) with the tools in the first of them, and calls and results as text."""
    found = list(_told(messages, tools)) if tools else [dict(message) for message in messages]
    written: list[dict[str, Any]] = []
    for message in found:
        is_result = message["role"] == "tool"
        if is_result:
            text = f"<tool_response>\n{message['content'] or ''}\n</tool_response>"
            message = {"role": "user", "content": text, "is_result": True}
            if written and written[-1].get("is_result"):  # templates may want the roles to alternate
                written[-1]["content"] += "\n" + text
                continue
        elif calls := message.pop("tool_calls", None):
            parts = [message["content"] or "", *(_call(call["function"]) for call in calls)]
            message["content"] = "\n".join(part for part in parts if part)
        written.append(message)
    for message in written:
        message.pop("is_result", None)
    return written


def _told(messages: Sequence[Mapping[str, Any]], tools: Tools) -> Iterator[dict[str, Any]]:
    text = _TOLD.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    rest = [dict(message) for message in messages]
    if rest[0]["role"] in ("system", "developer"):
        first = rest.pop(0)
        yield {**first, "content": f"{first['content']}\n\n{text}"}
    else:
        yield {"role": "system", "content": text}
    yield from rest


def _call(function: Mapping[str, Any]) -> str:
    name, given = json.dumps(function["name"], ensure_ascii=False), function["arguments"]
    arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'
