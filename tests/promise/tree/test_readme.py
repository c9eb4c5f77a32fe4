"""The pages say what is there: tables are current, files and commands they name exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import record
import tables

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("bench/*.md")})
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
# `native/src/…/x.h`, `bench/x.py`: a path from the root with a suffix, in backticks; NAME.py is a placeholder
PATH = re.compile(r"`((?:native|python|tools|tests|bench|docs|models|\.ci)/[\w./-]*[a-z0-9][\w-]*\.\w+)`")
COMMAND = re.compile(r"^\s*(?:\$ )?latentkv (\w+)", re.MULTILINE)


@pytest.mark.parametrize("page", tables.pages(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_tables_are_current(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    folder = page.parent.relative_to(ROOT).as_posix()
    assert tables.render(text, ROOT, folder) == text, "stale: run python bench/tables.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_files_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = [page.parent / target for target in LINK.findall(text) if "://" not in target]
    missing = [str(path) for path in [*links, *(ROOT / p for p in PATH.findall(text))] if not path.exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_commands_that_a_page_uses_exist(page: Path) -> None:
    used = set(COMMAND.findall(page.read_text(encoding="utf-8")))
    assert used <= {stem for stem, _ in tables.entries(ROOT / tables.REGISTRIES["command"])}


def write_repository(root: Path) -> Path:
    columns = [record.Column("kv", "cache"), record.Column("ppl", "perplexity", ".2f")]
    record.save(
        root / "bench" / "results" / "small.json",
        command="make small",
        columns=columns,
        rows=[{"kv": "f16", "ppl": 14.694}, {"kv": "q4", "ppl": None}],
    )
    return root


PAGE = "before\n<!-- result: small -->\n<!-- /result -->\nafter\n"


def test_a_result_becomes_a_table(tmp_path: Path) -> None:
    page = tables.render(PAGE, write_repository(tmp_path))
    assert "| cache | perplexity |\n|---|--:|\n| f16 | 14.69 |\n| q4 | – |\n" in page
    assert "`make small`" in page
    assert "(bench/results/small.json)" in page
    assert "(../bench/results/small.json)" in tables.render(PAGE, tmp_path, "docs")
    assert page.startswith("before\n")
    assert page.endswith("after\n")
    assert tables.render(page, tmp_path) == page


def test_a_page_may_show_a_part_of_a_result(tmp_path: Path) -> None:
    root = write_repository(tmp_path)
    marked = PAGE.replace("small -->", "small columns=ppl rows=^f1 -->")
    page = tables.render(marked, root)
    assert "\n| perplexity |\n|--:|\n| 14.69 |\n\n[JSON](bench/results/small.json)\n" in page
    assert tables.render(page, root) == page
    for wrong in ("columns=bytes", "rows=q8"):
        with pytest.raises(tables.StaleError, match=r"^\[tables\] expected (columns|rows) of small.json"):
            tables.render(PAGE.replace("small -->", f"small {wrong} -->"), root)


def test_a_result_is_found_in_any_folder_and_once(tmp_path: Path) -> None:
    results = write_repository(tmp_path) / "bench" / "results"
    (results / "speed").mkdir()
    (results / "small.json").rename(results / "speed" / "small.json")
    assert "(bench/results/speed/small.json)" in tables.render(PAGE, tmp_path)
    write_repository(tmp_path)
    with pytest.raises(tables.StaleError, match=r"expected one small.json below bench/results; got 2$"):
        tables.render(PAGE, tmp_path)


def test_a_changed_number_makes_the_page_stale(tmp_path: Path) -> None:
    page = tables.render(PAGE, write_repository(tmp_path))
    path = tmp_path / "bench" / "results" / "small.json"
    result = json.loads(path.read_text(encoding="utf-8"))
    result["rows"][0]["ppl"] *= 1.01
    path.write_text(json.dumps(result), encoding="utf-8")
    assert tables.render(page, tmp_path) != page


@pytest.mark.parametrize(
    "block", ["<!-- result: absent -->\n<!-- /result -->", "<!-- registry: no -->\n<!-- /registry -->"]
)
def test_a_block_without_a_source_is_an_error(tmp_path: Path, block: str) -> None:
    with pytest.raises(tables.StaleError, match=r"^\[tables\] expected .*; got "):
        tables.render(block, tmp_path)


# Where figures are measured ones: what stands there without a source is a scale, a version or an example.
MEASURED = ["README.md", "docs/results.md", "docs/results/*.md", "docs/cache.md", "docs/architectures.md"]
NOT_MEASURED = (
    "Python 3.10 to 3.13",
    "capability 8.0",
    "Qwen 1.5 to 3.8",
    "Qwen 3.5 to 3.8",
    "1.5 billion",
    "At 0.001 nobody notices",
    "At\n  0.01 one token in twenty",
    "At 0.1 texts take other directions",
    "**99.9 %**",
)
NO_PROSE = re.compile(r"```.*?```|`[^`\n]*`|\]\([^)\n]*\)|^[|#][^\n]*", re.DOTALL | re.MULTILINE)
NUMBER = r"(?:\d[\d,]*\d|\d)(?:\.\d+)?"
SHARES = re.compile(rf"(?<![\w.-])((?:(?:{NUMBER}|§)(?:, | and | or | to |\s))*(?:{NUMBER}|§)) %")
DECIMALS = re.compile(r"(?<![\w.-])\d+\.\d+(?![\w.]*[-\w])")
BUDGETS = {"28", "14", "8.5"}  # per cent, of converted files: their names


def loose(text: str) -> set[str]:
    """Decimals and percentages of the text that do not say which result they are from."""
    text = tables.FIGURE.sub("§", tables.BLOCK.sub("", text))
    for phrase in NOT_MEASURED:
        text = text.replace(phrase, "")
    text = NO_PROSE.sub("", text)
    shares = [number for found in SHARES.findall(text) for number in re.findall(NUMBER, found)]
    return {*DECIMALS.findall(text), *shares} - BUDGETS


@pytest.mark.parametrize("pattern", MEASURED)
def test_every_measured_figure_of_the_text_is_its_results(pattern: str) -> None:
    """With test_tables_are_current: figures that differ from their JSON are none."""
    found = {page.name: loose(page.read_text(encoding="utf-8")) for page in ROOT.glob(pattern)}
    assert found
    assert not {name: numbers for name, numbers in found.items() if numbers}


def test_a_figure_of_the_text_follows_its_result(tmp_path: Path) -> None:
    root = write_repository(tmp_path)
    page = "f16 has 15.0<!--=small/f16/ppl-->, 14.694<!--=small/f16/ppl-->, 99 %<!-- --> of 14.7.\n"
    now = tables.render(page, root)
    assert now == page.replace("15.0<", "14.7<")
    assert loose(now) == {"99", "14.7"}
    assert tables.render("1<!--=small/f16/ppl/f16-->", root) == "100<!--=small/f16/ppl/f16-->"
    for wrong in ("small/q8/ppl", "small/q4/ppl", "small/f16/kv", "small/f16/none", "absent/f16/ppl"):
        with pytest.raises(tables.StaleError, match=r"^\[tables\] expected one "):
            tables.render(f"1.0<!--={wrong}-->", root)


def test_a_table_that_nobody_reads_is_an_error(tmp_path: Path) -> None:
    for name in ("a.b", "a/b", ""):
        with pytest.raises(tables.StaleError, match=r"^\[tables\] expected `<!-- result: NAME"):
            tables.render(f"<!-- result: {name} -->\n<!-- /result -->\n", tmp_path)


def test_pages_stay_short() -> None:
    """Words, table cells included."""
    folders = ("", "docs/**/", "bench/", "models/*/", "native/src/ops/cuda/")
    pages = [page for folder in folders for page in ROOT.glob(f"{folder}*.md")]
    words = {path.relative_to(ROOT).as_posix(): len(path.read_text("utf-8").split()) for path in pages}
    limits = {"README.md": 900}
    long = {
        name: count
        for name, count in words.items()
        if count > limits.get(name, 600 if name.startswith("docs/lab/") else 2000)
    }
    assert not long
    assert sum(words.values()) <= 25_000
