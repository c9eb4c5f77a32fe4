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
from ..source.gguf_blocks import qtype
from ..weights.encoding import Encoding
from ..weights.tensor import OutTensor, encode, n_bytes
from .keys import add_key


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
        for tensor in tensors:
            kind, shape = kinds[tensor.name], tensor.shape
            f32, size = np.dtype(np.float32), n_bytes(kind, shape)
            writer.add_tensor_info(tensor.name, shape, f32, size, raw_dtype=qtype(kind))
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
    return encode(array, kind, tensor.name, encoding.importance_of(tensor))


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name beside `path`, renamed to it on success and removed on any failure, Ctrl-C
    included. A link stays one: what it leads to is replaced."""
    try:
        with durable.replacing(Path(os.path.realpath(path))) as partial:
            yield partial
    except OSError as error:
        raise ConvertError("output", f"to write {path}", error.strerror or str(error)) from None
