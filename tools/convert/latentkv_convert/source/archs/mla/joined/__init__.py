"""GGUFs from before May 2025: a layer's attn_kv_b holds both factors, and key_length and value_length are
those of a head, where later files have those of the row that all heads read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from .....compute import floats
from .....errors import ConvertError
from .....ir import Array
from ....gguf_blocks import dequantized
from ....gguf_file import GgufFile, TensorInfo

_BOTH, _KEYS, _VALUES = "attn_kv_b.weight", "attn_k_b.weight", "attn_v_b.weight"
_NUMBERS = {"f32": np.uint32, "bf16": np.uint16, "f16": np.uint16}  # their bits; blocks lie across keys


class LaterParts(GgufFile):
    """A GGUF as its later form: with attn_k_b, transposed, and attn_v_b in place of attn_kv_b."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._made: dict[str, TensorInfo] = {}
        if any(name.endswith(_BOTH) for name in super().names()):
            self._split()

    def _number(self, key: str) -> int:
        value = self.values.get(key)
        if value is None or not isinstance(value.data, int):
            raise ConvertError(self.path.name, f"the key {key}", "none")
        return value.data

    def _split(self) -> None:
        architecture = self.values["general.architecture"].plain()
        of = f"{architecture}.attention."
        if f"{of}key_length_mla" in self.values:
            raise ConvertError(self.path.name, f"{_KEYS} beside key_length_mla", f"{_BOTH} too")
        rank, n_rot = self._number(f"{of}kv_lora_rank"), self._number(f"{architecture}.rope.dimension_count")
        n_head, n_value = self._number(f"{of}head_count"), self._number(f"{of}value_length")
        key_length = self._number(f"{of}key_length")
        self._n_key = key_length - n_rot
        later = {
            "key_length": rank + n_rot,
            "value_length": rank,
            "key_length_mla": key_length,
            "value_length_mla": n_value,
            "head_count_kv": 1,
        }
        kind = self.values[f"{of}key_length"]
        self.values = {**self.values, **{f"{of}{name}": replace(kind, data=n) for name, n in later.items()}}
        for name in super().names():
            if not name.endswith(_BOTH):
                continue
            both = super().info(name)
            expected = (n_head * (self._n_key + n_value), rank)
            if self._n_key < 1 or both.shape != expected:
                where = f"{self.path.name}: {name}"
                raise ConvertError(where, f"shape {list(expected)}", str(list(both.shape)))
            shapes = {_KEYS: (n_head, rank, self._n_key), _VALUES: (n_head, n_value, rank)}
            types = {_KEYS: both.type if both.type in _NUMBERS else "f16", _VALUES: both.type}
            for role, shape in shapes.items():
                own = name.removesuffix(_BOTH) + role
                self._made[own] = replace(both, name=own, shape=shape, type=types[role])

    def __contains__(self, name: str) -> bool:
        return name in self._made or (super().__contains__(name) and not name.endswith(_BOTH))

    def names(self) -> list[str]:
        return [*(name for name in super().names() if not name.endswith(_BOTH)), *self._made]

    def info(self, name: str) -> TensorInfo:
        return self._made[name] if name in self._made else super().info(name)

    def raw(self, name: str) -> Array:
        if name not in self._made:
            return super().raw(name)
        info = self._made[name]
        both = super().info(name.removesuffix(_KEYS).removesuffix(_VALUES) + _BOTH)
        rows = super().raw(both.name)
        heads = rows.reshape(info.shape[0], -1, rows.shape[-1])
        if name.endswith(_VALUES):
            return np.ascontiguousarray(heads[:, self._n_key :]).reshape(-1, heads.shape[-1])
        own = np.ascontiguousarray(heads[:, : self._n_key])
        if both.type in _NUMBERS:
            numbers = own.view(_NUMBERS[both.type])
        else:
            found = dequantized(own, both.type, both.name)
            numbers = floats.f16(found).reshape(info.shape[0], self._n_key, -1)
        turned = np.ascontiguousarray(numbers.transpose(0, 2, 1))
        return turned.reshape(-1, self._n_key).view(np.uint8)
