"""The folder of kept sequences: one process's at a time, as two would take each other's files for too much,
and remove them."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from latentkv import durable
from latentkv.errors import expected


def opened(folder: Path) -> int:
    """Makes the folder and locks it. Returns a descriptor that is open as long as this process has it; the
    system gives it back, however the process ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise expected("--cache-dir", "a folder to write to", f"{folder}: {error.strerror}") from None
    lock = _locked(folder)
    durable.sweep(folder)
    return lock


def _locked(folder: Path) -> int:
    try:
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.truncate(lock, 0)
            with contextlib.suppress(OSError):  # of a full disk, whose files are read all the same
                os.write(lock, str(os.getpid()).encode())
        except OSError:
            os.close(lock)
            raise
    except BlockingIOError:
        got = f"{folder}, in use by process {(folder / 'lock').read_text() or 'unknown'}"
        hint = "choose another, or stop that one"
        raise expected("--cache-dir", "a folder without another server of this model", got, hint) from None
    except OSError as error:
        raise expected("--cache-dir", "a folder to lock", f"{folder}: {error.strerror}") from None
    return lock
