"""Text that people hand over, in a file or through a pipe: the same text, whichever way it comes."""

from __future__ import annotations

import codecs
import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from latentkv.errors import expected

LARGEST = 1 << 30  # bytes of a text; a pipe may go on for ever
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_KINDS = ((stat.S_ISBLK, "a device"), (stat.S_ISCHR, "a device"), (stat.S_ISSOCK, "a socket"))


def read_text(path: str | Path, where: str = "text") -> str:
    """The text of a file, or of a pipe with a name. One that nobody writes to is empty; it is not waited for.

    Raises:
        OSError: no such file, a directory, no permission.
        UnicodeDecodeError: other bytes than UTF-8.
        LatentKVError: a device or a socket, UTF-16, or more than LARGEST bytes.
    """
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(handle).st_mode
    if stat.S_ISDIR(mode):  # open() would name it by its number
        os.close(handle)
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    with open(handle, "rb") as file:
        for is_kind, kind in _KINDS:
            if is_kind(mode) and not file.isatty():
                raise expected(where, "a file of text", f"{kind} {path}")
        os.set_blocking(handle, True)
        return read_stream(file, where)


def read_stream(stream: BinaryIO, where: str = "text") -> str:
    """The text of an open stream, such as a pipe on standard input."""
    data = stream.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise expected(where, f"at most {LARGEST} bytes of text", "more")
    return decoded(data, where)


def decoded(data: bytes, where: str = "text") -> str:
    """UTF-8 without a byte-order mark, lines ended by \\\\n: an editor on Windows changes no prompt.

    >>> decoded(b"\\xef\\xbb\\xbfone\\r\\ntwo\\r\\n")
    'one\\ntwo\\n'
    """
    if data.startswith(_UTF16):
        raise expected(where, "UTF-8", "UTF-16, by its byte-order mark", "save it as UTF-8")
    text = data.decode("utf-8-sig")
    return text.replace("\r\n", "\n").replace("\r", "\n")
