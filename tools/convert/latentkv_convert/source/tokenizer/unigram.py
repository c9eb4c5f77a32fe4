"""Unigram SentencePiece (T5-like): libllama's "t5" vocabulary, which finds the best-scored segmentation."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from .files import BYTE, CONTROL, NORMAL, UNKNOWN, TokenizerFiles, Vocabulary
from .sentencepiece import adds_prefix

ADDED_SCORE = -1000.0


def read(files: TokenizerFiles, n_vocab: int) -> Vocabulary:
    """From tokenizer.model when there is one, else from tokenizer.json."""
    vocabulary = Vocabulary.empty("t5", "default", n_vocab)
    vocabulary.scores = [-10000.0] * n_vocab
    flags: dict[str, Any] = {}
    if files.sentencepiece:
        for token, (text, score, kind) in enumerate(files.sentencepiece.pieces):
            vocabulary.put(token, text, kind, score)
        charsmap = files.sentencepiece.charsmap
        flags["tokenizer.ggml.add_space_prefix"] = files.sentencepiece.add_dummy_prefix
        flags["tokenizer.ggml.remove_extra_whitespaces"] = files.sentencepiece.remove_extra_whitespaces
    else:
        unknown = files.model.get("unk_id")
        for token, (text, score) in enumerate(files.model["vocab"]):
            kind = NORMAL
            if token == unknown:
                kind = UNKNOWN
            elif len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
                kind = BYTE
            elif text in ("<s>", "</s>", "<pad>"):
                kind = CONTROL
            vocabulary.put(token, text, kind, float(score))
        charsmap = _charsmap(files.json.get("normalizer"))
        flags["tokenizer.ggml.add_space_prefix"] = adds_prefix(files.json)
        flags["tokenizer.ggml.remove_extra_whitespaces"] = _squeezes(files.json.get("normalizer"))
    if charsmap:
        flags["tokenizer.ggml.precompiled_charsmap"] = np.frombuffer(charsmap, dtype=np.uint8)
    vocabulary.put_added(files.added, ADDED_SCORE)
    vocabulary.flags = flags
    return vocabulary


def _charsmap(node: Any) -> bytes:
    """The Precompiled normalizer of a tokenizer.json, base64 in the file."""
    if not node:
        return b""
    if node.get("type") == "Precompiled":
        return base64.b64decode(node.get("precompiled_charsmap") or "")
    return b"".join(_charsmap(child) for child in node.get("normalizers", []))


def _squeezes(node: Any) -> bool:
    """Whether runs of spaces become one: a Replace of ` {2,}`."""
    if not node:
        return False
    if node.get("type") == "Replace":
        return "{2,}" in str(node.get("pattern", {}).get("Regex", ""))
    return any(_squeezes(child) for child in node.get("normalizers", []))
