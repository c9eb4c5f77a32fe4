"""What the options of `palu` are worth on models/demo: group, allocation, basis and rotation at half rank.

Quality is measured twice, since the two disagree: as divergence on a text, and as numbers found in it.

python bench/lab/palu_options.py [--out build/palu]      writes palu-basis.json and palu-rotation.json
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # bench/

from command import ROOT, latentkv, needles, score
from inputs.hide import write_questions
from record import RESULTS, Column, save

CALIB = Path("models/demo/sample-calib.txt")
TEXT = Path("models/demo/sample-val.txt")
CONTEXT = 512
QUALITY = [
    Column("ppl", "perplexity", ".2f"),
    Column("kld", "mean KLD", ".4f"),
    Column("kld_p99", "99 %", ".3f"),
    Column("same_top", "same top token", ".1%"),
    Column("found", "numbers found"),
]
N_QUESTIONS = 24
NOTE = (
    f"`models/demo`, `--method palu --keep 0.5`, `sample-val.txt` at {CONTEXT} tokens; "
    f"KLD in nats per token against the uncompressed f16 cache. Numbers found: of {N_QUESTIONS} hidden in "
    "passages of 3000 characters (about 900 tokens), teacher forced."
)


def convert(out: Path, name: str, *options: str) -> Path:
    gguf = out / f"{name}.gguf"
    latentkv("convert", "models/demo", "-o", str(gguf), "--outtype", "f16", "--no-plot", *options)
    return gguf


def measure(gguf: Path, kv: str, against: Path, data: Path) -> dict[str, Any]:
    return score(gguf, TEXT, kv, CONTEXT, str(against)) | {"found": needles(gguf, data, kv)}


def palu(out: Path, name: str, *options: str) -> Path:
    return convert(out, name, "--method", "palu", "--keep", "0.5", "--calib", str(CALIB), *options)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("build/palu"), help="where the GGUF files go")
    out: Path = parser.parse_args().out
    (ROOT / out).mkdir(parents=True, exist_ok=True)
    plain = convert(out, "plain", "--method", "none")
    data = out / "needles.jsonl"
    write_questions((ROOT / TEXT).read_text(encoding="utf-8"), N_QUESTIONS, 3000, ROOT / data)

    rows: list[dict[str, Any]] = []
    for group, allocate, basis in [
        ("1", "uniform", "whitened"),
        ("2", "uniform", "whitened"),
        ("all", "uniform", "whitened"),
        ("all", "uniform", "plain"),
        ("all", "fisher", "whitened"),
    ]:
        name = f"{group}-{allocate}-{basis}"
        gguf = palu(out, name, "--group", group, "--allocate", allocate, "--basis", basis)
        options = {"group": group, "allocate": allocate, "basis": basis}
        rows.append(options | measure(gguf, "f16", plain, data))
    columns = [Column(key, f"`--{key}`") for key in ("group", "allocate", "basis")]
    save(
        RESULTS / "palu-basis.json",
        command="python bench/lab/palu_options.py",
        columns=columns + QUALITY,
        rows=rows,
        note=NOTE,
    )

    rows = []
    for flag in ("--rotate", "--no-rotate"):
        gguf = palu(out, flag.strip("-"), "--group", "all", "--allocate", "uniform", flag)
        rows += [{"rotation": f"`{flag}`"} | measure(gguf, kv, plain, data) for kv in ("q4", "q3", "q2")]
    rows.sort(key=lambda row: row["kv"], reverse=True)
    columns = [
        Column("kv", "`--kv`"),
        Column("rotation", "rotation"),
        Column("bytes", "bytes per token", ",.0f"),
    ]
    save(
        RESULTS / "palu-rotation.json",
        command="python bench/lab/palu_options.py",
        columns=columns + QUALITY,
        rows=rows,
        note=NOTE,
    )


if __name__ == "__main__":
    main()
