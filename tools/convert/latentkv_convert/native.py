"""The runtime's own code, where the converter has to do a thing exactly as it does."""

from __future__ import annotations

import importlib
from typing import Any

from .errors import ConvertError


def core(where: str, wanted: str) -> Any:
    """latentkv._core. wanted: what it is needed for, as an error says it.

    Raises:
        ConvertError: it is not installed.
    """
    try:
        return importlib.import_module("latentkv._core")
    except ImportError:
        raise ConvertError(where, wanted, "no native latentkv module") from None
