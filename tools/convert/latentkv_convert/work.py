"""What a method may look at while it plans: the model, its weights, the statistics and its own bases, kept
once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from .calibrate.kept import Kept
from .calibrate.sample import Sample
from .calibrate.saved.trail import Trail
from .compute.memo import Memo
from .ir import F32, F64, OF_VALUE, Array, Basis, ModelSpec, Plan
from .source.source import Source
from .weights.encoding import Encoding

KEEP_BYTES = 2 << 30  # of bases in memory; the rest is computed anew when its layer is written


@dataclass
class Work:
    source: Source
    stats: Mapping[str, Sequence[Mapping[str, Array]]]  # statistic -> layer -> array
    seed: int
    decompose: Callable[[Work, int, str, int], tuple[Basis, ...]]  # see `bases`
    sample: Sample | None = None  # the largest that was read, for methods that measure while they plan
    device: str = "cpu"
    rotate: bool = True
    center: bool = True
    encoding: Encoding | None = None  # of the file's tensors
    trains: bool = False  # the factors, after the plan
    polished: Mapping[tuple[int, str], tuple[Basis, ...]] = field(default_factory=dict)  # of the plan's sides
    kept: Kept = field(default_factory=Kept)
    trail: Trail = field(default_factory=Trail)
    _sigmas: dict[tuple[int, str, int], tuple[F64, ...]] = field(default_factory=dict)
    _kept: Memo[tuple[int, str, int], tuple[Basis, ...]] = field(default_factory=lambda: Memo(KEEP_BYTES))

    @property
    def spec(self) -> ModelSpec:
        return self.source.spec

    @property
    def stored_as(self) -> Encoding:
        return self.encoding or Encoding.of(self.spec, "f16")

    def projection_bytes(self, layer: int, side: str) -> int:
        """Bytes of W_k or W_v as the file would hold it."""
        stored = self.source.stored(f"attn_{side}.weight", layer)
        return self.stored_as.projection_bytes(self.spec, layer, side, stored)

    def weight(self, layer: int, side: str) -> F32:
        """W of q (without its gate), k or v, [out, n_embd] in transformers' row order."""
        weight = self.source.tensor(f"attn_{side}.weight", layer)
        if side != "q" or not self.spec.block.output_gate:
            return weight
        heads = weight.reshape(self.spec.n_head, 2, self.spec.head_dim, -1)
        return heads[:, 0].reshape(self.spec.q_width, -1)

    def output_map(self, layer: int, side: str) -> F64:
        """[w, n_embd]: W, and the weights of a norm over all heads of K. The norm divides by another number
        for every token, which changes no axis."""
        weight = self.weight(layer, side).astype(np.float64)
        if side == "k" and self.spec.norms_whole("k"):
            weight *= self.source.tensor("attn_k_norm.weight", layer)[:, None]
        return weight

    def bias(self, layer: int, side: str) -> F32 | None:
        role = f"attn_{side}.bias"
        return self.source.tensor(role, layer) if self.source.has(role, layer) else None

    def output_weight(self, layer: int) -> F32:
        """W_o [n_embd, n_head·head_dim]."""
        return self.source.tensor("attn_output.weight", layer)

    def bases(self, layer: int, side: str, group: int) -> tuple[Basis, ...]:
        """One full-rank, importance-ordered Basis for every `group` KV heads."""
        return self._kept.get(
            (layer, side, group),
            lambda: self._decomposed(layer, side, group),
            lambda bases: sum(basis.down.nbytes + basis.up.nbytes for basis in bases),
        )

    def _decomposed(self, layer: int, side: str, group: int) -> tuple[Basis, ...]:
        bases = self.decompose(self, layer, side, group)
        self._sigmas[layer, side, group] = tuple(basis.sigma for basis in bases)
        return bases

    def sigmas(self, layer: int, side: str, group: int) -> tuple[F64, ...]:
        """The importance of every column of these bases; remembered for all layers."""
        if (layer, side, group) not in self._sigmas:
            self.bases(layer, side, group)
        return self._sigmas[layer, side, group]

    def energy(self, plan: Plan, layer: int, side: str) -> float:
        """Kept share of the squared energy of a layer's K or V, all groups together."""
        chosen = plan.layers[layer].side(side)
        if chosen == OF_VALUE:
            return self.energy(plan, layer, "v")
        if not chosen.ranks:
            return 1.0
        pairs = list(zip(self.sigmas(layer, side, chosen.group), chosen.kept, strict=True))
        total = sum(float(np.square(sigma).sum()) for sigma, _ in pairs)
        return sum(float(np.square(sigma[:rank]).sum()) for sigma, rank in pairs) / total if total else 1.0
