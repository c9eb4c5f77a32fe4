"""Gemma 4's: BPE over whole lines of text, whose spaces are ▁, with merges in order and bytes for what has no
token. libllama knows it as a family of its own."""

from __future__ import annotations

from .files import USER_DEFINED, TokenizerFiles, Vocabulary
from .sentencepiece import read as read_pieces

# Special tokens that llama.cpp shows, as parsers of answers look for them.
_SHOWN = frozenset(
    (
        "<|channel>",
        "<channel|>",
        "<|tool_call>",
        "<tool_call|>",
        "<|tool_response>",
        "<tool_response|>",
        '<|"|>',
    )
)


def is_of(files: TokenizerFiles) -> bool:
    """Whether the checkpoint's is one: merges, and a model that llama.cpp reads so."""
    named = str(files.config.get("model_type", "")).startswith("gemma4")
    return named and bool(files.model.get("byte_fallback")) and bool(files.model.get("merges"))


def read(files: TokenizerFiles, n_vocab: int) -> Vocabulary:
    vocabulary = read_pieces(files, n_vocab)
    vocabulary.model = vocabulary.pre = "gemma4"
    vocabulary.merges = [
        pair if isinstance(pair, str) else " ".join(pair)
        for pair in files.model["merges"]
        if "\n" not in "".join(pair)  # lines are apart
    ]
    for token, text in enumerate(vocabulary.tokens):
        if text in _SHOWN:
            vocabulary.types[token] = USER_DEFINED
    return vocabulary
