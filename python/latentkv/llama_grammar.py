"""Names of llama-cpp-python's module, and its grammars of any JSON value and of a list."""

from typing import NoReturn

from latentkv.errors import no_name
from latentkv.sampling.grammar import LlamaGrammar

__all__ = ["JSON_GBNF", "LIST_GBNF", "LlamaGrammar"]

JSON_GBNF = r"""
root ::= object
value ::= object | array | string | number | "true" | "false" | "null"
object ::= "{" blank (member ("," blank member)*)? "}" blank
member ::= string ":" blank value blank
array ::= "[" blank (value blank ("," blank value blank)*)? "]"
string ::= "\"" ([^"\\\x00-\x1F\x7F] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}))* "\""
number ::= "-"? ("0" | [1-9] [0-9]{0,15}) ("." [0-9]{1,16})? ([eE] [-+]? [0-9]{1,3})?
blank ::= [ \t\n]{0,20}
"""
LIST_GBNF = r"""
root ::= item+
item ::= "- " [^\r\n\x0b\x0c\x85\u2028\u2029]+ "\n"
"""

_INSTEAD = {
    "json_schema_to_gbnf": "use LlamaGrammar.from_json_schema(schema): schemas are followed as they are",
    "SchemaConverter": "use LlamaGrammar.from_json_schema(schema): schemas are followed as they are",
    "C_GBNF": "read llama.cpp's grammars/c.gbnf with LlamaGrammar.from_file",
    "CHESS_GBNF": "read llama.cpp's grammars/chess.gbnf with LlamaGrammar.from_file",
    "ARITHMETIC_GBNF": "read llama.cpp's grammars/arithmetic.gbnf with LlamaGrammar.from_file",
    "JAPANESE_GBNF": "read llama.cpp's grammars/japanese.gbnf with LlamaGrammar.from_file",
    "JSON_ARR_GBNF": "read llama.cpp's grammars/json_arr.gbnf with LlamaGrammar.from_file",
}


def __getattr__(name: str) -> NoReturn:
    raise no_name(__name__, name, _INSTEAD)
