"""Run a program on a data-center GPU as a consumer card would: "in kind".

    python bench/gpu/consumer.py rtx4090 -- python bench/gpu/default_files.py 8b --save default-files-8b-4090
    python bench/gpu/consumer.py rtx4090 --cmake-args        # how the program is built for it

An H100 has three times the memory bandwidth of an RTX 4090 and about as many multiprocessors, so it hides
what a small cache is for. Here some multiprocessors read memory all the time, until a kernel beside them that
reads it, with 16 KB in flight a multiprocessor, gets as many bytes a second as the card has; the program sees
the others, the card's compute capability and its shared memory a block, and runs code that was compiled for
that capability. What is left is measured and printed before and after, and written with what is not imitated
where --report asks for it.

The readers have multiprocessors of their own in every cluster (companion/places.h), and their rate is steered
until the light kernel has the card's bandwidth: on an H100 24 readers leave it 0.98 to 1.03 TB/s, whatever
the program did before or holds in memory. A kernel with more in flight gets more, the fewer readers there
are: q8_0 attention at 65536 tokens 1.16 TB/s beside 24, 0.97 beside 36; CONSUMER_CHOICE=36,0 asks for 36.
Caches are compared by turns in one process (beside.py), which steers before each round. Memory answers later
than on the card, which no readers can help. Where none leave so little, the program is refused; with
CONSUMER_ANY=1 it runs all the same.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).resolve().parent
BUILD = HERE.parents[1] / "build" / "consumer"
DIES_WITH_PARENT = 1  # of prctl
HERE_CAPABILITY = 90


@dataclass(frozen=True)
class Card:
    """A consumer card: its memory in GB/s (NVIDIA's data sheet), and what a kernel may ask for."""

    gb_per_s: int
    multiprocessors: int
    capability: int
    shared_kb: int = 99
    threads: int = 1536  # of a multiprocessor


# What a program finds as it is on the GPU that is here.
LEFT_OUT = (
    "L2: its size and speed",
    "clocks and latencies",
    "the speed of the tensor cores",
    "registers, and how many blocks run on a multiprocessor",
    "cuBLAS, whose kernels are those of the GPU",
)
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
    """The library that is loaded before the program, compiled where it is older than its sources."""
    library = BUILD / "companion.so"
    sources = sorted((HERE / "companion").iterdir())
    if library.exists() and library.stat().st_mtime >= max(source.stat().st_mtime for source in sources):
        return library
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if not Path(nvcc).exists():
        sys.exit(f"[consumer] expected nvcc on the PATH; got none, nor {nvcc}")
    BUILD.mkdir(parents=True, exist_ok=True)
    homes = (os.environ.get("CUDA_HOME", "/usr/local/cuda"), Path(nvcc).resolve().parents[1])
    paths = [f"-rpath={home}/lib64" for home in homes if Path(home, "lib64").exists()]
    made = BUILD / f"companion.{os.getpid()}.so"
    command = [nvcc, "-std=c++17", "-O2", "-shared", "-cudart", "shared", "-arch=sm_90", "-ldl"]
    command += ["-Xcompiler", "-fPIC,-fvisibility=hidden", *(f"-Xlinker={path}" for path in paths)]
    command += [str(source) for source in sources if source.suffix in (".cu", ".cpp")]
    status = subprocess.run([*command, "-o", str(made)]).returncode
    if status != 0:
        sys.exit(f"[consumer] expected nvcc to compile {HERE / 'companion'}; got status {status}")
    return made.replace(library)


def alone() -> IO[str]:
    """A lock that is held: two programs on a GPU share its time, and what either measures is wrong.

    Raises:
        SystemExit: another program has it.
    """
    gpu = "".join(c if c.isalnum() else "-" for c in os.environ.get("CUDA_VISIBLE_DEVICES", "0"))
    path = Path(tempfile.gettempdir(), f"latentkv-consumer-{gpu}.lock")
    lock = path.open("a", encoding="utf-8")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f"[consumer] expected a GPU without another program in kind; got one, which holds {path}")
    return lock


def die_with_parent() -> None:
    """In the program's process: whoever kills this program ends that one too."""
    ctypes.CDLL(None).prctl(DIES_WITH_PARENT, signal.SIGKILL)


def run(program: list[str], environment: dict[str, str]) -> int:
    """The program's exit status."""
    try:
        process = subprocess.Popen(program, env=environment, preexec_fn=die_with_parent)
    except OSError as error:
        sys.exit(f"[consumer] expected a program; got {program[0]}: {error.strerror}")
    signal.signal(signal.SIGTERM, lambda *_: process.kill())
    return process.wait()


def described(name: str, card: Card, found: dict[str, Any]) -> dict[str, Any]:
    """What the companion measured, with the card's own figures and what is left out."""
    return {"card": name, "in_kind": True, "card_gb_per_s": card.gb_per_s, **found, "left_out": LEFT_OUT}


def main() -> int:
    parser = argparse.ArgumentParser(
        usage="%(prog)s CARD [--report FILE] -- PROGRAM …",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("card", choices=CARDS)
    parser.add_argument("--cmake-args", action="store_true", help="print the arguments of cmake, and end")
    parser.add_argument("--no-readers", action="store_true", help="leave the memory as fast as it is")
    parser.add_argument(
        "--own-code", action="store_true", help="the program has code for the GPU that is here alone"
    )
    parser.add_argument("--report", type=Path, help="a JSON file: the bandwidth left, and what is left out")
    own, program = sys.argv[1:], []
    if "--" in own:
        own, program = own[: own.index("--")], own[own.index("--") + 1 :]
    args = parser.parse_args(own)
    card = CARDS[args.card]
    if args.cmake_args:
        print("\n".join(cmake_args(card)))
        return 0
    if not program:
        parser.error("[program] expected a program behind --; got none")
    held = alone()
    environment = os.environ | {
        "LD_PRELOAD": " ".join(filter(None, (str(companion()), os.environ.get("LD_PRELOAD")))),
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",  # a queue for the companion alone
        "CONSUMER_GB_PER_S": str(card.gb_per_s),
        "CONSUMER_SHARED_KB": str(card.shared_kb),
        "CONSUMER_CAPABILITY": str(HERE_CAPABILITY if args.own_code else card.capability),
        "CONSUMER_MULTIPROCESSORS": str(card.multiprocessors),
        "CONSUMER_THREADS": str(card.threads),
    }
    if args.no_readers:
        environment["CONSUMER_NO_READERS"] = "1"
    if args.report:
        environment["CONSUMER_REPORT"] = str(args.report)
        args.report.unlink(missing_ok=True)
    status = run(program, environment)
    held.close()
    if args.report:
        if not args.report.exists():
            return status or sys.exit(
                "[consumer] expected a program that asks the CUDA runtime; got one that does not"
            )
        found = json.loads(args.report.read_text())
        args.report.write_text(json.dumps(described(args.card, card, found), indent=1) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
