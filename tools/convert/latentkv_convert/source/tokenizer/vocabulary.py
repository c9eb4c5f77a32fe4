"""The vocabulary of a checkpoint directory: its keys in the file, and text to tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import ConvertError, need
from . import keys, special
from .files import TokenizerFiles


class CheckpointVocabulary:
    """config: of the text. pre: tokenizer.ggml.pre, where the split rules are unknown."""

    def __init__(self, directory: Path, config: Mapping[str, Any], pre: str | None) -> None:
        self._directory, self._config, self._pre = directory, dict(config), pre

    def keys(self, n_vocab: int) -> dict[str, Any]:
        return keys(self._directory, self._config, n_vocab, self._pre)

    def encode(self, text: str) -> Sequence[int]:
        """No special token is added."""
        path = self._directory / "tokenizer.json"
        if not path.is_file():
            slow = need("transformers").AutoTokenizer.from_pretrained(str(path.parent))
            return list(slow.encode(text, add_special_tokens=False))
        try:
            backend = need("tokenizers").Tokenizer.from_file(str(path))
        except Exception as error:  # the Rust side raises a bare Exception
            raise ConvertError("tokenizer.json", "a tokenizer that tokenizers can read", str(error)) from None
        backend.no_truncation()
        return list(backend.encode(text, add_special_tokens=False).ids)

    def bos(self) -> int | None:
        files = TokenizerFiles(self._directory, self._config)
        family = "llama" if files.sentencepiece and not files.sentencepiece.is_unigram else ""
        return special.token_id(files, "bos") if special.adds(files, "bos", family) else None
