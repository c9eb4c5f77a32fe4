"""Whether a value obeys a JSON schema, as the grammar of the schema would have it written.

    obeys({"type": "object", "properties": {"n": {"type": "integer"}}}, {"n": "two"})  # False

The grammar takes time linear in the text, for any pattern, where regular expressions of a validator may take
exponential time. It wants the keys of an object in the schema's order; a value may have them in any.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from latentkv.sampling.library import byte_tokenizer, llguidance
from latentkv.sampling.schema import checked

if TYPE_CHECKING:
    from llguidance import LLMatcher

_BLANKS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def obeys(schema: Any, value: Any) -> bool:
    """Raises LatentKVError for a schema that no grammar can enforce."""
    said, start = _started(json.dumps(schema))
    text = json.dumps(_in_order(value, [said], said), ensure_ascii=False)
    matcher = start.deep_copy()
    matcher.consume_tokens(list(text.encode()))
    return not matcher.is_error() and bool(matcher.is_accepting())


@lru_cache(maxsize=64)
def _started(text: str) -> tuple[dict[str, Any], LLMatcher]:
    """The schema of a text in llguidance's words, and its grammar."""
    said, library = checked(json.loads(text)), llguidance()
    grammar = library.LLMatcher.grammar_from_json_schema(json.dumps({**said, "x-guidance": _BLANKS}))
    limits = library.LLParserLimits(verbose_errors=False)
    return said, library.LLMatcher(byte_tokenizer(), grammar, log_level=0, limits=limits)


def _in_order(value: Any, schemas: Sequence[Any], root: Mapping[str, Any]) -> Any:
    """The value with keys as its schemas list them, and others after. schemas: those that it may have to
    obey."""
    applied = list(_applied(schemas, root))
    if isinstance(value, dict):
        listed: dict[str, list[Any]] = {}
        for schema in applied:
            for key, part in schema.get("properties", {}).items():
                listed.setdefault(key, []).append(part)
        others = [schema["additionalProperties"] for schema in applied if "additionalProperties" in schema]
        others += [part for schema in applied for part in schema.get("patternProperties", {}).values()]
        keys = [key for key in listed if key in value] + [key for key in value if key not in listed]
        return {key: _in_order(value[key], listed.get(key, others), root) for key in keys}
    if isinstance(value, list):
        return [_in_order(each, list(_items(applied, i)), root) for i, each in enumerate(value)]
    return int(value) if isinstance(value, float) and value.is_integer() else value  # 1.0 is an integer too


def _applied(schemas: Sequence[Any], root: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The schemas, and those that they name or consist of, once each."""
    waiting, seen = list(reversed(schemas)), set()
    while waiting:
        schema = waiting.pop()
        if not isinstance(schema, Mapping) or id(schema) in seen:
            continue
        seen.add(id(schema))
        yield schema
        parts = [part for keyword in ("allOf", "anyOf", "oneOf") for part in schema.get(keyword, ())]
        if "$ref" in schema:
            parts.append(root["$defs"][schema["$ref"].rpartition("/")[2]])
        waiting += reversed(parts)


def _items(schemas: Sequence[Mapping[str, Any]], index: int) -> Iterator[Any]:
    for schema in schemas:
        first = schema.get("prefixItems", ())
        if index < len(first):
            yield first[index]
        elif "items" in schema:
            yield schema["items"]
