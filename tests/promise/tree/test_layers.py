"""Dependencies point down: includes and imports against the tables of ARCHITECTURE.md.

A table whose head names a source tree lists its folders and files from the top down, those of one row from
left to right. A file may include or import what stands below it, never what stands above. No two folders
need each other, and no file leads back to itself.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "ARCHITECTURE.md"
CONVERTER = "tools/convert/latentkv_convert"
# what the page calls a tree: the folders that are read, and what their files' names begin with in its table
TREES = {
    "native/": {"native/bindings": "bindings/", "native/src": "src/"},
    f"{CONVERTER}/": {CONVERTER: ""},
    "python/latentkv/": {"python/latentkv": "", CONVERTER: "latentkv_convert/"},
}
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
MOST = 20  # source files of a folder at one level
CPP = {".h", ".cpp", ".cu", ".cuh"}

Imports = dict[str, set[str]]  # file -> files of the same tree that it needs


def order(page: str, tree: str) -> list[str]:
    """Folders (`cache/`) and files (`work.py`) of a tree's table, from the top down."""
    table = re.search(rf"^\| `{tree}`[^\n]*\n\|[-| ]+\n((?:\|[^\n]*\n)+)", page, re.MULTILINE)
    assert table is not None, f"no table headed `{tree}`"
    return [name for row in table[1].splitlines() for name in re.findall(r"`([^`]+)`", row.split("|")[1])]


def place(file: str, listed: list[str]) -> int | None:
    """Where a file stands in the order: its own entry, or that of the innermost folder with one."""
    found = [name for name in listed if file == name or (name.endswith("/") and file.startswith(name))]
    return listed.index(max(found, key=len)) if found else None


def files(root: Path, tree: str) -> Iterator[tuple[str, Path, Path]]:
    """Name in the table, path, and the folder that was read. A package's own __init__.py is left out: it
    hands names on."""
    for folder, prefix in TREES[tree].items():
        for path in sorted((root / folder).rglob("*")):
            inside = path.relative_to(root / folder).as_posix()
            if path.suffix in (CPP if tree == "native/" else {".py"}) and inside != "__init__.py":
                yield prefix + inside, path, root / folder


def imports(root: Path, tree: str) -> Imports:
    listed = list(files(root, tree))
    return (included if tree == "native/" else imported)(listed)


def included(listed: list[tuple[str, Path, Path]]) -> Imports:
    """A path in an include begins at the root or beside the file."""
    names = {path: name for name, path, _ in listed}
    found: Imports = {}
    for name, path, root in listed:
        wanted = INCLUDE.findall(path.read_text(encoding="utf-8"))
        roots = {root, path.parent, *(folder for _, _, folder in listed)}
        targets = {(folder / each).resolve() for folder in roots for each in wanted}
        found[name] = {names[target] for target in targets if target in names} - {name}
    return found


def imported(listed: list[tuple[str, Path, Path]]) -> Imports:
    """Imports anywhere in a file, those for types too."""

    def module(path: Path, root: Path) -> str:
        parts = path.relative_to(root.parent).with_suffix("").parts
        return ".".join(parts).removesuffix(".__init__")

    names = {module(path, root): name for name, path, root in listed}
    found: Imports = {}
    for name, path, root in listed:
        own = module(path, root).split(".")
        package = own if path.name == "__init__.py" else own[:-1]
        wanted: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                base = package[: len(package) - node.level + 1] if node.level else []
                source = ".".join([*base, *([node.module] if node.module else [])])
                parts = {f"{source}.{each.name}" for each in node.names}
                wanted |= {part if part in names else source for part in parts}
            elif isinstance(node, ast.Import):
                wanted |= {each.name for each in node.names}
        found[name] = {names[each] for each in wanted if each in names} - {name}
    return found


