"""Tools for templates that read the types of parameters and fail where a schema says them in another way:
by a list of types, alternatives, a $ref, or not at all.

Only what the prompt shows becomes simpler. Grammars are made of the schemas as given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from latentkv.chat.tools import Tools

_DEEPEST = 12
_OF_VALUES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


def typed(tools: Tools) -> list[dict[str, Any]]:
    """The tools (shown()) with one type and a description in each schema."""
    return [_tool(tool["function"]) for tool in tools]


def _tool(function: Mapping[str, Any]) -> dict[str, Any]:
    given = function["parameters"]
    parameters = _schema({**given, "type": "object"}, given, 0)
    return {"type": "function", "function": {"description": "", **function, "parameters": parameters}}


def _schema(given: Any, root: Mapping[str, Any], depth: int) -> dict[str, Any]:
    if depth > _DEEPEST or not isinstance(given, Mapping):  # true says that anything may come
        return {"type": "string", "description": ""}
    found = _resolved(given, root, depth)
    kind = _type(found)
    out = {"description": "", **found, "type": kind}
    if kind == "object":
        parts = found.get("properties")
        listed = parts.items() if isinstance(parts, Mapping) else ()
        out["properties"] = {key: _schema(each, root, depth + 1) for key, each in listed}
        needed = found.get("required")
        out["required"] = needed if isinstance(needed, list) else []
    if kind == "array":
        out["items"] = _schema(found.get("items"), root, depth + 1)
    return out


def _resolved(given: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> dict[str, Any]:
    """The schema with what it refers to, all that has to hold, and the first of its alternatives."""
    found = {key: value for key, value in given.items() if key not in ("$ref", "allOf", "anyOf", "oneOf")}
    parts: list[Any] = [_target(given["$ref"], root)] if "$ref" in given else []
    for keyword in ("allOf", "anyOf", "oneOf"):
        each = given.get(keyword)
        choices = [part for part in each if isinstance(part, Mapping)] if isinstance(each, list) else []
        if keyword != "allOf":
            choices = [part for part in choices if part.get("type") != "null"][:1]
        parts += choices
    for part in parts:
        if isinstance(part, Mapping) and depth <= _DEEPEST:
            part = _resolved(part, root, depth + 1)
            both = {**(part.get("properties") or {}), **(found.get("properties") or {})}
            found = {**part, **found} | ({"properties": both} if both else {})
    return found


def _target(reference: Any, root: Mapping[str, Any]) -> Any:
    found: Any = root
    for key in str(reference).removeprefix("#").split("/")[1:]:
        found = found.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def _type(schema: Mapping[str, Any]) -> str:
    given = schema.get("type")
    if isinstance(given, list):
        given = next((each for each in given if each != "null"), None)
    if isinstance(given, str):
        return given
    if "properties" in schema:
        return "object"
    if "items" in schema:
        return "array"
    values = schema.get("enum")
    first = schema.get("const", values[0] if isinstance(values, list) and values else "")
    return _OF_VALUES.get(type(first), "string")
