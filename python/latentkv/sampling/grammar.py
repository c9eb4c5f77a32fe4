"""Grammars (GBNF) and JSON schemas that constrain what is sampled."""

from __future__ import annotations

import json
import reprlib
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakKeyDictionary

from latentkv.console.reading import read_text
from latentkv.errors import LatentKVError, expected
from latentkv.sampling import closing, gbnf, lark
from latentkv.sampling.schema import as_grammar, checked
from latentkv.sampling.triggers import LazyMatcher, Triggers
from latentkv.text import utf8

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from latentkv import _core

_JSON = "json"  # the rule that a schema stands for


class LlamaGrammar:
    """GBNF text with the name of its first rule, and JSON schemas in place of some of its rules. It is read
    when a sampler is built, or by prepare().

    A `lazy` grammar waits for one of `triggers` ({"type": "word" | "pattern" | "pattern_full" | "token",
    "value", "token"}) and describes the text from there on. `prefix` is text in front of the answer that
    the grammar describes as well. `schemas`: what rules that the text names, but does not have, stand for.
    `json_schema`: what the answer is, where that is a schema, or about that; such an answer is closed
    before it has no room left (sampling/closing.py).
    """

    __module__ = "latentkv"

    def __init__(
        self,
        text: str,
        root: str = "root",
        *,
        lazy: bool = False,
        triggers: Sequence[Mapping[str, Any]] = (),
        prefix: str = "",
        schemas: Mapping[str, Any] | None = None,
        json_schema: Mapping[str, Any] | None = None,
    ) -> None:
        utf8(text, "grammar")
        self.text = text
        self.root = root
        self.lazy = lazy
        self.triggers = [dict(trigger) for trigger in triggers]
        self.prefix = prefix
        self.schemas = dict(schemas or {})
        self.json_schema = json_schema
        self._lock = threading.Lock()
        self._started: WeakKeyDictionary[_core.Model, LLMatcher] = WeakKeyDictionary()

    @classmethod
    def of(cls, given: LlamaGrammar | str | None) -> LlamaGrammar | None:
        """The `grammar` argument of the calls: a grammar, or its GBNF text."""
        if isinstance(given, str):
            return cls.from_string(given)
        if not isinstance(given, LlamaGrammar | None):
            raise expected("grammar", "a LlamaGrammar, or GBNF as text", repr(given))
        return given

    @classmethod
    def from_string(cls, grammar: str, verbose: bool = True) -> LlamaGrammar:
        """From GBNF text. `verbose` is accepted for llama-cpp-python's signature."""
        return cls(grammar)

    @classmethod
    def from_file(cls, file: str | Path, verbose: bool = True) -> LlamaGrammar:
        """From a GBNF file. Raises LatentKVError for what is no grammar."""
        text = read_text(file, "grammar")
        if not text.strip():
            raise expected("grammar", "a GBNF grammar", f"an empty file {file}")
        gbnf.parsed(text)
        return cls(text)

    @classmethod
    def from_json_schema(cls, json_schema: str | Mapping[str, Any], verbose: bool = True) -> LlamaGrammar:
        """JSON texts that fit a schema. Raises LatentKVError, which names the keyword and its place, for one
        that no grammar can enforce."""
        schema = parsed_schema(json_schema)
        about = schema if isinstance(schema, Mapping) else {}
        return cls(f"root ::= {_JSON}", schemas={_JSON: checked(schema)}, json_schema=about)

    def prepare(self, model: _core.Model) -> None:
        """Reads it for this model's vocabulary, once. Raises LatentKVError for what is no grammar."""
        self._start(model)
        if self.json_schema is not None:
            closing.prepare(model)

    def matcher(self, model: _core.Model) -> _core.TokenMatcher:
        """What follows one answer."""
        from latentkv.sampling.matcher import TokenMatcher, ends_of

        matcher = TokenMatcher(self._start(model), ends_of(model), self._where)
        return LazyMatcher(model, matcher, Triggers(self.triggers)) if self.lazy else matcher

    @property
    def _where(self) -> str:
        return "json_schema" if self.schemas else "grammar"

    def _start(self, model: _core.Model) -> LLMatcher:
        from latentkv.sampling.matcher import started

        with self._lock:
            if model not in self._started:
                rules = gbnf.parsed(self.text, self.root, known=self.schemas)
                holes = {rule: as_grammar(schema) for rule, schema in self.schemas.items()}
                text = lark.written(rules, self.root, holes, model.find_token, _splitter(model))
                prefix = [] if self.lazy else _prefix_tokens(model, self.prefix)
                self._started[model] = started(model, text, prefix, self._where)
            return self._started[model]


def parsed_schema(schema: str | Mapping[str, Any] | bool) -> Any:
    """The schema of a text or of an object, as JSON has it."""
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema, allow_nan=False)
        utf8(text, "json_schema")
        return json.loads(text, parse_constant=_no_constant)
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, LatentKVError):
            raise
        why = " ".join(str(error).split())[:200]
        shown = reprlib.repr(schema)
        raise expected("json_schema", "a schema as JSON", f"{shown} ({why})") from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _splitter(model: _core.Model) -> Callable[[str], Sequence[str | int]]:
    """Cuts special tokens, which an answer does not show, out of a literal."""

    def split(text: str) -> Sequence[str | int]:
        tokens = model.tokenize(text.encode(), False, True)
        if all(model.token_to_piece(token) for token in tokens):
            return [text]
        parts: list[bytes | int] = []
        for token in tokens:
            piece = model.token_to_piece(token)
            if piece and parts and isinstance(last := parts[-1], bytes):
                parts[-1] = last + piece
            else:
                parts.append(piece or token)
        return [part if isinstance(part, int) else part.decode(errors="replace") for part in parts]

    return split


def _prefix_tokens(model: _core.Model, prefix: str) -> list[int]:
    """Tokens of the text in front of the answer, without the space that a tokenizer puts before a text."""
    if not prefix:
        return []
    tokens = list(model.tokenize(prefix.encode(), False, True))
    if tokens and not prefix.startswith(" ") and model.token_to_piece(tokens[0], True) == b" ":
        del tokens[0]
    return tokens
