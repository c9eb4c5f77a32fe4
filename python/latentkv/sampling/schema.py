"""JSON schemas as llguidance takes them: each keyword is said in a form that it obeys, or refused by name.

llguidance refuses most of what it cannot say, but not everything: it takes bounds as 64-bit floats, knows a
keyword or not by `$schema`, and counts a key that comes twice as two. All of that is decided before.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from typing import Any

from latentkv.sampling.library import byte_tokenizer, llguidance
from latentkv.sampling.schema_part import HINT, SchemaError, escaped, schema_error
from latentkv.sampling.schema_reader import SchemaReader

_MOST_DROPPED = 200  # keywords of one schema
_STRUCTURE = ("properties", "required", "items", "anyOf", "allOf")  # dropped where nothing else helps
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_ESCAPES = {"json_allowed_escapes": 'nrbtf\\"'}  # no \u, by which a key can be written in two ways


def checked(schema: Any, at: str = "") -> dict[str, Any]:
    """The schema in the words that llguidance obeys; annotations and unknown keywords, which validators
    ignore too, are left out. Raises LatentKVError that names a keyword which no grammar can enforce, and
    where it stands (a JSON pointer). at: of a schema in it, which is read in its place."""
    reader = SchemaReader(schema)
    said = reader.part(reader.find(at), at)
    if reader.has_patterns:  # which hold for what a key says, however it is written
        said["x-guidance"] = _ESCAPES
    if why := _refused(said):
        raise _located(schema, at, why)
    return said


def loosened(schema: Any, at: str = "") -> dict[str, Any]:
    """As checked(), without the keywords that it would refuse: fewer texts are refused then. At the worst any
    JSON is left."""
    given = schema
    for _ in range(_MOST_DROPPED):
        try:
            return checked(schema, at)
        except SchemaError as error:
            if schema is given:
                schema = copy.deepcopy(given)
            try:
                if not _dropped(schema, error.pointer):
                    break
            except (LookupError, TypeError, ValueError):  # a place that is written in another way
                break
    return {}


def _dropped(schema: Any, pointer: str) -> bool:
    """Takes the keyword, or the schema, at a pointer away; whether there was one below the root."""
    parents = [key.replace("~1", "/").replace("~0", "~") for key in pointer.split("/")[1:]]
    if not parents:
        return False
    for key in parents[:-1]:
        schema = schema[int(key)] if isinstance(schema, list) else schema[key]
    last: Any = int(parents[-1]) if isinstance(schema, list) else parents[-1]
    is_schema = isinstance(schema, list) or (len(parents) > 1 and parents[-2] in _MAPS)
    if is_schema and schema[last] != {}:
        schema[last] = {}
    else:
        del schema[last]
    return True


def as_grammar(schema: Mapping[str, Any]) -> str:
    """A checked schema with what a JSON text may look like: blanks as llama.cpp's grammars allow them."""
    options = _ESCAPES | {"whitespace_pattern": r"(?: |\n{1,2}[ \t]{0,20})"}
    return json.dumps({**schema, "x-guidance": options})


def _refused(schema: Mapping[str, Any]) -> str:
    """Why llguidance refuses a checked schema; "" where it takes it."""
    library = llguidance()
    grammar = library.LLMatcher.grammar_from_json_schema(as_grammar(schema))
    limits = library.LLParserLimits(verbose_errors=False)
    matcher = library.LLMatcher(byte_tokenizer(), grammar, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()
    error: str = matcher.get_error()
    return "nothing matches it" if "NoExtension" in error else error


def _located(root: Any, at: str, why: str) -> SchemaError:
    """The error for a schema that llguidance refuses: of the deepest part that it refuses by itself."""
    schema = SchemaReader(root).find(at)
    deeper: tuple[str, Any] | None = ("", schema)
    while deeper is not None and isinstance(deeper[1], Mapping):
        at, schema = at + deeper[0], deeper[1]
        tried = (
            (place, each, _refused(SchemaReader(root).part(each, at + place)))
            for place, each in children(schema)
        )
        found = next(((place, each, said) for place, each, said in tried if said), None)
        deeper = None if found is None else found[:2]
        why = why if found is None else found[2]
    given = sorted(schema, key=lambda key: key in _STRUCTURE) if isinstance(schema, Mapping) else []
    needed = (
        key
        for key in given
        if key != "type"
        and not _refused(SchemaReader(root).part({k: v for k, v in schema.items() if k != key}, at))
    )
    place = f"{at}/{next(needed, '')}"
    reason = " ".join(why.split("<state>")[0].split("Enable '")[0].split()).removeprefix("ERROR: ")[:160]
    return schema_error("keywords that a grammar can enforce", f"{place} ({reason})", place.rstrip("/"), HINT)


def children(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas right in a schema, each with its place in it as a JSON pointer."""
    for keyword in ("properties", "patternProperties"):
        if isinstance(schema.get(keyword), Mapping):
            yield from ((f"/{keyword}/{escaped(key)}", each) for key, each in schema[keyword].items())
    for keyword in ("prefixItems", "items", "allOf", "anyOf", "oneOf"):
        if isinstance(schema.get(keyword), list):
            yield from ((f"/{keyword}/{i}", each) for i, each in enumerate(schema[keyword]))
    for keyword in ("items", "additionalItems", "additionalProperties"):
        if isinstance(schema.get(keyword), Mapping):
            yield f"/{keyword}", schema[keyword]
