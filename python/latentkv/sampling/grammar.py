"""Grammars (GBNF) that constrain what is sampled."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from latentkv.console.reading import read_text
from latentkv.errors import LatentKVError, expected
from latentkv.text import utf8

MAX_NESTING = 256  # libllama parses them by recursion: its stack ends at some thousands
_UNNESTED = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*', re.DOTALL)


class LlamaGrammar:
    """GBNF text with the name of its first rule. Parsed by libllama when a sampler is built.

    A `lazy` grammar waits for one of `triggers` ({"type": "word" | "pattern" | "pattern_full" | "token",
    "value", "token"}) and describes the text from there on. `prefix` is text in front of the answer that
    the grammar describes as well. `json_schema`: what it says, where that is a schema, or about that;
    such an answer is closed before it has no room left (sampling/closing.py).
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
        json_schema: Mapping[str, Any] | None = None,
    ) -> None:
        utf8(text, "grammar")
        if (depth := nesting(text)) > MAX_NESTING:
            raise expected("grammar", f"parentheses at most {MAX_NESTING} deep", depth)
        self.text = text
        self.root = root
        self.lazy = lazy
        self.triggers = [dict(trigger) for trigger in triggers]
        self.prefix = prefix
        self.json_schema = json_schema

    @classmethod
    def from_string(cls, grammar: str, verbose: bool = True) -> LlamaGrammar:
        """From GBNF text. `verbose` is accepted for llama-cpp-python's signature."""
        return cls(grammar)

    @classmethod
    def from_file(cls, file: str | Path, verbose: bool = True) -> LlamaGrammar:
        """From a GBNF file."""
        text = read_text(file, "grammar")
        if not text.strip():
            raise expected("grammar", "a GBNF grammar", f"an empty file {file}")
        return cls(text)

    @classmethod
    def from_json_schema(cls, json_schema: str | Mapping[str, Any], verbose: bool = True) -> LlamaGrammar:
        """JSON texts that fit a schema, by llama.cpp's converter. Raises LatentKVError for a schema that a
        grammar cannot say."""
        from latentkv import _core  # a grammar alone needs no native code

        schema = json_schema if isinstance(json_schema, str) else json.dumps(json_schema)
        utf8(schema, "json_schema")
        try:
            text = _core.json_schema_to_grammar(schema)
            parsed = json.loads(schema)
            return cls(text, json_schema=parsed if isinstance(parsed, Mapping) else {})
        except _core.Error as error:
            raise LatentKVError(str(error)) from None


def nesting(text: str) -> int:
    """How deep the parentheses of a grammar are, those in literals, sets and comments aside.

    >>> nesting('root ::= ("(" ("a" | [(]))')
    2
    """
    depth = deepest = 0
    for sign in re.findall(r"[()]", _UNNESTED.sub("", text)):
        depth += 1 if sign == "(" else -1
        deepest = max(deepest, depth)
    return deepest
