"""The ways to group KV heads that a plan is chosen from, each with what its segments cost in every row
format: bytes of all slots, and nats of divergence per token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from latentkv.console.progress import stage
from latentkv.plan.allocation import Group, Table

from ..compute import crew, floats
from ..compute.memo import Memo
from ..course import CHOOSE
from ..fuse.rotation import runs
from ..ir import F64, SIDES, Basis, ModelSpec, Plan, SidePlan
from ..rows import cached_rows, sizes
from ..rows.cached_rows import CachedRows
from ..work import KEEP_BYTES, Work

if TYPE_CHECKING:
    from torch import Tensor

# Segments with a scale and a minimum each: a row is at most four runs that a kernel walks one by one. All of
# f16, q8, q6, q5 … q1 lose 7 % less on SmolLM2-135M at 14 % of f16 (KLD 0.0089, not 0.0096).
FORMATS = ("q8", "q4", "q2", "q1", "none")
# Rows with one scale. Without n6 and n3 the weighted error of SmolLM2-135M is 26, 13 and 7 % larger at 28, 14
# and 8.5 % of f16; with segments of 16 it is 40 % larger at 28 % and 4 to 6 % smaller below.
ROW_FORMATS = ("n8", "n6", "n4", "n3", "n2", "n1", "none")
ROW_WIDTHS = (32,)


@dataclass(frozen=True)
class Shape:
    """What all candidates of a conversion have in common."""

    paths: Mapping[str, str]  # side -> path
    widths: tuple[int, ...]  # of segments, to choose from
    sink: int
    recent: int
    context: int | None  # that a rotated k is fitted for
    one_row: bool = False  # keys are made of V's rows where V is what the key projection makes
    one_scale: bool = False  # a row has one scale, not one and a minimum in every segment
    regains: bool = False  # factors make up for what few bits take from the energy (fuse/energy.py)
    _rows: Memo[tuple[int, str], CachedRows] = field(
        default_factory=lambda: Memo(KEEP_BYTES), repr=False, compare=False
    )

    def regions(self, fmt: str) -> Plan:
        """A plan of exact tokens in one row format, and no layers yet."""
        plan = Plan((), self.sink, self.recent, fitted_context=self.context)
        return replace(plan, sink_format=fmt, recent_format=fmt)

    def has_one_row(self, spec: ModelSpec, layer: int) -> bool:
        return self.one_row and spec.at(layer).value_of_key

    def cached(self, work: Work, layer: int, side: str) -> CachedRows:
        """Kept in memory as far as it lasts: every grouping of heads asks for the same ones."""
        path = cached_rows.ONE_ROW if self.has_one_row(work.spec, layer) else self.paths[side]

        def made() -> CachedRows:
            with crew.alone():  # whoever asks first: the same bits
                return cached_rows.of(work, layer, side, path, self.context)

        return self._rows.get((layer, side), made, lambda found: found.nbytes)

    def side(self, side: str, group: int, widths: tuple[tuple[int, ...], ...]) -> SidePlan:
        """widths: of the segments of every group."""
        ranks = tuple(map(sum, widths))
        return SidePlan(
            self.paths[side], group, ranks, widths, one_scale=self.one_scale, regains=self.regains
        )

    @property
    def formats(self) -> tuple[str, ...]:
        """What a segment may be stored in: the widest first."""
        return ROW_FORMATS if self.one_scale else FORMATS


@dataclass(frozen=True)
class Candidate:
    """One grouping of KV heads."""

    groups: Mapping[str, int]  # side -> KV heads that share a latent, in most layers
    tables: Sequence[Group]  # by layer, side and group of heads: a table for every width of segments

    def group(self, spec: ModelSpec, layer: int, side: str) -> int:
        """KV heads of this layer that share a latent."""
        return spec.group_at(layer, self.groups[side])


Priced = Callable[[int, str, int], list[Group]]  # layer, side, KV heads that share a latent -> its groups


def candidates(
    priced: Priced, groupings: Sequence[Mapping[str, int]], layers: Sequence[int], device: str
) -> Iterator[Candidate]:
    """One by one, as each takes minutes with a large model. layers: those that attend."""
    known: dict[tuple[str, int], list[list[Group]]] = {}  # side and KV heads -> layer -> groups
    for groups in groupings:
        sides = [(side, groups[side]) for side in SIDES]
        new = [key for key in sides if key not in known]
        known |= {key: [] for key in new}

        def step(at: int, new: Sequence[tuple[str, int]] = new) -> list[list[Group]]:
            return [priced(layers[at], *key) for key in new]

        with stage(len(new) * len(layers), CHOOSE, "tensor") as bar:
            for found in crew.each(step, len(layers), device):
                for key, of_key in zip(new, found, strict=True):
                    known[key].append(of_key)
                bar.update(len(new))
        yield Candidate(
            groups, [group for at in range(len(layers)) for key in sides for group in known[key][at]]
        )


def places(candidate: Candidate, shape: Shape, spec: ModelSpec) -> dict[tuple[int, str], range]:
    """Where the groups of a layer and side are among the candidate's tables."""
    found, begin = {}, 0
    for layer in spec.row_layers:
        for side in SIDES:
            is_made = side == "k" and shape.has_one_row(spec, layer)
            n = 0 if is_made else spec.at(layer).n_kv // candidate.group(spec, layer, side)
            found[layer, side] = range(begin, begin + n)
            begin += n
    return found


