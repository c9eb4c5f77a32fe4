"""What the low-rank methods share: --keep, the K path, and a plan from ranks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ..errors import ConvertError
from ..ir import FULL, SIDES, LayerPlan, ModelSpec, Plan, SidePlan
from ..schema import RANK_PAD
from ..work import Work
from . import allocate
from .allocate import RankProblem, Ranks


def add_k_path(parser: Any, rotary: str) -> None:
    """`rotary`: the method's path for keys with RoPE."""
    parser.add_argument(
        "--k-path",
        choices=(rotary, "absorbed"),
        default=None,
        help=f"path of K: {rotary}, or absorbed without RoPE (default: absorbed where possible)",
    )


def k_path(options: Mapping[str, Any], spec: ModelSpec, rotary: str) -> str:
    """The K path that was asked for, else `absorbed` where nothing stands between W_k and the score.

    Raises:
        ConvertError: absorbed with RoPE, a per-head norm or a clamp of K.
    """
    why = spec.before_scores
    chosen: str = options["k_path"] or (rotary if why else "absorbed")
    if chosen == "absorbed" and why:
        raise ConvertError("--k-path", f"{rotary}, as keys go through {why}", "absorbed")
    return chosen


def problem(work: Work, group: int, keep: float, full_layers: frozenset[int] = frozenset()) -> RankProblem:
    spec = work.spec
    return RankProblem(
        layers=spec.attention_layers,
        n_groups=spec.n_kv // group,
        group_width=group * spec.head_dim,
        keep=keep,
        pad=RANK_PAD,
        stats=work.stats,
        sigmas=partial(work.sigmas, group=group),
        full_layers=full_layers,
    )


def ranks_of(work: Work, group: int, keep: float, allocator: str) -> Ranks:
    return allocate.module(allocator).allocate(problem(work, group, keep))


def from_ranks(spec: ModelSpec, group: int, ranks: Ranks, k: str, fitted_context: int | None = None) -> Plan:
    """One segment per group; a layer without ranks keeps full K and V."""
    paths = {"k": k, "v": "latent"}
    layers = []
    for layer in range(spec.n_layer):
        sides = {side: FULL for side in SIDES}
        for side in SIDES:
            if (layer, side) in ranks:
                chosen = ranks[layer, side]
                sides[side] = SidePlan(paths[side], group, chosen, tuple((rank,) for rank in chosen))
        layers.append(LayerPlan(sides["k"], sides["v"]))
    return Plan(tuple(layers), fitted_context=fitted_context)
