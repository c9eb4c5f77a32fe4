"""Native and Python tests under the compiler's sanitizers: `make sanitize`, `make sanitize-threads`.

    python tools/sanitize.py address|thread [PYTEST ARGUMENTS]

`address`: address and undefined-behaviour sanitizers in our own code, llama.cpp without. `thread`: of
threads, in ggml as well, whose threads are ours (native/src/threads). Each has a build in build/sanitize.
Native tests run first, those on the emulated GPU left out: it runs threads as fibers, whose stacks a
sanitizer takes for one. Then the Python tests of the sanitizer, or those that are named, with the module
from there.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT = 1800  # seconds of a test: its limit in the suite is for programs without a sanitizer
SOAK = {
    "LATENTKV_SOAK_OPERATIONS": "100",
    "LATENTKV_SOAK_SECONDS": "1",
}  # a quarter of the suite's, ten times slower


@dataclass(frozen=True)
class Sanitizer:
    flags: str  # of -fsanitize
    # first in a program that is not compiled with it; who throws is looked up when it begins
    libraries: tuple[str, ...]
    native_tests: str  # a regular expression of ctest
    python_tests: tuple[str, ...]
    # What is found ends the program, or a test would go on and pass. Python frees little at its exit.
    environment: dict[str, str]


SANITIZERS = {
    "address": Sanitizer(
        flags="address,undefined",
        libraries=("libasan.so", "libstdc++.so.6"),
        native_tests=".",
        python_tests=(
            "tests/promise/test_cache.py",
            "tests/promise/test_eviction.py",
            "tests/promise/hybrid/test_hybrid_logits.py",
            "tests/promise/hybrid/test_hybrid_states.py",
            "tests/promise/test_hostile_states.py",
            "tests/promise/test_regions.py",
            "tests/promise/test_soak.py",
            "tests/promise/test_transcode.py",
            "tests/python/survival/test_hostile_files.py",
            "tests/python/llama/test_sampler.py",
            "tests/python/llama/test_streams.py",
            # counts on how often sums fall on the edge of two codes, which a compiler changes
            "--deselect=tests/promise/test_cache.py::test_quantized_decode_equals_prefill",
        ),
        environment={
            **SOAK,
            "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1:allocator_may_return_null=1",
            "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        },
    ),
    "thread": Sanitizer(
        flags="thread",
        libraries=("libtsan.so", "libstdc++.so.6"),
        native_tests="^test_team$",  # the others compute on one thread
        python_tests=(
            # sessions of two threads
            "tests/promise/test_soak.py::test_sequences_stay_what_they_are[full rows, q8_0]",
            "tests/promise/test_soak.py::test_sequences_stay_what_they_are[a ring]",
            # several threads of Python
            "tests/python/llama/test_threads.py",
            "tests/server/engine/test_meanwhile.py",
        ),
        environment={**SOAK, "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1"},
    ),
}


def run(sanitizer: Sanitizer, *command: str | Path, **environment: str) -> None:
    words = [str(word) for word in command]
    if subprocess.run(words, cwd=ROOT, env=os.environ | sanitizer.environment | environment).returncode:
        raise SystemExit(f"error: [sanitize] expected success of: {' '.join(words)}")


def build(sanitizer: Sanitizer, folder: Path) -> None:
    bin_dir = Path(sys.executable).parent
    pybind = subprocess.run(
        [sys.executable, "-m", "pybind11", "--cmakedir"], capture_output=True, text=True, check=True
    ).stdout.strip()
    options = {
        "CMAKE_MAKE_PROGRAM": bin_dir / "ninja",
        "CMAKE_C_FLAGS_RELEASE": "-O2 -g1",
        "CMAKE_CXX_FLAGS_RELEASE": "-O1 -g1",
        "LATENTKV_BUILD_TESTS": "ON",
        "LATENTKV_SANITIZE": sanitizer.flags,
        "Python_EXECUTABLE": sys.executable,
        "pybind11_DIR": pybind,
    }
    definitions = (f"-D{k}={v}" for k, v in options.items())
    given = shlex.split(os.environ.get("CMAKE_ARGS", ""))  # as `pip install` takes them
    run(sanitizer, "cmake", "-S", ROOT, "-B", folder, "-G", "Ninja", *definitions, *given)
    run(sanitizer, bin_dir / "ninja", "-C", folder)


def python_tests(sanitizer: Sanitizer, folder: Path, arguments: list[str]) -> None:
    package = folder / "package"
    shutil.rmtree(package, ignore_errors=True)
    built = shutil.ignore_patterns("levels", "*.so", "__pycache__")  # modules without the sanitizer
    shutil.copytree(ROOT / "python" / "latentkv", package / "latentkv", ignore=built)
    level = package / "latentkv" / "levels" / "native"
    level.mkdir(parents=True)
    for module in (folder / "native").glob("_core*.so"):
        shutil.copy(module, level)
    preload = " ".join(map(library, sanitizer.libraries))
    path = f"{package}{os.pathsep}{ROOT / 'tools' / 'convert'}"
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", f"--timeout={TIMEOUT}", "-n", "auto", *arguments)
    run(sanitizer, sys.executable, *words, LD_PRELOAD=preload, PYTHONPATH=path)


def library(name: str) -> str:
    found = subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return found.stdout.strip()


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] not in SANITIZERS:
        got = arguments[0] if arguments else "none"
        print(f"error: [sanitize] expected {' or '.join(SANITIZERS)}; got {got}", file=sys.stderr)
        return 2
    sanitizer = SANITIZERS[arguments[0]]
    folder = ROOT / "build" / "sanitize" / arguments[0]
    build(sanitizer, folder)
    words = ("--tests-regex", sanitizer.native_tests, "--parallel", str(os.cpu_count()))
    run(sanitizer, "ctest", "--test-dir", folder, *words, "--output-on-failure", "--no-tests=error")
    python_tests(sanitizer, folder, arguments[1:] or list(sanitizer.python_tests))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
