"""The native module shows its initializer alone, and lives beside other libraries in any order of imports.

A symbol of libstdc++ that leaves the module is merged with the one that numpy or torch brought, whichever
comes first, and then the process ends in a segmentation fault.
"""

from __future__ import annotations

import importlib.util
import itertools
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from latentkv import processor

MODULES = sorted(processor.FOLDER.glob("*/_core*.so"))
GPU_LIBRARIES = sorted(processor.FOLDER.parent.glob("lib/*.so"))  # of the wheel with the code for GPUs
# its static objects compile regular expressions, whose tables are the locale's
USE = "import latentkv._core as core; core.build_info()"


def exported(library: Path) -> list[str]:
    """Names that other libraries can see, as the linker writes them."""
    lines = subprocess.run(
        ["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [line.split()[-1] for line in lines]


needs_nm = pytest.mark.skipif(shutil.which("nm") is None, reason="nm of binutils is not installed")


@needs_nm
def test_the_count_sees_symbols() -> None:
    spec = importlib.util.find_spec("numpy")
    assert spec is not None
    assert spec.origin is not None
    library = next(Path(spec.origin).parent.rglob("_multiarray_umath*.so"))
    assert "PyInit__multiarray_umath" in exported(library)


@needs_nm
@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.parent.name)
def test_a_module_exports_its_initializer_alone(module: Path) -> None:
    assert exported(module) == ["PyInit__core"]


@needs_nm
@pytest.mark.parametrize("library", GPU_LIBRARIES, ids=lambda path: path.name)
def test_the_gpu_library_keeps_the_standard_library_to_itself(library: Path) -> None:
    assert [
        name for name in exported(library) if name.startswith(("_ZSt", "_ZNSt", "_ZNKSt", "_ZGVNSt"))
    ] == []


def test_there_is_a_module() -> None:
    assert MODULES


@pytest.mark.parametrize(
    "order", list(itertools.permutations(["numpy", "torch", "latentkv._core"])), ids=" ".join
)
def test_any_order_of_imports_works(order: tuple[str, ...]) -> None:
    missing = [name for name in ("numpy", "torch") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{missing[0]} is not installed")
    program = "; ".join([*(f"import {name}" for name in order), USE])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
