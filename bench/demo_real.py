"""`make demo-real`: gives SmolLM2-135M a smaller cache, measures what it lost, and asks it something.

python bench/demo_real.py [--out build/demo-real]

The model is downloaded once (bench/inputs/real_models.py); the text to convert and to measure on is the
Python reference (bench/inputs/texts.py). The conversion takes most of the time.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

from command import ROOT, arguments, latentkv
from demo import print_table
from inputs import texts
from inputs.real_models import model_path
from ladder import cell
from ladder.cell import Job
from record import Column

BUDGET = "14%"
QUESTION = "What is a cache? Answer in two sentences."
COLUMNS = [
    Column("file", "file"),
    Column("kv", "cache"),
    Column("bytes", "bytes per token", ",.0f"),
    Column("share", "of f16", ".1%"),
    Column("ppl", "perplexity", ".3f"),
    Column("kld", "mean KLD", ".5f"),
    Column("kld_median", "median", ".5f"),
    Column("same_top", "same top token", ".1%"),
]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/demo-real"), help="where the files go")
    parser.add_argument("-t", "--threads", type=int, default=0, help="of the measurement")
    options = parser.parse_args()
    begin = time.monotonic()
    plain = model_path("smollm2")
    out: Path = ROOT / options.out
    calib, held_out = texts.write(out)
    small = out / "smollm2-14.gguf"
    converting = time.monotonic()
    latentkv(
        *("convert", str(plain), "-o", str(small), "--calib", str(calib)),
        *("--kv-budget", BUDGET, "--fisher-tokens", "8192"),
    )
    converted = time.monotonic() - converting
    latentkv("info", str(small), "-c", "8192")

    print("\nmeasuring: f16 rows, q4_0 rows, and the new file", flush=True)
    folder = out / "reference"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    rows = []
    for gguf, kv in ((plain, "f16"), (plain, "q4_0"), (small, "")):
        job = Job(
            *(str(gguf), str(plain), str(folder), str(held_out), {"kv": kv} if kv else {}),
            n_ctx=1024,
            chunks=2,
            samples=0,
            answers=0,
            threads=options.threads,
        )
        rows.append({"file": gguf.stem, "kv": kv or "plan"} | cell.run(job))
    shutil.rmtree(folder)
    latentkv("chat", str(small), "-c", "2048", "--temp", "0", "-n", "80", "-p", QUESTION)
    print(
        f"\nBytes: of a cache of {cell.SERVED} tokens. KLD in nats per token against the first row: two "
        "windows of 1024\ntokens, first halves read as a prompt, second ones decoded one by one and scored. "
        "That row beside itself,\n"
        "one window at a time: what products with 4-bit weights round, with any cache.\n"
    )
    print_table(rows, COLUMNS)
    print(
        f"\n{time.monotonic() - begin:.0f} s, {converted:.0f} of them for the conversion; the files are in "
        f"{options.out}. Try: {Path(sys.executable).parent / 'latentkv'} chat {small}"
    )


if __name__ == "__main__":
    main()
