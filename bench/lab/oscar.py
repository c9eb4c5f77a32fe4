"""OSCAR's recipe (Zhou et al. 2026, arXiv 2605.17757) as a file that this runtime reads.

    python bench/lab/oscar.py SOURCE -o OUT.gguf --calib TEXT [--device cuda]

K and V of every KV head are turned by a fixed orthogonal matrix U·H: U are the eigenvectors of the queries'
second moment after RoPE for K, and of the values as attention mixes them for V; H is Hadamard's. Old tokens
are kept in 2 bits, the first 64 and the last 256 of a sequence whole. In this format that is K `rotated` and
V `latent` at full rank, one group per KV head, rows of `q2`.

Two differences. The paper clips outliers at thresholds found offline; scale and minimum are here those of
least squared error, row by row. And its bit-reversal order of channels spreads them over quantization groups
shorter than a head; here a head is one group. A head of 64 channels takes 2.5 bits a channel with scale and
minimum, one of 128 takes 2.25.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mixtures
import numpy as np

from latentkv_convert import pipeline
from latentkv_convert.errors import ConvertError
from latentkv_convert.fuse import rotation
from latentkv_convert.ir import F64, Basis, LayerPlan, ModelSpec, Plan, SidePlan
from latentkv_convert.plan import latent_plan, methods
from latentkv_convert.plan.linalg import eigenbasis
from latentkv_convert.recipe import Recipe
from latentkv_convert.rows import served
from latentkv_convert.source.frequencies import frequencies
from latentkv_convert.weights.tensor import OUTTYPES
from latentkv_convert.work import Work

SINK, RECENT, FORMAT = 64, 256, "q2"


@dataclass(frozen=True)
class Oscar:
    k_path: str
    context: int | None  # positions that moments of turned queries are averaged over; None: no RoPE

    @property
    def needs(self) -> tuple[str, ...]:
        return ("heads", "mixtures")

    def decompose(self, work: Work, layer: int, side: str, group: int) -> tuple[Basis, ...]:
        moments = self.queries(work, layer) if side == "k" else work.stats["mixtures"][layer]["v"]
        return tuple(turn(np.asarray(moment, np.float64), f"layer {layer} {side}") for moment in moments)

    def queries(self, work: Work, layer: int) -> F64:
        """[n_kv, head_dim, head_dim] as they meet the keys."""
        moments = np.asarray(work.stats["heads"][layer]["q"], dtype=np.float64)
        if self.context is None:
            return moments
        freqs = frequencies(work.spec, self.context, layer)
        return np.stack(
            [served.after_rope(each, freqs, work.spec.head_dim, self.context) for each in moments]
        )

    def plan(self, work: Work) -> Plan:
        n_kv, width = work.spec.n_kv, work.spec.head_dim

        def side(path: str) -> SidePlan:
            return SidePlan(path, 1, (width,) * n_kv, ((width,),) * n_kv, ((FORMAT,),) * n_kv)

        layers = (LayerPlan(side(self.k_path), side("latent")),) * work.spec.n_layer
        return Plan(layers, sink=SINK, recent=RECENT, fitted_context=self.context)


def turn(moment: F64, where: str) -> Basis:
    """down = U·H, up = its transpose."""
    sigma, directions = eigenbasis(moment, where)
    turned = directions @ rotation.spread(len(sigma))
    return Basis(sigma, turned, turned.T)


def create(options: Mapping[str, Any], spec: ModelSpec) -> Oscar:
    path = latent_plan.k_path({"k_path": None}, spec, "rotated")
    return Oscar(path, spec.n_ctx if spec.block.position == "rope" else None)


def register() -> None:
    """Lets the converter find the method and its statistic, which are not in its own directories."""
    known = methods.module
    this: Any = sys.modules[__name__]
    methods.module = lambda name: this if name == "oscar" else known(name)
    sys.modules["latentkv_convert.calibrate.mixtures"] = mixtures


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="checkpoint directory or GGUF")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="OUT.gguf")
    parser.add_argument("--calib", type=Path, required=True, help="text to calibrate on")
    parser.add_argument("--calib-tokens", type=int, default=65536)
    parser.add_argument("--outtype", choices=OUTTYPES, help="of the weights (default: the source's own)")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    args = parser.parse_args()
    register()
    recipe = Recipe(
        args.source,
        args.output,
        "oscar",
        outtype=args.outtype,
        rotate=False,  # H is in the basis already
        calib=(args.calib,) if args.calib else (),
        calib_tokens=args.calib_tokens,
        device=args.device,
        plot=False,
    )
    try:
        pipeline.convert(recipe)
    except ConvertError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
