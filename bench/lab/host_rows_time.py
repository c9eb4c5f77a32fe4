"""What a step of 8B shape costs with the middle's rows in the host's memory: bytes, and time by them.

    python bench/lab/host_rows_time.py [--gather host_gather.json]

--gather takes what bench/gpu/host_gather.cu printed on a GPU and makes results/host-gather.json of it, from
which the time over PCIe is taken; without it that is what stands there already.

Rows are those of the default file (random_model.PLANS, groups of 4 heads). A step with all rows on the GPU
is measured (results/default-files-8b-h100.json) up to 131072 tokens, beyond on a line through the last two
depths. A step that fetches is the measured one without a cache, plus the time of the index (its share of the
time that attention to whole rows takes, by bytes: kernels are bound by products, not by memory), plus that of
attention to what is fetched, plus the fetched bytes over PCIe. Choosing the best scores and its launches
count nothing, so it is a bound from below.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # bench/

from inputs.random_model import CHOSEN_GROUPS, PLANS, SHAPES
from latentkv_convert.rows.sizes import segment_bytes
from record import RESULTS, Column, save

SHAPE = SHAPES["8b"]
GROUP = CHOSEN_GROUPS["8b"]
COLUMNS = [
    Column("tokens", "tokens"),
    Column("rows", "rows"),
    Column("gpu", "on the GPU", ".2f", "GiB"),
    Column("host", "in the host's memory", ".2f", "GiB"),
    Column("fetched", "fetched a step", ".0f", "MB"),
    Column("pcie_ms", "PCIe", ".1f", "ms"),
    Column("step_ms", "step", ".1f", "ms"),
    Column("hidden_ms", "PCIe hidden", ".1f", "ms"),
    Column("tps", "tokens/s", ".0f"),
]
GATHERED = [
    Column("tokens", "tokens"),
    Column("row", "bytes of a row"),
    Column("share", "fetched", ".0%"),
    Column("unit", "side by side"),
    Column("host_ms", "from the host", ".2f", "ms"),
    Column("host_gbs", "GB/s", ".0f"),
    Column("device_ms", "from the GPU's memory", ".2f", "ms"),
    Column("whole_copy_ms", "all rows copied", ".1f", "ms"),
]


def row_bytes() -> tuple[list[int], list[int]]:
    """Of K's and V's segments, all groups of a layer together."""
    k, v = PLANS["14", GROUP]
    groups = SHAPE.n_kv // GROUP
    return [groups * segment_bytes(*s) for s in k], [groups * segment_bytes(*s) for s in v]


def measured_steps() -> tuple[dict[int, float], str]:
    """Depth -> ms of a step with all rows on the GPU."""
    found = json.loads((RESULTS / "default-files-8b-h100.json").read_text(encoding="utf-8"))
    row = next(row for row in found["rows"] if row["file"] == "14 %, speed")
    keys = [key for key in row if key.startswith("at ") and row[key]]
    return {int(key[3:]): 1000 / row[key] for key in keys}, found["note"].split(",")[0]


def attention_ms(steps: dict[int, float], tokens: int) -> float:
    """Of all rows on the GPU: what a step takes over one without a cache."""
    if tokens in steps:
        return steps[tokens] - steps[0]
    (a, x), (b, y) = sorted(steps.items())[-2:]
    return float(y + (y - x) / (b - a) * (tokens - b)) - steps[0]


def rows(tokens: int, chosen: float, copied: float) -> list[dict[str, Any]]:
    """chosen, copied: GB/s of single rows and of all of them over PCIe."""
    k, v = row_bytes()
    whole = sum(k) + sum(v)
    steps, _ = measured_steps()
    attention = attention_ms(steps, tokens)
    stored = tokens * SHAPE.n_layer

    def row(name: str, index: int, share: float) -> dict[str, Any]:
        """index: bytes of a row that stay on the GPU; what is fetched is the rest of the row."""
        fetched = stored * share * (whole - index)
        pcie = fetched / (copied if share == 1 else chosen) / 1e6
        on_gpu = steps[0] + attention * (index / whole + share * (1 - index / whole))
        return {
            "tokens": tokens,
            "rows": name,
            "gpu": stored * index / 2**30,
            "host": 0.0 if index == whole else stored * whole / 2**30,
            "fetched": fetched / 1e6,
            "pcie_ms": pcie,
            "step_ms": on_gpu + pcie,
            "hidden_ms": max(on_gpu, pcie),
            "tps": 1000 / (on_gpu + pcie),
        }

    kept = {
        "first segment of K": k[0],
        "two segments of K": k[0] + k[1],
        "all of K": sum(k),
        "first segments of K and V": k[0] + v[0],
    }
    made = [row("all on the GPU", whole, 0.0), row("all in the host's memory, all read", 0, 1.0)]
    for name, index in kept.items():
        for share in (0.01, 0.05):
            made.append(row(f"{name} kept, {index / whole:.0%}; {share:.0%} fetched", index, share))
    return made


def save_gathered(path: Path) -> None:
    """The table of what host_gather.cu measured."""
    found = json.loads(path.read_text(encoding="utf-8"))
    note = (
        f"{found['gpu']}: rows gathered out of pinned memory (host) or its own (GPU) in one launch a layer, "
        f"{found['layers']} layers; copied whole: the same layers by the copy engine."
    )
    command = "nvcc -O3 -std=c++17 -arch=native bench/gpu/host_gather.cu -o host_gather && ./host_gather"
    save(
        RESULTS / "host-gather.json",
        command=command,
        columns=GATHERED,
        rows=found["cases"],
        note=note,
        gpu=found["gpu"],
    )


def gathered_rates() -> tuple[float, float, str]:
    """GB/s of 5 % of rows one by one, near a default row without its first segment; and of all, copied."""
    found = json.loads((RESULTS / "host-gather.json").read_text(encoding="utf-8"))
    k, v = row_bytes()
    fitting = [case for case in found["rows"] if case["unit"] == 1 and case["share"] == 0.05]
    case = min(fitting, key=lambda case: (abs(case["row"] - (sum(k) - k[0] + sum(v))), case["tokens"]))
    return float(case["host_gbs"]), float(case["whole_gbs"]), str(found["gpu"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gather", type=Path, metavar="JSON", help="output of bench/gpu/host_gather.cu")
    parser.add_argument("--tokens", type=int, nargs="+", default=[131072, 524288])
    args = parser.parse_args()
    if args.gather:
        save_gathered(args.gather)
    chosen, copied, gathered_on = gathered_rates()
    k, v = row_bytes()
    steps, gpu = measured_steps()
    if not np.isclose(8 * sum(k + v) / (16 * 2 * SHAPE.n_kv * SHAPE.head_dim), 0.14, atol=0.005):
        raise SystemExit(f"error: [host_rows_time] expected rows of 14 % of f16; got {sum(k + v)} bytes")
    note = (
        f"{SHAPE.name} shape, batch 1, the default rows of {sum(k) + sum(v)} bytes a token and layer (K "
        f"{sum(k)}, V {sum(v)}). Steps without a cache and with all rows on the GPU: {gpu}, measured up to "
        f"{max(steps)} tokens. PCIe: {chosen:.1f} GB/s of chosen rows, {copied:.1f} of all, as an "
        f"{gathered_on} gathers them. Hidden: as if all of it went beside other work."
    )
    table = [row for tokens in args.tokens for row in rows(tokens, chosen, copied)]
    command = "python bench/lab/host_rows_time.py"
    save(RESULTS / "host-rows-time.json", command=command, columns=COLUMNS, rows=table, note=note)
    for each in table:
        print({key: round(value, 3) if isinstance(value, float) else value for key, value in each.items()})


if __name__ == "__main__":
    main()
