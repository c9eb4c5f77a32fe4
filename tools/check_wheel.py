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
from typing import Any

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


def said(where: str, level: str, models: list[str], gpu_layers: str = "0") -> dict[str, Any]:
    """What AT_LEVEL found; decoding has to agree with prefill."""
    done = at_level(level, *models, gpu_layers=gpu_layers)
    expect(done.returncode == 0, f"{where} to run", f"status {done.returncode}: {done.stderr.strip()}")
    out: dict[str, Any] = json.loads(done.stdout)
    if models:
        wanted = f"decoding to agree with prefill at {where}"
        expect(out["apart"] < AGREE, wanted, f"distance {out['apart']:.2g}")
    return out


def apart(where: str, out: dict[str, Any], greatest: dict[str, Any]) -> float:
    """The distance of what two runs of the model say, which has to be small."""
    found = distance(out["logits"], greatest["logits"])
    expect(found < AGREE, f"{where} to say what the greatest level says", f"distance {found:.2g}")
    return found


def main(models: list[str]) -> int:
    expect(not any(map(shutil.which, ("cc", "gcc", "g++", "clang", "cmake"))), "no compiler in PATH", "one")
    levels = processor.built()
    expect("native" not in levels and len(levels) > 1, "the levels of a wheel", levels)
    here = processor.usable(levels, processor.features())
    found = {level: said(level, level, models) for level in here}
    greatest = found[here[0]]
    for level, out in found.items():
        expect(f"/levels/{level}/" in out["file"], f"the module of {level}", out["file"])
        if models:
            apart(level, out, greatest)
        print(f"{level}: {', '.join(out['features'])}")
    if greatest["cuda"]:
        print(f"latentkv-cuda: {greatest['gpus']} GPUs")
    if greatest["gpus"] and models:
        out = said("the GPU", here[0], models, ALL_LAYERS)
        expect(out["on_gpu"], "layers on the GPU", "none")
        print(f"GPU: distance {apart('the GPU', out, greatest):.2g} from the CPU")
    refused = at_level("native")
    expect(
        refused.returncode != 0 and processor.VARIABLE in refused.stderr,
        "another level refused",
        refused.stderr,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
