"""Responses that later ones go on from (`previous_response_id`): the latest, in memory and in files.

A response knows what it was asked and the one before it. Of responses that were gone on from, the last goes
first: without the others it is of no use.
"""

from __future__ import annotations

import json
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from latentkv import durable
from latentkv.server.errors import Refused

MOST_BYTES = 64 << 20
_ID = re.compile("resp_[0-9a-f]{32}")  # files of others are left


@dataclass(frozen=True)
class Stored:
    """JSON: `response` an object, `asked` the items of its own input. previous: the id of the one before, "":
    none. salt: whose it is."""

    response: bytes
    asked: bytes
    previous: str
    salt: str

    @property
    def n_bytes(self) -> int:
        return len(self.response) + len(self.asked)

    def items(self) -> list[dict[str, Any]]:
        """What was asked and answered."""
        return [*json.loads(self.asked), *json.loads(self.response)["output"]]

    def written(self) -> bytes:
        head = json.dumps({"previous": self.previous, "salt": self.salt}).encode()
        return b"\n".join((head, self.asked, self.response))

    @staticmethod
    def read(data: bytes) -> Stored:
        """Raises ValueError, KeyError or TypeError for what is no such file."""
        head, asked, response = data.split(b"\n")
        told = json.loads(head)
        json.loads(asked), json.loads(response)["output"]
        return Stored(response, asked, str(told["previous"]), str(told["salt"]))


class StoredResponses:
    """The latest, up to `most` bytes. Any thread may ask. folder: where each has a file of its own."""

    def __init__(self, most: int = MOST_BYTES, folder: Path | None = None) -> None:
        self._most, self._folder = most, folder
        self._known: OrderedDict[str, Stored] = OrderedDict()  # the first to go first
        self._n_bytes = 0
        self._lock = threading.Lock()
        if folder is not None:
            self._find(folder)

    @property
    def keeps(self) -> bool:
        return self._most > 0

    def put(self, name: str, stored: Stored) -> None:
        with self._lock:
            self._keep(name, stored)
            if name in self._known and self._folder is not None:
                self._write(self._folder / f"{name}.json", stored.written())

    def get(self, name: str, salt: str) -> Stored:
        """Raises Refused (404) where it is not there, or another's."""
        with self._lock:
            return self._at(name, salt)

    def delete(self, name: str, salt: str) -> None:
        with self._lock:
            self._at(name, salt)
            self._drop(name)

    def conversation(self, name: str, salt: str) -> list[dict[str, Any]]:
        """All that was asked and answered up to a response. Raises Refused (404) where one is not there."""
        with self._lock:
            names = list(self._chain(name))
            chain = [self._at(each, salt, "previous_response_id") for each in names]
        return [item for each in reversed(chain) for item in each.items()]

    def _chain(self, name: str) -> Iterator[str]:
        """A response and those before it, up to one that is not there."""
        seen = set()
        while name and name not in seen:
            seen.add(name)
            yield name
            name = self._known[name].previous if name in self._known else ""

    def _at(self, name: str, salt: str, where: str = "response_id") -> Stored:
        found = self._known.get(name)
        if found is None or found.salt != salt:
            said = f"[{where}] expected a response that is stored here, and no newer one took its place; got"
            code = "previous_response_not_found" if where == "previous_response_id" else None
            raise Refused(404, f"{said} {name}", where, code)
        return found

    def _keep(self, name: str, stored: Stored) -> None:
        self._known[name] = stored
        self._n_bytes += stored.n_bytes
        for each in self._chain(stored.previous):
            if each in self._known:
                self._known.move_to_end(each)
        while self._n_bytes > self._most:
            self._drop(next(iter(self._known)))

    def _drop(self, name: str) -> None:
        self._n_bytes -= self._known.pop(name).n_bytes
        if self._folder is not None:
            (self._folder / f"{name}.json").unlink(missing_ok=True)

    def _write(self, path: Path, data: bytes) -> None:
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            with durable.writing(path, flushed=False) as file:  # what a power cut damages is left out
                file.write(data)
        except OSError as error:
            said = f"expected to write {path}; got {error.strerror}"
            print(f"warning: [--cache-dir] {said}", file=sys.stderr, flush=True)

    def _find(self, folder: Path) -> None:
        found = [path for path in folder.glob("*.json") if _ID.fullmatch(path.stem)]
        for path in sorted(found, key=lambda each: each.stat().st_mtime):
            try:
                self._keep(path.stem, Stored.read(path.read_bytes()))
            except (OSError, ValueError, KeyError, TypeError):
                path.unlink(missing_ok=True)
