"""Standard streams as a command finds them: cron jobs, service managers and launchers of windows may close
some."""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import sys
import unicodedata


class Notes(io.TextIOWrapper):
    """Standard error, which may be on a full disk: what is said beside an answer does not fail it."""

    def write(self, text: str, /) -> int:
        with contextlib.suppress(OSError):
            return super().write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            super().flush()


_PLAIN = {"±": "+-", "–": "-", "Δ": "d"}  # of our own pages


def _replaced(error: UnicodeError) -> tuple[str, int]:
    """Characters that an encoding lacks, in those that all have: "..." for "…", "?" for an emoji."""
    assert isinstance(error, UnicodeEncodeError)
    lost = error.object[error.start : error.end]
    plain = (_PLAIN.get(sign) or unicodedata.normalize("NFKD", sign) for sign in lost)
    return "".join(each.encode("ascii", "ignore").decode() or "?" for each in plain), error.end


codecs.register_error("latentkv.replaced", _replaced)


def prepare() -> None:
    """Connects a standard stream that is closed with nothing: input is empty, output is thrown away. The next
    file that is opened would get its number, and a message would be written into a model. Makes Notes of
    standard error. What the encoding of an output lacks is replaced: a terminal need not know UTF-8."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            with contextlib.suppress(OSError):
                found = os.open(os.devnull, os.O_RDWR)
                if found != number:
                    os.dup2(found, number)
                    os.close(found)
        if getattr(sys, name) is None:
            stream = os.fdopen(number, "r" if number == 0 else "w", encoding="utf-8", closefd=False)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
    output, errors = sys.stdout, sys.stderr
    if isinstance(output, io.TextIOWrapper):
        output.reconfigure(errors="latentkv.replaced")
    if type(errors) is io.TextIOWrapper:  # no test's
        sys.stderr = Notes(errors.buffer, errors.encoding, "latentkv.replaced", line_buffering=True)


def give_up_output() -> None:
    """Redirects standard output to nothing, because nobody reads it any more or its disk is full: Python
    would otherwise fail when it flushes at exit."""
    with contextlib.suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
