"""How a layer's K or V becomes tensors of the file: a function for each cache path, shapes per docs/gguf.md.

full      the stock projection.
rebuild   K: z is cached before RoPE; k = B z + bias, then norm and RoPE at read.
latent    V: z is cached; a head's output is B times the attention-weighted sum of z, plus the bias once.
absorbed  K without RoPE: z is cached and queries move into its space, q' = E_q q. The projection's bias is
          left out, and the mean where rows are centred: they add the same to every score of a query, which
          the softmax removes.
value     K: no rows. A key is the row of V, normed as keys are, then RoPE; the projection of both stays.
rotated   K: z_g = E_k k_g is cached after bias, norm and RoPE, and q' = E_q q; nothing is rebuilt at read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from ..fuse import center
from ..fuse.rotation import finished
from ..ir import F32, SIDES, Basis, ModelSpec, Plan, SidePlan
from ..schema import TENSORS
from ..source.frequencies import paired_rows
from ..weights.tensor import OutTensor
from ..work import Work
from . import mla, packed


@dataclass(frozen=True)
class SideJob:
    work: Work
    layer: int
    side: str
    plan: SidePlan
    form: str  # "a" or "e" (docs/gguf.md)
    factors: Callable[[], tuple[Basis, ...]]  # truncated and rotated, one per group

    @property
    def spec(self) -> ModelSpec:
        """As the layer sees it."""
        return self.work.spec.at(self.layer)

    @property
    def rows(self) -> NDArray[np.int64] | None:
        """Head-dimension order of the file (None: the checkpoint's own)."""
        return head_rows(self.spec, self.spec.n_kv) if self.side == "k" else None

    def name(self, key: str) -> str:
        """Tensor name from the schema, `key` with the side left out: "attn_{side}_a"."""
        return TENSORS[key.format(side=self.side)].format(layer=self.layer)

    def in_file_order(self, array: F32) -> F32:
        return array if self.rows is None else array[self.rows]

    def bias(self, bias: F32 | None) -> list[OutTensor]:
        """[w], added after the path has produced k or v."""
        if bias is None:
            return []
        stock = f"blk.{self.layer}.attn_{self.side}.bias"
        return [OutTensor(stock, bias.shape, "vector", lambda: self.in_file_order(bias))]


def head_rows(spec: ModelSpec, n_heads: int) -> NDArray[np.int64] | None:
    if spec.block.position == "rope" and spec.block.rope_pairing == "norm":
        return paired_rows(n_heads, spec.head_dim, spec.n_rot)
    return None


def tensors(work: Work, plan: Plan, trained: Mapping[tuple[int, str], tuple[Basis, ...]]) -> list[OutTensor]:
    """K and V of all layers. trained: bases that stand in for those of the plan, by layer and side."""

    @lru_cache(maxsize=1)  # the factors of a side are written in a row
    def factors(layer: int, side: str) -> tuple[Basis, ...]:
        return finished(work, plan.layers[layer].side(side), layer, side, trained.get((layer, side)))

    made: list[OutTensor] = []
    for index in work.spec.attention_layers:
        layer = plan.layers[index]
        if work.spec.mla is not None:
            if layer.v.path == "latent":
                made += mla.tensors(work, index, partial(factors, index, "v"))
            continue
        if packed.is_packed(work, layer):
            made += packed.together(work, index)
            continue
        if work.spec.packed_qkv:
            made += packed.query(work, index)
        for side in SIDES if not work.spec.at(index).shares_kv else ():
            chosen = layer.side(side)
            form = plan.form(work.spec.at(index), chosen)
            job = SideJob(work, index, side, chosen, form, partial(factors, index, side))
            made += PATHS[chosen.path](job)
    return made


def full(job: SideJob) -> list[OutTensor]:
    return [*projection(job), *job.bias(center.whole_bias(job.work, job.layer, job.side))]


def rebuild(job: SideJob) -> list[OutTensor]:
    """Or latent."""
    bias = center.output_bias(job.work, job.layer, job.side)
    return [*down(job), up(job), *job.bias(bias)]


def absorbed(job: SideJob) -> list[OutTensor]:
    return [*down(job), query_side(job)]


def rotated(job: SideJob) -> list[OutTensor]:
    return [*full(job), encoder(job), query_side(job)]


def value(job: SideJob) -> list[OutTensor]:
    return projection(job)


PATHS = {
    "full": full,
    "rebuild": rebuild,
    "latent": rebuild,
    "absorbed": absorbed,
    "rotated": rotated,
    "value": value,
}


def projection(job: SideJob) -> list[OutTensor]:
    """W [w, d], the stock one; none of a V that is made of K's."""
    if job.side == "v" and job.spec.value_of_key:
        return []
    stock = OutTensor(
        f"blk.{job.layer}.attn_{job.side}.weight",
        (job.spec.kv_width, job.spec.n_embd),
        "weight",
        lambda: job.in_file_order(job.work.weight(job.layer, job.side)),
        job.work.source.stored(f"attn_{job.side}.weight", job.layer),
    )
    return [stock]


def down(job: SideJob) -> list[OutTensor]:
    """The tensors that make latents: A, or E after the projection; and the mean that is subtracted."""
    if job.form == "e":
        return [*projection(job), *_less_mean(job), encoder(job)]
    return [_a(job), *_less_latent_mean(job)]


def encoder(job: SideJob) -> OutTensor:
    """E [Σr, group·head_dim]: every group's latent of its own heads, whose dimensions are in the file's
    order."""
    width = job.plan.group * job.spec.head_dim
    columns = head_rows(job.spec, job.plan.group) if job.side == "k" else None

    def load() -> F32:
        rows = np.concatenate([basis.down.T for basis in job.factors()]).astype(np.float32)
        return rows if columns is None else rows[:, columns]

    return OutTensor(job.name("attn_{side}_e"), (sum(job.plan.ranks), width), "factor", load)


def _less_mean(job: SideJob) -> list[OutTensor]:
    """[w]: minus the mean of the projection's output, added to it."""
    mean = center.mean(job.work, job.layer, job.side)
    if mean is None:
        return []
    bias = (-mean).astype(np.float32)
    return [OutTensor(job.name("attn_{side}_e_bias"), bias.shape, "vector", lambda: job.in_file_order(bias))]


def _a(job: SideJob) -> OutTensor:
    """A [Σr, d]: every group's latent of the layer's input, groups in KV-head order."""
    rank = sum(job.plan.ranks)

    def load() -> F32:
        weight = job.work.weight(job.layer, job.side).astype(np.float64)
        parts, begin = [], 0
        for basis in job.factors():
            width = basis.down.shape[0]
            rows = basis.down.T @ weight[begin : begin + width] if basis.rows is None else basis.rows
            parts.append(rows)
            begin += width
        return np.concatenate(parts).astype(np.float32)

    return OutTensor(job.name("attn_{side}_a"), (rank, job.spec.n_embd), "down", load)


def _less_latent_mean(job: SideJob) -> list[OutTensor]:
    """[Σr]: minus the latent's mean, added to z."""
    if center.mean(job.work, job.layer, job.side) is None:
        return []

    def load() -> F32:
        mean = center.latent_mean(job.work, job.layer, job.side, job.factors())
        assert mean is not None
        return (-mean).astype(np.float32)

    return [OutTensor(job.name("attn_{side}_a_bias"), (sum(job.plan.ranks),), "vector", load)]


def up(job: SideJob) -> OutTensor:
    """B [w, r_max]: row = KV head and head dimension in the file's order, zero past the group's rank."""
    r_max = max(job.plan.ranks)

    def load() -> F32:
        full = np.zeros((job.spec.kv_width, r_max), dtype=np.float32)
        begin = 0
        for basis in job.factors():
            rank, width = basis.up.shape
            full[begin : begin + width, :rank] = basis.up.T
            begin += width
        return job.in_file_order(full)

    return OutTensor(job.name("attn_{side}_b"), (job.spec.kv_width, r_max), "factor", load)


def query_side(job: SideJob) -> OutTensor:
    """E_q [n_kv, r_max, head_dim]: each KV head's columns of its group's `up`, zero past the group's rank."""
    spec, r_max = job.spec, max(job.plan.ranks)
    columns = head_rows(spec, 1)

    def load() -> F32:
        full = np.zeros((spec.n_kv, r_max, spec.head_dim), dtype=np.float32)
        for group, basis in enumerate(job.factors()):
            rank = basis.up.shape[0]
            heads = basis.up.reshape(rank, job.plan.group, spec.head_dim).transpose(1, 0, 2)
            full[group * job.plan.group : (group + 1) * job.plan.group, :rank] = heads
        return full if columns is None else full[:, :, columns]

    return OutTensor(
        TENSORS["attn_q_e"].format(layer=job.layer), (spec.n_kv, r_max, spec.head_dim), "factor", load
    )
