"""SentencePiece BPE (Llama 1 and 2, Mistral, Yi): pieces with scores; libllama merges the best-scored pair
first."""

from __future__ import annotations

from typing import Any

from ...errors import warn
from .files import BYTE, CONTROL, NORMAL, UNKNOWN, TokenizerFiles, Vocabulary

ADDED_SCORE = -1000.0  # below every learned piece, so that merging never builds an added token


def read(files: TokenizerFiles, n_vocab: int) -> Vocabulary:
    """From tokenizer.model when there is one, else from a tokenizer.json with byte_fallback."""
    vocabulary = Vocabulary.empty("llama", "default", n_vocab)
    vocabulary.scores = [-10000.0] * n_vocab
    if files.sentencepiece:
        if files.sentencepiece.charsmap:
            warn(
                "tokenizer.model",
                "no normalisation rules, as in Llama's own",
                f"{len(files.sentencepiece.charsmap)} bytes of them",
                "libllama does not apply them to this family, so unusual characters may get other ids",
            )
        for token, (text, score, kind) in enumerate(files.sentencepiece.pieces):
            vocabulary.put(token, text, kind, score)
        prefix = files.sentencepiece.add_dummy_prefix
        extra = files.sentencepiece.remove_extra_whitespaces
    else:
        _from_json(vocabulary, files.model)
        prefix, extra = adds_prefix(files.json), False
    vocabulary.put_added(files.added, ADDED_SCORE)
    prefix = bool(files.settings.get("add_prefix_space", prefix))
    vocabulary.flags = {
        "tokenizer.ggml.add_space_prefix": prefix,
        "tokenizer.ggml.remove_extra_whitespaces": extra,
    }
    return vocabulary


def _from_json(vocabulary: Vocabulary, model: dict[str, Any]) -> None:
    """A piece's score is minus the rank of the first merge that makes it: the order in which the pieces were
    learned."""
    rank: dict[str, int] = {}
    for position, pair in enumerate(model["merges"]):
        rank.setdefault("".join(pair.split(" ", 1) if isinstance(pair, str) else pair), position)
    unknown = model.get("unk_token")
    for text, token in model["vocab"].items():
        kind = NORMAL
        if text == unknown:
            kind = UNKNOWN
        elif len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            kind = BYTE
        elif text in ("<s>", "</s>"):
            kind = CONTROL
        vocabulary.put(int(token), text, kind, -float(rank.get(text, len(rank))))


def adds_prefix(tokenizer: dict[str, Any]) -> bool:
    """A tokenizer.json prepends ▁ with a Prepend normalizer or a Metaspace pre-tokenizer."""
    nodes = [tokenizer.get("normalizer"), tokenizer.get("pre_tokenizer")]
    while nodes:
        node = nodes.pop()
        if not node:
            continue
        nodes += node.get("normalizers", []) + node.get("pretokenizers", [])
        if node.get("type") == "Prepend":
            return True
        if node.get("type") == "Metaspace":
            scheme = node.get("prepend_scheme")
            return bool(scheme != "never" if scheme else node.get("add_prefix_space", True))
    return False
