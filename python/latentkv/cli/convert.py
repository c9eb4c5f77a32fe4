"""Convert a GGUF or a Hugging Face checkpoint to a GGUF with a smaller KV cache."""

from __future__ import annotations

from collections.abc import Sequence

from latentkv.errors import expected

_EXTRA = "install with pip install 'latentkv[convert]'"


def main(argv: Sequence[str]) -> int:
    """Hands over to the converter, which has its own options and its own dependencies."""
    try:
        from latentkv_convert.cli import main as convert

        status: int = convert(list(argv))
    except ModuleNotFoundError as error:  # torch and others are imported when they are needed
        raise expected(
            "convert", "the converter's dependencies", f"no module {error.name}", _EXTRA
        ) from error
    return status
