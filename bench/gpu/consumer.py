"""Run a program on a data-center GPU as a consumer card would: "in kind".

    python bench/gpu/consumer.py rtx4090 -- python bench/gpu/default_files.py 8b --save default-files-8b-4090
    python bench/gpu/consumer.py rtx4090 --cmake-args        # how the program is built for it

An H100 has three times the memory bandwidth of an RTX 4090 and about as many multiprocessors, so it hides
what a small cache is for. Here some multiprocessors read memory all the time, until a copy beside them moves
as many bytes a second as on the card; the program sees the others, the card's compute capability and its
shared memory a block, and runs code that was compiled for that capability. The bandwidth that is left is
measured and printed before and after.

Not imitated: L2 (an H100's is 50 MB, a 4090's 72), clocks, latencies, and the speed of the tensor cores.
The program and its companion compile; no GPU has run them yet.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUILD = HERE.parents[1] / "build" / "consumer"


@dataclass(frozen=True)
class Card:
    """A consumer card: its memory in GB/s (NVIDIA's data sheet), and what a kernel may ask for."""

    gb_per_s: int
    multiprocessors: int
    capability: int
    shared_kb: int = 99


CARDS = {"rtx4090": Card(1008, 128, 89), "rtx3090": Card(936, 82, 86)}


def cmake_args(card: Card) -> list[str]:
    """Code for the card's capability in machine code of the GPU that is here."""
    gencode = f"-gencode=arch=compute_{card.capability},code=sm_90"
    return [
        "-DCMAKE_CUDA_ARCHITECTURES=OFF",
        f"-DCMAKE_CUDA_FLAGS={gencode}",
        "-DCMAKE_CUDA_RUNTIME_LIBRARY=Shared",
    ]


def companion() -> Path:
    """The library that is loaded before the program, compiled where it is older than its source."""
    source, library = HERE / "companion.cu", BUILD / "companion.so"
    if library.exists() and library.stat().st_mtime >= source.stat().st_mtime:
        return library
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    BUILD.mkdir(parents=True, exist_ok=True)
    runtime = Path(nvcc).resolve().parents[1] / "lib64"
    command = [nvcc, "-std=c++17", "-O2", "-shared", "-cudart", "shared", "-arch=sm_90"]
    command += ["-Xcompiler", "-fPIC,-fvisibility=hidden", "-Xlinker", f"-rpath={runtime}"]
    subprocess.run([*command, str(source), "-o", str(library)], check=True)
    return library


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("card", choices=CARDS)
    parser.add_argument("--cmake-args", action="store_true", help="print the arguments of cmake, and end")
    parser.add_argument("program", nargs="*", help="behind --")
    args = parser.parse_args()
    card = CARDS[args.card]
    if args.cmake_args:
        print("\n".join(cmake_args(card)))
        return 0
    if not args.program:
        parser.error("[program] expected a program behind --; got none")
    environment = os.environ | {
        "LD_PRELOAD": " ".join(filter(None, (str(companion()), os.environ.get("LD_PRELOAD")))),
        "CONSUMER_GB_PER_S": str(card.gb_per_s),
        "CONSUMER_SHARED_KB": str(card.shared_kb),
        "CONSUMER_CAPABILITY": str(card.capability),
        "CONSUMER_MULTIPROCESSORS": str(card.multiprocessors),
    }
    return subprocess.run(args.program, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
