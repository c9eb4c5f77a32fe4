"""Hidden states and gradients that a pass comes back to, under names: files of a folder, or in memory."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

_IN_MEMORY = 4 << 30  # bytes beyond which states without a folder lie in unnamed temporary files
_PAGE = 1024  # f32 in a page of a file, of which the digest reads one
_FILE = re.compile(r"([a-z]+[0-9]+)\.([0-9a-f]{16})\.npy")


class States:
    """Tensors by name. With a folder they outlive the process: each is a file that gets its name when it is
    whole, and the name has a digest of one number per page, for what a power failure leaves."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._memory: dict[str, Tensor] = {}
        self._files: dict[str, Path] = {}
        self._writer = ThreadPoolExecutor(1)  # in order, so that what is dropped has its successor
        self._pending: deque[Future[None]] = deque()
        self._written: dict[str, Future[None]] = {}
        if folder is not None:
            folder.mkdir(exist_ok=True)
            self._files = {match[1]: path for path in folder.iterdir() if (match := _whole(path))}

    def __contains__(self, name: str) -> bool:
        return name in self._memory or name in self._files

    def numbers(self, kind: str) -> set[int]:
        """Numbers of the states of a kind: 3 and 4 of h3 and h4."""
        names = [*self._memory, *self._files]
        return {int(name.removeprefix(kind)) for name in names if re.fullmatch(f"{kind}[0-9]+", name)}

    def keep(self, name: str, x: Tensor) -> None:
        """x is not to be written to from here on. Files are written behind the caller's back, one at a time.

        Raises:
            OSError: an earlier one could not be written.
        """
        x = x.cpu()
        if self.folder is None:
            held = sum(each.nbytes for each in self._memory.values())
            self._memory[name] = x if held + x.nbytes <= _IN_MEMORY else _spilled(x)
            return
        array = x.numpy()
        path = self._files[name] = self.folder / f"{name}.{_digest(array)}.npy"
        self._written[name] = self.then(lambda: _write(path, array))

    def take(self, name: str) -> Tensor:
        """On the CPU."""
        if name in self._memory:
            return self._memory[name]
        if name in self._written:
            self._written[name].result()
        return torch.from_numpy(np.load(self._files[name], mmap_mode="c"))

    def drop(self, name: str) -> None:
        self._memory.pop(name, None)
        if name in self._files:
            path = self._files.pop(name)
            self._written.pop(name, None)
            self._pending.append(self._writer.submit(path.unlink, missing_ok=True))

    def then(self, write: Callable[[], None]) -> Future[None]:
        """After everything that was kept and dropped so far, and behind the caller's back.

        Raises:
            OSError: an earlier file could not be written.
        """
        self.settle(leave=2)
        written = self._writer.submit(write)
        self._pending.append(written)
        return written

    def settle(self, leave: int = 0) -> None:
        """Waits for all but `leave` files."""
        while len(self._pending) > leave:
            self._pending.popleft().result()


def _write(path: Path, array: np.ndarray) -> None:
    partial = path.with_name(f".{path.name}")
    np.save(partial, array)
    os.replace(partial, path)


def _whole(path: Path) -> re.Match[str] | None:
    """The parts of a file's name, if it holds what the name says."""
    match = _FILE.fullmatch(path.name)
    try:
        return match if match and _digest(np.load(path, mmap_mode="r")) == match[2] else None
    except (OSError, ValueError):  # cut short
        return None


def _digest(array: np.ndarray) -> str:
    sample = np.ascontiguousarray(array.reshape(-1)[::_PAGE])
    return hashlib.sha256(repr(array.shape).encode() + sample.tobytes()).hexdigest()[:16]


def _spilled(x: Tensor) -> Tensor:
    with tempfile.TemporaryFile() as file:  # stays mapped after the file is closed
        room = np.memmap(file, dtype=np.float32, mode="w+", shape=tuple(x.shape))
    room[:] = x.numpy()
    return torch.from_numpy(room)
