"""The exceptions of this package. `except LatentKVError` catches all of them, those of native code too."""

from collections.abc import Mapping


class LatentKVError(ValueError):
    """Bad input or state, said in one line: `[where] expected …; got …`, then the flag to change."""

    __module__ = "latentkv"


class NoMemory(LatentKVError, MemoryError):
    """The operating system has no memory left."""

    __module__ = "latentkv.errors"


class NoAttribute(LatentKVError, AttributeError):
    """An attribute that an object lacks as it was made: hasattr() is False."""

    __module__ = "latentkv.errors"


def expected(where: str, wanted: str, got: object, hint: str = "") -> LatentKVError:
    """Builds the error, so that every message has the same form.

    >>> str(expected("max_tokens", "an integer", "'ten'", "use -1 for no limit"))
    "[max_tokens] expected an integer; got 'ten'; use -1 for no limit"
    """
    return LatentKVError(_line(where, wanted, got, hint))


def absent(where: str, wanted: str, got: object, hint: str = "") -> NoAttribute:
    """The same for a property that has no value: hasattr() is False, and whoever reads it learns why."""
    return NoAttribute(_line(where, wanted, got, hint))


def _line(where: str, wanted: str, got: object, hint: str) -> str:
    message = f"[{where}] expected {wanted}; got {got}"
    return f"{message}; {hint}" if hint else message


class NoName(LatentKVError, ImportError):
    """A name of llama-cpp-python that is not here."""

    __module__ = "latentkv.errors"


def no_name(module: str, name: str, instead: Mapping[str, str]) -> Exception:
    """What a module's __getattr__ raises; instead: by name what to use. Of those `from … import` says it."""
    if name in instead:
        return NoName(_line(module.rpartition(".")[2], "a name that latentkv has", name, instead[name]))
    return AttributeError(f"module {module!r} has no attribute {name!r}")
