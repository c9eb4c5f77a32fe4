"""Reads one .safetensors file: u64 header length, JSON header, tensor bytes. The format's library checks the
header. It opens no file larger than memory for torch, and has no BF16 for NumPy, so tensors are read here."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..compute import floats
from ..errors import ConvertError, need
from ..ir import F32

_DTYPES: dict[str, Any] = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.int16}
_DTYPES |= {name: np.uint8 for name in floats.BITS if name.startswith("F8")}


@dataclass(frozen=True)
class Entry:
    dtype: str
    shape: tuple[int, ...]
    begin: int  # in the file


class SafetensorsFile:
    """Tensors of one file by name.

    Raises:
        ConvertError: a header that is damaged, that contradicts itself, or that promises what the file lacks.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        library = need("safetensors")
        try:
            with library.safe_open(path, framework="np"):
                pass
        except library.SafetensorError as error:
            got = f"{type(error).__name__}: {error}"
            raise ConvertError(path.name, "a whole safetensors file", got) from None
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        self._entries = {
            name: Entry(each["dtype"], tuple(each["shape"]), 8 + length + each["data_offsets"][0])
            for name, each in header.items()
        }

    def names(self) -> Iterable[str]:
        return self._entries

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def is_fp8(self, name: str) -> bool:
        return self._entries[name].dtype.startswith("F8")

    def read(self, name: str) -> F32:
        """The tensor as float32, in its own shape."""
        entry = self._readable(name)
        raw = np.fromfile(self.path, _DTYPES[entry.dtype], math.prod(entry.shape), offset=entry.begin)
        return floats.f32(raw, entry.dtype).reshape(entry.shape)

    def columns(self, name: str, part: slice) -> F32:
        """Some of a matrix, the rest of which is not read."""
        entry = self._readable(name)
        raw = np.memmap(self.path, _DTYPES[entry.dtype], "r", entry.begin, entry.shape)[:, part]
        return floats.f32(np.ascontiguousarray(raw).reshape(-1), entry.dtype).reshape(raw.shape)

    def _readable(self, name: str) -> Entry:
        entry = self._entries[name]
        if entry.dtype not in _DTYPES:
            where = f"{self.path.name}: {name}"
            raise ConvertError(where, f"a dtype of {', '.join(_DTYPES)}", entry.dtype)
        return entry
