"""`make demo`: converts models/demo, measures what its cache lost, and asks it something.

python bench/demo.py [--out build/demo]
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from command import ROOT, arguments, latentkv, score
from inputs.hide import hide
from latentkv.console.terminal import show, table
from record import Column

TEXT = Path("models/demo/sample-val.txt")
CONTEXT = 1024  # sample-val.txt has 2900 tokens: two windows
SECRET = "4178410"

COLUMNS = [
    Column("file", "file"),
    Column("kv", "cache"),
    Column("bytes", "bytes per token", ",.0f"),
    Column("share", "of f16", ".1%"),
    Column("ppl", "perplexity", ".3f"),
    Column("kld", "mean KLD", ".5f"),
    Column("same_top", "same top token", ".1%"),
]


def print_table(rows: list[dict[str, Any]], columns: list[Column]) -> None:
    """Names to the left, numbers to the right."""
    cells = [["-" if row[c.key] is None else format(row[c.key], c.format) for c in columns] for row in rows]
    show(table([c.label for c in columns], cells, left=2, rule=False))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/demo"), help="where the GGUF files go")
    options = parser.parse_args()
    start = time.monotonic()
    (ROOT / options.out).mkdir(parents=True, exist_ok=True)
    plain, small = options.out / "demo-f16.gguf", options.out / "demo-14.gguf"

    latentkv("convert", "models/demo", "-o", str(plain), "--method", "none", "--outtype", "f16")
    latentkv(
        *("convert", "models/demo", "-o", str(small), "--outtype", "f16"),
        *("--calib", "models/demo/sample-calib.txt", "--kv-budget", "14%"),
    )
    latentkv("info", str(small), "-c", "32768")

    rows: list[dict[str, Any]] = []
    for gguf, kv, against in [
        (plain, "f16", None),
        (plain, "q8_0", "f16"),
        (plain, "q4_0", "f16"),
        (small, "", str(plain)),
    ]:
        rows.append(score(gguf, TEXT, kv, CONTEXT, against))
    for row in rows:
        row["share"] = row["bytes"] / rows[0]["bytes"]

    prompt = options.out / "question.txt"
    text = (ROOT / TEXT).read_text(encoding="utf-8")[:3000]
    (ROOT / prompt).write_text(hide(text, "warehouse", SECRET, 750), encoding="utf-8")
    print(f"\nA number, {SECRET}, hidden in 900 tokens ({prompt}), read back through the compressed cache:")
    latentkv("chat", str(small), "-c", "2048", "--temp", "0", "-n", "32", "-f", str(prompt))

    print(
        f"\n{plain.stem}: the checkpoint as it is. {small.stem}: a cache of 14 % of f16 at 32768 tokens, "
        "its first and latest tokens exact. KLD in nats per token against the first row.\n"
    )
    print_table(rows, COLUMNS)
    print(
        f"\n{time.monotonic() - start:.0f} s; the files are in {options.out}. "
        f"Try: {Path(sys.executable).parent / 'latentkv'} chat {small}"
    )


if __name__ == "__main__":
    main()
