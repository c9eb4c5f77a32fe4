"""The tools of a request as functions of a chat, and calls of these functions as items.

    function                           itself
    custom                             a function of one text, `input`; its description tells the format
    namespace                          each of its tools, as namespace__name
    local_shell, shell, apply_patch    functions with the arguments that their items have
    tool_search of the client          a function with the parameters that it names

A service runs all others: they are left out, and the log says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json

from latentkv.errors import expected
from latentkv.server.left_out import say_left_out

Tool = Mapping[str, Any]
_TEXT = {"type": "string"}
_MS = {"timeout_ms": {"type": "integer"}}
_INPUT = {"type": "object", "properties": {"input": _TEXT}, "required": ["input"]}
_OPERATION = {
    "type": "object",
    "properties": {
        "type": {"enum": ["create_file", "update_file", "delete_file"]},
        "path": _TEXT,
        "diff": {"type": "string", "description": "V4A diff; none to delete a file."},
    },
    "required": ["type", "path"],
}
_OWN = {  # types that have a name and parameters of their own: what they do, parameters, which are required
    "local_shell": (
        "Runs a command.",
        {"command": {"type": "array", "items": _TEXT}, "working_directory": _TEXT, **_MS},
        "command",
    ),
    "shell": (
        "Runs shell commands.",
        {"commands": {"type": "array", "items": _TEXT}, **_MS, "max_output_length": {"type": "integer"}},
        "commands",
    ),
    "apply_patch": ("Creates, changes or deletes a file.", {"operation": _OPERATION}, "operation"),
}


@dataclass(frozen=True)
class Called:
    """What a function of the chat is called in the request."""

    kind: str
    name: str
    namespace: str | None = None

    def item(self, call_id: str, arguments: str) -> dict[str, Any]:
        """A call as an item, without its id and status. arguments: JSON, or its beginning."""
        if self.kind == "function":
            shown = {"type": "function_call", "call_id": call_id, "name": self.name, "arguments": arguments}
            return shown if self.namespace is None else shown | {"namespace": self.namespace}
        if self.kind == "custom":
            shown = {"type": "custom_tool_call", "call_id": call_id, "name": self.name}
            shown |= {} if self.namespace is None else {"namespace": self.namespace}
            return shown | {"input": self.input(arguments)}
        given, shown = _object(arguments), {"type": f"{self.kind}_call", "call_id": call_id}
        if self.kind == "local_shell":
            return shown | {"action": {"type": "exec", "command": [], "env": {}} | given}
        if self.kind == "shell":
            return shown | {
                "action": {"commands": [], "timeout_ms": None, "max_output_length": None} | given,
                "environment": {"type": "local"},
            }
        if self.kind == "apply_patch":
            return shown | {"operation": given.get("operation")}
        return shown | {"execution": "client", "arguments": given}

    def input(self, arguments: str) -> str:
        """The text of a custom tool's call; all of the arguments where a model wrote other ones."""
        found = _object(arguments).get("input")
        return found if isinstance(found, str) else arguments


@dataclass
class Tools:
    """functions: those of the chat. shown: the tools of the request that they stand for."""

    functions: list[dict[str, Any]] = field(default_factory=list)
    shown: list[Tool] = field(default_factory=list)
    _called: dict[str, Called] = field(default_factory=dict)

    @staticmethod
    def of(tools: Sequence[Tool]) -> Tools:
        """Raises LatentKVError for what is no tool, and for two with one name that are called in different
        ways."""
        found = Tools()
        for tool in tools:
            functions = list(_functions(tool))
            for called, function in functions:
                name = function_name(called.name, called.namespace)
                if found._called.setdefault(name, called) != called:
                    raise expected("tools", "names that differ", f"two tools named {name!r}")
                found.functions.append({"type": "function", "function": {**function, "name": name}})
            found.shown += [tool] if functions else []
        return found

    def called(self, name: str) -> Called:
        return self._called.get(name) or Called("function", name)

    def choice(self, asked: str | Tool | None) -> str | dict[str, Any] | None:
        """tool_choice in the shape of a chat."""
        if not isinstance(asked, Mapping):
            return asked
        if asked.get("type") == "allowed_tools":
            wanted = asked.get("tools")
            if isinstance(wanted, list):
                wanted = [{"function": self._named(tool) or tool} for tool in wanted]
            return {"type": "allowed_tools", "allowed_tools": {"mode": asked.get("mode"), "tools": wanted}}
        named = self._named(asked)
        return dict(asked) if named is None else {"type": "function", "function": named}

    def _named(self, asked: Any) -> dict[str, Any] | None:
        """The function that a choice names, by its name or where a type has one tool by that type."""
        kind = asked.get("type") if isinstance(asked, Mapping) else None
        if kind in ("function", "custom") and isinstance(asked.get("name"), str):
            return {"name": function_name(asked["name"], asked.get("namespace"))}
        return {"name": kind} if isinstance(kind, str) and kind in self._called else None


