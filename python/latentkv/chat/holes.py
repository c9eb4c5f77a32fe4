"""JSON schemas beside llama.cpp's chat code: it says how a template frames an answer in JSON, or a tool's
arguments, and the schemas stay here.

Each schema is a mark for it, a constant text that it writes into its grammar. There the mark becomes a rule
that stands for the schema (LlamaGrammar.schemas).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from latentkv.errors import LatentKVError, expected
from latentkv.sampling.schema import checked, loosened
from latentkv.sampling.schema_part import SchemaError, escaped

_MARK = "latentkv-json-"


class Holes:
    """The marks of one request, which stand for its schemas."""

    def __init__(self) -> None:
        self._schemas: list[dict[str, Any]] = []
        self._strict: list[_StrictTool] = []

    def mark(self, checked_schema: dict[str, Any]) -> dict[str, Any]:
        """The schema that llama.cpp reads in place of the given one. It does not allow strings, as llama.cpp
        would write these as plain text between tags."""
        self._schemas.append(checked_schema)
        return {"const": [f"{_MARK}{len(self._schemas) - 1}"]}

    def tool(self, tool: Mapping[str, Any], must_obey: bool) -> Mapping[str, Any]:
        """The tool with marks in place of its parameters' schemas: one mark for all where calls are JSON, one
        for each where they are tagged. must_obey: a schema that no grammar can enforce is refused; otherwise
        that part is left out."""
        function = tool.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("parameters") or {}, Mapping):
            return tool  # llama.cpp says what is wrong
        given = {**(function.get("parameters") or {}), "type": "object"}
        try:
            text = json.dumps(given)
        except (TypeError, ValueError, RecursionError):
            return tool  # so is what is no JSON
        try:
            said, parts = _parameters(text, must_obey)
        except SchemaError as error:
            name = function.get("name")
            raise LatentKVError(
                str(error).replace("[json_schema] expected", f"[tools] expected of {name!r}")
            ) from None
        whole = self.mark(said)
        marked, texts = {}, []
        for key, schema, is_text in parts:
            marked[key] = self.mark(schema)
            if is_text:
                (rule,) = marked[key]["const"]
                marked[key] = {"type": "string", "const": rule}
                if schema.keys() - {"type"}:
                    texts.append((key, rule))
        if must_obey:
            self._strict.append(_StrictTool(str(function.get("name")), whole["const"][0], texts))
        needed = given.get("required")
        required = [key for key in needed if key in marked] if isinstance(needed, list) else []
        parameters = {"type": "object", **whole, "properties": marked, "required": required}
        return {**tool, "function": {**function, "parameters": parameters}}

    @property
    def has_strict(self) -> bool:
        """Whether any tool is strict."""
        return bool(self._strict)

    def filled(self, grammar: str) -> tuple[str, dict[str, Any]]:
        """llama.cpp's grammar with an undefined rule in place of each mark, and the schemas of these
        rules."""
        found = {}
        for number, schema in enumerate(self._schemas):
            rule = f"{_MARK}{number}"
            for literal in (json.dumps(json.dumps(rule)), json.dumps(json.dumps([rule]))):
                if literal in grammar:
                    grammar = grammar.replace(literal, f" {rule} ")
                    found[rule] = schema
        for tool in self._strict:
            lost = [key for key, rule in tool.texts if rule not in found]
            if tool.whole not in found and lost:
                raise expected(
                    "tools",
                    f"parameters of {tool.name!r} that this chat template's calls can be bound to",
                    f"more than a type for {lost[0]!r}, which is written as plain text",
                    "leave it out, and check the call yourself",
                )
        return grammar, found

    def shown(self, text: str, schema: Any) -> str:
        """The prompt with the schema in place of the first mark."""
        return text.replace(json.dumps({"const": [f"{_MARK}0"]}), json.dumps(schema, ensure_ascii=False))


@lru_cache(maxsize=512)  # agents send the same tools in every turn
def _parameters(text: str, must_obey: bool) -> tuple[dict[str, Any], list[tuple[str, dict[str, Any], bool]]]:
    """The schema of all parameters of a tool, and of each parameter, with whether it is written as text."""
    given = json.loads(text)
    read = checked if must_obey else loosened
    whole = read(given) or {"type": "object"}
    listed = given.get("properties")
    parts = [
        (key, read(given, f"/properties/{escaped(key)}"), _is_text(schema, given))
        for key, schema in (listed if isinstance(listed, Mapping) else {}).items()
    ]
    return whole, parts


class _StrictTool:
    def __init__(self, name: str, whole: str, texts: list[tuple[str, str]]) -> None:
        """texts: parameters that are text and something more, with their marks."""
        self.name, self.whole, self.texts = name, whole, texts


def _is_text(schema: Any, root: Mapping[str, Any], depth: int = 0) -> bool:
    """Whether llama.cpp writes the value as plain text between tags, which it does if the value can be a
    string."""
    if not isinstance(schema, Mapping) or depth > 20:
        return False
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        found: Any = root
        for key in reference[2:].split("/"):
            found = found.get(key) if isinstance(found, Mapping) else None
        return _is_text(found, root, depth + 1)
    kind = schema.get("type")
    if kind is not None:
        return kind == "string" or (isinstance(kind, list) and "string" in kind)
    parts = schema.get("allOf") or ()
    if parts and all(_is_text(each, root, depth + 1) for each in parts):
        return True
    choices = [each for word in ("anyOf", "oneOf") for each in schema.get(word) or ()]
    if choices:
        return any(_is_text(each, root, depth + 1) for each in choices)
    values = [schema["const"]] if "const" in schema else schema.get("enum") or ()
    return any(isinstance(value, str) for value in values) or any(
        word in schema for word in ("pattern", "minLength", "maxLength", "format")
    )
