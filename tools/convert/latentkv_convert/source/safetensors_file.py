"""Reads one .safetensors file: u64 header length, JSON header, tensor bytes. Memory-mapped, nothing copied
until asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from .. import floats
from ..errors import ConvertError
from ..ir import F32

_DTYPES: dict[str, Any] = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}


class SafetensorsFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        size = path.stat().st_size
        where = path.name
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise ConvertError(where, f"a header of at most {max(size - 8, 0)} bytes", f"{length} bytes")
            self.header_bytes = file.read(length)
        try:
            header = json.loads(self.header_bytes)
        except ValueError:
            raise ConvertError(where, "a safetensors header in JSON", "other bytes") from None
        header.pop("__metadata__", None)
        self.entries: dict[str, dict[str, Any]] = header
        self._start = 8 + length
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if self._start + end > size:
            raise ConvertError(where, f"a file of {self._start + end} bytes", f"{size} bytes (truncated)")

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.entries[name]["shape"])

    def read(self, name: str) -> F32:
        """The tensor as float32, in its own shape."""
        entry = self.entries[name]
        if entry["dtype"] not in _DTYPES:
            raise ConvertError(
                f"{self.path.name}: {name}", f"a dtype of {', '.join(_DTYPES)}", entry["dtype"]
            )
        begin, end = entry["data_offsets"]
        with self.path.open("rb") as file:
            file.seek(self._start + begin)
            raw = np.fromfile(
                file, dtype=_DTYPES[entry["dtype"]], count=-1 if end == begin else self._count(entry)
            )
        return floats.f32(raw, entry["dtype"] == "BF16").reshape(entry["shape"])

    def _count(self, entry: dict[str, Any]) -> int:
        begin, end = entry["data_offsets"]
        count = int(np.prod(entry["shape"], dtype=np.int64))
        if count * np.dtype(_DTYPES[entry["dtype"]]).itemsize != end - begin:
            raise ConvertError(
                self.path.name, f"{count} elements for shape {entry['shape']}", f"{end - begin} bytes"
            )
        return count
