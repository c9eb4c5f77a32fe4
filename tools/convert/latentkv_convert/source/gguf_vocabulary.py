"""Text to tokens with the vocabulary of a GGUF. libllama tokenizes, as it will for the converted file."""

from __future__ import annotations

import os
from collections.abc import Container
from pathlib import Path

from .. import native
from ..errors import ConvertError

_NEEDED = ("tokenizer.ggml.model", "tokenizer.ggml.tokens")


def check(keys: Container[str], where: str) -> None:
    """Raises:
    ConvertError: keys of a vocabulary are missing.
    """
    for key in _NEEDED:
        if key not in keys:
            raise ConvertError(where, f"a vocabulary ({key})", "none")


class GgufVocabulary:
    """Raises:
    ConvertError: no native module, or a vocabulary that libllama refuses.
    """

    def __init__(self, path: Path) -> None:
        core = native.core("--calib", "libllama's tokenizer")
        try:
            self._model = core.Model(os.fsencode(path), vocab_only=True)
        except core.Error as error:
            raise ConvertError(path.name, "a vocabulary that libllama reads", str(error)) from None

    def encode(self, text: str) -> list[int]:
        """No special token is added; those that the text spells out are tokens."""
        ids: list[int] = self._model.tokenize(text.encode(), add_special=False, parse_special=True)
        return ids

    def bos(self) -> int | None:
        return int(self._model.token_bos()) if self._model.add_bos() else None
