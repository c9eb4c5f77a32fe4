"""What caches of well-known models take, in GiB, and the share of f16 by length: computed, nothing is run.

    python bench/sizes.py --save

The bytes of a cache depend on K and V alone, so each model is a file with its layers and heads whose weights
are narrow. A converted file takes at most its budget of f16.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from command import arguments
from inputs.random_model import write
from inputs.random_rows import sides_of
from inputs.random_shapes import SHAPES, DeltaNet, Heads, Mla, Shape
from record import RESULTS, Column, save

CACHES = ("f16", "q8_0", "small")
BUDGET = 14  # per cent of f16
LENGTHS = (32768, 131072)
PRESETS = ("q8_0", "balanced", "small", "smaller", "smallest")
SHORTER = (2048, 8192, *LENGTHS)
OF = "Llama-3.1-8B"  # whose shares are shown by length
GIB = 1 << 30
NARROW = 64  # channels of the residual stream


@dataclass(frozen=True)
class Known:
    """A published model. name: as it is published; where several have the same layers, all of them."""

    name: str
    shape: Shape


def dense(name: str, n_layer: int, n_kv: int, head_dim: int = 128, **more: Any) -> Known:
    return Known(name, Shape(name, n_layer, NARROW, NARROW, n_kv, n_kv, NARROW, 1e6, head_dim, **more))


def hybrid(name: str, n_layer: int, n_kv: int) -> Known:
    """Qwen 3.5 and later: one of four layers attends."""
    more: dict[str, Any] = {"architecture": "qwen35", "n_rot": 64, "period": 4, "delta_net": DeltaNet(2, 2)}
    return dense(name, n_layer, n_kv, 256, **more)


def with_mla(name: str, n_layer: int, mla: Mla) -> Known:
    shape = SHAPES["glm47-flash"]
    narrow = {"n_embd": NARROW, "n_ff": NARROW, "n_vocab": NARROW, "n_head": 2}
    return Known(name, replace(shape, name=name, n_layer=n_layer, mla=mla, **narrow))


KNOWN = (
    dense("Llama-3.1-8B", 32, 8),
    dense("Llama-3.3-70B", 80, 8),
    dense("Mistral-Small-3.2-24B", 40, 8),
    dense("Qwen2.5-7B", 28, 4),
    dense("Qwen3-8B", 36, 8),
    dense("Qwen3-30B-A3B", 48, 4),
    dense("Qwen3-32B", 64, 8),
    hybrid("Qwen3.5-9B", 32, 4),
    hybrid("Qwen3.5-27B, 3.6-27B", 64, 4),
    hybrid("Qwen3.5-35B-A3B, 3.6-35B-A3B", 40, 2),
    dense("Gemma-3-12B", 48, 8, 256, architecture="gemma4", period=6, global_heads=Heads(8, 256, 256)),
    dense("Gemma-3-27B", 62, 16, architecture="gemma4", period=6, global_heads=Heads(16, 128, 128)),
    with_mla("GLM-4.7-Flash", 47, Mla(NARROW, 192, 256, n_ff=NARROW)),
    with_mla("DeepSeek-V3, R1", 61, Mla(NARROW, 128, 128, n_ff=NARROW)),
)


def forecasts(
    known: Known, caches: tuple[str, ...], lengths: tuple[int, ...], gpu: bool
) -> dict[tuple[str, int], int]:
    """Bytes of one sequence's rows, exact tokens and cells, by cache and length. gpu: where ubatches, and so
    exact windows, are longer; it need not be there. States of recurrent layers are left out: they have the
    same bytes in every cache."""
    from latentkv import _core
    from latentkv.plan.master import planned

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "shape.gguf"
        write(known.shape, path, sides_of("full/full", known.shape), "narrow", 1)
        model = _core.Model(str(path), describe_only=True, n_gpu_layers=99 if gpu else 0)
        found = {}
        for name in caches:
            for n in lengths:
                told = model.forecast(n, **planned(model, {"kv": name}))
                found[name, n] = int(told["total"] - told["states"])
        return found


def model_rows() -> list[dict[str, Any]]:
    rows = []
    for known in KNOWN:
        found = forecasts(known, CACHES, LENGTHS, gpu=True)
        row: dict[str, Any] = {"model": known.name}
        for n in LENGTHS:
            row |= {f"{name}_{n}": found[name, n] / GIB for name in CACHES}
            row[f"converted_{n}"] = BUDGET / 100 * found["f16", n] / GIB
        rows.append(row)
    return rows


def share_rows() -> list[dict[str, Any]]:
    known = next(each for each in KNOWN if each.name == OF)
    rows = []
    for where, gpu in (("on the CPU", False), ("on a GPU", True)):
        found = forecasts(known, ("f16", *PRESETS), SHORTER, gpu)
        for name in PRESETS:
            shares = {f"share_{n}": 100 * found[name, n] / found["f16", n] for n in SHORTER}
            rows.append({"cache": name, "where": where} | shares)
    return rows


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--save", action="store_true", help="write bench/results/sizes*.json")
    args = parser.parse_args()
    models, shares = model_rows(), share_rows()
    for row in (*models, *shares):
        print(", ".join(f"{each:.2f}" if isinstance(each, float) else each for each in row.values()))
    if args.save:
        command = "python bench/sizes.py --save"
        labels = {"converted": f"{BUDGET} %"}
        columns = [
            Column(f"{name}_{n}", f"{labels.get(name, name)} at {n}", ".2f")
            for n in LENGTHS
            for name in (*CACHES, "converted")
        ]
        save(
            RESULTS / "sizes.json", command=command, columns=[Column("model", "model"), *columns], rows=models
        )
        columns = [Column(f"share_{n}", f"at {n}", ".1f", "%") for n in SHORTER]
        columns = [Column("cache", f"of f16, {OF}"), Column("where", ""), *columns]
        save(RESULTS / "sizes-by-length.json", command=command, columns=columns, rows=shares)
    return 0


if __name__ == "__main__":
    sys.exit(main())
