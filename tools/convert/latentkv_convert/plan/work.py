"""What a method may look at while it plans: the model, its weights, the statistics and its own bases, kept
once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..calibrate.sample import Sample
from ..ir import F32, F64, Array, Basis, ModelSpec
from ..source.source import Source
from ..write.encoding import Encoding

_KEEP_BYTES = 2 << 30  # bases held in memory; the rest is recomputed when its layer is written


@dataclass
class Work:
    source: Source
    stats: Mapping[str, Sequence[Mapping[str, Array]]]  # statistic -> layer -> array
    seed: int
    decompose: Callable[[Work, int, str], tuple[Basis, ...]]
    sample: Sample | None = None  # the largest that was read, for methods that measure while they plan
    device: str = "cpu"
    rotate: bool = True
    center: bool = True
    encoding: Encoding | None = None  # of the file's tensors
    trains: bool = False  # the factors, after the plan
    _sigmas: dict[tuple[int, str], tuple[F64, ...]] = field(default_factory=dict)
    _kept: dict[tuple[int, str], tuple[Basis, ...]] = field(default_factory=dict)
    _bytes: int = 0

    @property
    def spec(self) -> ModelSpec:
        return self.source.spec

    @property
    def stored_as(self) -> Encoding:
        return self.encoding or Encoding.of(self.spec, "f16")

    def projection_bytes(self, layer: int, side: str) -> int:
        """Of W of k or v as the file would hold it."""
        stored = self.source.stored(f"attn_{side}.weight", layer)
        return self.stored_as.projection_bytes(self.spec, layer, side, stored)

    def weight(self, layer: int, side: str) -> F32:
        """W of q, k or v, [out, n_embd] in transformers' row order."""
        return self.source.tensor(f"attn_{side}.weight", layer)

    def bias(self, layer: int, side: str) -> F32 | None:
        role = f"attn_{side}.bias"
        return self.source.tensor(role, layer) if self.source.has(role, layer) else None

    def output_weight(self, layer: int) -> F32:
        """W_o [n_embd, n_head·head_dim]."""
        return self.source.tensor("attn_output.weight", layer)

    def bases(self, layer: int, side: str) -> tuple[Basis, ...]:
        """One full-rank, importance-ordered Basis per group."""
        key = (layer, side)
        if key in self._kept:
            return self._kept[key]
        bases = self.decompose(self, layer, side)
        self._sigmas[key] = tuple(basis.sigma for basis in bases)
        size = sum(basis.down.nbytes + basis.up.nbytes for basis in bases)
        if self._bytes + size <= _KEEP_BYTES:
            self._kept[key] = bases
            self._bytes += size
        return bases

    def rebase(self, decompose: Callable[[Work, int, str], tuple[Basis, ...]]) -> None:
        """Bases of another decomposition from here on."""
        if decompose == self.decompose:
            return
        self.decompose = decompose
        self._sigmas.clear()
        self._kept.clear()
        self._bytes = 0

    def sigmas(self, layer: int, side: str) -> tuple[F64, ...]:
        """The importance of every column, per group; remembered for all layers."""
        if (layer, side) not in self._sigmas:
            self.bases(layer, side)
        return self._sigmas[layer, side]
