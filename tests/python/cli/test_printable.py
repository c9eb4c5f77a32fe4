"""What a terminal is sent has nothing in it that a terminal obeys."""

from __future__ import annotations

import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from latentkv.console.printable import printable, printable_lines


@given(st.text())
def test_nothing_is_obeyed(text: str) -> None:
    shown = printable(text)
    assert not [c for c in shown if unicodedata.category(c) in ("Cc", "Zl", "Zp", "Cs")]
    assert not [
        c for c in shown if unicodedata.bidirectional(c) in ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI")
    ]
    lines = printable_lines(text)
    assert lines.count("\n") == text.count("\n")
    assert printable(lines.replace("\n", "").replace("\t", "")) == lines.replace("\n", "").replace("\t", "")


@given(st.text(st.characters(categories=("L", "N", "P", "S", "Zs"))))
def test_the_rest_is_as_it_was(text: str) -> None:
    assert printable(text) == printable_lines(text) == text


def test_spelling() -> None:
    assert printable("a\x1b[2J\x9b\u202e\n") == r"a\x1b[2J\xc2\x9b\xe2\x80\xae\x0a"
    assert printable_lines("a\tb\n\rc") == "a\tb\n" + r"\x0dc"
