"""Files that are old or new, never half, after a kill or a power cut: they are written under another name,
flushed to the disk, then renamed."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

_ABANDONED = 60  # seconds, after which a temporary file that nobody holds is one of a killed process


def flush(file: IO[bytes]) -> None:
    """Down to the disk."""
    file.flush()
    os.fsync(file.fileno())


def replace(partial: Path, target: Path) -> None:
    """Renames a flushed file, and flushes the folder, which holds the names."""
    os.replace(partial, target)
    folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextlib.contextmanager
def writing(target: Path, flushed: bool = True) -> Iterator[IO[bytes]]:
    """A file that gets its name when the block ends, and is removed where it fails. What a killed process has
    left under `target`'s temporary names goes first. flushed: not, where a power cut may take the file."""
    _sweep(target)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file
            if flushed:
                flush(file)
        if flushed:
            replace(temporary, target)
        else:
            os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _sweep(target: Path) -> None:
    for path in target.parent.glob(f".{glob.escape(target.name)}.????????"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime < _ABANDONED:
                continue
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
