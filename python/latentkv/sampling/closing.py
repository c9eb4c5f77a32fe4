"""The end of a JSON answer that has no room left: it is closed, not cut.

A grammar says what may come next, not when enough has come: strings and arrays without a bound, and objects
of any keys, can go on for ever, and small models do. When the tokens that are left are as few as closing
takes, the likeliest token becomes the one that closes most: the grammar still decides whether it may come. So
what is open ends, and what the schema requires still comes, as short as it can be.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from latentkv import _core

# The first that the grammar allows. A quote before all: in a string only it closes, and elsewhere it opens
# what can be closed at once. Blanks, which a grammar allows in many places, come last.
_CLOSERS = b'"}],:'
_STEP = 1000.0  # more than logits and penalties differ by
_PER_BRACKET = 3  # tokens that closing one may take: itself, and a value that had begun
_SLACK = 10  # what a template puts after, as a fence, and the end
_UNKNOWN = 24  # characters of a value whose schema is not looked into
_DEEPEST = 8  # schemas may refer to themselves
_MOST_ITEMS, _LONGEST = 100, 10_000  # that are counted


class OfSchema(Protocol):
    """A grammar that knows the schema its texts obey."""

    json_schema: Mapping[str, Any] | None


class JsonClosing:
    """Follows one answer token by token, and closes it before it runs out of tokens."""

    def __init__(self, model: _core.Model, schema: Mapping[str, Any]) -> None:
        prepare(model)
        self._bias = _biases[model]
        self._due: dict[
            bytes, list[int]
        ] = {}  # required keys that have not come yet: tokens of each, its value too
        for key, text in required(schema):
            self._due.setdefault(key.encode(), []).append(len(model.tokenize(text.encode(), False, False)))
        self._n_due = sum(map(sum, self._due.values()))
        self._depth, self._escaped = 0, False
        self._string: bytearray | None = None  # the one that is open

    def push(self, piece: bytes) -> None:
        """Tells it the next bytes of the answer."""
        for byte in piece:
            if self._string is not None:
                self._read(byte)
            elif byte == 0x22:
                self._string = bytearray()
            elif byte in b"{[":
                self._depth += 1
            elif byte in b"}]":
                self._depth -= 1

    def _read(self, byte: int) -> None:
        """Reads a byte inside of a string."""
        assert self._string is not None
        if byte == 0x22 and not self._escaped:
            costs = self._due.get(bytes(self._string))
            self._n_due -= costs.pop() if costs else 0
            self._string = None
            return
        self._string.append(byte)
        self._escaped = byte == 0x5C and not self._escaped

    def applied(self, logits: NDArray[np.float32], left: int) -> NDArray[np.float32]:
        """The logits [n_vocab] of the next token, changed if the answer has to be closed. left: tokens that
        may still come, including this one."""
        # what must come is not cut into tokens as it is alone
        if left > _SLACK + 1.5 * self._n_due + _PER_BRACKET * max(0, self._depth):
            return logits
        return logits + self._bias


def prepare(model: _core.Model) -> None:
    """Makes what all answers of a model share, once."""
    if model not in _biases:
        _biases[model] = _bias(model)


def closing_of(model: _core.Model, grammar: OfSchema | None) -> JsonClosing | None:
    """The JsonClosing of an answer; None if the answer has no JSON schema."""
    if grammar is None or grammar.json_schema is None:
        return None
    return JsonClosing(model, grammar.json_schema)


def required(schema: Any, depth: int = 0) -> list[tuple[str, str]]:
    """The keys that values of a schema have at least, outer ones first, each with about the shortest text
    that it and its value take.

    >>> required({"type": "object", "properties": {"a": {"enum": [1, 22]}, "b": {}}, "required": ["a"]})
    [('a', '"a": 22,')]
    """
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return []
    for word in ("anyOf", "oneOf", "allOf"):
        if word in schema:
            return max((required(each, depth + 1) for each in schema[word]), key=len, default=[])
    if "items" in schema:
        return required(schema["items"], depth + 1) * min(int(schema.get("minItems") or 0), _MOST_ITEMS)
    found = []
    properties = schema.get("properties") or {}
    for key in schema.get("required") or []:
        value = properties.get(key)
        found.append((str(key), f'"{key}": {shortest(value)},'))
        found += required(value, depth + 1)
    return found


def shortest(schema: Any) -> str:
    """Text about as long as the shortest value that fits a schema, or longer, without the keys that it
    requires.

    >>> shortest({"type": "array", "items": {"enum": ["a", "bc"]}, "minItems": 2})
    '["bc", "bc"]'
    """
    if not isinstance(schema, Mapping):
        return "x" * _UNKNOWN
    if "const" in schema:
        return _longest([schema["const"]])
    if "enum" in schema:
        return _longest(schema["enum"])
    kind = schema.get("type")
    if kind == "object" or "properties" in schema:
        return "{}"
    if kind == "array" or "items" in schema:
        count = min(int(schema.get("minItems") or 0), _MOST_ITEMS)
        return "[" + ", ".join([shortest(schema.get("items"))] * count) + "]"
    if kind == "string" and not {"pattern", "format"} & set(schema):
        return '"' + "x" * min(int(schema.get("minLength") or 0), _LONGEST) + '"'
    return "false" if kind in ("boolean", "null") else "x" * _UNKNOWN


def _longest(values: Any) -> str:
    return max((json.dumps(value, ensure_ascii=False) for value in values), key=len, default="")


_biases: WeakKeyDictionary[_core.Model, NDArray[np.float32]] = WeakKeyDictionary()


def _bias(model: _core.Model) -> NDArray[np.float32]:
    """A bias for every token, [n_vocab], which makes the best allowed token the most likely one."""
    pieces = [model.token_to_piece(token) for token in range(model.n_vocab)]
    # what must come, as the name of a key, in few tokens
    bias = np.array(
        [-_STEP if piece.isspace() else 10.0 * min(len(piece), 50) for piece in pieces], np.float32
    )
    for i, sign in enumerate(_CLOSERS):
        token = _token_of(model, bytes([sign]))
        if token is not None:
            bias[token] = (len(_CLOSERS) - i) * _STEP
    ends = [token for token in range(model.n_vocab) if model.is_eog(token)]
    bias[ends] = (len(_CLOSERS) + 1) * _STEP
    return bias


def _token_of(model: _core.Model, text: bytes) -> int | None:
    """The token whose text is exactly this, whatever stands before it."""
    found = model.find_token(text.decode())
    if found >= 0 and model.token_to_piece(found) == text:
        return found
    tokens = model.tokenize(text, False, False)
    return tokens[0] if len(tokens) == 1 and model.token_to_piece(tokens[0]) == text else None
