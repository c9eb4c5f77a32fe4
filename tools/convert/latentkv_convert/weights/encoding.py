"""How the tensors of one conversion are stored: a type for each, and the importance of its columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..ir import F32, READS, Array, ModelSpec, module_name
from ..source.source import Stored
from .mixes import BASE, Mix
from .tensor import OutTensor, choose, n_bytes, unread

_LEAST = 1e-6  # of the mean importance: a channel that the text never used is still a channel


@dataclass(frozen=True)
class Encoding:
    """`outtype`: of weights that are encoded anew, and of no other where `copies`. `factor_type`: of A; B and
    E are f16 beside it, or f32."""

    outtype: str
    factor_type: str
    copies: bool
    mix: Mix
    importance: Sequence[Mapping[str, Array]] | None = None  # per layer, role -> [inputs]

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        outtype: str,
        factor_type: str | None = None,
        copies: bool = False,
        importance: Sequence[Mapping[str, Array]] | None = None,
    ) -> Encoding:
        """factor_type None: that of the weights, of K-quants q8_0, as products of two matrices are not made
        for fewer bits."""
        tied = all(role.target != "output.weight" for role in spec.global_tensors)
        group, important = spec.n_head // spec.n_kv, importance is not None
        mix = Mix(outtype, spec.gguf_arch, spec.n_layer, group, tied, important)
        default = "q8_0" if outtype in BASE else outtype
        return cls(outtype, factor_type or default, copies, mix, importance)

    def settled(self, tensor: OutTensor) -> OutTensor:
        """The tensor with its type: copied if the source keeps it or already has this type, else to be
        encoded."""
        if tensor.stored is None or self.copies or tensor.stored.type == self._chosen(tensor):
            return tensor
        return replace(tensor, stored=None)

    def type_of(self, tensor: OutTensor) -> str:
        return self._chosen(tensor) if tensor.stored is None else tensor.stored.type

    def _chosen(self, tensor: OutTensor) -> str:
        if tensor.kind in ("weight", "table") and self.outtype in BASE:
            layer, role = split(tensor.name)
            return self.mix.type_of(role.partition(".")[0], layer, tensor.shape)
        outtype = self.factor_type if tensor.kind in ("down", "factor") else self.outtype
        return choose(outtype, tensor.kind, tensor.shape)

    def n_bytes(self, tensor: OutTensor) -> int:
        """In the file, without padding."""
        return n_bytes(self.type_of(tensor), tensor.shape)

    def importance_of(self, tensor: OutTensor) -> F32 | None:
        """[row length]: mean squares of the inputs that a weight's columns multiply, 1 on average. None for
        tables, and if no text was read."""
        layer, role = split(tensor.name)
        stem = module_name(role)
        if self.importance is None or layer is None or tensor.kind != "weight":
            return None
        if layer >= len(self.importance):  # after the layers that the text passed
            return None
        known, other = self.importance[layer], READS.get(stem, stem)
        found = np.asarray(known[other if other in known else stem], dtype=np.float64)
        mean = max(float(found.mean()), np.finfo(np.float64).tiny)
        return np.maximum(found / mean, _LEAST).astype(np.float32)

    def projection_bytes(self, spec: ModelSpec, layer: int, side: str, stored: Stored | None) -> int:
        """Bytes of W_k or W_v as this file would hold it."""
        name, shape = f"blk.{layer}.attn_{side}.weight", (spec.at(layer).kv_width, spec.n_embd)
        return self.n_bytes(self.settled(OutTensor(name, shape, "weight", unread, stored)))

    def channel_bytes(self, form: str, width: int, n_embd: int) -> float:
        """Bytes of one channel of a latent whose group is `width` wide: its row of A or E, and its column of
        B (or E_q)."""
        return self.row_bytes(form, width, n_embd) + width * self._factor_element

    def row_bytes(self, form: str, width: int, n_embd: int) -> float:
        """Bytes of a channel's row of A or E."""
        if form == "e":
            return width * self._factor_element
        return float(n_bytes(choose(self.factor_type, "down", (1, n_embd)), (1, n_embd)))

    @property
    def _factor_element(self) -> int:
        return 4 if choose(self.factor_type, "factor", (1, 1)) == "f32" else 2


def split(name: str) -> tuple[int | None, str]:
    """`blk.3.attn_q.weight` -> (3, "attn_q.weight"); of the whole model (None, name)."""
    if not name.startswith("blk."):
        return None, name
    _, layer, role = name.split(".", 2)
    return int(layer), role
