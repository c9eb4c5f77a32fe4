"""Files that are old or new, never half, after a kill or a power cut: they are written under another name,
flushed to the disk, then renamed.

A process holds a lock on each temporary file that it writes. One that nobody holds was left by a killed
process, and is removed when the next file is written to its folder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

PREFIX, SUFFIX = "latentkv-", ".partial"


@contextlib.contextmanager
def replacing(target: Path, mode: int = 0o666, flushed: bool = True) -> Iterator[Path]:
    """An empty file beside `target` that gets its name when the block ends, and is removed where it fails. By
    then it must be closed. flushed: not, where a power cut may take the file.

    Raises:
        OSError: of the target, a full disk too.
    """
    sweep(target.parent)
    temporary, handle = _created(target, mode)
    try:
        yield temporary
        if flushed:
            os.fsync(handle)
        os.replace(temporary, target)
        if flushed:
            _flush_names(target.parent)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename in (None, str(temporary)):
            error.filename = str(target)
        raise
    finally:
        os.close(handle)


@contextlib.contextmanager
def writing(target: Path, flushed: bool = True) -> Iterator[IO[bytes]]:
    """The same, open, and its owner's alone."""
    with replacing(target, 0o600, flushed) as temporary, temporary.open("wb") as file:
        yield file


def rehearse(target: Path, size: int) -> None:
    """Does what `replacing` will do, with a file of `size` bytes that takes no room, before hours of work.

    Raises:
        OSError: of the target: no permission for its folder or to replace it, a limit of sizes.
    """
    sweep(target.parent)
    temporary, handle = _created(target, 0o600)
    try:
        os.truncate(handle, size)
        folder, own = target.parent.stat(), os.geteuid()
        is_foreign = target.exists() and own not in (0, folder.st_uid, target.stat().st_uid)
        if is_foreign and folder.st_mode & stat.S_ISVTX:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(target))
    except OSError as error:
        error.filename = str(target)
        raise
    finally:
        temporary.unlink(missing_ok=True)
        os.close(handle)


def sweep(folder: Path) -> None:
    """Removes what killed processes have left."""
    for path in folder.glob(f"{PREFIX}????????{SUFFIX}"):
        with contextlib.suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def _created(target: Path, mode: int) -> tuple[Path, int]:
    """A new file in the target's folder, and a handle that holds it."""
    while True:
        path = target.with_name(f"{PREFIX}{secrets.token_hex(4)}{SUFFIX}")
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        except FileExistsError:
            continue
        except OSError as error:
            error.filename = str(target)
            raise
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            if os.fstat(handle).st_nlink > 0:  # else it was swept between the two
                return path, handle
        except BaseException:
            os.close(handle)
            path.unlink(missing_ok=True)
            raise
        os.close(handle)


def _flush_names(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