def cut(rank: int, width: int) -> tuple[int, ...]:
    """Segments of `width` channels, the last one what is left."""
    return (width,) * (rank // width) + ((rank % width,) if rank % width else ())


def tables(
    cached: CachedRows,
    bases: tuple[Basis, ...],
    plan: SidePlan,
    head_dim: int,
    device: str,
    formats: Sequence[str] = FORMATS,
) -> list[Table]:
    """One per group of `plan`, bytes of one slot; bases as they go into the file.

    Distortion in nats per token: ½ mean of importance · eᵀ G e over real rows, e the quantizer's error of one
    segment and G = up F upᵀ the Fisher moment in its coordinates. Importance: the row's gradient energy over
    the mean row's. Options are `formats`.
    """
    import torch

    moved = partial(floats.tensor, device=device)
    width = bases[0].down.shape[0]
    blocks = [slice(index * width, (index + 1) * width) for index in range(len(bases))]
    latents = [
        (moved(cached.rows[:, block]).double() @ moved(basis.down)).float()
        for block, basis in zip(blocks, bases, strict=True)
    ]
    shares = sizes.has_group_scales(formats)
    found = []
    for index, (basis, block, latent) in enumerate(zip(bases, blocks, latents, strict=True)):
        fisher = cached.fisher[block, block]
        heads = slice(index * plan.group, (index + 1) * plan.group)
        weight = moved(importance(cached, fisher, heads, head_dim))
        up = moved(basis.up)
        metric = up @ moved(fisher) @ up.T
        widths = plan.segments[index]
        scales = group_scales(latent, widths, formats) if shares else {}
        columns, at = [], 0
        for part, n_segments in runs(widths):
            here = {name: scale[at : at + n_segments] for name, scale in scales.items()}
            columns.append(_nats(latent[:, part], metric[part, part], weight, n_segments, formats, here))
            at += n_segments
        distortion = torch.cat(columns)
        # as a master file holds them: the same plan there
        kept = distortion.clamp_min(0).float().double().cpu().numpy()
        cost = np.array([[sizes.segment_bytes(fmt, n) for fmt in formats] for n in widths])
        if shares:
            cost[0] += sizes.group_scale_bytes()  # a group has its first segment at least
        found.append(Table(cost, kept))
    return found


def importance(cached: CachedRows, fisher: F64, heads: slice, head_dim: int) -> F64:
    """[n] gradient energy of the group's rows over the mean; ones where no query reads them."""
    share = np.diagonal(fisher).reshape(-1, head_dim).sum(1)  # mean energy of each KV head
    if not share.any():
        return np.ones(len(cached.energy))
    weight = cached.energy[:, heads] @ share / share.sum()
    return np.asarray(weight / weight.mean(), dtype=np.float64)


def group_scales(latent: Tensor, widths: Sequence[int], formats: Sequence[str]) -> dict[str, Tensor]:
    """Scales [segments, n, 1] by format, as far as they are known before formats are chosen: with spanning
    ones for all segments up to this, with fitted ones for the leading half of the group."""
    import torch

    from ..rows import quantizer

    peaks = torch.stack([part.abs().amax(1, keepdim=True) for part in latent.split(widths, 1)])
    spans = peaks.cummax(0).values
    leading = latent[:, : max(1, latent.shape[1] // 2)]
    power = leading.square().mean(1, keepdim=True).sqrt().expand_as(spans)
    stored = [name for name in formats if name != "none"]
    return {
        name: spans / quantizer.outermost(name) if quantizer.is_spanned(name) else power for name in stored
    }


def _nats(
    latent: Tensor,
    metric: Tensor,
    weight: Tensor,
    n_segments: int,
    formats: Sequence[str],
    scales: Mapping[str, Tensor],
) -> Tensor:
    """[segments, formats] f64 of latent [n, segments · width], metric of both sides' channels. scales
    [segments, n, 1]: of the group, by format; none where segments have their own."""
    import torch

    from ..rows import quantizer

    exact = latent.unflatten(1, (n_segments, -1)).transpose(0, 1).contiguous()
    width = exact.shape[-1]
    blocks = metric.unflatten(0, (n_segments, width)).unflatten(2, (n_segments, width))
    own = blocks.diagonal(dim1=0, dim2=2).permute(2, 0, 1).float()  # [segments, width, width]
    columns = []
    for fmt in formats:
        if fmt in scales:
            error = exact - scales[fmt] * quantizer.levels(exact, scales[fmt], fmt)
        else:
            error = exact - quantizer.stored(exact, fmt)
        columns.append(0.5 * ((error @ own).mul_(error).sum(-1).double() @ weight) / len(weight))
    return torch.stack(columns, dim=1)
