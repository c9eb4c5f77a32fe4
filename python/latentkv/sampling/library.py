"""llguidance, which is loaded where the first grammar is read."""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

from latentkv.errors import expected

if TYPE_CHECKING:
    from llguidance import LLTokenizer


def llguidance() -> ModuleType:
    """The package. Raises LatentKVError where it was not installed with latentkv."""
    try:
        import llguidance
    except ImportError as error:
        why = " ".join(str(error).split())
        raise expected("grammar", "the package llguidance", why, "pip install llguidance") from None
    return llguidance


@cache
def byte_tokenizer() -> LLTokenizer:
    """A vocabulary of bytes, for what is asked of a grammar without a model."""
    tokenizer: LLTokenizer = llguidance().LLTokenizer("byte")
    return tokenizer
