"""Whole-model speed on a GPU of files as `convert` writes them by default, beside full f16 rows.

    python bench/gpu/default_files.py 8b --plans 14 --prefer speed,size --save default-files-8b
    python bench/gpu/default_files.py 8b --kv f16,q8_0,q4_0 --plans 28,14,8.5 --card rtx4090 --save 8b-rtx4090

Files are random weights in the shape's size, with rows as the planner cuts them (random_model.py), all
measured in one run. With --llama-bench llama.cpp measures the plain file too, with flash attention and the
caches of --llama-kv. With --card every program runs as on that card, in kind (consumer.py); with --parts too,
memory stays as fast as it is, and the table has what follows from the parts of a step (on_card.py).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # bench/

from gpu import cuda
from gpu.consumer import CARDS
from gpu.on_card import Memory, tokens_per_s
from inputs import random_model, random_rows
from inputs.random_rows import Side
from inputs.random_shapes import SHAPES
from record import RESULTS, Column, save

HERE = Path(__file__).resolve().parent
LLAMA_SHARE = {"f16": 1.0, "q8_0": 8.5 / 16, "q4_0": 4.5 / 16}  # of f16's bytes
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


class Runner:
    """Runs programs, as on a card where one is asked for."""

    def __init__(self, card: str | None, parts: bool, folder: Path) -> None:
        self.reports: list[dict[str, Any]] = []
        self._card, self._report = card, folder / "consumer.json"
        self._options = ["--no-readers"] if parts else []

    def run(self, *command: str) -> str:
        """What the program prints.

        Raises:
            subprocess.CalledProcessError: it failed.
        """
        prefix = []
        if self._card:
            prefix = [
                sys.executable,
                str(HERE / "consumer.py"),
                self._card,
                *self._options,
                "--report",
                str(self._report),
                "--",
            ]
        out = subprocess.run([*prefix, *command], stdout=subprocess.PIPE, text=True, check=True).stdout
        if self._card:
            self.reports.append(json.loads(self._report.read_text()))
            os.environ["CONSUMER_CHOICE"] = self.reports[0]["choice"]  # all alike
        return out


def measure(runner: Runner, path: Path, name: str, kv: str, args: argparse.Namespace) -> Rows:
    depths = args.size_depths if "size" in name else args.depths
    found = path.with_suffix(".json")
    sizes = {"decode": args.decode, "prefill": args.prefill, "prefill-depth": args.prefill_depth}
    options = [
        f"--{key}={value}" for key, value in {**sizes, "ubatch": args.ubatch, "depths": depths}.items()
    ]
    options += ["--copies"] if args.copies else []
    program = str(HERE / "cuda.py")
    runner.run(sys.executable, program, str(path), f"--kv={kv}", *options, f"--json={found}")
    result = json.loads(found.read_text())
    return [{**row, "weight_bytes": result["weight_bytes"]} for row in result["rows"]]


def llama_bench(runner: Runner, path: Path, kv: str, args: argparse.Namespace) -> Rows:
    command = [args.llama_bench, "-m", str(path), "-ngl", "99", "-fa", "1", "-r", "1", "-o", "jsonl"]
    command += ["-ctk", kv, "-ctv", kv]
    decode = [*command, "-p", "0", "-n", "48", "-d", args.depths]
    prefill = [*command, "-p", str(args.prefill), "-n", "0", "-d", str(args.prefill_depth)]
    prefill += ["-ub", "512,2048"]  # the faster one counts
    rows: Rows = []
    for of, key in ((decode, "decode_tps"), (prefill, "prefill_tps")):
        lines = [line for line in runner.run(*of).splitlines() if line.startswith("{")]
        rows += [{"depth": line["n_depth"], key: line["avg_ts"]} for line in map(json.loads, lines)]
    return rows


def on_card(measured: dict[str, Rows], memory: Memory) -> dict[str, Rows]:
    """What a card decodes in a second. llama.cpp's steps read the same weights, and rows of its types."""
    base = measured["full f16"][0]
    found: dict[str, Rows] = {}
    for name, rows in measured.items():
        here = {row["depth"]: row["decode_tps"] for row in rows if "decode_tps" in row}
        if 0 not in here:
            continue
        of = next((row for row in rows if "bytes_per_token" in row), base)
        row_bytes = of["bytes_per_token"] * (LLAMA_SHARE[name.split()[-1]] if of is base else 1)
        rates = tokens_per_s(here, base["weight_bytes"], row_bytes, memory)
        found[name] = [{"depth": depth, "decode_tps": rate} for depth, rate in rates.items()]
    return found


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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
    parser.add_argument("--card", choices=CARDS, help="measure as on this card, in kind")
    parser.add_argument("--parts", action="store_true", help="with --card: from parts (on_card.py)")
    parser.add_argument("--save", metavar="NAME", help="bench/results/NAME.json")
    args = parser.parse_args()
    if args.parts and not args.card:
        parser.error("[parts] expected --card beside --parts; got none")
    chosen = random_rows.chosen_group(args.shape)
    args.groups = [int(n) for n in args.groups.split(",")] if args.groups else [chosen]
    return args


def write_table(measured: dict[str, Rows], runner: Runner, args: argparse.Namespace) -> Rows:
    columns = columns_of(args)
    if args.parts:
        columns = [column for column in columns if column.key not in ("prefill", "batch")]
        measured = on_card(measured, Memory.of(runner.reports[0], CARDS[args.card].gb_per_s))
    rows = table(measured, "full f16", [column.key for column in columns])
    if args.save:
        gpu = cuda.ask_gpu("name")
        how = "from parts of steps" if args.parts else "in kind"
        where = f"{args.card} {how}, on {gpu}" if args.card else gpu
        note = f"{where}, {SHAPES[args.shape].name} shape, tokens/s, batch 1."
        command = "python bench/gpu/default_files.py " + " ".join(sys.argv[1:])
        more = {"in_kind": runner.reports} if args.card else {}
        save(RESULTS / f"{args.save}.json", command=command, columns=columns, rows=rows, note=note, **more)
    return rows


def main() -> None:
    args = parse()
    measured: dict[str, Rows] = {}
    with tempfile.TemporaryDirectory() as folder:
        runner, path = (
            Runner(args.card, args.parts, Path(folder)),
            Path(folder) / "model.gguf",
        )  # one file at a time
        for name, sides in files(args).items():
            random_model.write(SHAPES[args.shape], path, sides, name, 1)
            print(f"wrote {name}", file=sys.stderr, flush=True)
            formats = {f"full {kv}": kv for kv in args.kv.split(",")} if name == "full" else {name: ""}
            for of, kv in formats.items():
                measured[of] = measure(runner, path, of, kv, args)
                rows = write_table(measured, runner, args)
            for kv in args.llama_kv.split(",") if args.llama_bench and name == "full" else ():
                measured[f"llama.cpp {kv}"] = llama_bench(runner, path, kv, args)
                rows = write_table(measured, runner, args)
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
