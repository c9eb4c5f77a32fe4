"""Whether an installed wheel works at every level of instructions that this machine has.

    python tools/check_wheel.py [MODEL.gguf]

Needs nothing but the wheel: no compiler, no test runner. At every level the model has to say the same, and
decoding has to agree with prefill; LATENTKV_CPU with another word has to be refused. Ends with status 1
where something is wrong.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

from latentkv import processor

# By relative norm: levels add in another order, and weights of few bits round what reaches them.
AGREE = 0.1
AT_LEVEL = """
import json, sys
import numpy as np
from latentkv import _core, processor
out = {"file": _core.__file__, "features": _core.build_info()["cpu_features"]}
if len(sys.argv) > 1:
    model = _core.Model(sys.argv[1])
    tokens = np.random.default_rng(1).integers(0, model.n_vocab, 64).tolist()
    whole = _core.Session(model, n_ctx=64).decode(tokens, output="last").ravel()
    session = _core.Session(model, n_ctx=64)
    for token in tokens:
        last = session.decode([token], output="last").ravel()
    out["logits"] = last.astype(float).tolist()
    out["apart"] = float(np.linalg.norm(last - whole) / np.linalg.norm(whole))
print(json.dumps(out))
"""


def expect(holds: bool, wanted: str, got: object) -> None:
    if not holds:
        raise SystemExit(f"error: [check_wheel] expected {wanted}; got {got}")


def at_level(level: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {processor.VARIABLE: level}
    command = [sys.executable, "-c", AT_LEVEL, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def distance(a: list[float], b: list[float]) -> float:
    return float((sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) / sum(y * y for y in b)) ** 0.5)


def main(models: list[str]) -> int:
    expect(not any(map(shutil.which, ("cc", "gcc", "g++", "clang", "cmake"))), "no compiler in PATH", "one")
    levels = processor.built()
    expect("native" not in levels and len(levels) > 1, "the levels of a wheel", levels)
    first: list[float] = []
    for level in processor.usable(levels, processor.features()):
        done = at_level(level, *models)
        expect(done.returncode == 0, f"{level} to run", f"status {done.returncode}: {done.stderr.strip()}")
        out = json.loads(done.stdout)
        expect(f"/levels/{level}/" in out["file"], f"the module of {level}", out["file"])
        if models:
            expect(
                out["apart"] < AGREE,
                f"decoding to agree with prefill at {level}",
                f"distance {out['apart']:.2g}",
            )
            first = first or out["logits"]
            apart = distance(out["logits"], first)
            expect(apart < AGREE, f"{level} to say what the greatest level says", f"distance {apart:.2g}")
        print(f"{level}: {', '.join(out['features'])}")
    refused = at_level("native")
    expect(
        refused.returncode != 0 and processor.VARIABLE in refused.stderr,
        "another level refused",
        refused.stderr,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
