"""The version of the installed package."""

from importlib import metadata


def version() -> str:
    """As pip knows it; from the native module when the package runs from a source tree."""
    try:
        return metadata.version("latentkv")
    except metadata.PackageNotFoundError:
        from latentkv import _core

        return _core.__version__
