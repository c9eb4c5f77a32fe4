"""JSON schemas: what is let through fits; what no grammar can enforce is refused by name and place."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from latentkv import LatentKVError, LlamaGrammar
from latentkv.sampling.pattern import PatternError, translated
from latentkv.sampling.schema import as_grammar, checked, loosened

jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema (pip install '.[test]')")

BYTES = LLTokenizer("byte")
TEXT, INT, NUM = {"type": "string"}, {"type": "integer"}, {"type": "number"}
BYTE = {**INT, "format": "uint8"}


def thing(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def matcher(schema: Any) -> LLMatcher:
    return LLMatcher(BYTES, LLMatcher.grammar_from_json_schema(as_grammar(checked(schema))), log_level=0)


def takes(schema: Any, text: str) -> bool:
    one = matcher(schema)
    return one.try_consume_tokens(list(text.encode())) == len(text.encode()) and one.is_accepting()


def written(schema: Any, rng: random.Random) -> str | None:
    """A text of random bytes that the grammar allows; None where it does not end soon."""
    one, out = matcher(schema), bytearray()
    for i in range(400):
        if one.is_accepting() and (one.is_stopped() or rng.random() < 0.3):
            return out.decode()
        bits = np.unpackbits(np.frombuffer(one.compute_bitmask(), np.uint8), bitorder="little")
        allowed = [int(byte) for byte in np.flatnonzero(bits) if byte < 256]
        if not allowed:
            return out.decode() if one.is_accepting() else None
        closing = [byte for byte in allowed if byte in b'"}]']
        byte = rng.choice(closing if closing and rng.random() < 0.25 + i / 400 else allowed)
        assert one.consume_token(byte)
        out.append(byte)
    return None


OBEYED: list[Any] = [
    {"type": "integer", "minimum": -5, "maximum": 13},
    {"type": "object", "patternProperties": {"^a$": INT, r"^\d": TEXT}, "maxProperties": 3},
    {"type": "string", "pattern": r"^[^\d\s]{1,9}$"},
    {"type": "integer", "minimum": 10**9},
    {"type": "integer", "minimum": -(10**18), "exclusiveMaximum": 10**16 + 1},
    {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    {"type": "integer", "format": "uint8"},
    {"type": "number", "minimum": 5, "maximum": 6},
    {"type": "number", "exclusiveMinimum": -0.25, "exclusiveMaximum": 1e-3},
    {"type": "number", "minimum": -1.7976931348623157e308},
    {"type": "integer", "multipleOf": 7, "minimum": 100, "maximum": 200},
    {"type": "number", "multipleOf": 0.5},
    {"type": "string", "pattern": r"^\d{3}-\w+$"},
    {"type": "string", "pattern": "^a|b$"},
    {"type": "string", "pattern": r"^.\S\W\D$"},
    {"type": "string", "minLength": 2, "maxLength": 4},
    *({"type": "string", "format": name} for name in ("date", "date-time", "time", "ipv4", "ipv6", "uuid")),
    {"enum": [1, 'a"b', None, True, [1, 2], {"k": "v"}, 1.5]},
    {"type": "string", "enum": ["a", "b", 3]},
    {"type": ["string", "null"], "maxLength": 2},
    {"type": "array", "prefixItems": [TEXT, INT], "items": {"type": "null"}, "minItems": 1},
    thing(a={"type": "integer", "maximum": 3}) | {"additionalProperties": INT},
    {"type": "object", "required": ["x"]},
    {"required": ["a"]},
    {"type": "object", "additionalProperties": {"type": "boolean"}, "minProperties": 1, "maxProperties": 2},
    {"type": "object", "patternProperties": {"^x": INT}, "properties": {"xa": {"minimum": 5}, "b": TEXT}},
    {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": INT},
    {"type": "object", "propertyNames": {"maxLength": 2}},
    {"allOf": [thing(a=TEXT)], "properties": {"b": INT}, "required": ["b"]},
    thing(k={"const": "v"}) | {"anyOf": [thing(a=TEXT), thing(b=TEXT)]},
    {"oneOf": [thing(k={"const": "a"}, v=INT), thing(k={"const": "b"}, w=TEXT)]},
    {
        "$defs": {"A": thing(t={"const": "a"}, x=INT), "B": thing(t={"const": "b"}, y=TEXT)},
        **thing(u={"oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]}),
    },
    {"type": "object", "properties": {"c": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}}},
    {"$defs": {"p/q": {"type": "integer", "minimum": 3}}, **thing(a={"$ref": "#/$defs/p~1q", "maximum": 4})},
    True,
]


@pytest.mark.parametrize("schema", OBEYED, ids=lambda schema: json.dumps(schema)[:60])
def test_what_is_let_through_fits(schema: Any) -> None:
    draft = jsonschema.Draft202012Validator
    validator = draft(schema, format_checker=draft.FORMAT_CHECKER)
    rng = random.Random(4)
    texts = [text for _ in range(12) if (text := written(schema, rng)) is not None]
    assert texts
    for text in texts:
        assert [error.message for error in validator.iter_errors(json.loads(text))] == [], text


@pytest.mark.parametrize(
    ("schema", "fits", "does_not"),
    [
        ({"type": "string", "pattern": "[0-9]{4}"}, '"ab1234"', '"123"'),
        ({"type": "string", "pattern": "^[\\w-.]+$"}, '"a-.b"', '"a,b"'),
        ({"type": "string", "pattern": "^{a}$"}, '"{a}"', '"a"'),
        ({"type": "string", "pattern": "^[a-z]{0,2000}$"}, f'"{"x" * 2000}"', f'"{"x" * 2001}"'),
        *(({**TEXT, "maxLength": n}, f'"{"x" * n}"', f'"{"x" * (n + 1)}"') for n in (1999, 2000, 2001, 5000)),
        *(
            ({"type": "array", "items": INT, "maxItems": n}, str([1] * n), str([1] * (n + 1)))
            for n in (1000, 2000, 5000)
        ),
        ({"type": "integer", "minimum": 10**18}, "1000000000000000000", "10"),
        ({"type": "integer", "maximum": -(10**16)}, "-10000000000000001", "-10"),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, "0.5", "0.0"),
        ({**BYTE, "exclusiveMaximum": 1000}, "255", "256"),
        ({**BYTE, "exclusiveMaximum": 10}, "9", "10"),
        ({**BYTE, "exclusiveMinimum": -10}, "0", "-1"),
        ({**BYTE, "exclusiveMinimum": 7}, "8", "7"),
        ({**BYTE, "minimum": 0, "exclusiveMinimum": False}, "0", "-1"),
        ({**BYTE, "maximum": 255, "exclusiveMaximum": True}, "254", "255"),
        ({**NUM, "exclusiveMinimum": 0, "maximum": 0.5}, "0.25", "0"),
        ({**NUM, "minimum": -0.5, "exclusiveMaximum": 0}, "-0.25", "-0"),
        ({**NUM, "exclusiveMinimum": 5, "maximum": 5.5}, "5.5", "5.0"),
        ({"type": "string", "format": "date"}, '"2024-02-29"', '"2023-02-29"'),
        ({"$schema": "http://json-schema.org/draft-04/schema#", "const": 1}, "1", "2"),
        ({**NUM, "minimum": 3, "exclusiveMinimum": True}, "3.5", "3"),
        ({"type": "array", "items": [TEXT, INT], "additionalItems": False}, '["a", 1]', '["a", 1, 2]'),
        (thing(a=TEXT) | {"additionalProperties": INT}, '{"a": "x", "b": 1}', '{"a": "x", "\\u0061": 1}'),
        ({"type": "object", "additionalProperties": False}, "{}", '{"a": 1}'),
        (thing(a=TEXT), '{"a": "x"}', '{"a": "x", "b": 1}'),  # narrower than the schema: llama.cpp's way
        (thing(a=TEXT) | {"additionalProperties": True}, '{"a": "x", "b": 1}', "{}"),
        ({"allOf": [thing(a=TEXT), thing(b=INT)]}, '{"a": "x", "b": 1}', '{"a": "x"}'),
        (
            {"$defs": {"A": thing(a=TEXT)}, "anyOf": [{"$ref": "#/$defs/A"}, {"type": "null"}]},
            '{"a": "x"}',
            '{"a": "x", "b": 1}',
        ),
        (
            {"$defs": {"A": thing(a=TEXT)}, "allOf": [{"$ref": "#/$defs/A"}], **thing(b=INT)},
            '{"b": 1, "a": "x"}',
            '{"b": 1}',
        ),
    ],
    ids=lambda each: json.dumps(each)[:50],
)
def test_texts_that_fit_and_those_that_do_not(schema: Any, fits: str, does_not: str) -> None:
    assert takes(schema, fits)
    assert not takes(schema, does_not)


A_KEYS = {"type": "object", "patternProperties": {"^a": INT}}


@pytest.mark.parametrize(
    "schema",
    [
        A_KEYS,
        A_KEYS | {"additionalProperties": TEXT},
        A_KEYS | {"additionalProperties": False},
        A_KEYS | {"properties": {"c": INT}},
        {"type": "object", "patternProperties": {"b$": INT}},
        {"$defs": {"A": A_KEYS}, "anyOf": [{"$ref": "#/$defs/A"}, {"type": "null"}]},
    ],
    ids=json.dumps,
)
def test_keys_that_a_pattern_names_are_written_in_one_way(schema: Any) -> None:
    """Whoever makes a grammar of the checked schema, with our options or none."""
    bare = LLMatcher(BYTES, LLMatcher.grammar_from_json_schema(json.dumps(checked(schema))), log_level=0)
    assert takes(schema, '{"ab": 1}')
    for text in ('{"ab":"x"}', r'{"\u0061b":"x"}', r'{"a\u0062":"x"}', r'{"\u0061\u0062":"x"}'):
        assert not takes(schema, text)
        assert bare.validate_tokens(list(text.encode())) < len(text)


@pytest.mark.parametrize(
    ("pattern", "key"),
    [("^a$", "a\n"), (r"^\d$", "\u0663"), ("^.b", "\u2028b"), (r"^\w+$", "\u00e9"), (r"^[^\d]$", "\u0663")],
)
def test_keys_that_validators_read_in_two_ways_obey_in_both(pattern: str, key: str) -> None:
    schema = {"type": "object", "patternProperties": {pattern: INT}}
    assert not takes(schema, json.dumps({key: "x"}, ensure_ascii=False))
    assert takes(schema, json.dumps({key: 1}, ensure_ascii=False))
    assert not takes(schema | {"additionalProperties": False}, json.dumps({key: 1}, ensure_ascii=False))


@pytest.mark.parametrize(
    "sign", ['"', "\\", "/", "\n", "\t", "\b", "\u00e9", "\u2028", "\U0001f600", " ", "$", "^"]
)
def test_what_json_escapes_is_the_same_in_keys_and_values(sign: str) -> None:
    text = f"a{sign}b"
    pattern = f"^{re.escape(text)}$"
    keyed = {"type": "object", "properties": {text: INT}, "additionalProperties": TEXT}
    named = {"type": "object", "patternProperties": {pattern: INT}, "additionalProperties": TEXT}
    for schema in ({"const": text}, {"enum": ["ab", text]}, {**TEXT, "pattern": pattern}):
        assert takes(schema, json.dumps(text, ensure_ascii=False))
        assert not takes(schema, json.dumps(text + "c", ensure_ascii=False))
    for schema in (keyed, named):
        assert takes(schema, json.dumps({text: 1}, ensure_ascii=False))
        assert not takes(schema, json.dumps({text: "x"}, ensure_ascii=False))
        assert takes(schema, json.dumps({text + "c": "x"}, ensure_ascii=False))


REFUSED = [
    ({"const": "a\x01b"}, "/const", "without control characters"),
    ({"enum": ["a", ["\x7f"]]}, "/enum", "without control characters"),
    ({**TEXT, "pattern": "^a\\x01b$"}, "/pattern", "U+0001"),
    ({**TEXT, "pattern": "^a[\\x7f]b$"}, "/pattern", "U+007F"),
    (thing(a={**TEXT, "pattern": "^(?=x)[a-z]+$"}), "/properties/a/pattern", "lookaround"),
    (thing(a={**TEXT, "pattern": r"(a)\1"}), "/properties/a/pattern", "back-reference"),
    ({**TEXT, "pattern": "^a($"}, "/pattern", "regex parse error"),
    ({"type": "array", "items": {"type": "array", "uniqueItems": True}}, "/items/uniqueItems", ""),
    ({"not": INT}, "/not", ""),
    ({"if": INT, "then": {"minimum": 3}}, "/if", ""),
    ({"type": "array", "contains": INT}, "/contains", ""),
    ({"dependentRequired": {"a": ["b"]}}, "/dependentRequired", ""),
    (thing(x={"oneOf": [INT, NUM]}), "/properties/x/oneOf", "oneOf"),
    (thing(a={"$ref": "https://example.com/s.json"}), "/properties/a/$ref", "https://example.com/s.json"),
    ({"$ref": "#/nowhere"}, "/$ref", "a place that exists"),
    ({"$ref": "#"}, "", "nothing matches it"),
    ({**TEXT, "format": "regex"}, "/format", "one of date-time"),
    ({**TEXT, "format": ["date"]}, "/format", "one of date-time"),
    ({**INT, "minimum": 5, "maximum": 4}, "/minimum", "got 5"),
    ({**INT, "minimum": 10**30}, "/minimum", "at most 1000000000000000000"),
    ({**INT, "multipleOf": 1000003}, "/multipleOf", "10000 steps"),
    ({**TEXT, "minLength": 5, "maxLength": 3}, "/minLength", "greater than maxLength"),
    ({"type": "object", "minProperties": 3}, "/minProperties", "one above"),
    ({"const": 9007199254740993}, "/const", "exactly"),
    ({"type": "no such type"}, "/type", "one of null, boolean"),
    ({"properties": {"a": 5}}, "/properties/a", "a schema"),
    ({"type": "object", "propertyNames": 5}, "/propertyNames", "a schema"),
    ({"type": "object", "propertyNames": {"enum": 5}}, "/propertyNames", "a list"),
    (json.loads('{"items":' * 100 + "{}" + "}" * 100), "/items/items", "60 deep"),
    (False, "", "schema is false"),
]


@pytest.mark.parametrize(
    ("schema", "place", "said"), REFUSED, ids=[place + said for _, place, said in REFUSED]
)
def test_what_no_grammar_can_enforce_is_refused_by_name(schema: Any, place: str, said: str) -> None:
    with pytest.raises(LatentKVError, match=r"^\[json_schema\] expected .*; got ") as error:
        LlamaGrammar.from_json_schema(schema)
    assert place in str(error.value)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_tool_that_is_only_offered_loses_what_cannot_be_enforced() -> None:
    given = thing(
        a={**TEXT, "pattern": "(?=x)", "maxLength": 3}, b={"type": "array", "items": INT, "uniqueItems": True}
    )
    kept = thing(
        a={"type": ["string"], "maxLength": 3}, b={"type": ["array"], "items": {"type": ["integer"]}}
    )
    found = loosened(given)
    assert found["properties"]["a"] == kept["properties"]["a"]
    assert "uniqueItems" not in found["properties"]["b"]
    assert found["required"] == ["a", "b"]
    assert given["properties"]["a"]["pattern"] == "(?=x)"  # the caller's is left alone
    for schema, _, _ in REFUSED:
        matcher(loosened(schema))


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        (r"\bx", "word boundary"),
        (r"[^]", "begins with"),
        (r"[b-a]", "runs backwards"),
        (r"\Z", "escape"),
        (r"a++", "quantifier"),
        (r"a{,3}", "lower bound"),
        (r"(?x) a", "flags"),
        (r"[a", "without end"),
        (r"\ud800", "half a character"),
    ],
)
def test_patterns_that_two_dialects_read_in_two_ways(pattern: str, said: str) -> None:
    with pytest.raises(PatternError, match=said):
        translated(pattern)
