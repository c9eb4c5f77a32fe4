"""Standard streams as a command finds them: cron jobs, service managers and launchers of windows may close
some."""

from __future__ import annotations

import contextlib
import io
import os
import sys


class Notes(io.TextIOWrapper):
    """Standard error, which may be on a full disk: what is said beside an answer does not fail it."""

    def write(self, text: str, /) -> int:
        with contextlib.suppress(OSError):
            return super().write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            super().flush()


def prepare() -> None:
    """Connects a standard stream that is closed with nothing: input is empty, output is thrown away. The next
    file that is opened would get its number, and a message would be written into a model. Makes Notes of
    standard error."""
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
    errors = sys.stderr
    if type(errors) is io.TextIOWrapper:  # no test's
        sys.stderr = Notes(errors.buffer, errors.encoding, errors.errors, line_buffering=True)


def give_up_output() -> None:
    """Redirects standard output to nothing, because nobody reads it any more or its disk is full: Python
    would otherwise fail when it flushes at exit."""
    with contextlib.suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
