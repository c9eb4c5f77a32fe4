"""What a smaller cache costs a model three of whose four layers do not attend, by --prefer and bytes.

    python bench/toy/quality.py [models/demo-hybrid models/demo] --save

Keys of `speed` are stored rotated, those of `size` before RoPE. In the layout of Qwen 3.5 RoPE turns a
quarter of each head, so the two should be nearer to each other than in models/demo, where it turns all of it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # bench/

from command import ROOT, latentkv, score
from demo import print_table
from record import RESULTS, Column, save

MODELS = ("models/demo-hybrid", "models/demo")
BUDGETS, PREFERENCES = ("28%", "14%", "8.5%"), ("speed", "size")
STOCK = ("q8_0", "q4_0")
CONTEXT, WINDOWS = 2048, 24
COLUMNS = [
    Column("model", "model"),
    Column("cache", "cache"),
    Column("bytes", "bytes per token", ",.0f"),
    Column("share", "of f16", ".1%"),
    Column("ppl", "perplexity", ".3f"),
    Column("kld", "mean KLD", ".5f"),
    Column("kld_p99", "99 %", ".4f"),
    Column("same_top", "same top token", ".1%"),
]


def held_out(model: Path, path: Path) -> None:
    """Text of every kind that neither training nor calibration has read, in the model's template."""
    from transformers import AutoTokenizer

    from latentkv_convert.calibrate.text import mix

    tokenizer = AutoTokenizer.from_pretrained(model)
    text = mix.text(
        lambda messages: tokenizer.apply_chat_template(messages, tokenize=False), part=mix.HELD_OUT
    )
    path.write_text(text, encoding="utf-8")


def measured(model: str, out: Path, windows: int) -> list[dict[str, Any]]:
    """The f16 cache first, stock types, then a file for every budget and preference."""
    folder = out / Path(model).name
    (ROOT / folder).mkdir(parents=True, exist_ok=True)
    text, plain = folder / "held-out.txt", folder / "plain.gguf"
    held_out(ROOT / model, ROOT / text)
    weights = ("--outtype", "f16")
    latentkv("convert", model, "-o", str(plain), "--method", "none", *weights)
    files: list[tuple[str, Path, str, str | None]] = [("f16", plain, "f16", None)]
    files += [(kv, plain, kv, "f16") for kv in STOCK]
    for budget in BUDGETS:
        for prefer in PREFERENCES:
            path = folder / f"{budget.rstrip('%')}-{prefer}.gguf"
            asked = ("--kv-budget", budget, "--prefer", prefer, "--no-plot")
            latentkv("convert", model, "-o", str(path), *weights, *asked)
            files.append((f"{budget.rstrip('%')} %, {prefer}", path, "", str(plain)))
    rows = []
    for name, path, kv, against in files:
        row = {"model": Path(model).name, "cache": name}
        rows.append(row | score(path, text, kv, CONTEXT, against, "--chunks", str(windows)))
    for row in rows:
        row["share"] = row["bytes"] / rows[0]["bytes"]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=MODELS, help="checkpoints (default: both)")
    parser.add_argument("--out", type=Path, default=Path("build/hybrid"), help="where the GGUF files go")
    parser.add_argument("--windows", type=int, default=WINDOWS, help=f"of {CONTEXT} tokens")
    parser.add_argument("--save", action="store_true", help="write bench/results/hybrid-toy.json")
    options = parser.parse_args()
    rows = [row for model in options.models for row in measured(model, options.out, options.windows)]
    print_table(rows, COLUMNS)
    if options.save:
        save(
            RESULTS / "hybrid-toy.json",
            command="python bench/toy/quality.py --save",
            columns=COLUMNS,
            rows=rows,
            note=f"f16 weights, held-out text of {options.windows} windows of {CONTEXT} tokens; "
            "KLD in nats per token against the f16 cache.",
        )


if __name__ == "__main__":
    main()
