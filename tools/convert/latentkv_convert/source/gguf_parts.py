"""A GGUF as one file, or as the parts `NAME-00001-of-0000N.gguf`, … that llama.cpp splits it into. A file
without split.count is whole, whatever its name."""

from __future__ import annotations

import re
from pathlib import Path

from ..errors import ConvertError
from ..ir import Array
from .gguf_file import GgufFile, TensorInfo, Value

_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


def paths(path: Path) -> list[Path]:
    """The paths of all parts of the GGUF that `path` belongs to, in order. They need not exist."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        return [path]
    stem, count = match[1], int(match[3])
    return [path.with_name(f"{stem}-{i:05}-of-{match[3]}.gguf") for i in range(1, count + 1)]


def _files(path: Path) -> list[GgufFile]:
    parts = paths(path)
    named = GgufFile(path) if len(parts) == 1 or path.is_file() else None
    if named is not None and _count(named) == 1:
        return [named]
    for part in parts:
        if not part.is_file():
            raise ConvertError("source", f"all {len(parts)} parts of {path.name}", f"no {part.name}")
    return [GgufFile(part) for part in parts]


def _count(file: GgufFile) -> int:
    """Of parts, as the file says."""
    count = file.values.get("split.count")
    return 1 if count is None or not isinstance(count.data, int) else max(1, count.data)


class GgufParts:
    """Keys of the first file, tensors of all.

    Raises:
        ConvertError: a part is missing, or belongs to another GGUF.
    """

    def __init__(self, path: Path) -> None:
        self.files = _files(path)
        self.values: dict[str, Value] = self.files[0].values
        self._check_counts()
        self._owner: dict[str, GgufFile] = {}
        for file in self.files:
            for name in file.tensors:
                if name in self._owner:
                    raise ConvertError(file.path.name, "every tensor in one part", f"{name} in two")
                self._owner[name] = file
        total = self.values.get("split.tensors.count")
        if total is not None and total.data != len(self._owner):
            raise ConvertError(path.name, f"{total.data} tensors in all parts", f"{len(self._owner)}")

    def _check_counts(self) -> None:
        for number, file in enumerate(self.files):
            said, no = _count(file), file.values.get("split.no")
            if said != len(self.files):
                expected = f"{said} files, as split.count says, NAME-00001-of-{said:05}.gguf and so on"
                raise ConvertError(file.path.name, expected, str(len(self.files)))
            if len(self.files) > 1 and (no is None or no.data != number):
                got = "none" if no is None else str(no.data)
                raise ConvertError(file.path.name, f"split.no {number}", got)

    def __contains__(self, name: str) -> bool:
        return name in self._owner

    def names(self) -> list[str]:
        return list(self._owner)

    def info(self, name: str) -> TensorInfo:
        if name not in self._owner:
            raise ConvertError(
                self.files[0].path.name, f"a tensor {name}", f"none among {len(self._owner)} tensors"
            )
        return self._owner[name].tensors[name]

    def raw(self, name: str) -> Array:
        """A tensor's bytes, [rows, bytes of a row]."""
        self.info(name)
        return self._owner[name].raw(name)
