"""What makes `latentkv-cuda` of the project: another name, NVIDIA's packages, and their compiler.

The compiler is of those packages too, so that a machine without a toolkit builds the same wheel.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NAME = "latentkv-cuda"
# libcudart.so.13 and libcublas.so.13, in site-packages/nvidia/cu13/lib (native/gpu_library.cmake)
RUNTIME = ("nvidia-cuda-runtime>=13.0,<14", "nvidia-cublas>=13.0,<14")
TOOLKIT = (
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-cccl==13.0.85",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cublas==13.1.2.11",
)
PROVIDED = ("libcuda.so.1", "libcudart.so.13", "libcublas.so.13", "libcublasLt.so.13")
# machine code of 8.0 runs on 8.6 and 8.9; newer GPUs than 9.0 start from its intermediate code
ARCHITECTURES = "80-real;90"
TAKEN = (".gitignore", "CMakeLists.txt", "LICENSE", "README.md", "native", "python", "tools")


def project(folder: Path) -> Path:
    """The project under the wheel's name: its pyproject.toml with two lines changed, the rest linked."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in TAKEN:
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    words = ", ".join(f'"{need}"' for need in RUNTIME)
    changes = ((r'^name = "latentkv"$', f'name = "{NAME}"'), (r"^(dependencies = \[.*)\]$", rf"\1, {words}]"))
    for line, other in changes:
        text, count = re.subn(line, other, text, flags=re.MULTILINE)
        if count != 1:
            raise SystemExit(f"error: [pyproject.toml] expected one line {line}; got {count}")
    (folder / "pyproject.toml").write_text(text, encoding="utf-8")
    return folder


def name_libraries(toolkit: Path) -> Path:
    """The toolkit with the names that CMake looks for, which the packages leave out."""
    for short in ("libcudart.so", "libcublas.so", "libcublasLt.so"):
        link = toolkit / "lib" / short
        if not link.exists():
            link.symlink_to(f"{short}.13")
    if not (toolkit / "lib64").exists():
        (toolkit / "lib64").symlink_to("lib")
    return toolkit


def settings(toolkit: Path, architectures: str) -> tuple[str, ...]:
    return (
        "cmake.define.LATENTKV_CUDA=ON",
        f"cmake.define.CMAKE_CUDA_ARCHITECTURES={architectures}",
        f"cmake.define.CMAKE_CUDA_COMPILER={toolkit / 'bin' / 'nvcc'}",
        f"cmake.define.CUDAToolkit_ROOT={toolkit}",
    )
