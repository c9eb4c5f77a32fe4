"""Reads one .gguf file: magic, version, counts, keys, tensor infos, then tensor bytes. Memory-mapped, and
every count that the file states is checked against its size before it is used."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConvertError, need
from ..ir import Array

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_MAX_DIMS = 4
_STRING, _ARRAY = 8, 9
# value type -> struct format: u8 i8 u16 i16 u32 i32 f32 bool u64 i64 f64
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


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
    offset: int  # in the file
    n_bytes: int


class GgufFile:
    """Keys and tensors of one file.

    Raises:
        ConvertError: another kind of file, one that is cut short, or one that contradicts itself.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.size = path.stat().st_size
            self._bytes: Array = np.memmap(path, dtype=np.uint8, mode="r") if self.size else np.empty(0, "u1")
        except OSError as error:
            raise ConvertError("source", f"a readable file {path}", error.strerror or str(error)) from None
        cursor = _Cursor(self._bytes.data, path.name)
        if bytes(self._bytes[:4]) != MAGIC:
            raise ConvertError(path.name, "a GGUF, whose first bytes are GGUF", "other bytes")
        cursor.at = 4
        version = cursor.scalar("I")
        if version not in _VERSIONS:
            raise ConvertError(path.name, "a little-endian GGUF of version 2 or 3", str(version))
        n_tensors, n_keys = cursor.count(24), cursor.count(12)
        self.values: dict[str, Value] = {}
        for _ in range(n_keys):
            key = cursor.text()
            if key in self.values:
                raise ConvertError(path.name, "every key once", f"{key} twice")
            self.values[key] = cursor.value(cursor.scalar("I"))
        infos = [self._info(cursor) for _ in range(n_tensors)]
        start = _round_up(cursor.at, self._alignment())
        self.tensors: dict[str, TensorInfo] = {}
        for info in infos:
            self._place(info, start)

    def _alignment(self) -> int:
        value = self.values.get("general.alignment")
        alignment = _ALIGNMENT if value is None else value.data
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ConvertError(self.path.name, "general.alignment a power of two", str(alignment)[:40])
        return alignment

    def _info(self, cursor: _Cursor) -> TensorInfo:
        name = cursor.text()
        n_dims = cursor.scalar("I")
        if not 1 <= n_dims <= _MAX_DIMS:
            raise ConvertError(f"{self.path.name}: {name}", f"1 to {_MAX_DIMS} dimensions", str(n_dims))
        ne = [cursor.scalar("Q") for _ in range(n_dims)]
        number, offset = cursor.scalar("I"), cursor.scalar("Q")
        gguf = need("gguf")
        try:
            kind = gguf.GGMLQuantizationType(number)
        except ValueError:
            raise ConvertError(f"{self.path.name}: {name}", "a known tensor type", str(number)) from None
        block, size = gguf.GGML_QUANT_SIZES[kind]
        if min(ne) < 1 or ne[0] % block:
            expected = f"rows of a multiple of {block} for {kind.name.lower()}"
            raise ConvertError(f"{self.path.name}: {name}", expected, str(ne))
        n_bytes = size * (ne[0] // block)
        for n in ne[1:]:
            n_bytes *= n
        return TensorInfo(name, tuple(reversed(ne)), kind.name.lower(), offset, n_bytes)

    def _place(self, info: TensorInfo, start: int) -> None:
        if info.name in self.tensors:
            raise ConvertError(self.path.name, "every tensor once", f"{info.name} twice")
        end = start + info.offset + info.n_bytes
        if end > self.size:
            raise ConvertError(self.path.name, f"a file of {end} bytes", f"{self.size} bytes (truncated)")
        self.tensors[info.name] = TensorInfo(
            info.name, info.shape, info.type, start + info.offset, info.n_bytes
        )

    def raw(self, name: str) -> Array:
        """A tensor's bytes, [rows, bytes of a row]."""
        info = self.tensors[name]
        n_rows = int(np.prod(info.shape[:-1], dtype=np.int64))
        return self._bytes[info.offset : info.offset + info.n_bytes].reshape(n_rows, -1)


class _Cursor:
    """Reads values one after another and never past the end."""

    def __init__(self, data: memoryview, where: str) -> None:
        self.data, self.where, self.at = data, where, 0

    def scalar(self, fmt: str) -> Any:
        size = struct.calcsize(f"<{fmt}")
        self._need(size)
        (value,) = struct.unpack_from(f"<{fmt}", self.data, self.at)
        self.at += size
        return value

    def count(self, size: int) -> int:
        """A number of items of at least `size` bytes each."""
        number: int = self.scalar("Q")
        self._need(number * size)
        return number

    def string(self) -> bytes:
        n = self.count(1)
        self.at += n
        return bytes(self.data[self.at - n : self.at])

    def text(self) -> str:
        return self.string().decode("utf-8", "replace")

    def value(self, kind: int) -> Value:
        if kind == _ARRAY:
            item = self.scalar("I")
            return Value(kind, item, self._items(item))
        return Value(kind, None, self._reader(kind)())

    def _items(self, kind: int) -> list[Any]:
        if kind not in _SCALARS:
            read = self._reader(kind)
            return [read() for _ in range(self.count(8))]
        size = struct.calcsize(f"<{_SCALARS[kind]}")
        n = self.count(size)
        items = list(struct.unpack_from(f"<{n}{_SCALARS[kind]}", self.data, self.at))
        self.at += n * size
        return items

    def _reader(self, kind: int) -> Callable[[], Any]:
        if kind == _STRING:
            return self.string
        if kind not in _SCALARS:
            raise ConvertError(self.where, "values of known types, no arrays of arrays", f"type {kind}")
        return lambda: self.scalar(_SCALARS[kind])

    def _need(self, n: int) -> None:
        if self.at + n > len(self.data):
            raise ConvertError(
                self.where, f"a file of at least {self.at + n} bytes", f"{len(self.data)} bytes (truncated)"
            )


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
