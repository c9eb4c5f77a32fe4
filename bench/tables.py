"""Regenerates the tables of README.md (and of docs/), and figures of their text, from what they are about.

    python bench/tables.py           rewrite
    python bench/tables.py --check   exit 1 when a page is stale, naming the table

Three kinds of block, each between its markers; what stands between them is never edited by hand:

    <!-- result: NAME -->    ... <!-- /result -->      NAME.json below bench/results (bench/record.py)
        columns=KEY,KEY      these alone, without the note
        rows=REGEX           those whose first two cells, "A | B", it finds
    <!-- registry: NAME -->  ... <!-- /registry -->    a directory: one entry per file (REGISTRIES)
    <!-- flags: VERDICT -->  ... <!-- /flags -->       llama.cpp's flags (llama_cpp_flags.txt)

A figure of the text is followed by where it comes from, and keeps the decimals that it is written with:

    0.0011<!--=NAME/ROW/KEY-->    KEY of the row of NAME.json whose cells begin with ROW. ROW is written
                                  without spaces, its cells joined by +: f16, waterfill,speed+28%
    106<!--=NAME/ROW/KEY/OTHER--> KEY of ROW, in per cent of the row OTHER's
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
FLAGS = "python/latentkv/cli/llama_cpp_flags.txt"
LEFT_OUT = "leave it out; "
CONVERT = "tools/convert/latentkv_convert"
REGISTRIES = {
    "method": f"{CONVERT}/plan/methods",
    "architecture": f"{CONVERT}/source/archs",
    "allocator": f"{CONVERT}/plan/allocate",
    "command": "python/latentkv/cli",
}
BLOCK = re.compile(
    r"(<!-- (result|registry|flags): ([\w-]+)(?: columns=(\S+))?(?: rows=(.+?))? -->\n)(.*?)(<!-- /\2 -->)",
    re.DOTALL,
)
BEGINS = re.compile(r"<!-- (?:result|registry|flags): .*")
FIGURE = re.compile(r"(\d[\d,]*(?:\.\d+)?)<!--=([\w-]+)/([^\s/]+)/([^\s/>]+?)(?:/([^\s/]+))?-->")


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


def read_result(name: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    found = sorted(folder.rglob(f"{name}.json"))
    if len(found) != 1:
        raise StaleError(f"[tables] expected one {name}.json below bench/results; got {len(found)}")
    result: dict[str, Any] = json.loads(found[0].read_text(encoding="utf-8"))
    return found[0], result


def render_result(
    name: str, folder: Path = RESULTS, link: str = "bench/results", only: str = "", rows: str = ""
) -> str:
    path, result = read_result(name, folder)
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


def texts_of(row: dict[str, Any], result: dict[str, Any]) -> dict[str, str]:
    """The cells of a row, by column."""
    return {c["key"]: cell(row[c["key"]], c["format"], c["unit"]) for c in result["columns"]}


def figure(written: str, name: str, row: str, key: str, other: str | None, folder: Path = RESULTS) -> str:
    """What should be written in place of a figure of the text, in its own precision."""
    _, result = read_result(name, folder)
    value = number(result, name, row, key)
    if other:
        value *= 100 / number(result, name, other, key)
    elif any(c["format"].endswith("%") for c in result["columns"] if bare(c["key"]) == key):
        value *= 100
    decimals = len(written.partition(".")[2])
    return format(value, f"{',' if ',' in written else ''}.{decimals}f")


def number(result: dict[str, Any], name: str, row: str, key: str) -> float:
    """The number of a key in the only row that begins so."""
    found = []
    for each in result["rows"]:
        cells = bare("+".join(texts_of(each, result).values()))
        if f"{cells}+".startswith(f"{row}+"):
            found += [value for at, value in each.items() if bare(at) == key]
    if len(found) != 1 or not isinstance(found[0], int | float):
        raise StaleError(f"[tables] expected one row {row} of {name} with a number {key}; got {len(found)}")
    return float(found[0])


def bare(text: str) -> str:
    return text.replace(" ", "")


def table_of(result: dict[str, Any], where: str, only: str, rows: str) -> str:
    columns = {column["key"]: column for column in result["columns"]}
    wanted = only.split(",") if only else list(columns)
    if unknown := [key for key in wanted if key not in columns]:
        raise StaleError(f"[tables] expected columns of {where}; got {', '.join(unknown)}")
    chosen = [columns[key] for key in wanted]
    cells = []
    for row in result["rows"]:
        texts = texts_of(row, result)
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


def flag_rows(root: Path) -> list[tuple[str, str, str, str]]:
    """(commands, names, verdict, words) of every row of llama.cpp's flags; a verdict's FLAG or values are
    its words where it has no others."""
    lines = (root / FLAGS).read_text(encoding="utf-8").splitlines()
    found = []
    for line in lines:
        if line and not line.startswith("#"):
            commands, named, said, words = [*line.split(" | "), ""][:4]
            names = "/".join(f"`{word}`" for word in named.split() if word.startswith("-"))
            verdict, _, rest = said.partition(" ")
            found.append((commands, names, f"{verdict} at" if rest[:3] == "at " else verdict, words or rest))
    return found


def render_flags(verdict: str, root: Path = ROOT) -> str:
    """llama.cpp's flags of a verdict, by what is said of them: `equals`, or `refused`, those that are
    accepted at some values too. Others change nothing."""
    wanted = {"equals": ("equals",), "refused": ("refused", "ignored at")}
    if verdict not in wanted:
        raise StaleError(f"[tables] expected flags of {', '.join(wanted)}; got {verdict}")
    rows = [row for row in flag_rows(root) if row[2] in wanted[verdict]]
    said: dict[str, dict[str, list[str]]] = {}
    for commands, names, _, words in rows:
        said.setdefault(words, {}).setdefault(commands, []).append(names)
    lines: dict[bool, list[str]] = {False: [], True: []}  # by whether there is nothing to write instead
    for words, by_commands in said.items():
        parts = [
            ", ".join(names) + ("" if commands == "*" else f" ({commands.replace(' ', '/')})")
            for commands, names in by_commands.items()
        ]
        told = f"`{words}`" if verdict == "equals" else words.removeprefix(LEFT_OUT)
        lines[words.startswith(LEFT_OUT)].append(f"* {', '.join(parts)}: {told}")
    groups = ["\n".join(lines[False]), *(["Leave these out:", "\n".join(lines[True])] if lines[True] else [])]
    return "\n" + "\n\n".join(groups) + "\n\n"


def render(page: str, root: Path = ROOT, folder: str = ".") -> str:
    """The page, which lies in `folder`, with every block replaced by what it should say now."""
    if unread := BEGINS.findall(BLOCK.sub("", page)):
        raise StaleError(
            f"[tables] expected `<!-- result: NAME … -->`, a name of letters, digits and -; got {unread[0]}"
        )
    results = Path("bench") / "results"
    link = Path(os.path.relpath(results, folder)).as_posix()

    def block(match: re.Match[str]) -> str:
        name = match.group(3)
        if match.group(2) == "result":
            body = render_result(name, root / results, link, match.group(4) or "", match.group(5) or "")
        elif match.group(2) == "flags":
            body = render_flags(name, root)
        else:
            body = render_registry(name, root)
        return match.group(1) + body + match.group(7)

    def again(match: re.Match[str]) -> str:
        written, *source = match.groups()
        return match.group().replace(written, figure(written, *source, root / results), 1)

    return FIGURE.sub(again, BLOCK.sub(block, page))


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
