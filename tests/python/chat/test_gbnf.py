"""Grammars of llama.cpp: what they match, and that none takes for ever."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from latentkv import LatentKVError, LlamaGrammar
from latentkv.sampling.gbnf import parsed
from latentkv.sampling.lark import written

BYTES = LLTokenizer("byte")


def takes(grammar: str, text: str) -> bool:
    one = LLMatcher(BYTES, written(parsed(grammar)), log_level=0)
    assert not one.is_error(), one.get_error()
    return one.try_consume_tokens(list(text.encode())) == len(text.encode()) and one.is_accepting()


WORDS = [f"{'abcdefghij'[i % 10]}{i * 7919 % 10007} {'xyz'[i % 3] * (i % 12)}." for i in range(9000)]
JSON = r"""
root   ::= object  # a comment
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""


@pytest.mark.parametrize(
    ("grammar", "fits", "does_not"),
    [
        ('root ::= "a" | "ab" "c"?', ["a", "ab", "abc"], ["", "ac", "b"]),
        ('root ::= ("a" | "ab") "d"', ["ad", "abd"], ["abcd"]),
        ('root ::= "abc" | [a-z]+ "!"', ["abc", "abd!", "abc!"], ["abd"]),
        ("root ::= [^a-c\\n]{2,3}", ["de", "def"], ["d", "da", "d\n"]),
        ('root ::= "é" . "\\u4e2d"', ["éx中", "é中中"], ["é中"]),
        ('root ::= "a"{2}{2}', ["aaaa"], ["aa", "aaa"]),
        ('root ::= "ab"{2,}', ["abab", "ababab"], ["ab", "aba"]),
        ('root ::= "a"{0,2000} "b"', ["b", "a" * 2000 + "b"], ["a" * 2001 + "b"]),
        ('root ::= "a"{2000} | "a"{5000}', ["a" * 2000, "a" * 5000], ["a" * 1999, "a" * 2001]),
        ('root ::= root "a" | "b"', ["b", "baaa"], ["a"]),
        ('root ::= "" | "x" root', ["", "xxx"], ["y"]),
        ("root ::= (a*)*\na ::= [xy]", ["", "xyx"], ["z"]),
        (
            "root ::= until\nuntil ::= | [^<] until | [<] u1\nu1 ::= | [^/<] until | [<] u1",
            ["a<b", ""],
            ["a</"],
        ),
        (JSON, ['{"a": [1, -2.5e3, "\\u00e9\\n"], "b":{}}'], ['{"a": 01}', "{,}", '{"a":"\t"}']),
        (
            "root ::= " + " | ".join(json.dumps(word) for word in WORDS),
            [WORDS[0], WORDS[-1]],
            [WORDS[5][:-1]],
        ),
    ],
    ids=lambda each: str(each)[:40],
)
def test_what_a_grammar_matches(grammar: str, fits: list[str], does_not: list[str]) -> None:
    assert [text for text in fits if not takes(grammar, text)] == []
    assert [text for text in does_not if takes(grammar, text)] == []


NONE = [
    ('root ::= "a"{5,2}', "m of at most n"),
    ('root ::= "a"{,}', "a repetition, {m}, {m,} or {m,n}"),
    ('root ::= "a"{,3}', "a repetition"),
    ('root ::= "a"{999999999999}', "repetitions of at most"),
    ("root ::= [z-", "a character"),
    ("root ::= []", "at least one character"),
    ('root ::= "a', "a closing quote"),
    ('root ::= ("a"', "a closing parenthesis"),
    ('root ::= "a")', "a new line or the end"),
    ("root ::= other", "'other' in 'root'"),
    ('other ::= "a"', "the rule 'root'; got the rules other"),
    ("", "the rule 'root'; got an empty one"),
    ("root", "::="),
    ("root ::= <no end", "a token"),
    ("root ::= " + "(" * 257 + '"a"' + ")" * 257, "parentheses at most 256 deep"),
    ('root ::= "\\q"', "an escape that GBNF has"),
    ('root ::= * "a"', "a new line or the end"),
]


@pytest.mark.parametrize(("grammar", "said"), NONE, ids=[said for _, said in NONE])
def test_what_is_no_grammar(grammar: str, said: str) -> None:
    with pytest.raises(LatentKVError, match=r"^\[grammar\] expected ") as error:
        parsed(grammar)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.fixture(scope="module")
def model(plain_gguf: Path) -> Any:
    from latentkv import _core

    return _core.Model(str(plain_gguf), vocab_only=True)


@pytest.mark.parametrize(
    "grammar",
    [
        "root ::= root",
        "root ::= a\na ::= b\nb ::= a",
        'root ::= (("a"{100}){100}){100}',
        'root ::= (("a"{0,1000}){0,1000}){0,1000} "b"',
        'root ::= "a"{1000000000}',
        "root ::= r0\n"
        + "\n".join(f"r{i} ::= r{i + 1} r{i + 1} r{i + 1}" for i in range(30))
        + '\nr30 ::= "a"?',
        "root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1} | r{i + 1}" for i in range(40)) + '\nr40 ::= "a"',
        'root ::= s\ns ::= "a" s "b" | "a" s "c" | "a"',
        "root ::= " + "(" * 250 + '"a"' + ")" * 250,
        'root ::= "' + "a" * 65_000 + '"',
        "root ::= " + " | ".join(f'"w{i}" x' for i in range(4000)) + "\nx ::= [0-9]*",
        'root ::= ("a"? "a"? "a"?)*',
    ],
    ids=lambda grammar: grammar[:40],
)
def test_no_grammar_takes_for_ever(model: Any, grammar: str) -> None:
    """Each is followed, or refused in one line."""
    begin, said = time.process_time(), "[grammar] expected one that "
    try:
        one = LlamaGrammar(grammar).matcher(model)
        for _ in range(20):
            allowed = one.allowed()
            token = next(i for i in range(model.n_vocab) if allowed[i // 8] >> i % 8 & 1)
            one.accept(token)
            if model.is_eog(token):
                break
    except LatentKVError as error:
        said = str(error)
    assert said.startswith("[grammar] expected one that ")
    assert "\n" not in said
    assert time.process_time() - begin < 10


def test_text_that_a_grammar_forces_comes_in_the_tokens_of_the_vocabulary(model: Any) -> None:
    """Not in pieces that the model hardly knows, of which an answer would have more."""
    text = "the quick brown fox \U0001f600 and the other one"
    one = LlamaGrammar(f'root ::= "{text}" [0-9]').matcher(model)
    usual = list(model.tokenize(text.encode(), False, False))
    for token in usual[:-1]:
        bits = int.from_bytes(one.clone().allowed(), "little")
        assert bits == 1 << token
        assert one.allows(token)
        one.accept(token)
    other = LlamaGrammar('root ::= "the" " end"').matcher(model)
    other.allowed()
    first = model.tokenize(b"t", False, False)[-1]
    other.accept(first)  # drawn, and allowed as well
    assert int.from_bytes(other.allowed(), "little").bit_count() == 1
