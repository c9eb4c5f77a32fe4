"""Whose a cached beginning is. A request says it with `cache_salt`, and with `--isolate` its API key does:
those of one salt share beginnings, and learn nothing of others'."""

from __future__ import annotations

import hmac
import secrets
import sys
from pathlib import Path

from latentkv import durable

_BYTES = 32
_CHARACTERS = 32  # of a salt: 128 bits


class Salts:
    """Turns keys and what requests say into salts that say nothing of either: they stand in files, and names
    of files. folder: where the secret for that is kept for later servers (None: it is this one's alone)."""

    def __init__(self, folder: Path | None = None, isolates: bool = False) -> None:
        """isolates: each API key has beginnings of its own."""
        self.isolates = isolates
        self._secret = secrets.token_bytes(_BYTES) if folder is None else _kept(folder / "secret")

    def of(self, key: str, given: str | None) -> str:
        """The salt of a request with this API key. "": what it asks is everyone's."""
        key = key if self.isolates else ""
        if not key and given is None:
            return ""
        said = len(key.encode()).to_bytes(8, "little") + key.encode() + (given or "").encode()
        return hmac.digest(self._secret, said, "sha256").hex()[:_CHARACTERS]


def _kept(path: Path) -> bytes:
    """The secret in a file, its owner's alone. A new one where there is none: what older salts named is found
    no more."""
    try:
        if len(found := path.read_bytes()) == _BYTES:
            return found
    except OSError:
        pass
    made = secrets.token_bytes(_BYTES)
    try:
        with durable.writing(path) as file:
            file.write(made)
    except OSError as error:
        print(f"warning: [--cache-dir] expected to write {path}; got {error.strerror}", file=sys.stderr)
    return made
