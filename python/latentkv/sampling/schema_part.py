"""One JSON schema, keyword by keyword: what llguidance obeys is kept in its words, the rest is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, Protocol

from latentkv.errors import LatentKVError, expected
from latentkv.sampling.disjoint import are_apart
from latentkv.sampling.formats import NO_FORMATS, PATTERNS, RANGES, STRING_FORMATS
from latentkv.sampling.numbers import constant, count, factor, number_bounds
from latentkv.sampling.pattern import PatternError, quoted, translated

HINT = "leave it out, and check the answer yourself"

_OF_TYPE = {
    "object": (
        "properties",
        "additionalProperties",
        "patternProperties",
        "propertyNames",
        "required",
        "minProperties",
        "maxProperties",
        "unevaluatedProperties",
    ),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
    "string": ("minLength", "maxLength", "pattern"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_IN_PLACE = ("$ref", "allOf", "anyOf", "oneOf")
# Validators heed these, and a grammar cannot.
_UNSAID = (
    "not",
    "if",
    "contains",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "unevaluatedItems",
    "$dynamicRef",
    "$recursiveRef",
)


class SchemaError(LatentKVError):
    """What of a schema no grammar can enforce: `pointer` is the place of a keyword, or of a schema."""

    pointer = ""


def schema_error(wanted: str, got: str, pointer: str, hint: str = "") -> SchemaError:
    error = SchemaError(str(expected("json_schema", wanted, got, hint)))
    error.pointer = pointer.removeprefix("#")
    return error


class Document(Protocol):
    """What a part needs of the schema that it stands in."""

    has_patterns: bool

    def read(self, schema: Any, at: str, depth: int, is_alone: bool) -> Any: ...
    def definition(self, reference: Any, at: str, is_alone: bool) -> dict[str, Any]: ...
    def inlined(self, schema: Any, at: str) -> tuple[Any, str]: ...
    def add_step(self, step: float) -> bool: ...


class SchemaPart:
    """One schema, without those in it."""

    def __init__(
        self, reader: Document, schema: Mapping[str, Any], at: str, depth: int, is_alone: bool
    ) -> None:
        self._reader, self._given, self._at, self._depth = reader, schema, at, depth
        self._is_alone = is_alone  # and so are its alternatives, where it says nothing of keys itself
        self._is_whole = is_alone and not set(schema) & {*_IN_PLACE, "patternProperties"}
        self._more: list[Any] = []  # schemas that hold as well

    def read(self) -> dict[str, Any]:
        for keyword in _UNSAID:
            if keyword in self._given:
                self._refuse(keyword)
        types = self._types()
        out: dict[str, Any] = {} if types is None else {"type": types}
        kinds = set(_TYPES if types is None else types)
        if kinds & {"integer", "number"}:
            out |= self._numbers("number" not in kinds)
        if "string" in kinds:
            out |= self._strings()
        if "array" in kinds:
            out |= self._arrays()
        if "object" in kinds:
            out |= self._objects()
        out |= self._values()
        self._combine(out)
        return out

    def _refuse(self, keyword: str, wanted: str = "") -> NoReturn:
        place = f"{self._at}/{keyword}"
        if wanted:
            got = f"{short(self._given.get(keyword))} at {place}"
            raise schema_error(f"{keyword} to be {wanted}", got, place)
        raise schema_error("keywords that a grammar can enforce", place, place, HINT)

    def _types(self) -> list[str] | None:
        """As given; else the one type that the keywords are about."""
        given = self._given.get("type")
        if given is None:
            about = [kind for kind, words in _OF_TYPE.items() if any(word in self._given for word in words)]
            return about if len(about) == 1 and not {"enum", "const"} & set(self._given) else None
        types = [given] if isinstance(given, str) else given
        if not isinstance(types, list) or not types or any(each not in _TYPES for each in types):
            self._refuse("type", f"one of {', '.join(_TYPES)}, or a list of them")
        return list(types)

    def _numbers(self, is_integer: bool) -> dict[str, Any]:
        given = self._given
        name = given.get("format")
        within = RANGES.get(name) if is_integer and isinstance(name, str) else None
        out = number_bounds(given, is_integer, self._refuse, within)
        if "multipleOf" in given:
            step = factor(given["multipleOf"], self._refuse)
            if not (is_integer and step == 1):
                out["multipleOf"] = step
                if not self._reader.add_step(step):
                    self._refuse("multipleOf", "one number, or two small ones, in all of the schema")
        return out

    def _strings(self) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for keyword in ("minLength", "maxLength"):
            if keyword in self._given:
                out[keyword] = count(self._given[keyword], keyword, self._refuse)
        if "pattern" in self._given:
            out["pattern"] = self._pattern(self._given["pattern"], "pattern")
        name = self._given.get("format")
        if name is None or name in (*NO_FORMATS, *RANGES):
            return out
        if name not in STRING_FORMATS:
            self._refuse("format", f"one of {', '.join(STRING_FORMATS)}")
        self._more += [{"type": "string", "pattern": each} for each in PATTERNS.get(name, ())]
        return out | {"format": name}

    def _pattern(self, pattern: Any, keyword: str, is_wide: bool = False) -> str:
        if not isinstance(pattern, str):
            self._refuse(keyword, "a regular expression")
        try:
            return translated(pattern, is_wide)
        except PatternError as error:
            got = f"{error} at {self._at}/{keyword}"
            raise schema_error(
                "a pattern that a grammar can enforce", got, f"{self._at}/{keyword}", HINT
            ) from None

    def _arrays(self) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for keyword in ("minItems", "maxItems"):
            if keyword in self._given:
                out[keyword] = count(self._given[keyword], keyword, self._refuse)
        first, rest = self._given.get("prefixItems"), self._given.get("items")
        first_name, rest_name = "prefixItems", "items"
        if isinstance(rest, list):  # until draft 2019-09
            first, rest = rest, self._given.get("additionalItems")
            first_name, rest_name = "items", "additionalItems"
        if first is not None:
            out["prefixItems"] = self._list(first, first_name)
        if rest is not None:
            out["items"] = self._child(rest, rest_name)
        if self._given.get("uniqueItems") not in (None, False) and out.get("maxItems", 2) > 1:
            self._refuse("uniqueItems")
        return out

    def _objects(self) -> dict[str, Any]:
        out: dict[str, Any] = {}
        if "properties" in self._given:
            out["properties"] = self._map("properties")
        if "patternProperties" in self._given:
            values = self._map("patternProperties")
            more = self._given.get("additionalProperties", self._given.get("unevaluatedProperties"))
            keys = [self._pattern(key, "patternProperties", more is not False) for key in values]
            out["patternProperties"] = dict(zip(keys, values.values(), strict=True))
        more = "additionalProperties"
        if more not in self._given and "unevaluatedProperties" in self._given:
            more = "unevaluatedProperties"
            if set(self._given) & APPLIED:
                self._refuse(more)
        if more in self._given:
            out["additionalProperties"] = self._child(self._given[more], more)
        if "propertyNames" in self._given:
            self._name(out)
        self._reader.has_patterns |= "patternProperties" in out
        if "required" in self._given:
            keys = self._given["required"]
            if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
                self._refuse("required", "a list of keys")
            out["required"] = keys
        is_listed = "properties" in out and set(out.get("required", ())) <= out["properties"].keys()
        if self._is_whole and is_listed and "additionalProperties" not in out:
            # llama.cpp's way and OpenAI's: a small model writes keys without end where any may come
            out["additionalProperties"] = False
        for keyword in ("minProperties", "maxProperties"):
            if keyword in self._given:
                out[keyword] = count(self._given[keyword], keyword, self._refuse)
        # llguidance cannot keep the other keys apart, and a validator counts one that comes twice once
        if out.get("minProperties", 0) > len(set(out.get("required", ()))) + 1:
            self._refuse("minProperties", "at most one above the number of required keys")
        return out

    def _name(self, out: dict[str, Any]) -> None:
        """propertyNames, as patternProperties."""
        names = self._given["propertyNames"]
        if names is True or names == {}:
            return
        if isinstance(names, Mapping) and "$ref" in names:
            names, _ = self._reader.inlined(names, f"{self._at}/propertyNames")
        if not isinstance(names, Mapping):
            self._refuse("propertyNames", "a schema")
        said = {
            key: names[key] for key in ("enum", "const", "pattern", "minLength", "maxLength") if key in names
        }
        if "properties" in out or "patternProperties" in out or "format" in names or not said:
            self._refuse("propertyNames", "enum, pattern or lengths, without properties beside it")
        if "enum" in said or "const" in said:
            keys = [said["const"]] if "const" in said else said["enum"]
            if not isinstance(keys, list):
                self._refuse("propertyNames", "an enum that is a list")
            constant(keys, "propertyNames", self._refuse)
            pattern = f"^(?:{'|'.join(quoted(key) for key in keys if isinstance(key, str))})$"
        elif "pattern" in said and len(said) == 1:
            pattern = self._pattern(said["pattern"], "propertyNames")
        elif "pattern" not in said:
            least, most = (said.get(word) for word in ("minLength", "maxLength"))
            low = 0 if least is None else count(least, "propertyNames", self._refuse)
            high = "" if most is None else count(most, "propertyNames", self._refuse)
            pattern = rf"^(?s:.){{{low},{high}}}$"
        else:
            self._refuse("propertyNames", "either a pattern or lengths")
        out["patternProperties"] = {pattern: out.get("additionalProperties", True)}
        out["additionalProperties"] = False

    def _values(self) -> dict[str, Any]:
        out: dict[str, Any] = {}
        if "const" in self._given:
            out["const"] = constant(self._given["const"], "const", self._refuse)
        if "enum" in self._given:
            values = self._given["enum"]
            if not isinstance(values, list) or not values:
                self._refuse("enum", "a list of at least one value")
            out["enum"] = [constant(value, "enum", self._refuse) for value in values]
        return out

    def _combine(self, out: dict[str, Any]) -> None:
        if "$ref" in self._given:
            out |= self._reader.definition(self._given["$ref"], self._at, self._is_alone_in("$ref"))
        for keyword in ("allOf", "anyOf", "oneOf"):
            if keyword in self._given:
                out[keyword] = self._list(self._given[keyword], keyword)
        if "oneOf" in out and "anyOf" not in out and are_apart(out["oneOf"]):
            out["anyOf"] = out.pop("oneOf")
        if self._more:
            out["allOf"] = [*out.get("allOf", []), *self._more]

    def _list(self, schemas: Any, keyword: str) -> list[Any]:
        if not isinstance(schemas, list) or not schemas:
            self._refuse(keyword, "a list of at least one schema")
        places = [(each, f"{self._at}/{keyword}/{i}") for i, each in enumerate(schemas)]
        if keyword == "oneOf":
            places = [self._reader.inlined(*place) for place in places]
        is_alone = self._is_whole if keyword in ("prefixItems", "items") else self._is_alone_in(keyword)
        return [self._reader.read(each, at, self._depth + 1, is_alone) for each, at in places]

    def _is_alone_in(self, keyword: str) -> bool:
        """Whether each of a keyword's schemas describes its value alone."""
        beside = set(self._given) & {*_IN_PLACE, *_OF_TYPE["object"], *_OF_TYPE["array"]} - {keyword}
        return self._is_alone and keyword != "allOf" and not beside

    def _map(self, keyword: str) -> dict[str, Any]:
        given = self._given[keyword]
        if not isinstance(given, Mapping):
            self._refuse(keyword, "an object of schemas")
        return {key: self._child(each, f"{keyword}/{escaped(key)}") for key, each in given.items()}

    def _child(self, schema: Any, place: str) -> Any:
        return self._reader.read(schema, f"{self._at}/{place}", self._depth + 1, self._is_whole)


APPLIED = {word for words in _OF_TYPE.values() for word in words} | {
    "type",
    "format",
    "const",
    "enum",
    "allOf",
    "anyOf",
    "oneOf",
}


def escaped(key: str) -> str:
    """A key as a part of a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
