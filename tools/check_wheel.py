"""Whether an installed wheel works at every level of instructions that this machine has.

    python tools/check_wheel.py [MODEL.gguf]

Needs nothing but the wheel: no compiler, no test runner. At every level the model has to say the same, and
decoding has to agree with prefill; LATENTKV_CPU with another word has to be refused. Where latentkv-cuda is
installed and finds a GPU, the model runs there too, at the greatest level. Ends with status 1 where something
is wrong.
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
ALL_LAYERS = "99"
AT_LEVEL = """
import json, sys
import numpy as np
from latentkv import _core, processor
info = _core.build_info()
out = {"file": _core.__file__, "features": info["cpu_features"], "cuda": info["cuda"]}
out["gpus"] = len(_core.gpu_memory())
if len(sys.argv) > 2:
    model = _core.Model(sys.argv[2], n_gpu_layers=int(sys.argv[1]))
    out["on_gpu"] = any(run["gpu"] is not None for run in model.forecast(64)["runs"])
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


def at_level(level: str, *models: str, gpu_layers: str = "0") -> subprocess.CompletedProcess[str]:
    environment = os.environ | {processor.VARIABLE: level}
    command = [sys.executable, "-c", AT_LEVEL, gpu_layers, *models]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def distance(a: list[float], b: list[float]) -> float:
    return float((sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) / sum(y * y for y in b)) ** 0.5)


def on_gpu(level: str, models: list[str], on_cpu: list[float]) -> None:
    """The model in all of the GPU's layers has to say what it says on the CPU."""
    done = at_level(level, *models, gpu_layers=ALL_LAYERS)
    status = f"status {done.returncode}: {done.stderr.strip()}"
    expect(done.returncode == 0, "the GPU to run the model", status)
    out = json.loads(done.stdout)
    expect(out["on_gpu"], "layers on the GPU", "none")
    expect(out["apart"] < AGREE, "decoding to agree with prefill on the GPU", f"distance {out['apart']:.2g}")
    apart = distance(out["logits"], on_cpu)
    expect(apart < AGREE, "the GPU to say what the CPU says", f"distance {apart:.2g}")
    print(f"GPU: distance {apart:.2g} from the CPU")


def main(models: list[str]) -> int:
    expect(not any(map(shutil.which, ("cc", "gcc", "g++", "clang", "cmake"))), "no compiler in PATH", "one")
    levels = processor.built()
    expect("native" not in levels and len(levels) > 1, "the levels of a wheel", levels)
    first: list[float] = []
    here = processor.usable(levels, processor.features())
    cuda, gpus = False, 0
    for level in here:
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
        cuda, gpus = out["cuda"], out["gpus"]
        print(f"{level}: {', '.join(out['features'])}")
    if cuda:
        print(f"latentkv-cuda: {gpus} GPUs")
    if gpus and models:
        on_gpu(here[0], models, first)
    refused = at_level("native")
    expect(
        refused.returncode != 0 and processor.VARIABLE in refused.stderr,
        "another level refused",
        refused.stderr,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
