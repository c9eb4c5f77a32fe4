"""Alternatives of which a value fits one at most: `oneOf` says no more than `anyOf` there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import combinations
from typing import Any


def are_apart(schemas: Sequence[Any]) -> bool:
    """Whether no value fits two of them: by their types, by what they list, or by a key that objects of both
    need. False where that is not seen.

    >>> kind = lambda value: {"type": ["object"], "properties": {"t": {"const": value}}, "required": ["t"]}
    >>> are_apart([kind(1), kind(2)]), are_apart([kind(1), {"type": ["object"]}])
    (True, False)
    """
    return all(_apart(one, other) for one, other in combinations(schemas, 2))


def _apart(one: Any, other: Any) -> bool:
    if one is False or other is False:
        return True
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    listed, others = _listed(one), _listed(other)
    if listed is not None and others is not None:
        return not listed & others
    if not _types(one) & _types(other):
        return True
    if _types(one) | _types(other) != {"object"}:
        return False
    needed = set(one.get("required", ())) & set(other.get("required", ()))
    return any(_apart(_property(one, key), _property(other, key)) for key in needed)


def _listed(schema: dict[str, Any]) -> set[str] | None:
    """The values of const or enum. Numbers count by their value: 1 and 1.0 are one."""
    if "const" in schema:
        return {_text(schema["const"])}
    return {_text(value) for value in schema["enum"]} if "enum" in schema else None


def _text(value: Any) -> str:
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _types(schema: dict[str, Any]) -> set[str]:
    every = {"null", "boolean", "number", "string", "array", "object"}
    return {"number" if kind == "integer" else kind for kind in schema.get("type", every)}


def _property(schema: dict[str, Any], key: str) -> Any:
    return schema.get("properties", {}).get(key, True)
