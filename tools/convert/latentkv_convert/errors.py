"""One exception for everything a user can get wrong, and the lazy import of the heavy packages."""

from __future__ import annotations

import importlib
from types import ModuleType


class ConvertError(Exception):
    """Bad input: prints as one line, `[where] expected …; got …`."""

    def __init__(self, where: str, expected: str, got: str, hint: str = "") -> None:
        text = f"[{where}] expected {expected}; got {got}"
        if hint:
            text += f"; {hint}"
        super().__init__(" ".join(text.split()))


def need(package: str) -> ModuleType:
    """Imports one of the packages of the `convert` extra.

    Raises:
        ConvertError: the package is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        if error.name is not None and error.name.split(".")[0] != package.split(".")[0]:
            raise
        raise ConvertError(
            "convert",
            f"the Python package {package}",
            "no such package",
            "run pip install 'latentkv[convert]'",
        ) from None
