#!/usr/bin/env bash
# llguidance 1.9.1, gbnf_to_lark: escapes of letters in a class lose their leading zeros, so [\u00e9] becomes [\ue9] and [\U00010400-\U0001044F]
# becomes [\U10400-\U1044F], which llguidance's own parser refuses as no regular expression. With the letters themselves, [é], the same grammars
# are taken, and llama.cpp reads both spellings alike. So a GBNF that other programs wrote in ASCII cannot be used through this translation.
# Seen: written as letters: True True. Escaped: "invalid regex" twice.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q llguidance==1.9.1
"$folder/venv/bin/python" - <<'END' 2>/dev/null
import llguidance
from llguidance.gbnf_to_lark import gbnf_to_lark

tokens = llguidance.LLTokenizer("byte")


def says(gbnf, text):
    """Whether the translated grammar takes the text, or why it cannot be read."""
    matcher = llguidance.LLMatcher(tokens, llguidance.LLMatcher.grammar_from_lark(gbnf_to_lark(gbnf)))
    if matcher.get_error():
        return "invalid regex" if "invalid regex" in matcher.get_error() else matcher.get_error()
    return all(matcher.consume_token(byte) for byte in text.encode()) and matcher.is_accepting()


letters = says("root ::= [é]+", "éé"), says("root ::= [\U00010400-\U0001044f]+", "\U00010400")
escaped = says(r"root ::= [\u00e9]+", "éé"), says(r"root ::= [\U00010400-\U0001044F]+", "\U00010400")
print("written as letters:", *letters, "escaped:", *escaped)
assert letters == (True, True) and escaped == ("invalid regex", "invalid regex")
END
