"""Statistics on disk, found by what they were computed from. One that is not finished lies in a folder of its
own (journal.py) and gets its name when it is whole."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from ..errors import ConvertError
from ..ir import Array
from .journal import Journal, arrays_of, writing

Layers = Sequence[Mapping[str, Array]]  # one {array name: array} per layer
_PARTIAL = ".partial-"
_KEPT_DAYS = 7  # an unfinished statistic that nobody came back for


def cache_root() -> Path:
    """$XDG_CACHE_HOME/latentkv or ~/.cache/latentkv."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "latentkv"


class Store:
    """A directory per key: {layer}/{array}.npy. Disabled, it keeps nothing and finds nothing."""

    def __init__(self, enabled: bool = True, root: Path | None = None) -> None:
        self.enabled = enabled
        self.root = (root or cache_root()) / "calibration"

    @staticmethod
    def key(*parts: object) -> str:
        return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:32]

    def load(self, key: str, n_layer: int) -> list[dict[str, Array]] | None:
        """Memory-mapped arrays of every layer, or None."""
        if not self.enabled:
            return None
        layers = [arrays_of(self.root / key / str(layer)) for layer in range(n_layer)]
        return layers if all(layers) else None

    def save(self, key: str, n_layer: int, layers: Iterable[tuple[int, Mapping[str, Array]]]) -> Layers:
        """Writes every layer's arrays as they come and returns all of them memory-mapped, so that a large
        model's statistics never lie in memory together.

        Raises:
            ConvertError: the cache directory cannot be written.
        """
        with self.journal(key, n_layer) as journal:
            journal.clear()
            return self.finish(journal, key, layers)

    @contextlib.contextmanager
    def journal(self, key: str, n_layer: int) -> Iterator[Journal]:
        """What an earlier run has left of `key`. Bad input ends it; whatever else stops the run leaves it
        to the next one.

        Raises:
            ConvertError: the cache directory cannot be written.
        """
        if not self.enabled:
            yield Journal(n_layer)
            return
        with writing(self.root):
            folder, lock = self._locked(key)
            journal = Journal(n_layer, folder, lock)
        try:
            yield journal
        except ConvertError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        finally:
            with contextlib.suppress(ConvertError):
                journal.settle()
            journal.close()

    def finish(self, journal: Journal, key: str, layers: Iterable[tuple[int, Mapping[str, Array]]]) -> Layers:
        """Writes the layers that are left and gives them, with those of the journal, the name `key`."""
        for layer, arrays in layers:
            journal.write(layer, arrays)
        if journal.folder is None:
            return [journal.read(layer) for layer in range(journal.n_layer)]
        journal.settle()
        with writing(self.root):
            self._name(journal.layers, key, journal.n_layer)
            shutil.rmtree(journal.folder, ignore_errors=True)
        found = self.load(key, journal.n_layer)
        assert found is not None
        return found

    def _name(self, layers: Path, key: str, n_layer: int) -> None:
        """Gives a folder of all layers its name. What another process has named so meanwhile stays: somebody
        may be reading it."""
        if self.load(key, n_layer) is not None:
            return
        shutil.rmtree(self.root / key, ignore_errors=True)
        try:
            os.replace(layers, self.root / key)
        except OSError:
            if self.load(key, n_layer) is None:
                raise

    def _locked(self, key: str) -> tuple[Path, IO[bytes]]:
        """The folder of an unfinished statistic, or a new one where another process is at work on it."""
        self.root.mkdir(parents=True, exist_ok=True)
        self._sweep()
        folder = self.root / f"{_PARTIAL}{key}"
        folder.mkdir(exist_ok=True)
        lock = _lock(folder)
        if lock is None:
            folder = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=self.root))
            lock = _lock(folder)
            assert lock is not None
        return folder, lock

    def _sweep(self) -> None:
        """Removes what was left unfinished and nobody came back for."""
        for folder in self.root.glob(f"{_PARTIAL}*"):
            if time.time() - folder.stat().st_mtime > _KEPT_DAYS * 86400 and (lock := _lock(folder)):
                shutil.rmtree(folder, ignore_errors=True)
                lock.close()


def _lock(folder: Path) -> IO[bytes] | None:
    """None: another process has it."""
    file = (folder / "lock").open("wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file
