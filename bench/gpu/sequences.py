"""Steps of several sequences on a GPU: default files beside full f16 rows, tokens of all sequences or few.

    python bench/gpu/sequences.py 8b,7b

Eight sequences are filled to a depth each; then steps of one token of eight, four or one of them are timed,
and of eight in an empty cache. Milliseconds, medians.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # bench/

from gpu import cuda
from inputs import random_model, random_rows
from inputs.random_shapes import SHAPES
from latentkv import _core
from record import RESULTS, Column, save

SEQUENCES, STEPS, SKIPPED = 8, 56, 6
ASKED = (8, 4, 1)


def measured(path: Path, kv: str, depth: int) -> dict[str, float]:
    model = _core.Model(str(path), n_gpu_layers=99)
    random = np.random.default_rng(1)
    exact = 0 if kv else -1  # the file's windows
    n_ctx = SEQUENCES * (depth + 4 * STEPS + 256)
    session = _core.Session(model, n_ctx=n_ctx, n_seq_max=SEQUENCES, kv=kv, sink=exact, recent=exact)

    def step_ms(n: int) -> float:
        return 1e3 * cuda.step_time(session, random, model.n_vocab, n, STEPS, SKIPPED)

    found = {"empty": step_ms(SEQUENCES)}
    for seq in range(SEQUENCES):
        assert session.seq_rm(seq, 0, -1)
        session.decode(random.integers(0, model.n_vocab, depth).tolist(), seq=[seq] * depth, output="last")
    return found | {f"{n} of {SEQUENCES}": step_ms(n) for n in ASKED}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shapes", help=f"of {', '.join(SHAPES)}, with commas between")
    parser.add_argument("--depth", type=int, default=6144, help="tokens of a sequence (default 6144)")
    parser.add_argument("--save", metavar="NAME", help="bench/results/NAME.json")
    args = parser.parse_args()
    rows = []
    for name in args.shapes.split(","):
        shape = SHAPES[name]
        default = random_rows.planned("14", "speed", shape, random_rows.chosen_group(name))
        for cache, kv, sides in (
            ("full f16", "f16", random_rows.sides_of("full/full", shape)),
            ("default file, 14 %", "", default),
        ):
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "model.gguf"
                random_model.write(shape, path, sides, cache, 1)
                rows.append({"shape": shape.name, "cache": cache} | measured(path, kv, args.depth))
            print(json.dumps(rows[-1]), flush=True)
    if args.save:
        columns = [Column("shape", "shape"), Column("cache", "cache")]
        columns.append(Column("empty", "8, empty", ".2f"))
        columns += [Column(f"{n} of {SEQUENCES}", f"{n} of {SEQUENCES}", ".2f") for n in ASKED]
        note = (
            f"{cuda.ask_gpu('name')}; milliseconds of a step, {SEQUENCES} sequences of {args.depth} tokens."
        )
        command = f"python bench/gpu/sequences.py {args.shapes} --depth {args.depth}"
        save(RESULTS / f"{args.save}.json", command=command, columns=columns, rows=rows, note=note)


if __name__ == "__main__":
    main()
