"""The seams of ARCHITECTURE.md, checked in the text of the sources: who may know what."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tables

ROOT = Path(__file__).resolve().parents[3]
SUFFIXES = {".py", ".pyi", ".h", ".cpp", ".cu", ".cuh", ".cmake", ".txt"}

# (what must not be said, where, files that may say it, why)
RULES = [
    (
        re.compile(r"\b(palu|zack|lorc|tale|eigen[ _]?att|waterfill)", re.IGNORECASE),
        ["native", "python"],
        set(),
        "method names die at the GGUF boundary",
    ),
    (
        re.compile(r'"(llama|qwen2|qwen3|phi3|falcon|opt|mpt)"'),
        ["native/src"],
        {"native/src/tokens/vocab_file.cpp"},
        "architecture is data",
    ),
    (
        re.compile(r'#include [<"]ggml'),
        ["native/src/ops"],
        set(),
        "kernels know no ggml",
    ),
    (re.compile(r'#include [<"]ggml'), ["native/src/cache"], set(), "the cache knows no graph"),
    (re.compile(r"^\s*(import|from) torch", re.MULTILINE), ["python"], set(), "the runtime needs no torch"),
    (
        re.compile(
            r"\blatentkv\._core\b|from latentkv\b(?!\.(console|plan)\.)"
            r"|^\s*from \.+ import .*\bnative\b",
            re.MULTILINE,
        ),
        ["tools/convert"],
        {
            f"tools/convert/latentkv_convert/{name}.py"
            for name in [
                "native",
                "weights/tensor",
                "rows/sizes",
                "write/sidecar",
                "write/gguf_write",
                "source/gguf_blocks",
                "source/gguf_file",
                "source/gguf_vocabulary",
                "limits",
                "calibrate/text/chats",
                "compute/arithmetic",
                "cli",
                "files",
                "report",
            ]
        },
        "the converter needs no runtime but to read GGUFs, code, tokenize, hash, flush and render alike, for "
        "budgets, limits, the processor and the terminal",
    ),
    (
        re.compile(
            r"\b\w*ubatch\w*(\.\w+)? *(=|[<>]=?|==|or|//) *[{(]?[1-9]"
            r"|\b\w*(usual|long|least|short|chosen)\w*_ubatch\w*"
            r"|\bubatches(\.\w+)? = (?!(lkv::)?Ubatches::of\(|(of\.)?ubatches;)",
            re.IGNORECASE,
        ),
        ["native/src", "native/bindings", "python", "tools/convert"],
        {"native/src/cache/ubatches.cpp"},
        "one place decides how long a ubatch is",
    ),
    (
        re.compile(r"\b(checkpoint|gguf)_source\b"),
        [
            f"tools/convert/latentkv_convert/{room}"
            for room in ("calibrate", "rows", "plan", "recover", "write")
        ],
        set(),
        "only source/ knows what a model is stored in",
    ),
]


def sources(folder: str) -> list[Path]:
    return sorted(path for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES)


def violations(pattern: re.Pattern[str], folders: list[str], allowed: set[str]) -> list[str]:
    found = []
    for path in (path for folder in folders for path in sources(folder)):
        name = path.relative_to(ROOT).as_posix()
        text = path.read_text(encoding="utf-8")
        if name not in allowed:
            found += [
                f"{name}:{text.count(chr(10), 0, m.start()) + 1}: {m.group().strip()}"
                for m in pattern.finditer(text)
            ]
    return found


@pytest.mark.parametrize(("pattern", "folders", "allowed", "why"), RULES, ids=[rule[-1] for rule in RULES])
def test_who_may_know_what(pattern: re.Pattern[str], folders: list[str], allowed: set[str], why: str) -> None:
    assert not violations(pattern, folders, allowed), why


def test_the_search_finds_what_is_there() -> None:
    assert violations(re.compile(r"#pragma once"), ["native/src/cache"], set())
    assert sources("python")
    assert sources("tools/convert")


@pytest.mark.parametrize("registry", sorted(tables.REGISTRIES))
def test_nobody_lists_a_registry(registry: str) -> None:
    """The directory is the registry: no module outside it imports an entry by name."""
    folder = ROOT / tables.REGISTRIES[registry]
    package = folder.name
    entries = "|".join(stem for stem, _ in tables.entries(folder))
    by_name = re.compile(rf"\b{package}\.({entries})\b|from \.*{package} import ({entries})\b")
    inside = {path.relative_to(ROOT).as_posix() for path in folder.glob("*.py")}
    assert not violations(by_name, ["python", "tools/convert"], inside)
