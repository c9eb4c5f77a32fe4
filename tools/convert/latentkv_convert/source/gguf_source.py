"""A GGUF as a source. Tensors are dequantized when they are read; tensors that stay in the file are copied as
they are."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..compute import floats
from ..ir import F32, Array, ModelSpec
from . import fingerprint, gguf_model, gguf_vocabulary
from .archs.mla.joined import LaterParts
from .frequencies import paired_rows
from .gguf_blocks import block_of, dequantized
from .gguf_file import paths
from .source import Stored

_OURS = "latentkv."
_PARTS = ("attn_k.", "attn_v.", "attn_qkv.")
_NOT_COPIED = ("general.architecture", "general.alignment")  # of the written file


class GgufSource:
    def __init__(self, path: Path) -> None:
        self._parts = LaterParts(path)
        self._where = path.name
        self.spec: ModelSpec = gguf_model.model_spec(self._parts, self._where)
        self.factors = gguf_model.factors(self._parts, self.spec)
        self.outtype = self._precision()
        gguf_vocabulary.check(self._parts.values, self._where)

    def _precision(self) -> str:
        """The widest type of the K and V projections, of those that are written: what is computed from them
        is a product, so blocks of any kind become q8_0."""
        first = gguf_model.prefix(self.spec.attention_layers[0])
        names = (f"{first}attn_{part}.weight" for part in ("k", "v", "qkv", "kv_a_mqa"))
        types = {self._parts.info(name).type for name in names if name in self._parts}
        for kind in ("f32", "bf16", "f16"):
            if kind in types:
                return kind
        return "q8_0"

    def _at(self, layer: int | None) -> ModelSpec:
        return self.spec if layer is None else self.spec.at(layer)

    def _place(self, role: str, layer: int | None) -> tuple[str, slice]:
        """The name of the tensor that holds a role, and the role's rows in it."""
        name = gguf_model.prefix(layer) + role
        attends = layer is None or self.spec.attends(layer)
        packed = gguf_model.packed_rows(self._at(layer)).get(role.partition(".")[0]) if attends else None
        if name not in self._parts and packed is not None:
            return f"{gguf_model.prefix(layer)}attn_qkv.{role.partition('.')[2]}", packed
        return name, slice(None)

    def has(self, role: str, layer: int | None = None) -> bool:
        return self._place(role, layer)[0] in self._parts

    def shape(self, role: str, layer: int | None = None) -> tuple[int, ...]:
        name, rows = self._place(role, layer)
        n_rows, *rest = self._parts.info(name).shape
        return (len(range(n_rows)[rows]), *rest)

    def tensor(self, role: str, layer: int | None = None) -> F32:
        name, rows = self._place(role, layer)
        found = dequantized(self._raw(name, rows), self._parts.info(name).type, name)
        array = found.reshape(self.shape(role, layer))
        if name in self.factors:
            array = array * self._factor(name).reshape(-1, *[1] * (array.ndim - 1))
        floats.check_finite(array, name)
        order = self._transformers_order(role.partition(".")[0], layer)
        return array if order is None else array[order]

    def columns(self, role: str, part: slice) -> F32:
        info, raw = self._parts.info(role), self._parts.raw(role)
        block, size = block_of(info.type)
        begin, end = part.start // block, -(-part.stop // block)
        found = dequantized(raw[:, begin * size : end * size], info.type, role)
        if role in self.factors:
            found = found * self._factor(role)
        floats.check_finite(found, role)
        return found[:, part.start - begin * block : part.stop - begin * block]

    def _factor(self, weight: str) -> F32:
        """[1], or of each expert."""
        return self._parts.raw(self.factors[weight]).view(np.float32).reshape(-1)

    def _raw(self, name: str, rows: slice) -> Array:
        """The bytes of some rows, or of some values of a vector (a bias)."""
        raw, shape = self._parts.raw(name), self._parts.info(name).shape
        if rows == slice(None):
            return raw
        return raw[rows] if len(shape) > 1 else raw.reshape(shape[0], -1)[rows]

    def _transformers_order(self, stem: str, layer: int | None) -> NDArray[np.int64] | None:
        """Rows in transformers' order, where RoPE planes are paired as in llama.cpp's llama architecture."""
        spec = self._at(layer)
        n_heads = {"attn_q": spec.n_head, "attn_k": spec.n_kv}.get(stem)
        block = spec.block
        if (
            n_heads is None
            or spec.mla is not None
            or block.position != "rope"
            or block.rope_pairing != "norm"
        ):
            return None
        return np.argsort(paired_rows(n_heads, spec.head_dim, spec.n_rot))

    def stored(self, role: str, layer: int | None = None) -> Stored | None:
        name, rows = self._place(role, layer)
        is_made = name in self.factors and self._is_part(name)  # with its factor
        if name not in self._parts or is_made:
            return None
        return Stored(self._parts.info(name).type, partial(self._raw, name, rows))

    @cached_property
    def beside(self) -> tuple[str, ...]:
        kept = [name for name in self.factors.values() if not self._is_part(name)]
        return (*gguf_model.behind(self._parts, self.spec), *kept)

    def _is_part(self, name: str) -> bool:
        """Of K or V, or of Q beside them."""
        layer, _, role = name.removeprefix("blk.").partition(".")
        return name.startswith("blk.") and self.spec.attends(int(layer)) and role.startswith(_PARTS)

    @property
    def note(self) -> str:
        n_blocks = int(self.spec.keys["block_count"]) - self.spec.n_layer
        if not gguf_model.behind(self._parts, self.spec):
            return ""
        blocks = f"{n_blocks} block{'s' * (n_blocks > 1)} behind the {self.spec.n_layer} layers"
        return f"{blocks} (multi-token prediction): kept as they are, for --spec-type draft-mtp"

    def keys(self) -> Mapping[str, Any]:
        """All keys of the file, except those of how it was split and aligned."""
        skipped = (_OURS, "split.")
        return {
            key: value
            for key, value in self._parts.values.items()
            if not key.startswith(skipped) and key not in _NOT_COPIED and value.data != []
        }

    @cached_property
    def _vocabulary(self) -> gguf_vocabulary.GgufVocabulary:
        return gguf_vocabulary.GgufVocabulary(self._parts.path)

    def encode(self, text: str) -> Sequence[int]:
        return self._vocabulary.encode(text)

    def bos(self) -> int | None:
        return self._vocabulary.bos()

    def identity(self) -> str:
        digest = hashlib.sha256()
        for part in self._hashed():
            digest.update(part)
        for path in filter(Path.is_file, paths(self._parts.path)):
            fingerprint.add_file(digest, path)
        return digest.hexdigest()

    def _hashed(self) -> Iterator[bytes]:
        """What the identity is computed from: every key but the vocabulary, and what tensors there are."""
        for key, value in self._parts.values.items():
            if not key.startswith("tokenizer."):
                yield f"{key}={value.data!r}".encode()
        yield f"{list(self._parts.tensors.values())}".encode()
