"""One table of what beside.py and llama-bench measured, as on a card or not: bench/results/cards/NAME.json.

    python bench/gpu/card_table.py 8b-rtx4090 8b.json 8b-more.json --of "Llama-3.1-8B's shape" \\
        --llama f16=llama-f16.jsonl

Beside each file of beside.py, X.json, lies the companion's report, X.report.json (consumer.py --report),
unless the GPU was as it is. The first cache of a file is what its others are compared with, turn by turn;
llama.cpp is compared with the first of all, which was measured at another time.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # bench/

from command import arguments
from record import RESULTS, Column, save

Row = dict[str, Any]


def label(cache: str) -> str:
    """
    >>> label("8b f16"), label("8b-8.5")
    ('f16', '8.5 %')
    """
    stem, _, kv = cache.partition(" ")
    return kv or f"{stem.rpartition('-')[2]} %"


def rows_gb_per_s(row: Row, empty: Row) -> float | None:
    """How fast a step read the cache's rows: their bytes over what the step takes longer than at depth 0."""
    if not row["depth"] or not row["decode_tps"] or not empty["decode_tps"]:
        return None
    seconds = 1 / row["decode_tps"] - 1 / empty["decode_tps"]
    return float(1e-9 * row["bytes_per_token"] * row["depth"] / seconds) if seconds > 0 else None


def table(files: list[list[Row]]) -> dict[str, Row]:
    """One row a cache, from rows a cache and a depth; a cache of two files is taken from the first."""
    found: dict[str, Row] = {}
    for rows in files:
        known = set(found)
        empty = {row["cache"]: row for row in rows if row["depth"] == 0}
        for row in rows:
            name = label(row["cache"])
            if name in known:
                continue
            depth = row["depth"]
            into = found.setdefault(name, {"cache": name, "prefill": None, "rows_gb_per_s": None})
            into[f"at_{depth}"] = row["decode_tps"]
            into[f"of_{depth}"] = 100 * row["of_first"] if row["of_first"] else None
            into["prefill"] = row.get("prefill_tps", into["prefill"])
            if row["cache"] in empty:
                into["rows_gb_per_s"] = rows_gb_per_s(row, empty[row["cache"]]) or into["rows_gb_per_s"]
    return found


def llama_row(name: str, lines: list[Row], base: Row) -> Row:
    """llama-bench's lines of one cache."""
    found: Row = {"cache": f"llama.cpp {name}", "prefill": None, "rows_gb_per_s": None}
    for line in lines:
        depth = line["n_depth"]
        if line["n_gen"]:
            f16 = base.get(f"at_{depth}")
            found[f"at_{depth}"] = line["avg_ts"]
            found[f"of_{depth}"] = 100 * line["avg_ts"] / f16 if f16 else None
        else:
            found["prefill"] = max(line["avg_ts"], found["prefill"] or 0)
    return found


def columns_of(depths: list[int], prefill: int, at: int) -> list[Column]:
    columns = [Column("cache", "cache")]
    for depth in depths:
        columns += [
            Column(f"at_{depth}", f"at {depth}", ".0f"),
            Column(f"of_{depth}", f"of f16 at {depth}", ".0f", "%"),
        ]
    return [
        *columns,
        Column("prefill", f"prompt of {prefill} at {at}", ",.0f"),
        Column("rows_gb_per_s", "rows read, GB/s", ".0f"),
    ]


def left(files: list[list[Row]]) -> dict[str, list[float]]:
    """Depth -> least and most that a light reader had around the rounds that count, in GB/s."""
    found: dict[str, list[float]] = {}
    for rows in files:
        for row in rows:
            found.setdefault(str(row["depth"]), []).extend(row["light_gb_per_s"])
    return {depth: [min(each), max(each)] for depth, each in found.items() if each}


def in_kind(report: Row, files: list[list[Row]]) -> tuple[str, str]:
    """The command before beside.py's, and what the card was made of."""
    ends = [end / 1e3 for each in left(files).values() for end in each]
    if not ends:
        sys.exit("[card_table] expected rounds beside a companion that left the card's bandwidth; got none")
    return (
        f"python bench/gpu/consumer.py {report['card']} -- ",
        f" in kind of an {report['card'].upper().replace('RTX', 'RTX ')}: code for its capability, 99 KB of "
        f"shared memory, {report['multiprocessors']} of {report['of']} multiprocessors, "
        f"{min(ends):.2f} to {max(ends):.2f} TB/s left to a light reader",
    )


def read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("name", help="of the table")
    parser.add_argument("files", nargs="+", type=Path, help="of beside.py")
    parser.add_argument("--of", required=True, help="the model, in the table's note")
    parser.add_argument("--llama", nargs="*", default=[], metavar="KV=FILE.jsonl", help="of llama-bench")
    parser.add_argument("--folder", type=Path, default=RESULTS / "cards")
    args = parser.parse_args()
    measured = [json.loads(path.read_text()) for path in args.files]
    beside = {path.stem: path.with_suffix(".report.json") for path in args.files}
    reports = {stem: json.loads(path.read_text()) for stem, path in beside.items() if path.exists()}
    files = [each["rows"] for each in measured]
    prefix, kind = in_kind(next(iter(reports.values())), files) if reports else ("", "")
    found = table(files)
    base = next(iter(found.values()))
    rows = list(found.values())
    rows += [
        llama_row(kv, read(Path(path)), base) for kv, _, path in (of.partition("=") for of in args.llama)
    ]
    depths = sorted({int(key[3:]) for row in rows for key in row if key.startswith("at_")})
    at = next((row["depth"] for each in files for row in each if "prefill_tps" in row), 0)
    columns = columns_of(depths, measured[0]["prefill"], at)
    save(
        args.folder / f"{args.name}.json",
        command=f"{prefix}python bench/gpu/beside.py …",
        columns=columns,
        rows=[{**dict.fromkeys(column.key for column in columns), **row} for row in rows],
        note=f"{measured[0]['gpu']}{kind}; {args.of}, batch 1, tokens/s. Caches of one process took turns.",
        light_gb_per_s=left(files),
        in_kind=reports,
    )
    print(args.folder / f"{args.name}.json")


if __name__ == "__main__":
    main()
