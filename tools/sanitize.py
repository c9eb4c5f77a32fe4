"""Native and Python tests under address and undefined-behaviour sanitizers: `make sanitize`.

    python tools/sanitize.py [PYTEST ARGUMENTS]

Our own code is compiled with them in build/sanitize, llama.cpp without. Native tests run first, those on the
emulated GPU left out: it runs threads as fibers, whose stacks the sanitizer takes for one. Then the tests of
PYTHON_TESTS, or those that are named, with the module from there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "sanitize"
PACKAGE = BUILD / "package"
PYTHON_TESTS = (
    "tests/promise/test_cache.py",
    "tests/promise/test_eviction.py",
    "tests/promise/test_hostile_states.py",
    "tests/promise/test_regions.py",
    "tests/promise/test_soak.py",
    "tests/promise/test_transcode.py",
    "tests/python/test_hostile_files.py",
    "tests/python/test_sampler.py",
    "tests/python/test_streams.py",
    # counts on how often sums fall on the edge of two codes, which a compiler changes
    "--deselect=tests/promise/test_cache.py::test_quantized_decode_equals_prefill",
)
# What a sanitizer finds ends the program, or a test would go on and pass. Python frees little at its exit.
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1:allocator_may_return_null=1",
    "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
}


def run(*command: str | Path, **environment: str) -> None:
    words = [str(word) for word in command]
    if subprocess.run(words, cwd=ROOT, env=os.environ | OPTIONS | environment).returncode:
        raise SystemExit(f"error: [sanitize] expected success of: {' '.join(words)}")


def build() -> None:
    bin_dir = Path(sys.executable).parent
    pybind = subprocess.run(
        [sys.executable, "-m", "pybind11", "--cmakedir"], capture_output=True, text=True, check=True
    ).stdout.strip()
    options = {
        "CMAKE_MAKE_PROGRAM": bin_dir / "ninja",
        "CMAKE_CXX_FLAGS_RELEASE": "-O1 -g1",
        "LATENTKV_BUILD_TESTS": "ON",
        "LATENTKV_SANITIZE": "ON",
        "Python_EXECUTABLE": sys.executable,
        "pybind11_DIR": pybind,
    }
    run("cmake", "-S", ROOT, "-B", BUILD, "-G", "Ninja", *(f"-D{k}={v}" for k, v in options.items()))
    run(bin_dir / "ninja", "-C", BUILD)


def python_tests(arguments: list[str]) -> None:
    shutil.rmtree(PACKAGE, ignore_errors=True)
    shutil.copytree(ROOT / "python" / "latentkv", PACKAGE / "latentkv")
    level = PACKAGE / "latentkv" / "levels" / "native"
    level.mkdir(parents=True)
    for module in (BUILD / "native").glob("_core*.so"):
        shutil.copy(module, level)
    # first in a program that is not compiled with it; who throws is looked up when it begins
    preload = " ".join(map(library, ("libasan.so", "libstdc++.so.6")))
    path = f"{PACKAGE}{os.pathsep}{ROOT / 'tools' / 'convert'}"
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments)
    run(sys.executable, *words, LD_PRELOAD=preload, PYTHONPATH=path)


def library(name: str) -> str:
    found = subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return found.stdout.strip()


def main(arguments: list[str]) -> int:
    build()
    run("ctest", "--test-dir", BUILD, "--parallel", "2", "--output-on-failure", "--no-tests=error")
    python_tests(arguments or list(PYTHON_TESTS))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
