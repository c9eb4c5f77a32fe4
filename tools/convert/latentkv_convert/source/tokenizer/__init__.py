"""`tokenizer.*` keys from a checkpoint's tokenizer files, for libllama's families, and what its
generation_config.json says.

byte-level BPE -> "gpt2", SentencePiece BPE -> "llama", unigram -> "t5", Gemma 4's BPE -> "gemma4". Each is a
module with `read(files, n_vocab) -> Vocabulary`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...errors import ConvertError
from . import bpe, gemma4, generation, sentencepiece, special, unigram
from .files import CONTROL, TokenizerFiles


def keys(directory: Path, config: dict[str, Any], n_vocab: int, pre: str | None = None) -> dict[str, Any]:
    """All `tokenizer.*` and `general.sampling.*` keys of the file.

    Args:
        directory: the checkpoint.
        config: its config.json, for special token ids.
        n_vocab: rows of the embedding; ids without a token become unused placeholders.
        pre: `tokenizer.ggml.pre`, overriding what the tokenizer's own split rules say.

    Raises:
        ConvertError: no tokenizer, one of another family, split rules libllama does not know, or a sampling
            option that no reader takes.
    """
    try:
        return _keys(TokenizerFiles(directory, config), n_vocab, pre)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        got = f"{type(error).__name__}: {error}"
        raise ConvertError("tokenizer", "files as tokenizers and transformers write them", got) from None


def _keys(files: TokenizerFiles, n_vocab: int, pre: str | None) -> dict[str, Any]:
    family = _family(files)
    if family == "gpt2":
        vocabulary = bpe.read(files, n_vocab, pre)
    elif gemma4.is_of(files):
        vocabulary = gemma4.read(files, n_vocab)
    elif family == "llama":
        vocabulary = sentencepiece.read(files, n_vocab)
    else:
        vocabulary = unigram.read(files, n_vocab)
    for token in generation.ends(files, n_vocab):
        if token in files.added:  # whether or not the checkpoint calls it special
            vocabulary.types[token] = CONTROL
    return vocabulary.keys() | special.keys(files, family, n_vocab) | generation.keys(files, n_vocab)


def _family(files: TokenizerFiles) -> str:
    model = files.model
    kind = model.get("type") or ("BPE" if model.get("merges") else None)
    if kind == "BPE":
        return "llama" if model.get("byte_fallback") else "gpt2"
    if kind == "Unigram" or (kind is None and files.sentencepiece and files.sentencepiece.is_unigram):
        return "t5"
    if kind is None and files.sentencepiece:
        return "llama"
    raise ConvertError(
        "tokenizer", "a BPE or Unigram tokenizer.json, or a tokenizer.model", str(kind or "neither")
    )
