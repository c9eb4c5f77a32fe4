"""No module of the runtime's Python needs one that needs it: imports point one way, those for types too."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2] / "python" / "latentkv"


def imported(path: Path, modules: set[str]) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module} | {f"{node.module}.{name.name}" for name in node.names}
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
    return found & modules


def circles(imports: dict[str, set[str]]) -> set[str]:
    """Modules that can be reached from themselves."""

    def reached(name: str) -> set[str]:
        seen: set[str] = set()
        to_see = [name]
        while to_see:
            new = imports[to_see.pop()] - seen
            seen |= new
            to_see += new
        return seen

    return {name for name in imports if name in reached(name)}


def room(name: str) -> str:
    """The folder of a module, or the module itself where it lies in none."""
    return ".".join(name.split(".")[:2])


def modules() -> dict[str, Path]:
    paths = {
        ".".join(("latentkv", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
        for path in ROOT.rglob("*.py")
    }
    del paths["latentkv"]  # hands names on, when they are asked for
    return paths


def test_nothing_is_circular() -> None:
    paths = modules()
    assert len(paths) > 50
    imports = {name: imported(path, set(paths)) - {name} for name, path in paths.items()}
    assert imports["latentkv.llama"] > {"latentkv.generate.chat", "latentkv.open_model"}
    assert not circles(imports)
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == {"b", "c"}


def test_rooms_are_not_circular() -> None:
    paths = modules()
    imports: dict[str, set[str]] = {room(name): set() for name in paths}
    for name, path in paths.items():
        imports[room(name)] |= {room(other) for other in imported(path, set(paths))} - {room(name)}
    assert imports["latentkv.engine"] > {"latentkv.session", "latentkv.sampling"}
    assert not circles(imports)
