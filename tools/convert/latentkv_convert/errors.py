"""One exception for everything a user can get wrong, a warning, and the lazy import of heavy packages."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from latentkv.console.printable import printable


class ConvertError(Exception):
    """Bad input: prints as one line, `[where] expected …; got …`."""

    def __init__(self, where: str, expected: str, got: str, hint: str = "") -> None:
        super().__init__(line(where, expected, got, hint))
        self._rest = (expected, got, hint)

    def at(self, where: str) -> ConvertError:
        """The same of another place."""
        return ConvertError(where, *self._rest)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, or a request to end: what is kept, and how to go on."""


def line(where: str, expected: str, got: str, hint: str = "") -> str:
    """The one shape of every message."""
    text = f"[{where}] expected {expected}; got {got}"
    return printable(" ".join((f"{text}; {hint}" if hint else text).split()))


def warn(where: str, expected: str, got: str, hint: str = "") -> None:
    """The conversion goes on, but not quite as asked: one line on standard error."""
    print(f"warning: {line(where, expected, got, hint)}", file=sys.stderr)


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
