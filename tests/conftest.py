"""What every part of the suite may use: the demo model, converted once per set of options."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from latentkv import processor

# Started in the background, a test run inherits an ignored SIGINT; programs that tests interrupt must not.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A conversion multiplies in bf16 where the processor has AMX (compute/arithmetic.py), and tests know what f32
# gives: a tiny model with keys far from 0 loses 15 times as much with bf16. This leaves AMX out.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "models" / "demo"

Converted = Callable[..., Path]


def missing_parts() -> str:
    """Why the demo model cannot be converted and run here, or ""."""
    if not processor.built():
        return "needs the native module (pip install .)"
    for module in ("latentkv_convert", "torch", "transformers"):
        if importlib.util.find_spec(module) is None:
            return f"needs {module} (pip install '.[convert]')"
    return ""


@pytest.fixture(scope="session")
def demo() -> Path:
    return DEMO


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    """`converted("--method", "palu", "--keep", "0.5")`: the demo model as a GGUF

    Processes of one run share the file, each in a folder of its own.
    """
    done: dict[tuple[str, ...], Path] = {}  # by the options, the source behind them
    base = tmp_path_factory.getbasetemp()
    whole_run = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def write(path: Path, source: Path, options: tuple[str, ...]) -> None:
        command = [
            sys.executable,
            "-m",
            "latentkv",
            "convert",
            str(source),
            "-o",
            str(path),
            "--no-plot",
            *options,
        ]
        if "none" not in options:
            command += ["--calib", str(DEMO / "sample-calib.txt"), "--calib-tokens", "6144"]
        env = os.environ | {"XDG_CACHE_HOME": str(base / "cache")}
        run = subprocess.run(command, capture_output=True, text=True, env=env)
        assert run.returncode == 0, run.stderr

    def convert(*options: str, source: Path = DEMO) -> Path:
        if reason := missing_parts():
            pytest.skip(reason)
        key = (*options, str(source))
        if key not in done:
            shared = whole_run / f"converted-{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}"
            shared.mkdir(exist_ok=True)
            with open(shared / "lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # the others wait
                if not (shared / "model.gguf").exists():
                    write(shared / "model.gguf", source, options)
            own = tmp_path_factory.mktemp("gguf")
            for file in shared.glob("model.*"):
                os.link(file, own / file.name)
            done[key] = own / "model.gguf"
        return done[key]

    return convert
