"""The tensors of a GGUFWriter on disk or in /dev/shm, written by many threads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np

PIECE = 1 << 26  # bytes of a write

Piece = tuple[memoryview, int]  # bytes, and where they begin in the file


def pieces(tensors: list[tuple[int, np.ndarray]]) -> Iterator[Piece]:
    """Tensors and where each begins, cut into parts of PIECE bytes."""
    for begin, tensor in tensors:
        data = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data
        for at in range(0, len(data), PIECE):
            yield data[at : at + PIECE], begin + at


def write_tensors(out: gguf.GGUFWriter, path: Path) -> None:
    """What `out.write_tensors_to_file()` writes behind the header and the metadata, and closes the file."""
    placed: list[tuple[int, np.ndarray]] = []
    offset = 0
    for info in out.tensors[0].values():
        assert info.tensor is not None  # it was added with data
        placed.append((offset, info.tensor))
        offset += out.ggml_pad(info.nbytes, out.data_alignment)
    out.write_ti_data_to_file()
    out.close()
    begin = out.ggml_pad(path.stat().st_size, out.data_alignment)
    with path.open("r+b") as file:
        file.truncate(begin + offset)

        def put(piece: Piece) -> None:
            data, at = piece
            while data:
                n = os.pwrite(file.fileno(), data, at)
                data, at = data[n:], at + n

        with ThreadPoolExecutor(min(32, os.cpu_count() or 1)) as threads:
            for _ in threads.map(put, pieces([(begin + at, tensor) for at, tensor in placed])):
                pass
