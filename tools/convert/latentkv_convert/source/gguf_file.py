"""A GGUF, of one file or of the parts that llama.cpp splits one into. The runtime's reader reads it: every
count that a file states is checked before it is used."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path
from typing import Any

from .. import native
from ..errors import ConvertError
from ..ir import Array
from .gguf_blocks import qtype

_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_STRING = 8


@dataclass(frozen=True)
class Value:
    """A key's value with the type that it has in the file; strings as bytes."""

    type: int
    sub_type: int | None  # of an array's items
    data: Any

    def plain(self) -> Any:
        """Strings as text."""
        if isinstance(self.data, bytes):
            return self.data.decode("utf-8", "replace")
        if self.sub_type == _STRING:
            return [item.decode("utf-8", "replace") for item in self.data]
        return self.data


@dataclass(frozen=True)
class TensorInfo:
    name: str
    shape: tuple[int, ...]  # NumPy's order, the reverse of ne
    type: str  # q4_k …
    n_bytes: int


def paths(path: Path) -> list[Path]:
    """The paths of all parts of the GGUF that `path` belongs to, in order. They need not exist."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    stem, count = match[1], int(match[3])
    return [path.with_name(f"{stem}-{i:05}-of-{match[3]}.gguf") for i in range(1, count + 1)]


class GgufFile:
    """Keys of the first part, tensors of all.

    Raises:
        LatentKVError: another kind of file, one that is cut short or contradicts itself, or no such part.
        ConvertError: a tensor of a type that cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = native.core("source", "the runtime's GGUF reader").GgufFile(os.fsencode(path))
        self.values = {key: Value(*value) for key, value in self._file.values().items()}
        self.tensors = {info.name: info for info in starmap(TensorInfo, self._file.tensors())}
        for kind in {info.type for info in self.tensors.values()}:
            qtype(kind)

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def names(self) -> list[str]:
        return list(self.tensors)

    def info(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise ConvertError(self.path.name, f"a tensor {name}", f"none among {len(self.tensors)} tensors")
        return self.tensors[name]

    def raw(self, name: str) -> Array:
        """A tensor's bytes, [rows, bytes of a row]."""
        raw: Array = self._file.raw(self.info(name).name)
        return raw
