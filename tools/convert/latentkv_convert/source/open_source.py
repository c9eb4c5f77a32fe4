"""The source at a path: a checkpoint directory or a GGUF."""

from __future__ import annotations

from pathlib import Path

from latentkv.console.model_file import no_gguf

from ..errors import ConvertError
from .checkpoint_source import CheckpointSource
from .gguf_source import GgufSource
from .source import Source


def open_source(path: Path, pre: str | None = None) -> Source:
    """A checkpoint directory or a GGUF. pre: `tokenizer.ggml.pre` of a checkpoint.

    Raises:
        ConvertError, LatentKVError: neither, or one that cannot be converted.
    """
    if error := no_gguf(path, converting=True):
        raise error
    if path.is_file():
        if pre is not None:
            raise ConvertError("--pre", "a checkpoint directory, as a GGUF has the key", path.name)
        return GgufSource(path)
    if not path.is_dir():
        raise ConvertError("source", f"a checkpoint directory or a GGUF at {path}", "none")
    return CheckpointSource(path, pre)
