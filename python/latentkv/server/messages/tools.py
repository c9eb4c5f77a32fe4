"""Anthropic's tools as functions of a chat: the client's own, and those whose parameters Anthropic names and
that the client runs. Its service runs all others; they are left out, and the log says so."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from latentkv.errors import expected
from latentkv.server.left_out import say_left_out

_TEXT, _LINE = {"type": "string"}, {"type": "integer"}
_EDIT = {
    **dict.fromkeys(("path", "file_text", "old_str", "new_str", "insert_text"), _TEXT),
    "insert_line": _LINE,
    "view_range": {"type": "array", "items": _LINE},
}
_MOVE = dict.fromkeys(("old_path", "new_path"), _TEXT)
_COMMANDS = ["view", "create", "str_replace", "insert"]
# types before their date: what they do, parameters, which are required
_ANTHROPICS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "bash": (
        "Runs a command in a shell that stays open.",
        {"command": _TEXT, "restart": {"type": "boolean"}},
        [],
    ),
    "text_editor": (
        "Shows and changes files.",
        {"command": {"enum": _COMMANDS}, **_EDIT},
        ["command", "path"],
    ),
    "memory": (
        "Shows and changes files that outlive the conversation.",
        {"command": {"enum": [*_COMMANDS, "delete", "rename"]}, **_EDIT, **_MOVE},
        ["command"],
    ),
}


def functions(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Raises LatentKVError for what is no tool."""
    return [{"type": "function", "function": each} for tool in tools if (each := _function(tool)) is not None]


def _function(tool: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = tool.get("type")
    if kind in (None, "custom"):
        function = {name: tool.get(name) for name in ("name", "description", "strict")}
        return function | {"parameters": tool.get("input_schema")}
    if not isinstance(kind, str):
        raise expected("tools", "tools with a type", repr(kind))
    found = _ANTHROPICS.get(re.sub(r"_\d{8}$", "", kind))
    if found is None:
        say_left_out("tools", kind)
        return None
    told, properties, required = found
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"name": tool.get("name"), "description": told, "parameters": parameters}
