"""The tools that a chat call offers, and which of them it wants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from latentkv.errors import expected

Tools = Sequence[Mapping[str, Any]]
NO_PARAMETERS = {"type": "object", "properties": {}}


@dataclass(frozen=True)
class ToolUse:
    """Which tools a call may use, and whether it wants one: auto, none or required. The prompt shows those of
    `shown`, whatever the choice, so that calls with different choices share a prefix."""

    tools: Tools = ()
    choice: str = "auto"
    shown: Tools = ()
    as_function: bool = False  # asked for by functions and function_call, and answered in that shape too
    is_named: bool = False  # one function, called once

    @staticmethod
    def of(
        tools: Tools | None,
        tool_choice: str | Mapping[str, Any] | None,
        functions: Tools | None = None,
        function_call: str | Mapping[str, Any] | None = None,
    ) -> ToolUse:
        """Reads OpenAI's arguments, including the deprecated ones that tools replaced. If a function is
        named, only that one may be called, and it is required. Allowed tools are the only ones."""
        if functions is None and function_call is None:
            return _chosen(plain_tools(tools or ()), tool_choice, "tool_choice", as_function=False)
        if tools is not None or tool_choice is not None:
            raise expected("functions", "either functions or tools", "both")
        older = [{"type": "function", "function": function} for function in functions or ()]
        return _chosen(plain_tools(older), function_call, "function_call", as_function=True)


def plain_tools(tools: Tools) -> list[dict[str, Any]]:
    """{"type": "function", "function": {"name", "description", "parameters", "strict"}}: null, and strict
    unless it is true, are as if left out. A function without parameters takes none."""
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise expected("tools", "a list of functions", repr(tools))
    return [_plain(tool) for tool in tools]


def _plain(tool: Any) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, Mapping) else tool
    if kind != "function":
        raise expected("tools", "OpenAI's function tools", f"the type {kind!r}")
    function = tool.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise expected("tools", "OpenAI's function tools, each with a name", f"the function {function!r}")
    plain: dict[str, Any] = {"name": function["name"]}
    for name, kind, wanted in (("description", str, "text"), ("parameters", Mapping, "a JSON schema")):
        value = function.get(name)
        if value is not None and not isinstance(value, kind):
            raise expected("tools", f"{name} of {function['name']} as {wanted}", repr(value))
        if value is not None:
            plain[name] = value
    strict = {"strict": True} if is_strict(tool) else {}
    return {"type": "function", "function": {"parameters": NO_PARAMETERS} | plain | strict}


def is_strict(tool: Mapping[str, Any]) -> bool:
    """Whether calls of the function must obey its schema."""
    return tool["function"].get("strict") is True


def shown(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a tool that templates read."""
    return {**tool, "function": {key: value for key, value in tool["function"].items() if key != "strict"}}


def _chosen(tools: list[dict[str, Any]], choice: Any, where: str, as_function: bool) -> ToolUse:
    if isinstance(choice, Mapping):
        kind = "function" if where == "function_call" else choice.get("type") or "function"
        if kind == "allowed_tools":
            return _allowed(tools, choice.get("allowed_tools"))
        if kind != "function":
            raise expected(where, "the type function or allowed_tools", repr(kind))
        function = choice if where == "function_call" else choice.get("function", choice)
        return ToolUse([_named(tools, function, where)], "required", tools, as_function, is_named=True)
    if choice not in (None, "auto", "none", "required") or (choice == "required" and not tools):
        raise expected(where, "None, 'none', 'auto', 'required' with tools, or a function", repr(choice))
    return ToolUse([] if choice == "none" else tools, choice or "auto", tools, as_function)


def _allowed(tools: list[dict[str, Any]], allowed: Any) -> ToolUse:
    mode = allowed.get("mode") if isinstance(allowed, Mapping) else None
    wanted = allowed.get("tools") if isinstance(allowed, Mapping) else None
    if mode not in ("auto", "required") or not isinstance(wanted, Sequence) or isinstance(wanted, str):
        raise expected("tool_choice", "allowed_tools with a mode (auto or required) and tools", repr(allowed))
    functions = [each.get("function") if isinstance(each, Mapping) else each for each in wanted]
    chosen = [_named(tools, function, "tool_choice") for function in functions]
    if mode == "required" and not chosen:
        raise expected("tool_choice", "allowed_tools with tools, as one is required", "none")
    return ToolUse([tool for tool in tools if tool in chosen], mode, tools)


def _named(tools: list[dict[str, Any]], function: Any, where: str) -> dict[str, Any]:
    name = function.get("name") if isinstance(function, Mapping) else None
    for tool in tools:
        if tool["function"]["name"] == name:
            return tool
    known = ", ".join(tool["function"]["name"] for tool in tools) or "none"
    raise expected(where, f"a function of {known}", repr(name))
