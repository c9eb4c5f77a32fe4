"""Whole-model speed on a GPU of files as `convert` writes them by default, beside full f16 rows.

    python bench/gpu/default_files.py 8b --plans 14 --prefer speed,size --save default-files-8b
    python bench/gpu/consumer.py rtx4090 -- python bench/gpu/default_files.py 8b --kv f16,q8_0,q4_0

Files are random weights in the shape's size, with rows as the planner cuts them (random_model.py), all
measured in one run. With --llama-bench llama.cpp measures the plain file too, with flash attention and the
caches of --llama-kv. Behind consumer.py every program runs as on a consumer card, in kind.
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

from command import arguments
from gpu import cuda
from inputs import random_model, random_rows
from inputs.random_rows import Side
from inputs.random_shapes import SHAPES
from record import RESULTS, Column, save

HERE = Path(__file__).resolve().parent
Rows = list[dict[str, Any]]


def files(args: argparse.Namespace) -> dict[str, tuple[Side, Side]]:
    """The plain file's first, then one per plan and preference."""
    shape = SHAPES[args.shape]
    sides = {"full": random_rows.sides_of("full/full", shape)}
    for plan in filter(None, args.plans.split(",")):
        for prefer in args.prefer.split(","):
            for group in args.groups:
                heads = f", groups of {group}" if len(args.groups) > 1 else ""
                sides[f"{plan} %, {prefer}{heads}"] = random_rows.planned(plan, prefer, shape, group)
    return sides


def measure(path: Path, name: str, kv: str, args: argparse.Namespace) -> Rows:
    depths = args.size_depths if "size" in name else args.depths
    found = path.with_suffix(".json")
    sizes = {"decode": args.decode, "prefill": args.prefill, "prefill-depth": args.prefill_depth}
    options = [
        f"--{key}={value}" for key, value in {**sizes, "ubatch": args.ubatch, "depths": depths}.items()
    ]
    options += ["--copies"] if args.copies else []
    program = str(HERE / "cuda.py")
    command = [sys.executable, program, str(path), f"--kv={kv}", *options, f"--json={found}"]
    subprocess.run(command, stdout=subprocess.PIPE, check=True)
    rows: Rows = json.loads(found.read_text())["rows"]
    return rows


def llama_bench(path: Path, kv: str, args: argparse.Namespace) -> Rows:
    command = [args.llama_bench, "-m", str(path), "-ngl", "99", "-fa", "1", "-r", "1", "-o", "jsonl"]
    command += ["-ctk", kv, "-ctv", kv]
    decode = [*command, "-p", "0", "-n", "48", "-d", args.depths]
    prefill = [*command, "-p", str(args.prefill), "-n", "0", "-d", str(args.prefill_depth)]
    prefill += ["-ub", "512,2048"]  # the faster one counts
    rows: Rows = []
    for of, key in ((decode, "decode_tps"), (prefill, "prefill_tps")):
        out = subprocess.run(of, stdout=subprocess.PIPE, text=True, check=True).stdout
        lines = [line for line in out.splitlines() if line.startswith("{")]
        rows += [{"depth": line["n_depth"], key: line["avg_ts"]} for line in map(json.loads, lines)]
    return rows


def table(measured: dict[str, Rows], base: str, keys: list[str]) -> Rows:
    """One row a file: tokens/s by depth, and each as a share of the base file's; None: not measured."""
    of_base = {row["depth"]: row["decode_tps"] for row in measured.get(base, []) if "decode_tps" in row}
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
    parser = arguments(__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--kv", default="f16", help="row formats of the plain file, such as f16,q8_0")
    parser.add_argument("--plans", default="14", help="shares of f16 (default: 14)")
    parser.add_argument("--prefer", default="speed,size", help=f"of {', '.join(random_rows.PREFER)}")
    parser.add_argument("--groups", help="KV heads that share a latent (default: those that convert takes)")
    parser.add_argument("--depths", default="0,4096,16384,65536")
    parser.add_argument("--size-depths", default="0,4096,16384,65536", help="of files whose keys are rebuilt")
    parser.add_argument("--decode", type=int, default=35)
    parser.add_argument("--prefill", type=int, default=2048)
    parser.add_argument("--prefill-depth", type=int, default=16384)
    parser.add_argument("--ubatch", type=int, default=0, help="0 (default): as sessions choose")
    parser.add_argument(
        "--copies", action="store_true", help="fill deep caches with copies of rows (cuda.py)"
    )
    parser.add_argument("--llama-bench", metavar="PATH")
    parser.add_argument("--llama-kv", default="f16", help="its cache types, such as f16,q8_0")
    parser.add_argument("--save", metavar="NAME", help="bench/results/NAME.json")
    args = parser.parse_args()
    chosen = random_rows.chosen_group(args.shape)
    args.groups = [int(n) for n in args.groups.split(",")] if args.groups else [chosen]
    return args


def write_table(measured: dict[str, Rows], args: argparse.Namespace) -> Rows:
    columns = columns_of(args)
    rows = table(measured, "full f16", [column.key for column in columns])
    if args.save:
        note = f"{cuda.ask_gpu('name')}, {SHAPES[args.shape].name} shape, tokens/s, batch 1."
        command = "python bench/gpu/default_files.py " + " ".join(sys.argv[1:])
        save(RESULTS / f"{args.save}.json", command=command, columns=columns, rows=rows, note=note)
    return rows


def main() -> None:
    args = parse()
    measured: dict[str, Rows] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"  # one file at a time
        for name, sides in files(args).items():
            random_model.write(SHAPES[args.shape], path, sides, name, 1)
            print(f"wrote {name}", file=sys.stderr, flush=True)
            formats = {f"full {kv}": kv for kv in args.kv.split(",")} if name == "full" else {name: ""}
            for of, kv in formats.items():
                measured[of] = measure(path, of, kv, args)
                rows = write_table(measured, args)
            for kv in args.llama_kv.split(",") if args.llama_bench and name == "full" else ():
                measured[f"llama.cpp {kv}"] = llama_bench(path, kv, args)
                rows = write_table(measured, args)
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
