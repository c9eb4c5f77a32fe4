"""Grammars (GBNF) that constrain what is sampled."""

from __future__ import annotations

import re
from pathlib import Path

from latentkv.errors import expected
from latentkv.text import utf8

MAX_NESTING = 256  # libllama parses them by recursion: its stack ends at some thousands
_UNNESTED = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*', re.DOTALL)

# RFC 8259, any object at the top. Whitespace is bounded: unbounded whitespace lets a model print blanks for
# ever.
JSON_OBJECT = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( pair ("," ws pair)* )? "}" ws
pair   ::= string ":" ws value
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" char* "\"" ws
char   ::= [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt/] | "u" hex hex hex hex)
hex    ::= [0-9a-fA-F]
number ::= "-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [-+]? [0-9]+)? ws
ws     ::= | " " | "\n" [ \t]{0,20}
""".strip()


class LlamaGrammar:
    """GBNF text with the name of its first rule. Parsed by libllama when a sampler is built."""

    def __init__(self, text: str, root: str = "root") -> None:
        utf8(text, "grammar")
        if (depth := nesting(text)) > MAX_NESTING:
            raise expected("grammar", f"parentheses at most {MAX_NESTING} deep", depth)
        self.text = text
        self.root = root

    @classmethod
    def from_string(cls, grammar: str, verbose: bool = False) -> LlamaGrammar:
        """From GBNF text. `verbose` is accepted for llama-cpp-python's signature."""
        return cls(grammar)

    @classmethod
    def from_file(cls, file: str | Path, verbose: bool = False) -> LlamaGrammar:
        """From a GBNF file."""
        return cls(Path(file).read_text(encoding="utf-8"))


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
