"""Statistics on disk, found by what they were computed from. One that is not finished lies in a folder of its
own (journal.py) and gets its name when it is whole."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from ...errors import ConvertError, Interrupted
from ...ir import Array
from .journal import Journal, arrays_of, writing
from .trail import Trail

Layers = Sequence[Mapping[str, Array]]  # one {array name: array} per layer
Pass = Generator[tuple[int, Mapping[str, Array]], None, None]  # (layer, its arrays), in any order
_PARTIAL = ".partial-"
_KEPT_DAYS = 7  # an unfinished statistic that nobody came back for
_ASK_AGAIN = 0.5  # seconds
LIMIT = 8 << 30  # bytes of all statistics
SAID = 16 << 20  # from so many on, it is said that they are kept


def cache_root() -> Path:
    """$XDG_CACHE_HOME/latentkv or ~/.cache/latentkv."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))  # by XDG's rules a relative one does not count
    return (base if base.is_absolute() else Path.home() / ".cache") / "latentkv"


class Store:
    """A directory per key: {layer}/{array}.npy. Disabled, it keeps nothing and finds nothing. limit: bytes of
    all directories, beyond which those that were not asked for longest are removed."""

    def __init__(self, enabled: bool = True, root: Path | None = None, limit: int = LIMIT) -> None:
        self.enabled, self.limit = enabled, limit
        self.root = (root or cache_root()) / "calibration"
        self._used: set[str] = set()  # keys of this conversion
        self._added = 0  # bytes

    @staticmethod
    def key(*parts: object) -> str:
        return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:32]

    def load(self, key: str, n_layer: int) -> list[dict[str, Array]] | None:
        """Memory-mapped arrays of every layer, or None."""
        if not self.enabled:
            return None
        layers = [arrays_of(self.root / key / str(layer)) for layer in range(n_layer)]
        if not all(layers):
            return None
        self._used.add(key)
        with contextlib.suppress(OSError):  # somebody else's, or on a disk that is read only
            os.utime(self.root / key)
        return layers

    def computed(self, key: str, n_layer: int, run: Callable[[Journal], Pass], *settings: object) -> Layers:
        """What `run` yields, saved as `key`. It goes on where a run with these settings was interrupted.

        Raises:
            ConvertError: the cache directory cannot be written.
            Interrupted: Ctrl-C, with what is kept.
        """
        with self.journal(self.key(key, *settings), n_layer, _say_waiting) as journal:
            found = self.load(key, n_layer)  # another process may have finished it meanwhile
            if found is not None:
                return found
            if journal.done():
                print(f"resuming: {journal.done()} are done", file=sys.stderr)
            try:
                with contextlib.closing(run(journal)) as layers:
                    return self.finish(journal, key, layers)
            except KeyboardInterrupt:
                journal.settle()
                raise Interrupted(_kept(journal)) from None

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
    def journal(self, key: str, n_layer: int, waits: Callable[[], None] = lambda: None) -> Iterator[Journal]:
        """What an earlier run has left of `key`. Bad input ends it; whatever else stops the run leaves it
        to the next one. Where another process is at work on it, waits until that one has finished or stopped;
        waits(): is called first.

        Raises:
            ConvertError: the cache directory cannot be written.
        """
        if not self.enabled:
            yield Journal(n_layer)
            return
        with writing(self.root):
            folder, lock = self._locked(key, waits)
            journal = Journal(n_layer, folder, lock)
        try:
            yield journal
        except ConvertError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        finally:
            with contextlib.suppress(ConvertError):
                journal.settle()
            if not journal.begun():
                shutil.rmtree(folder, ignore_errors=True)
            journal.close()

    @contextlib.contextmanager
    def trail(self, *of: object) -> Iterator[Trail]:
        """The passes of a plan, found by all it depends on. They go when the block ends; whatever stops it
        but bad input leaves them to the next run. Another process that is at the same plan keeps its own.

        Raises:
            ConvertError: the cache directory cannot be written.
        """
        if not self.enabled:
            yield Trail()
            return
        with writing(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            self._sweep()
            folder = self.root / f"{_PARTIAL}{self.key('plan', *of)}"
            folder.mkdir(exist_ok=True)
            lock = _lock(folder)
        trail = Trail() if lock is None else Trail(folder, lock)
        if said := trail.said():
            print(f"resuming: {said} are done", file=sys.stderr)
        kept = False
        try:
            yield trail
        except KeyboardInterrupt as stopped:
            trail.settle()
            kept = bool(said := trail.said())
            size = f"{_size(folder) / 2**20:.0f} MiB at {folder}"
            before = ", " if " and " in said else " and "
            what = f"{before}{said} are kept ({size})" if kept else " is kept"
            raise Interrupted(f"the calibration{what}: the same command goes on from there") from stopped
        except ConvertError:
            raise
        except BaseException:
            kept = True
            raise
        finally:
            trail.end(kept)

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
            self._added += _size(self.root / key)
        found = self.load(key, journal.n_layer)
        assert found is not None
        return found

    def tidied(self) -> str:
        """Removes what is too much. One line about what this conversion has added, or "" for little."""
        if not self.enabled or not self._added:
            return ""
        size, removed = self._shrunk()
        if self._added < SAID and not removed:
            return ""
        gone = f", {removed / 2**20:.0f} MiB of others removed" if removed else ""
        of = f"{size / 2**30:.1f} GiB there, {self.limit / 2**30:.0f} at most"
        added = f"{self._added / 2**20:.0f} MiB kept at {self.root} for other budgets of this model"
        return f"{added} ({of}{gone}; --no-cache keeps nothing)"

    def _shrunk(self) -> tuple[int, int]:
        """Bytes that are kept, and that were removed: the oldest first, but nothing that this conversion has
        or another one is writing."""
        sizes = {path: _size(path) for path in self.root.iterdir() if path.is_dir()}
        total, removed = sum(sizes.values()), 0
        for path in sorted(sizes, key=_asked_for):
            if total - removed <= self.limit:
                break
            if path.name not in self._used and _remove(path):
                removed += sizes[path]
        return total - removed, removed

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

    def _locked(self, key: str, waits: Callable[[], None]) -> tuple[Path, IO[bytes]]:
        """The folder of an unfinished statistic, and its lock."""
        self.root.mkdir(parents=True, exist_ok=True)
        self._sweep()
        folder, said = self.root / f"{_PARTIAL}{key}", False
        while True:
            folder.mkdir(exist_ok=True)
            lock = _lock(folder)
            if lock is not None:
                return folder, lock
            if not said:
                waits()
            said = True
            time.sleep(_ASK_AGAIN)

    def _sweep(self) -> None:
        """Removes what was left unfinished and nobody came back for."""
        for folder in self.root.glob(f"{_PARTIAL}*"):
            if time.time() - _asked_for(folder) > _KEPT_DAYS * 86400:
                _remove(folder)


def _say_waiting() -> None:
    said = "another conversion is measuring this model on this text: waiting for what it finds"
    print(f"{said} (--no-cache: measure it here as well)", file=sys.stderr, flush=True)


def _kept(journal: Journal) -> str:
    """What an interruption leaves."""
    if journal.folder is None:
        return "no layer is kept (--no-cache)"
    if not journal.done():
        return "no layer is finished"
    size = f"{journal.n_bytes() / 2**20:.0f} MiB at {journal.folder}"
    return f"{journal.done()} are kept ({size}): the same command goes on from there"


def _asked_for(folder: Path) -> float:
    """When it was, or was written to."""
    try:
        return folder.stat().st_mtime
    except OSError:
        return 0.0


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def _remove(folder: Path) -> bool:
    """Unless another process is at work in it."""
    lock = _lock(folder) if folder.name.startswith(_PARTIAL) else None
    if lock is None and folder.name.startswith(_PARTIAL):
        return False
    shutil.rmtree(folder, ignore_errors=True)
    if lock is not None:
        lock.close()
    return True


def _lock(folder: Path) -> IO[bytes] | None:
    """None: another process has it, or has just removed the folder."""
    try:
        file = (folder / "lock").open("wb")
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(file.fileno()).st_nlink:  # else removed by the one that had it
            return file
    except BlockingIOError:
        pass
    file.close()
    return None
