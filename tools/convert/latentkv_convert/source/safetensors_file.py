"""Reads one .safetensors file: u64 header length, JSON header, tensor bytes. Memory-mapped, nothing copied
until asked. Headers come from strangers: all of one is checked before any tensor is read."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..compute import floats
from ..errors import ConvertError
from ..ir import F32

_DTYPES: dict[str, Any] = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.int16}
_DTYPES |= {name: np.uint8 for name in floats.BITS if name.startswith("F8")}
_OTHERS = {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "C64": 8}
_SIZES = {name: np.dtype(dtype).itemsize for name, dtype in _DTYPES.items()} | _OTHERS  # bytes
_LONGEST_HEADER = 100_000_000  # bytes, as the format's own library has it


@dataclass(frozen=True)
class Entry:
    dtype: str
    shape: tuple[int, ...]
    begin: int  # bytes, behind the header
    end: int

    @property
    def count(self) -> int:
        return math.prod(self.shape)


class SafetensorsFile:
    """Tensors of one file by name.

    Raises:
        ConvertError: a header that is damaged, that contradicts itself, or that promises what the file lacks.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        size = path.stat().st_size
        most = min(max(size - 8, 0), _LONGEST_HEADER)
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > most:
                raise ConvertError(path.name, f"a header of at most {most} bytes", f"{length} bytes")
            header = file.read(length)
        self._start = 8 + length
        self._entries = _entries(header, path.name)
        end = max((entry.end for entry in self._entries.values()), default=0)
        if self._start + end > size:
            raise ConvertError(path.name, f"a file of {self._start + end} bytes", f"{size} bytes (truncated)")

    def names(self) -> Iterable[str]:
        return self._entries

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def is_fp8(self, name: str) -> bool:
        return self._entries[name].dtype.startswith("F8")

    def read(self, name: str) -> F32:
        """The tensor as float32, in its own shape."""
        entry = self._readable(name)
        with self.path.open("rb") as file:
            file.seek(self._start + entry.begin)
            raw = np.fromfile(file, dtype=_DTYPES[entry.dtype], count=entry.count)
        return floats.f32(raw, entry.dtype).reshape(entry.shape)

    def columns(self, name: str, part: slice) -> F32:
        """Some of a matrix, the rest of which is not read."""
        entry = self._readable(name)
        at, kind = self._start + entry.begin, _DTYPES[entry.dtype]
        raw = np.memmap(self.path, kind, "r", at, entry.shape)[:, part]
        return floats.f32(np.ascontiguousarray(raw).reshape(-1), entry.dtype).reshape(raw.shape)

    def _readable(self, name: str) -> Entry:
        entry = self._entries[name]
        if entry.dtype not in _DTYPES:
            where = f"{self.path.name}: {name}"
            raise ConvertError(where, f"a dtype of {', '.join(_DTYPES)}", entry.dtype)
        return entry


def _entries(header: bytes, where: str) -> dict[str, Entry]:
    """Every tensor of the header, none of whose bytes are another's."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ConvertError(where, "every name of the header once", f"{twice} twice")
        return found

    try:
        parsed = json.loads(header.decode("utf-8"), object_pairs_hook=once)
    except (ValueError, RecursionError):
        raise ConvertError(where, "a safetensors header in JSON", "other bytes") from None
    if not isinstance(parsed, dict):
        raise ConvertError(where, "a header that names tensors", _said(parsed))
    notes = parsed.pop("__metadata__", {})
    if not isinstance(notes, dict) or not all(isinstance(note, str) for note in notes.values()):
        raise ConvertError(where, "__metadata__ of names and texts", _said(notes))
    entries = {name: _entry(f"{where}: {name}", given) for name, given in parsed.items()}
    end, before = 0, ""
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin < end:
            raise ConvertError(f"{where}: {name}", f"bytes of its own, from {end} on", f"some of {before}'s")
        end, before = entry.end, name
    return entries


def _entry(where: str, given: Any) -> Entry:
    if not isinstance(given, Mapping):
        raise ConvertError(where, "dtype, shape and data_offsets", _said(given))
    for field in ("dtype", "shape", "data_offsets"):
        if field not in given:
            raise ConvertError(where, f"the field {field}", "none")
    dtype, shape, offsets = given["dtype"], given["shape"], given["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _SIZES:
        raise ConvertError(where, f"a dtype of {', '.join(_SIZES)}", _said(dtype))
    if not _is_naturals(shape):
        raise ConvertError(where, "a shape of whole numbers from 0", _said(shape))
    if not _is_naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ConvertError(where, "data_offsets [begin, end] from 0, the smaller first", _said(offsets))
    entry = Entry(dtype, tuple(shape), *offsets)
    if entry.count * _SIZES[dtype] != entry.end - entry.begin:
        wanted = f"{entry.count * _SIZES[dtype]} bytes for shape {list(shape)[:8]} in {dtype}"
        raise ConvertError(where, wanted, f"{entry.end - entry.begin} bytes")
    return entry


def _is_naturals(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _said(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}…"
