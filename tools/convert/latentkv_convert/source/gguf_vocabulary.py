"""Text to tokens with the vocabulary of a GGUF. libllama tokenizes, as it will for the converted file."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from .. import native
from ..errors import ConvertError, need
from .gguf_file import Value

_NEEDED = ("tokenizer.ggml.model", "tokenizer.ggml.tokens")


def check(values: Mapping[str, Value], where: str) -> None:
    """Raises:
    ConvertError: keys of a vocabulary are missing.
    """
    for key in _NEEDED:
        if key not in values:
            raise ConvertError(where, f"a vocabulary ({key})", "none")


class GgufVocabulary:
    """Raises:
    ConvertError: no native module, or a vocabulary that libllama refuses.
    """

    def __init__(self, values: Mapping[str, Value], where: str) -> None:
        core = native.core("--calib", "libllama's tokenizer")
        with tempfile.TemporaryDirectory(prefix="latentkv-") as directory:
            path = Path(directory) / "vocabulary.gguf"
            _write(values, path)
            try:
                self._model = core.Model(str(path), vocab_only=True, use_mmap=False)
            except core.Error as error:
                raise ConvertError(where, "a vocabulary that libllama reads", str(error)) from None

    def encode(self, text: str) -> list[int]:
        """No special token is added; those that the text spells out are tokens."""
        ids: list[int] = self._model.tokenize(text.encode(), add_special=False, parse_special=True)
        return ids

    def bos(self) -> int | None:
        return int(self._model.token_bos()) if self._model.add_bos() else None


def _write(values: Mapping[str, Value], path: Path) -> None:
    """Writes a file with these keys and no weights, which is all that libllama needs."""
    gguf = need("gguf")
    writer = gguf.GGUFWriter(None, "llama")
    for key, value in values.items():
        if (key.startswith("tokenizer.") or key == "general.name") and value.data != []:
            sub_type = None if value.sub_type is None else gguf.GGUFValueType(value.sub_type)
            writer.add_key_value(key, value.data, gguf.GGUFValueType(value.type), sub_type=sub_type)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
