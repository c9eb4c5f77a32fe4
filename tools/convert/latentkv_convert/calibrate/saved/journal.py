"""What an unfinished statistic has done: the arrays of finished layers, and the states that the next one
starts from. A conversion that was interrupted goes on from there.

States: h3 is the input of layer 3 (that of layer n_layer the last one's output), g3 the loss's gradient with
respect to it. A pass with gradients keeps all inputs on the way up and drops them on the way down. r3, e3:
inputs of layer 3 in a pass whose layers have no arrays of their own (plan/), which needs no others.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np

from ...errors import ConvertError, warn
from ...ir import Array

if TYPE_CHECKING:
    from torch import Tensor


_SPARE = 1 << 30  # bytes that are left free where states are kept
_SAID = _SPARE + (1 << 29)  # from so many on, it is said


class Journal:
    """The journal of one statistic, in a folder of its own or in memory. `lock` is open while it is used."""

    def __init__(self, n_layer: int, folder: Path | None = None, lock: IO[bytes] | None = None) -> None:
        from .states import States  # imports torch

        self.n_layer, self.folder, self.lock = n_layer, folder, lock
        self.states = States(None if folder is None else folder / "states")
        self._memory: dict[str, dict[int, Mapping[str, Array]]] = {"layers": {}, "watched": {}}
        if folder is not None and not self._consistent():
            self.clear()

    @property
    def layers(self) -> Path:
        assert self.folder is not None
        return self.folder / "layers"

    def write(self, layer: int, arrays: Mapping[str, Array], kind: str = "layers") -> None:
        """A finished layer's arrays, which are not to be written to from here on. kind: of the statistic, or
        of what watches its pass. Files are written in the order of calls, as those of `keep` are."""
        if self.folder is None:
            self._memory[kind][layer] = arrays
            return
        partial, target = self.folder / f".{kind}-{layer}", self.folder / kind / str(layer)
        with writing(self.folder.parent):
            self.states.then(lambda: save(arrays, partial, target))

    def keep(self, state: str, x: Tensor) -> None:
        """x is not to be written to from here on."""
        with writing(None if self.folder is None else self.folder.parent):
            self.states.keep(state, x)

    def read(self, layer: int, kind: str = "layers") -> Mapping[str, Array]:
        """Memory-mapped, where they are files."""
        return (
            self._memory[kind][layer] if self.folder is None else arrays_of(self.folder / kind / str(layer))
        )

    def finished(self, kind: str = "layers") -> set[int]:
        if self.folder is None:
            return set(self._memory[kind])
        folder = self.folder / kind
        return {int(path.name) for path in folder.iterdir()} if folder.is_dir() else set()

    def make_room(self, hidden: Tensor, n_states: int) -> None:
        """Before the first state: keeps them in memory where the disk is too small for so many."""
        if self.folder is None or self.states.numbers("h") or self.states.numbers("g"):
            return
        need, free = n_states * hidden.nbytes + _SPARE, shutil.disk_usage(self.folder).free
        if need > free:
            from .states import States

            expected = f"{need / 2**30:.1f} GiB free at {self.folder.parent}"
            hint = "an interrupted conversion will start again; set XDG_CACHE_HOME to another disk"
            warn("cache", expected, f"{free / 2**30:.1f}", hint)
            self.states = States(None)
        elif need > _SAID:
            told = f"up to {(need - _SPARE) / 2**30:.1f} GiB at {self.folder} until this is measured"
            after = "to go on from there after an interruption (--no-cache keeps nothing)"
            print(f"keeping {told}, {after}", file=sys.stderr)

    @property
    def reached(self) -> int:
        """The first layer that has not been run forward, or n_layer."""
        if self.states.numbers("g"):
            return self.n_layer
        return max(self.states.numbers("h"), default=0)

    @property
    def returned(self) -> int | None:
        """Layers from this one on have their gradients; None: no gradient has been taken."""
        return min(self.states.numbers("g"), default=None)

    def done(self) -> str:
        """`layers 0-11 of 30`, `layers 0-29 of 30 forward and 12-29 backward`, or ""."""
        if not self.reached:
            return ""
        up = f"layers {_span(0, self.reached)} of {self.n_layer}"
        if self.returned is None:
            return up
        back = _span(self.returned, self.n_layer)
        return f"{up} forward and {back} backward" if back else f"{up} forward"

    def begun(self) -> bool:
        """Whether there is anything to go on from."""
        return bool(self.reached or self.finished())

    def n_bytes(self) -> int:
        files = () if self.folder is None else self.folder.rglob("*.npy")
        return sum(path.stat().st_size for path in files)

    def clear(self, but: str = "") -> None:
        """Forgets everything but a folder of this name."""
        if self.folder is None:
            return
        from .states import States

        self.settle()
        for path in self.folder.iterdir():
            if path.is_dir() and path.name != but:
                shutil.rmtree(path, ignore_errors=True)
        self.states = States(self.folder / "states")

    def settle(self) -> None:
        """Waits until everything is written."""
        with writing(None if self.folder is None else self.folder.parent):
            self.states.settle()

    def close(self) -> None:
        """Lets another process have the folder."""
        if self.lock is not None:
            self.lock.close()

    def _consistent(self) -> bool:
        """Whether everything is there that going on needs."""
        inputs, finished = self.states.numbers("h"), self.finished()
        if self.returned is not None:
            return inputs >= set(range(self.returned)) and finished >= set(range(self.returned, self.n_layer))
        above = inputs - {self.reached}
        return finished >= set(range(self.reached)) or above == set(range(self.reached))


def save(arrays: Mapping[str, Array], partial: Path, target: Path) -> None:
    """A folder of files, which gets its name when they are whole."""
    for path in (partial, target):
        shutil.rmtree(path, ignore_errors=True)
    partial.mkdir(parents=True)
    target.parent.mkdir(exist_ok=True)
    for name, array in arrays.items():
        with (partial / f"{name}.npy").open("wb") as file:
            np.save(file, array)
            file.flush()
            os.fsync(file.fileno())
    os.replace(partial, target)


@contextlib.contextmanager
def writing(root: Path | None) -> Iterator[None]:
    """Raises:
    ConvertError: in place of an OSError, as the cache directory is no place to write to.
    """
    try:
        yield
    except OSError as error:
        place = "a temporary file" if root is None else str(root)
        hint = "" if root is None else "set XDG_CACHE_HOME or pass --no-cache"
        why = error.strerror or "a file that is cut short, as on a full disk"  # numpy's own has no number
        raise ConvertError("cache", f"to write {place}", why, hint) from None


def arrays_of(folder: Path) -> dict[str, Array]:
    """Memory-mapped arrays of one layer."""
    return {path.stem: np.load(path, mmap_mode="r") for path in sorted(folder.glob("*.npy"))}


def _span(begin: int, end: int) -> str:
    """`3-7` of the layers from begin to before end; ""."""
    return f"{begin}-{end - 1}" if begin < end else ""
