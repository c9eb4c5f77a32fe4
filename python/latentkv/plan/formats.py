"""Row formats as users name them: our names, llama.cpp's names, ggml's type numbers."""

from __future__ import annotations

import re

from latentkv.errors import expected

# ggml.h, enum ggml_type: the cache types that llama.cpp takes.
GGML_TYPES = {
    **{0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0"},
    **{20: "iq4_nl", 30: "bf16"},
}
# Those that have no row format of their own, and ours of as many bits a code, a scale and a minimum a head.
LLAMA_CPP = {"q4_1": "q4", "q5_0": "q5", "q5_1": "q5", "iq4_nl": "q4", "bf16": "f16"}
BLOCKS = ("c8", "c4", "c3", "c2")  # K of 32 tokens together


def format_name(value: str | int | None, where: str) -> str:
    """A name or ggml type number to a name; None is "" (the file's own plan, else f16)."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value.lower()
    if value not in GGML_TYPES:
        known = ", ".join(f"{number} ({name})" for number, name in GGML_TYPES.items())
        raise expected(where, f"a format name or one of the ggml types {known}", value)
    return GGML_TYPES[value]


def row_format(name: str) -> str:
    """The row format that a name stands for.

    >>> row_format("Q5_1"), row_format("c4")
    ('q5', 'c4')
    """
    return LLAMA_CPP.get(name.lower(), name.lower())


def stand_ins(*texts: str) -> str:
    """Of caches with types that llama.cpp alone has: what these are kept as, or "".

    >>> stand_ins("f16,q5_1", "")
    'q5_1 is kept as q5, codes of as many bits with a scale and a minimum a head'
    """
    names = dict.fromkeys(name.lower() for text in texts for name in re.split("[,/]", text))
    other = [name for name in names if name in LLAMA_CPP]
    kept = ", ".join(f"{name} is kept as {LLAMA_CPP[name]}" for name in other)
    return (
        kept
        if other in ([], ["bf16"])
        else f"{kept}, codes of as many bits with a scale and a minimum a head"
    )


def split_pair(text: str) -> tuple[str, str, str]:
    """`--kv` text to (kv, kv_k, kv_v): "q4" sets both sides, "q8/q4" K and V.

    >>> split_pair("q8/q4")
    ('', 'q8', 'q4')
    """
    k, slash, v = text.partition("/")
    if slash and not (k and v):
        raise expected("kv", "one format, or K/V as in q8/q4", repr(text))
    return ("", k, v) if slash else (text, "", "")
