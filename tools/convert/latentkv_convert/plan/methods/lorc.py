"""LoRC (Zhang et al. 2024): data-free joint SVD of each layer's K and V, ranks that fall with depth.

Plain SVD of W_k and W_v over all KV heads. The rank of a layer falls with its cumulative condition number
(eq. 12-13): log k~_l = sum_{j >= l} log kappa(W_k^j) + log kappa(W_v^j), rank_l = d_max · [1 - (max log k~ -
log k~_l) / (max - min) · (1 - d_min / d_max)], d_max = all KV dimensions of a layer; d_min meets the budget.
Sums of logarithms, as the products overflow (64 matrices of 1e5).

The paper leaves all of sigma with the down-projection. That is a scaling of the latent only; here sigma is
split evenly, which loses least when a rotated latent is quantized.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ... import limits
from ...errors import ConvertError, warn
from ...ir import F64, SIDES, Basis, ModelSpec, Plan
from ...work import Work
from .. import arguments, latent_plan
from ..allocate import by_depth
from ..linalg import balanced, eigenbasis

SUMMARY = "LoRC: joint SVD of the weights, ranks fall with depth"
SIGMA_MIN = 1e-5  # of the largest: sigma_min of a square matrix is rounding noise of the checkpoint


def add_arguments(parser: Any) -> None:
    arguments.add_keep(parser)
    parser.add_argument(
        "--skip-layers",
        type=limits.natural,
        default=0,
        metavar="N",
        help="first layers that keep full K and V, counted in --keep (default 0)",
    )
    parser.add_argument(
        "--steepest",
        type=arguments.fraction("a fraction"),
        default=0.25,
        metavar="F",
        help="least d_min / d_max; below it d_max comes down instead (default 0.25; 0: as published)",
    )
    latent_plan.add_k_path(parser, "rebuild")


def create(options: Mapping[str, Any], spec: ModelSpec) -> LoRC:
    """Raises:
    ConvertError: no layer would be compressed.
    """
    skipped = options["skip_layers"]
    if skipped > spec.attention_layers[-1]:
        fewer = f"fewer than the model's {spec.attention_layers[-1] + 1} layers"
        raise ConvertError("--skip-layers", fewer, str(skipped))
    path = latent_plan.k_path(options, spec, "rebuild")
    return LoRC(spec.n_kv, options["keep"], skipped, options["steepest"], path)


@dataclass(frozen=True)
class LoRC:
    group: int
    keep: float
    skip_layers: int
    steepest: float
    k_path: str
    needs: tuple[str, ...] = ()

    def decompose(self, work: Work, layer: int, side: str, group: int) -> tuple[Basis, ...]:
        """The joint SVD of the map [w, d], from the eigenvectors of W Wᵀ."""
        weight = work.output_map(layer, side)
        return (balanced(*eigenbasis(weight @ weight.T, f"layer {layer} {side}")),)

    def plan(self, work: Work) -> Plan:
        skipped = frozenset(range(self.skip_layers))
        problem = latent_plan.problem(work, self.group, self.keep, skipped)
        layers = [layer for layer in work.spec.attention_layers if layer >= self.skip_layers]
        sigmas = [[work.sigmas(layer, side, self.group)[0] for side in SIDES] for layer in layers]
        depth = relative_depth(sigmas)
        ranks = by_depth(problem, depth, self.steepest)
        return latent_plan.from_ranks(work.spec, self.group, ranks, self.k_path)


def relative_depth(sigmas: list[list[F64]]) -> F64:
    """(max log k~ - log k~_l) / (max - min) per layer, 0 for the first and 1 for the last; sigmas
    [layer][side]."""
    logs = np.array([sum(log_condition(sigma) for sigma in layer) for layer in sigmas])
    clamped = sum(bool(sigma[-1] < SIGMA_MIN * sigma[0]) for layer in sigmas for sigma in layer)
    if clamped:
        got = f"less in {clamped} of {logs.size * len(SIDES)}, taken as {SIGMA_MIN:g}"
        warn("condition numbers", f"sigma_min above {SIGMA_MIN:g} of sigma_max", got)
    remaining = np.cumsum(logs[::-1])[::-1]
    spread = float(remaining[0] - remaining[-1])
    return (remaining[0] - remaining) / spread if spread > 0 else np.zeros(len(sigmas))


def log_condition(sigma: F64) -> float:
    """log(sigma_max / sigma_min), sigma_min not below its floor."""
    return float(-np.log(max(float(sigma[-1]) / float(sigma[0]), SIGMA_MIN)))
