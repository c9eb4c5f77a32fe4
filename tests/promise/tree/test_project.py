"""Files about the project agree: one version, what CI runs, a stub that says what the module has."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from latentkv import processor

ROOT = Path(__file__).resolve().parents[3]
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
(VERSION,) = re.findall(r'^version = "(.*)"$', PYPROJECT, re.MULTILINE)
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))

# pybind11's metaclass and constructors; what exists for the type checker alone
CLASSES = ["ChatParser", "ChatStream", "ChatTemplates", "GgufFile", "Model", "Sampler", "Session"]
ALLOWED = [f"latentkv._core.{name}" for name in (*CLASSES, "CacheSlots", "TokenMatcher")]
ALLOWED += [f"latentkv._core.{name}.__init__" for name in CLASSES]


def test_the_version_stands_in_one_place() -> None:
    assert f"version: {VERSION}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"## {VERSION}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert VERSION not in (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")
    if processor.built():
        from latentkv import _core

        assert _core.__version__ == VERSION


def test_the_newest_supported_python_is_a_classifier() -> None:
    minors = [int(minor) for minor in re.findall(r"Programming Language :: Python :: 3\.(\d+)", PYPROJECT)]
    built = [int(minor) for minor in re.findall(r'"cp3(\d+)-\*"', PYPROJECT)]
    assert minors == built
    assert f'requires-python = ">=3.{minors[0]}"' in PYPROJECT
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"Python 3.{minors[0]} to 3.{minors[-1]}" in readme


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_by_hash_and_commands_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    used = re.findall(r"uses: (.*)", text)
    assert used
    assert all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40}  # v\d+(\.\d+)+", each) for each in used)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"run: make .*?([a-z-]+)$", text, re.MULTILINE):
        assert re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE), target


def test_the_stub_is_the_modules(tmp_path: Path) -> None:
    """Names that one has and the other lacks; signatures of pybind11 are not known to it."""
    if not processor.built():
        pytest.skip("needs the native module (pip install .)")
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("needs mypy (pip install '.[dev]')")
    allowed = tmp_path / "allowed.txt"
    allowed.write_text("\n".join(ALLOWED), encoding="utf-8")
    words = [sys.executable, "-m", "mypy.stubtest", "latentkv._core", "--ignore-unused-allowlist"]
    # The stub with what it imports, and no package around it, which takes mypy a minute to read.
    package = tmp_path / "stubs" / "latentkv"
    package.mkdir(parents=True)
    (package / "__init__.pyi").touch()
    for name in ("_core.pyi", "errors.py"):
        shutil.copy(ROOT / "python/latentkv" / name, package)
    environment = os.environ | {"MYPYPATH": str(package.parent)}
    done = subprocess.run(
        [*words, "--allowlist", str(allowed)], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
