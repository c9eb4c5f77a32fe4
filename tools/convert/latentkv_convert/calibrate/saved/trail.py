"""What the passes of a plan have found, for a conversion that is interrupted while it chooses and checks.

A plan follows from what was measured, so the same command takes the same passes. Each lies under a digest of
all it depends on, finished or with the states of its last layer; all of them go when the file is written.
"""

from __future__ import annotations

import hashlib
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import numpy as np

from ...ir import Array
from .journal import Journal, arrays_of, save, writing

VERSION = 1  # to be raised when a plan takes other passes, or these find something else
_FOUND = "found"


class Trail:
    """Of one conversion. `folder`: where, None keeps nothing; `lock` is open while it is used."""

    def __init__(self, folder: Path | None = None, lock: IO[bytes] | None = None) -> None:
        self.folder, self.lock = folder, lock
        self._open: dict[str, Journal] = {}

    @staticmethod
    def name(*of: object) -> str:
        """Of a pass, by all it depends on."""
        digest = hashlib.sha256()
        for each in of:
            digest.update(each.tobytes() if isinstance(each, np.ndarray) else repr(each).encode())
            digest.update(b"\n")
        return digest.hexdigest()[:32]

    def found(self, name: str) -> dict[str, Array] | None:
        """What a pass has found, or None if it was not finished."""
        if self.folder is None:
            return None
        return arrays_of(self.folder / name / _FOUND) or None

    def journal(self, name: str, n_layer: int, layers: bool = True) -> Journal:
        """Of a pass that is not finished. layers: else it is taken anew where it is interrupted."""
        if self.folder is None or not layers:
            return Journal(n_layer)
        with writing(self.folder.parent):
            (self.folder / name).mkdir(exist_ok=True)
            self._open[name] = Journal(n_layer, self.folder / name)
        return self._open[name]

    def keep(self, name: str, arrays: Mapping[str, Array]) -> None:
        """A finished pass, whose layers go."""
        if self.folder is None:
            return
        own = self.folder / name
        with writing(self.folder.parent):
            own.mkdir(exist_ok=True)
            partial = own / f".{_FOUND}-{threading.get_ident()}"
            save(arrays, partial, own / _FOUND)
        if name in self._open:
            self._open.pop(name).clear(but=_FOUND)

    def settle(self) -> None:
        """Waits until everything is written."""
        for journal in self._open.values():
            journal.settle()

    def said(self) -> str:
        """`3 steps of the choice and layers of the next one`, or ""."""
        if self.folder is None:
            return ""
        n = sum(path.is_dir() for path in self.folder.glob(f"*/{_FOUND}"))
        parts = [f"{n} step{'s' * (n > 1)} of the choice"] if n else []
        if any(self.folder.glob("*/states/[rhg][1-9]*.npy")):
            parts.append("layers of the next one" if n else "layers of the first step of the choice")
        return " and ".join(parts)

    def end(self, kept: bool) -> None:
        """kept: for the next run."""
        if self.folder is not None and not kept:
            for journal in self._open.values():
                journal.settle()
            shutil.rmtree(self.folder, ignore_errors=True)
        if self.lock is not None:
            self.lock.close()
