"""Which exceptions are the user's business, and how they read in one line."""

from __future__ import annotations

import re

from latentkv.console.printable import printable
from latentkv.errors import LatentKVError

BAD_INPUT = 2
ABORTED = 130  # 128 + SIGINT


def one_line(error: BaseException) -> str | None:
    """The line to print, or None for a defect of ours, which deserves its traceback."""
    line = _line(error)
    return None if line is None else printable(" ".join(line.split()))


def _line(error: BaseException) -> str | None:
    if isinstance(error, LatentKVError):
        return str(error)
    if isinstance(error, OSError):
        reason = error.strerror or str(error)
        return (
            f"[file] expected to open {error.filename}; got {reason.lower()}"
            if error.filename
            else f"[system] {reason}"
        )
    if isinstance(error, UnicodeDecodeError):
        return f"[text] expected UTF-8; got byte 0x{error.object[error.start]:02x} at offset {error.start}"
    if isinstance(error, UnicodeEncodeError):
        code = ord(error.object[error.start])
        return f"[text] expected characters that {error.encoding} can hold; got U+{code:04X}"
    if isinstance(error, MemoryError):
        return "[memory] expected room for weights and cache; got none; lower -c or choose a smaller --kv"
    if isinstance(error, ImportError) and error.name == "latentkv._core":
        return "[install] expected the native module latentkv._core; got none; install with pip install ."
    if isinstance(error, ImportError) and error.name == "_core":  # what the dynamic linker says of the module
        return _no_library(str(error))
    return None


def _no_library(said: str) -> str | None:
    """Why the native module does not load, where it is a library that the machine lacks."""
    missing = re.match(r"(lib[\w.+-]+): cannot open shared object file", said)
    if missing is None:
        return None
    library = missing[1]
    if library.startswith(("libcuda.", "libcudart.", "libcublas")):
        owner = "NVIDIA's driver" if library.startswith("libcuda.") else "the CUDA toolkit"
        return (
            f"[install] expected {library} of {owner}, which a CUDA build needs; got none; install it, "
            "or latentkv without -DLATENTKV_CUDA=ON"
        )
    return f"[install] expected the shared library {library}; got none; install it"
