"""Whole-model speed on a GPU of files as `convert` writes them by default, beside full f16 rows.

    python bench/gpu/default_files.py 8b --plans 14 --prefer speed,size --save default-files-8b

Files are random weights in the shape's size, with rows as the planner cuts them (random_model.py), all
measured in one run. With --llama-bench llama.cpp measures the plain file too, with flash attention and the
caches of --llama-kv.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # bench/

from gpu import cuda
from inputs import random_model, random_rows
from inputs.random_rows import Side
from inputs.random_shapes import SHAPES
from latentkv import _core
from record import RESULTS, Column, save


def caches(args: argparse.Namespace) -> dict[str, tuple[Side, Side]]:
    """The plain file's first, then one per plan and preference."""
    shape = SHAPES[args.shape]
    sides = {"full f16": random_rows.sides_of("full/full", shape)}
    for plan in args.plans.split(","):
        for prefer in args.prefer.split(","):
            for group in args.groups:
                heads = f", groups of {group}" if len(args.groups) > 1 else ""
                sides[f"{plan} %, {prefer}{heads}"] = random_rows.planned(plan, prefer, shape, group)
    return sides


def measure(path: Path, name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    depths = args.size_depths if "size" in name else args.depths
    model = _core.Model(str(path), n_gpu_layers=99)
    kv = "f16" if name == "full f16" else ""
    return cuda.measure(model, kv, [int(depth) for depth in depths.split(",")], args)


def llama_bench(program: str, path: Path, kv: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    command = [program, "-m", str(path), "-ngl", "99", "-fa", "1", "-r", "3", "-o", "jsonl"]
    command += ["-ctk", kv, "-ctv", kv]
    decode = [*command, "-p", "0", "-n", "32", "-d", args.depths]
    prefill = [*command, "-p", str(args.prefill), "-n", "0", "-d", str(args.prefill_depth)]
    prefill += ["-ub", "512,2048"]  # the faster one counts
    rows: list[dict[str, Any]] = []
    for of, key in ((decode, "decode_tps"), (prefill, "prefill_tps")):
        out = subprocess.run(of, capture_output=True, text=True, check=True).stdout
        rows += [
            {"depth": line["n_depth"], key: line["avg_ts"]} for line in map(json.loads, out.splitlines())
        ]
    return rows


def table(measured: dict[str, list[dict[str, Any]]], base: str, keys: list[str]) -> list[dict[str, Any]]:
    """One row a file: tokens/s by depth, and each as a share of the base file's; None: not measured."""
    of_base = {row["depth"]: row["decode_tps"] for row in measured[base] if "decode_tps" in row}
    rows = []
    for name, found in measured.items():
        row: dict[str, Any] = {**dict.fromkeys(keys), "file": name}
        for one in found:
            if "decode_tps" in one:
                row[f"at {one['depth']}"] = one["decode_tps"]
                if one["depth"] in of_base:
                    row[f"share at {one['depth']}"] = 100 * one["decode_tps"] / of_base[one["depth"]]
            if "prefill_tps" in one:
                row["prefill"] = max(one["prefill_tps"], row["prefill"] or 0)
            if "batch_of_8" in one:
                row["batch"] = one["batch_of_8"]
        rows.append(row)
    return rows


def columns_of(args: argparse.Namespace) -> list[Column]:
    columns = [Column("file", "cache")]
    for depth in args.depths.split(","):
        columns.append(Column(f"at {depth}", depth, ".0f"))
        columns.append(Column(f"share at {depth}", "of f16", ".0f", "%"))
    return [
        *columns,
        Column("prefill", f"prefill of {args.prefill} at {args.prefill_depth}", ".0f"),
        Column("batch", f"step of 8 tokens at {args.prefill_depth}, of one token's", ".2f", "x"),
    ]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--plans", default="14")
    parser.add_argument("--prefer", default="speed,size", help=f"of {', '.join(random_rows.PREFER)}")
    parser.add_argument("--groups", help="KV heads that share a latent (default: those that convert takes)")
    parser.add_argument("--depths", default="0,4096,16384,65536")
    parser.add_argument("--size-depths", default="0,4096,16384,65536", help="of files whose keys are rebuilt")
    parser.add_argument("--decode", type=int, default=35)
    parser.add_argument("--prefill", type=int, default=2048)
    parser.add_argument("--prefill-depth", type=int, default=16384)
    parser.add_argument("--ubatch", type=int, default=0, help="0 (default): as sessions choose")
    parser.add_argument("--llama-bench", metavar="PATH")
    parser.add_argument("--llama-kv", default="f16", help="its cache types, such as f16,q8_0")
    parser.add_argument("--save", metavar="NAME", help="bench/results/NAME.json")
    args = parser.parse_args()
    chosen = random_rows.chosen_group(args.shape)
    args.groups = [int(n) for n in args.groups.split(",")] if args.groups else [chosen]
    args.sink = args.recent = -1  # as the file asks
    return args


def main() -> None:
    args = parse()
    measured: dict[str, list[dict[str, Any]]] = {}
    for name, sides in caches(args).items():
        with tempfile.TemporaryDirectory() as folder:  # one file at a time
            path = Path(folder) / "model.gguf"
            random_model.write(SHAPES[args.shape], path, sides, name, 1)
            print(f"wrote {name}", file=sys.stderr, flush=True)
            if args.llama_bench and name == "full f16":
                for kv in args.llama_kv.split(","):
                    measured[f"llama.cpp {kv}"] = llama_bench(args.llama_bench, path, kv, args)
            measured[name] = measure(path, name, args)
    columns = columns_of(args)
    rows = table(measured, "full f16", [column.key for column in columns])
    if args.save:
        note = f"{cuda.ask_gpu('name')}, {SHAPES[args.shape].name} shape, tokens/s, batch 1."
        command = "python bench/gpu/default_files.py " + " ".join(sys.argv[1:])
        save(RESULTS / f"{args.save}.json", command=command, columns=columns, rows=rows, note=note)
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
