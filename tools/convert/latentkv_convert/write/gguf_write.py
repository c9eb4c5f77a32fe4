"""Writes the GGUF: keys, then one tensor at a time, to a temporary name that becomes the output only when
complete."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from latentkv import durable

from ..errors import ConvertError, need
from ..ir import Array
from ..source.gguf_file import Value
from ..weights import quantize
from ..weights.encoding import Encoding
from ..weights.out_tensor import OutTensor


def write(
    path: Path,
    gguf_arch: str,
    keys: Mapping[str, Any],
    tensors: Sequence[OutTensor],
    encoding: Encoding,
    each: Callable[[OutTensor], None],
) -> int:
    """Writes the file and returns its size in bytes. `each` is called after every tensor (progress).

    Raises:
        ConvertError: a value that its key or type cannot hold, or a disk that is full or read-only.
    """
    gguf = need("gguf")
    with replacing(path) as partial:
        writer = gguf.GGUFWriter(None, gguf_arch)
        for key, value in keys.items():
            add_key(writer, key, value)
        kinds = {t.name: encoding.type_of(t) for t in tensors}
        encoding.warn_of_widths(tensors)
        for tensor in tensors:
            qtype = gguf.GGMLQuantizationType[kinds[tensor.name].upper()]
            size = quantize.n_bytes(qtype, tensor.shape)
            writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), size, raw_dtype=qtype)
        try:
            writer.write_header_to_file(partial)
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            file = writer.fout[0]
            for tensor, data in _made(tensors, kinds, encoding):
                writer.write_padding(file, file.tell())
                file.write(data.data.cast("B"))
                writer.write_padding(file, data.nbytes)
                each(tensor)
        except BaseException:
            with contextlib.suppress(OSError):  # a full disk fails again when the buffer is flushed
                writer.close()
            raise
        writer.close()
    return path.stat().st_size


def _made(
    tensors: Sequence[OutTensor], kinds: Mapping[str, str], encoding: Encoding
) -> Iterator[tuple[OutTensor, Array]]:
    """Every tensor with its data; the next one is made while the one before is written."""
    with ThreadPoolExecutor(1) as pool:
        jobs = (pool.submit(_data, tensor, kinds[tensor.name], encoding) for tensor in tensors)
        ahead = next(jobs, None)
        for tensor in tensors:
            assert ahead is not None
            data = ahead.result()
            ahead = next(jobs, None)
            yield tensor, data


def _data(tensor: OutTensor, kind: str, encoding: Encoding) -> Array:
    if tensor.stored is not None:
        return np.ascontiguousarray(tensor.stored.data())
    array = tensor.load()
    if tuple(array.shape) != tensor.shape:
        raise ConvertError(tensor.name, f"shape {list(tensor.shape)}", f"{list(array.shape)}")
    return quantize.encode(array, kind, tensor.name, encoding.importance_of(tensor))


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name beside `path`, renamed to it on success and removed on any failure, Ctrl-C
    included. A link stays one: what it leads to is replaced."""
    try:
        with durable.replacing(Path(os.path.realpath(path))) as partial:
            yield partial
    except OSError as error:
        raise ConvertError("output", f"to write {path}", error.strerror or str(error)) from None


def add_key(writer: Any, key: str, value: Any) -> None:
    """One key-value pair: as it was read, or its GGUF type from the Python type: u32 for int (i32 when
    negative), f32 for float."""
    if isinstance(value, Value):
        types = need("gguf").GGUFValueType
        sub_type = None if value.sub_type is None else types(value.sub_type)
        writer.add_key_value(key, value.data, types(value.type), sub_type=sub_type)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        if value < 0:
            writer.add_int32(key, value)
        elif value < 2**32:
            writer.add_uint32(key, value)
        else:
            writer.add_uint64(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, np.ndarray):
        _add_array(writer, key, value)
    elif isinstance(value, (list, tuple)):
        if not value or any(type(item) is not type(value[0]) for item in value):
            raise ConvertError(key, "an array of one type with at least one value", repr(value)[:60])
        writer.add_array(key, value)
    else:
        raise ConvertError(key, "a bool, int, float, string or array", type(value).__name__)


def _add_array(writer: Any, key: str, value: np.ndarray) -> None:
    """Numeric arrays keep their width: i32, u8 or f32."""
    gguf = need("gguf")
    types = {"int32": "INT32", "uint8": "UINT8", "float32": "FLOAT32"}
    if value.dtype.name not in types or value.size == 0:
        raise ConvertError(
            key, f"a non-empty array of {', '.join(types)}", f"{value.dtype.name} x {value.size}"
        )
    sub_type = gguf.GGUFValueType[types[value.dtype.name]]
    writer.add_key_value(key, value.tolist(), gguf.GGUFValueType.ARRAY, sub_type=sub_type)
