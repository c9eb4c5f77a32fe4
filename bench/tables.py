"""Regenerates the tables of README.md (and of docs/) from what they are about.

    python bench/tables.py           rewrite
    python bench/tables.py --check   exit 1 when a page is stale, naming the table

Two kinds of block, each between its markers; what stands between them is never edited by hand:

    <!-- result: NAME -->    ... <!-- /result -->      NAME.json below bench/results (bench/record.py)
        columns=KEY,KEY      these alone, without the note
        rows=REGEX           those whose first two cells, "A | B", it finds
    <!-- registry: NAME -->  ... <!-- /registry -->    a directory: one entry per file (REGISTRIES)
"""

from __future__ import annotations

import ast
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
CONVERT = "tools/convert/latentkv_convert"
REGISTRIES = {
    "method": f"{CONVERT}/plan/methods",
    "architecture": f"{CONVERT}/source/archs",
    "allocator": f"{CONVERT}/plan/allocate",
    "command": "python/latentkv/cli",
}
BLOCK = re.compile(
    r"(<!-- (result|registry): ([\w-]+)(?: columns=(\S+))?(?: rows=(.+?))? -->\n)(.*?)(<!-- /\2 -->)",
    re.DOTALL,
)


class StaleError(ValueError):
    """A page asks for something that is not there, or a result file is not one."""


def markdown_table(header: list[str], rows: list[list[str]], align: list[str]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "|".join(align) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def cell(value: Any, spec: str, unit: str) -> str:
    if value is None:
        return "–"
    text = format(value, spec) if spec else str(value)
    return f"{text} {unit}" if unit else text


def render_result(
    name: str, folder: Path = RESULTS, link: str = "bench/results", only: str = "", rows: str = ""
) -> str:
    found = sorted(folder.rglob(f"{name}.json"))
    if len(found) != 1:
        raise StaleError(f"[tables] expected one {name}.json below bench/results; got {len(found)}")
    path = found[0]
    result = json.loads(path.read_text(encoding="utf-8"))
    missing = {"command", "environment", "columns", "rows"} - result.keys()
    if missing:
        raise StaleError(
            f"[tables] expected {', '.join(sorted(missing))} in {path.name}; got {', '.join(result)}"
        )
    source = f"[JSON]({link}/{path.relative_to(folder).as_posix()})"
    if not only and not rows:
        machine = result["environment"]
        note = f"{result['note']} " if result.get("note") else ""
        ran = f"{machine['cpu']}, {machine['cores']} cores, at {machine['commit']}"
        source = f"{note}`{result['command']}` on {ran} ({source})."
    return f"\n{table_of(result, path.name, only, rows)}\n{source}\n\n"


def table_of(result: dict[str, Any], where: str, only: str, rows: str) -> str:
    columns = {column["key"]: column for column in result["columns"]}
    wanted = only.split(",") if only else list(columns)
    if unknown := [key for key in wanted if key not in columns]:
        raise StaleError(f"[tables] expected columns of {where}; got {', '.join(unknown)}")
    chosen = [columns[key] for key in wanted]
    cells = []
    for row in result["rows"]:
        texts = {key: cell(row[key], column["format"], column["unit"]) for key, column in columns.items()}
        if re.search(rows, " | ".join(list(texts.values())[:2])):
            cells.append([texts[key] for key in wanted])
    if not cells:
        raise StaleError(f"[tables] expected rows of {where} in which {rows} is found; got none")
    numeric = [all(isinstance(row[key], int | float | None) for row in result["rows"]) for key in wanted]
    return markdown_table([c["label"] for c in chosen], cells, ["--:" if n else "---" for n in numeric])


def first_lines(docstring: str) -> str:
    """The docstring up to the first line that ends a sentence, or its first paragraph."""
    lines: list[str] = []
    for line in docstring.split("\n\n")[0].splitlines():
        lines.append(line.strip())
        if line.endswith("."):
            break
    return " ".join(lines)


def entries(folder: Path) -> list[tuple[str, str]]:
    """(name, first line of the docstring) of every module in a folder, and in its packages, that is an entry
    of the registry."""
    found = []
    for path in sorted((*folder.glob("*.py"), *folder.glob("*/*.py")), key=lambda path: path.stem):
        if path.stem.startswith("_"):
            continue
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        if not docstring:
            raise StaleError(f"[tables] expected a docstring at the head of {path.name}; got none")
        summary = re.sub(rf"^`?(latentkv )?{path.stem}`?\s*[:-]\s*", "", first_lines(docstring))
        found.append((path.stem, summary.rstrip(".")))
    return found


def render_registry(name: str, root: Path = ROOT) -> str:
    if name not in REGISTRIES:
        raise StaleError(f"[tables] expected a registry of {', '.join(REGISTRIES)}; got {name}")
    rows = [[f"`{stem}`", line] for stem, line in entries(root / REGISTRIES[name])]
    if not rows:
        raise StaleError(f"[tables] expected files in {REGISTRIES[name]}; got none")
    return "\n" + markdown_table([name, ""], rows, ["---", "---"]) + "\n"


def render(page: str, root: Path = ROOT, folder: str = ".") -> str:
    """The page, which lies in `folder`, with every block replaced by what it should say now."""
    results = Path("bench") / "results"
    link = Path(os.path.relpath(results, folder)).as_posix()

    def block(match: re.Match[str]) -> str:
        name = match.group(3)
        if match.group(2) == "result":
            body = render_result(name, root / results, link, match.group(4) or "", match.group(5) or "")
        else:
            body = render_registry(name, root)
        return match.group(1) + body + match.group(7)

    return BLOCK.sub(block, page)


def pages(root: Path = ROOT) -> list[Path]:
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def main(argv: list[str]) -> int:
    if argv not in ([], ["--check"]):
        print(f"error: [tables] expected no argument or --check; got {' '.join(argv)}", file=sys.stderr)
        return 2
    stale = []
    for path in pages():
        old = path.read_text(encoding="utf-8")
        try:
            new = render(old, ROOT, path.parent.relative_to(ROOT).as_posix())
        except StaleError as error:
            print(f"error: {error} ({path.name})", file=sys.stderr)
            return 1
        if new != old:
            stale.append(path.relative_to(ROOT))
            if not argv:
                path.write_text(new, encoding="utf-8")
    if stale and argv:
        print(
            f"error: [tables] expected current tables; got stale ones in {', '.join(map(str, stale))}",
            file=sys.stderr,
        )
        print("run: python bench/tables.py", file=sys.stderr)
        return 1
    for path in stale:
        print(f"rewrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
