"""Row formats as users name them: our names, llama.cpp's names, ggml's type numbers."""

from __future__ import annotations

from latentkv.errors import expected

# ggml.h, enum ggml_type: the cache types that llama.cpp takes.
GGML_TYPES = {
    **{0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0"},
    **{20: "iq4_nl", 30: "bf16"},
}
BLOCKS = ("c8", "c4", "c3", "c2")  # K of 32 tokens together
COMPARED = ("f16", "q8", "q4", "q3", "q2")  # that reports show beside a file's own plan


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


def one_of(name: str, value: str, other_name: str, other_value: str) -> str:
    """The one of two spellings that is set; both only when they agree."""
    if value and other_value and value != other_value:
        raise expected(name, f"the same as {other_name}", f"{value} and {other_value}", "set one of them")
    return value or other_value


def split_pair(text: str) -> tuple[str, str, str]:
    """`--kv` text to (kv, kv_k, kv_v): "q4" sets both sides, "q8/q4" K and V.

    >>> split_pair("q8/q4")
    ('', 'q8', 'q4')
    """
    k, slash, v = text.partition("/")
    if slash and not (k and v):
        raise expected("kv", "one format, or K/V as in q8/q4", repr(text))
    return ("", k, v) if slash else (text, "", "")