def function_name(name: Any, namespace: Any) -> Any:
    """What a tool of a group is called in a chat, where names have no groups."""
    if not isinstance(namespace, str) or not namespace or not isinstance(name, str):
        return name
    return f"{namespace.removesuffix('__')}__{name}"


def _functions(tool: Any, group: Tool | None = None) -> Iterator[tuple[Called, dict[str, Any]]]:
    """What a tool is in the request, and in a chat."""
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    if not isinstance(kind, str):
        raise expected("tools", "tools with a type", repr(tool))
    if kind == "namespace" and group is None:
        yield from _grouped(tool)
    elif kind in ("function", "custom"):
        name, namespace = tool.get("name"), None if group is None else group["name"]
        if not isinstance(name, str) or not name:
            raise expected("tools", f"a tool of the type {kind} with a name", repr(name))
        function = dict(tool) if kind == "function" else _custom(tool)
        yield Called(kind, name, namespace), function
    elif kind in _OWN and _is_clients(tool):
        told, properties, required = _OWN[kind]
        parameters = {"type": "object", "properties": properties, "required": [required]}
        yield Called(kind, kind), {"description": told, "parameters": parameters}
    elif kind == "tool_search" and tool.get("execution") == "client":
        yield Called(kind, kind), {name: tool.get(name) for name in ("description", "parameters")}
    else:
        say_left_out("tools", kind)


def _grouped(group: Tool) -> Iterator[tuple[Called, dict[str, Any]]]:
    """The tools of a group. The first of them tells what the group is for."""
    tools = group.get("tools")
    if not isinstance(group.get("name"), str) or not isinstance(tools, Sequence) or isinstance(tools, str):
        raise expected("tools", "a namespace with a name and tools", repr(group))
    told = group.get("description")
    for tool in tools:
        for called, function in _functions(tool, group):
            if isinstance(told, str) and told:
                own = function.get("description")
                function["description"] = f"{own}\n\n{told}" if isinstance(own, str) and own else told
                told = None
            yield called, function


def _custom(tool: Tool) -> dict[str, Any]:
    """A function for a tool of free text. No grammar enforces the format within a text of JSON: the model is
    told of it."""
    told, form = tool.get("description"), tool.get("format")
    if told is not None and not isinstance(told, str):
        raise expected("tools", f"description of {tool['name']} as text", repr(told))
    lines = [told] if told else []
    if isinstance(form, Mapping) and form.get("type") == "grammar":
        lines.append(f"The input follows this {form.get('syntax')} grammar:\n{form.get('definition')}")
    return {"description": "\n\n".join(lines), "parameters": _INPUT}


def _is_clients(tool: Tool) -> bool:
    """Whether the client runs it: a shell may be a service's container."""
    where = tool.get("environment")
    return not isinstance(where, Mapping) or where.get("type") == "local"


def _object(text: str) -> dict[str, Any]:
    try:
        found = from_json(text or "{}", allow_partial="trailing-strings")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def arguments_of(**values: Any) -> str:
    return json.dumps(values, ensure_ascii=False)
