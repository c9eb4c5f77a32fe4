"""A checkpoint directory as a source. The architecture's table maps roles to its tensors; packed rows are
taken apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConvertError
from ..ir import F32, SIDES, ModelSpec, TensorRole
from . import archs, mtp, recurrent, unread
from .archs import mla
from .checkpoint import Checkpoint
from .source import Stored
from .stock import NO_ARCHITECTURE
from .tokenizer.vocabulary import CheckpointVocabulary


@dataclass(frozen=True)
class _Place:
    """Where a checkpoint keeps a role."""

    name: str
    rows: NDArray[np.int64] | None = None
    role: TensorRole | None = None

    @property
    def names(self) -> list[str]:
        """One, or those of all experts."""
        if self.role is None or not self.role.n_expert:
            return [self.name]
        return [self.name.format(expert) for expert in range(self.role.n_expert)]


class CheckpointSource:
    outtype = "f16"
    beside = ()
    factors: Mapping[str, str] = MappingProxyType({})

    def __init__(self, directory: Path, pre: str | None = None) -> None:
        self.checkpoint = Checkpoint(directory)
        described = archs.model_spec(self.checkpoint.config)
        self.spec: ModelSpec = mtp.with_layer(described, self.checkpoint)
        self._vocabulary = CheckpointVocabulary(directory, archs.text_part(self.checkpoint.config), pre)
        recurrent.check_pattern(self.spec, "config.json", self.has)
        check_shapes(self.checkpoint, self.spec)
        numbers = {key: self._numbers(name) for key, name in self.spec.layer_numbers.items()}
        self.spec = replace(self.spec, keys={**self.spec.keys, **numbers})
        self._check_recurrent()
        self._check_mla()
        self._check_up()
        self.note = unread.note(
            self.checkpoint, self.spec, archs.text_part(self.checkpoint.config), self._read()
        )

    def _read(self) -> set[str]:
        """Names of the checkpoint's tensors that roles are read from."""
        names = [
            f"{self.spec.layers}.{at}.{of}"
            for of in self.spec.layer_numbers.values()
            for at in range(self.spec.n_layer)
        ]
        roles: list[tuple[str, int | None]] = [(role.target, None) for role in self.spec.global_tensors]
        for layer in range(self.spec.n_layer):
            roles += [(role.target, layer) for role in self.spec.tensors_of(layer)]
            if self.spec.makes_rows(layer):
                sides = SIDES[: 1 if self.spec.at(layer).value_of_key else 2]
                roles += [(f"attn_{side}.{leaf}", layer) for side in sides for leaf in ("weight", "bias")]
        places = [place for role, layer in roles if (place := self._place(role, layer)) is not None]
        names += [name for place in places for name in place.names]
        return {stored for name in names if (stored := self.checkpoint.stored(name)) is not None}

    @cached_property
    def _global(self) -> Mapping[str, TensorRole]:
        return {role.target: role for role in self.spec.global_tensors}

    @cached_property
    def _attention(self) -> Mapping[str, TensorRole]:
        return {role.target: role for role in self.spec.layer_tensors}

    @cached_property
    def _dense(self) -> Mapping[str, TensorRole]:
        return {role.target: role for role in self.spec.dense_tensors}

    @cached_property
    def _recurrent(self) -> Mapping[str, TensorRole]:
        return {role.target: role for role in self.spec.recurrent_tensors}

    @cached_property
    def _dense_recurrent(self) -> Mapping[str, TensorRole]:
        return {role.target: role for role in self.spec.dense_recurrent_tensors}

    @cached_property
    def _fed(self) -> Mapping[str, TensorRole]:
        return {role.target: role for role in self.spec.fed_tensors}

    def _layer(self, layer: int) -> Mapping[str, TensorRole]:
        if not self.spec.attends(layer):
            if self.spec.recurs(layer) and self.spec.is_dense(layer) and self._dense_recurrent:
                return self._dense_recurrent
            return self._recurrent if self.spec.recurs(layer) else self._fed
        return self._dense if self.spec.is_dense(layer) else self._attention

    def _place(self, role: str, layer: int | None) -> _Place | None:
        """Where a role is stored: Q, K and V in their projections, all others as the table says."""
        found = (self._global if layer is None else self._layer(layer)).get(role)
        prefix = "" if layer is None else f"{self.spec.layers}.{layer}."
        if found is not None:
            place = _Place(prefix + found.source, found.rows, found)
            if found.otherwise is None or place.names[0] in self.checkpoint:
                return place
            return _Place(prefix + found.otherwise.source, found.otherwise.rows, found.otherwise)
        stem, _, leaf = role.partition(".")
        side = stem.removeprefix("attn_")
        if layer is None or side not in self.spec.projections or not self.spec.attends(layer):
            return None
        projection = self.spec.projections[side]
        return _Place(f"{prefix}{projection.module}.{leaf}", projection.rows)

    def _found(self, role: str, layer: int | None) -> _Place:
        place = self._place(role, layer)
        if place is None:
            raise ConvertError("architecture", f"a tensor {role}", "none")
        return place

    def has(self, role: str, layer: int | None = None) -> bool:
        place = self._place(role, layer)
        return place is not None and place.names[0] in self.checkpoint

    def tensor(self, role: str, layer: int | None = None) -> F32:
        place = self._found(role, layer)
        array = self._stack(place.names) if len(place.names) > 1 else self.checkpoint.read(place.name)
        if place.rows is not None:
            array = array[place.rows]
        transform = None if place.role is None else place.role.transform
        return array if transform is None else transform(array)

    def columns(self, role: str, part: slice) -> F32:
        return self.checkpoint.columns(self._found(role, None).name, part)

    def shape(self, role: str, layer: int | None = None) -> tuple[int, ...]:
        place = self._found(role, layer)
        shape = self.checkpoint.shape(place.names[0])
        if len(place.names) > 1:
            shape = (len(place.names), *shape)
        if place.rows is not None:
            shape = (len(place.rows), *shape[1:])
        transform = None if place.role is None else place.role.transform
        return shape if transform is None else transform(np.broadcast_to(np.float32(0), shape)).shape

    def _stack(self, names: Sequence[str]) -> F32:
        first = self.checkpoint.shape(names[0])
        stacked = np.empty((len(names), *first), dtype=np.float32)
        for index, name in enumerate(names):
            shape = self.checkpoint.shape(name)
            if shape != first:
                raise ConvertError(name, f"shape {list(first)} of {names[0]}", f"{list(shape)}")
            stacked[index] = self.checkpoint.read(name)
        return stacked

    def _numbers(self, name: str) -> list[float]:
        """A tensor of one number in every layer."""
        names = [f"{self.spec.layers}.{layer}.{name}" for layer in range(self.spec.n_layer)]
        for each in names:
            if int(np.prod(self.checkpoint.shape(each))) != 1:
                raise ConvertError(each, "one number", f"shape {list(self.checkpoint.shape(each))}")
        return [float(self.checkpoint.read(each).reshape(())) for each in names]

    def _check_recurrent(self) -> None:
        """Checks that recurrent layers have the tensors of their kind, and other layers none of them."""
        shapes = recurrent.shapes(self.spec) if recurrent.kind(self.spec) else {}
        for layer in range(self.spec.n_layer if shapes else 0):
            for role in self.spec.tensors_of(layer):
                place = self._found(role.target, layer)
                name, rows = place.names[0], place.rows
                got = self.checkpoint.shape(name)
                enough = rows is None or (len(got) > 0 and got[0] > int(rows.max()))
                shape = shapes.get(role.target)
                if not enough or (shape is not None and self.shape(role.target, layer) != shape):
                    expected = f"sizes from config.json, {list(shape or ())} of {role.target}"
                    raise ConvertError(name, expected, f"shape {list(got)}")

    def _check_up(self) -> None:
        """The FFN has the width that the config promises."""
        keys, n_embd = self.spec.keys, self.spec.n_embd
        n_ff = keys["feed_forward_length"]
        first = n_ff.index(max(n_ff)) if self.spec.fed_tensors else 0
        role, expected = "ffn_up.weight", [n_ff[first] if isinstance(n_ff, list) else n_ff, n_embd]
        n_dense = int(keys["leading_dense_block_count"]) if self.spec.is_dense(0) else 0
        if self.spec.block.ffn in ("experts", "plain_experts"):
            of_experts = [keys["expert_count"], keys["expert_feed_forward_length"], self.spec.n_embd_expert]
            self._check_shape("ffn_up_exps.weight", max(n_dense, first), of_experts)
            if n_dense == 0:
                return
        elif self.spec.block.ffn != "plain" and "ffn_gate.weight" not in self._layer(0):
            expected[0] *= 2
        self._check_shape(role, first, expected)

    def _check_shape(self, role: str, layer: int, expected: Sequence[int]) -> None:
        got = list(self.shape(role, layer))
        if got != list(expected):
            name = self._found(role, layer).names[0]
            raise ConvertError(name, f"shape {list(expected)} from config.json", f"{got}")

    def _check_mla(self) -> None:
        for layer in range(self.spec.n_layer):
            for role, shape in mla.shapes(self.spec).items():
                if role in self._layer(layer):
                    self._check_shape(role, layer, shape)

    def stored(self, role: str, layer: int | None = None) -> Stored | None:
        return None

    def keys(self) -> Mapping[str, Any]:
        keys: dict[str, Any] = {
            "general.type": "model",
            "general.name": self.checkpoint.directory.resolve().name,
            "general.quantization_version": 2,
        }
        for name, value in self.spec.keys.items():
            keys[name if name.startswith(NO_ARCHITECTURE) else f"{self.spec.gguf_arch}.{name}"] = value
        return keys | self._vocabulary.keys(self.spec.n_vocab)

    def encode(self, text: str) -> Sequence[int]:
        return self._vocabulary.encode(text)

    def bos(self) -> int | None:
        return self._vocabulary.bos()

    def identity(self) -> str:
        return self.checkpoint.identity()


def check_shapes(checkpoint: Checkpoint, spec: ModelSpec) -> None:
    """The K and V projections, the embedding and a table of positions have the shapes the config promises."""
    table = spec.global_tensors[0]
    expected = {table.source: (spec.n_vocab, spec.n_embd)} if table.rows is None else {}
    layers = spec.attention_layers if spec.heads else spec.attention_layers[:1]
    for layer in layers if spec.mla is None else ():
        own = spec.at(layer)
        for side in () if own.shares_kv else SIDES[: 1 if own.value_of_key else 2]:
            width = own.q_width + 2 * own.kv_width if spec.packed_qkv else own.kv_width
            name = f"{spec.layers}.{layer}.{spec.projections[side].module}.weight"
            expected[name] = (width, spec.n_embd)
    for role in spec.global_tensors:
        if role.rows is not None and checkpoint.shape(role.source)[0] <= role.rows[-1]:
            got = f"{checkpoint.shape(role.source)[0]}"
            raise ConvertError(role.source, f"{role.rows[-1] + 1} rows from config.json", got)
    for name, shape in expected.items():
        if checkpoint.shape(name) != shape:
            raise ConvertError(
                name, f"shape {list(shape)} from config.json", f"{list(checkpoint.shape(name))}"
            )
