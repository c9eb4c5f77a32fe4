"""The tree stays one that a stranger can read: folders of at most twenty files, native functions of at most
two hundred lines, notes of at most six hundred words.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
VENDOR = "python/latentkv/server/page/vendor"  # other projects' files, as they publish them

MOST_FILES = 20
MOST_LINES = 200

MOST_WORDS_OF_A_NOTE = 600


@pytest.fixture(scope="module")
def files() -> list[Path]:
    """What git tracks, relative to the root, and still lies there."""
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs a git checkout")
    paths = [Path(name) for name in listed.stdout.decode().split("\0") if name]
    return [path for path in paths if (ROOT / path).exists()]


def test_no_folder_holds_more_files_than_a_reader_keeps_in_mind(files: list[Path]) -> None:
    ours = [path for path in files if not path.as_posix().startswith(f"{VENDOR}/")]
    held = Counter(path.parent.as_posix() for path in ours)
    assert held["tests/promise"] > 3
    too_many = {room: n for room, n in held.items() if n > MOST_FILES}
    assert not too_many


# comments, literals (but not the ' of 1'000) and directives with their continued lines
NO_CODE = re.compile(
    r"""//[^\n]*|/\*.*?\*/|R"\(.*?\)"|"(?:\\.|[^"\\\n])*"|(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+'"""
    r"""|^[ \t]*\#(?:[^\n]*\\\n)*[^\n]*""",
    re.DOTALL | re.MULTILINE,
)


def functions(text: str) -> Iterator[tuple[str, int]]:
    """(name, lines from its opening to its closing brace) of every outermost function of a C++ file."""
    text = NO_CODE.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), text)
    opened: list[tuple[str, int]] = []  # of every block that is open: a function's name or "", and where
    begin, line = 0, 1  # of the statement; of the character
    for at, char in enumerate(text):
        line += char == "\n"
        if char == "{":
            inside = any(name for name, _ in opened)
            opened.append(("" if inside else name_of(text[begin:at]), line))
        elif char == "}" and opened:
            name, first = opened.pop()
            if name:
                yield name, line - first + 1
        if char in "{};":
            begin = at + 1


# __launch_bounds__(256, blocks(2)) and alignas(16) stand before a function's name
ATTRIBUTES = re.compile(r"\b(?:__\w+__|alignas)\s*\((?:[^()]|\([^()]*\))*\)")


def name_of(head: str) -> str:
    """The function that a statement before a brace begins, or ""."""
    if re.search(r"\b(namespace|struct|class|union|enum)\b[^()]*$", head):
        return ""
    found = re.search(r"([\w:~]+|operator\S+)\s*\(", ATTRIBUTES.sub("", head))
    return found.group(1).split("::")[-1] if found else ""


CODE = """
#define X(name) { \\
    name( {
namespace a {
struct S {
    int get() const { return '{' + 1'000; }
    static_assert(sizeof(int) == 4);
};
__global__ void __launch_bounds__(threads(2), 1)
kernel(const int* p,
       int n) {
    if (n) {  // {
        use([=](auto f) {
            f("{");
        });
    }
}
}  // namespace a
void S::set(int n) {
}
"""


def test_functions_are_counted_as_a_reader_counts_them() -> None:
    assert list(functions(CODE)) == [("get", 1), ("kernel", 7), ("set", 2)]


def test_a_function_fits_a_few_screens(files: list[Path]) -> None:
    native = [path for path in files if path.suffix in (".cpp", ".h", ".cu", ".cuh")]
    lengths = [
        (name, n, path.as_posix())
        for path in native
        for name, n in functions((ROOT / path).read_text(encoding="utf-8"))
    ]
    assert len(lengths) > 1000
    too_long = [each for each in lengths if each[1] > MOST_LINES]
    assert not too_long


def test_a_note_on_what_was_tried_is_one_page(files: list[Path]) -> None:
    words = {
        path.as_posix(): len((ROOT / path).read_text(encoding="utf-8").split())
        for path in files
        if path.suffix == ".md"
    }
    print(f"{sum(words.values())} words of documents in {len(words)} pages")
    notes = {page: n for page, n in words.items() if page.startswith("docs/lab/")}
    assert notes
    assert not {page: n for page, n in notes.items() if n > MOST_WORDS_OF_A_NOTE}
