"""Grammars (GBNF) that constrain what is sampled."""

from __future__ import annotations

from pathlib import Path

from latentkv.text import utf8

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