def faults(needs: Imports, listed: list[str]) -> list[str]:
    """Files without a place, entries without a file, and whatever does not point down."""
    places = {name: place(name, listed) for name in needs}
    wrong = [f"{name} is in no row" for name, at in places.items() if at is None]
    wrong += [f"{entry} has no file" for at, entry in enumerate(listed) if at not in places.values()]
    for name, others in needs.items():
        for other in others:
            at, below = places[name], places[other]
            if at is not None and below is not None and below < at:
                wrong.append(f"{name} needs {other}, which stands above it")
    ties = {(folder(name), folder(other)) for name, others in needs.items() for other in others}
    for one, two in ties:
        nested = one.startswith(two) or two.startswith(one)
        if one < two and (two, one) in ties and not nested:
            wrong.append(f"{one} and {two} need each other")
    wrong += [f"{name} leads back to itself" for name in circles(needs)]
    return sorted(wrong)


def folder(name: str) -> str:
    return name[: name.rfind("/") + 1]


def circles(needs: Imports) -> set[str]:
    def reached(name: str) -> set[str]:
        seen: set[str] = set()
        to_see = [name]
        while to_see:
            new = needs[to_see.pop()] - seen
            seen |= new
            to_see += new
        return seen

    return {name for name in needs if name in reached(name)}


@pytest.mark.parametrize("tree", TREES)
def test_dependencies_point_down(tree: str) -> None:
    needs = imports(ROOT, tree)
    assert len(needs) > 50
    assert not faults(needs, order(PAGE.read_text(encoding="utf-8"), tree))


@pytest.mark.parametrize("tree", TREES)
def test_no_folder_is_a_heap(tree: str) -> None:
    folders = Counter(folder(name) for name, _, _ in files(ROOT, tree))
    assert not {name: n for name, n in folders.items() if n > MOST}


def test_what_files_need_is_found() -> None:
    runtime, native, converter = (
        imports(ROOT, tree) for tree in ("python/latentkv/", "native/", f"{CONVERTER}/")
    )
    assert runtime["llama.py"] > {"generate/chat.py", "open_model.py"}
    assert "latentkv_convert/cli.py" in runtime["cli/convert.py"]
    assert "src/cache/row.h" in native["src/cache/row.cpp"]
    assert native["bindings/session.cpp"] > {"bindings/bindings.h", "src/runtime/session.h"}
    assert converter["work.py"] > {"ir.py", "source/source.py"}


PAGE_OF_TWO = """
| `native/`, from the top | knows |
|---|---|
| `src/runtime/` | sessions |
| `src/cache/`, `src/base/` | rows, errors |
"""


def write(root: Path, **sources: str) -> Path:
    for name, text in sources.items():
        path = root / "native" / "src" / name.replace("__", "/").replace("_h", ".h")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_an_include_that_points_up_is_found(tmp_path: Path) -> None:
    listed = order(PAGE_OF_TWO, "native/")
    good = {"runtime__session_h": '#include "cache/row.h"\n', "cache__row_h": '#include "base/error.h"\n'}
    root = write(tmp_path, **good, base__error_h="#include <string>\n")
    assert not faults(imports(root, "native/"), listed)

    write(root, cache__row_h='#include "base/error.h"\n#include "../runtime/session.h"\n')
    assert faults(imports(root, "native/"), listed) == [
        "src/cache/ and src/runtime/ need each other",
        "src/cache/row.h leads back to itself",
        "src/cache/row.h needs src/runtime/session.h, which stands above it",
        "src/runtime/session.h leads back to itself",
    ]


def test_an_entry_and_a_file_belong_together(tmp_path: Path) -> None:
    root = write(tmp_path, runtime__session_h="", cache__row_h="", model__model_h="")
    assert faults(imports(root, "native/"), order(PAGE_OF_TWO, "native/")) == [
        "src/base/ has no file",
        "src/model/model.h is in no row",
    ]


def test_an_import_that_points_up_is_found() -> None:
    needs = {"a/x.py": {"b/y.py"}, "b/y.py": set(), "b/z.py": {"a/w.py"}, "a/w.py": set()}
    assert faults(needs, ["a/", "b/"]) == [
        "a/ and b/ need each other",
        "b/z.py needs a/w.py, which stands above it",
    ]
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == {"b", "c"}
