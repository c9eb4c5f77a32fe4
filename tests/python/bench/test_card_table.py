"""bench/gpu/card_table.py: one row a cache, shares by turns, and what llama.cpp had."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import tables
from gpu import card_table


def row(cache: str, depth: int, tps: float, of_first: float, **more: Any) -> dict[str, Any]:
    common = {"bytes_per_token": 1000, "light_gb_per_s": [990.0, 1020.0], "thrown": 0}
    return {"cache": cache, "depth": depth, "decode_tps": tps, "of_first": of_first, **common, **more}


FILES = {
    "8b": [
        row("8b f16", 0, 100, 1.0),
        row("8b-14", 0, 99, 0.99),
        row("8b f16", 1000, 50, 1.0, prefill_tps=700.0),
        row("8b-14", 1000, 90, 1.8, prefill_tps=650.0),
    ],
    "8b-more": [row("8b f16", 0, 80, 1.0), row("8b small", 0, 79, 0.98)],
}
REPORT = {"card": "rtx4090", "multiprocessors": 108, "of": 132}
LLAMA = [
    {"n_depth": 0, "n_gen": 48, "avg_ts": 95.0},
    {"n_depth": 2000, "n_gen": 48, "avg_ts": 40.0},
    {"n_depth": 1000, "n_gen": 0, "avg_ts": 800.0},
]


def test_a_table_is_made_of_several_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, rows in FILES.items():
        content = {"gpu": "an H100", "prefill": 2048, "rows": rows}
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
        (tmp_path / f"{name}.report.json").write_text(json.dumps(REPORT))
    (tmp_path / "llama.jsonl").write_text("load\n" + "\n".join(map(json.dumps, LLAMA)))
    files = [str(tmp_path / f"{name}.json") for name in FILES]
    llama = f"q8_0={tmp_path / 'llama.jsonl'}"
    command = ["card_table.py", "t", *files, "--of", "an 8B", "--llama", llama, "--folder", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    card_table.main()
    made = json.loads((tmp_path / "t.json").read_text())
    rows = {each["cache"]: each for each in made["rows"]}
    assert list(rows) == ["f16", "14 %", "small", "llama.cpp q8_0"]
    assert (rows["14 %"]["of_1000"], rows["14 %"]["prefill"]) == (180.0, 650.0)
    assert rows["f16"]["rows_gb_per_s"] == pytest.approx(1e-9 * 1e6 / (1 / 50 - 1 / 100))
    assert (rows["small"]["of_0"], rows["small"]["at_1000"]) == (98.0, None)
    assert (rows["llama.cpp q8_0"]["of_0"], rows["llama.cpp q8_0"]["prefill"]) == (95.0, 800.0)
    assert (rows["llama.cpp q8_0"]["at_2000"], rows["llama.cpp q8_0"]["of_2000"]) == (40.0, None)
    assert "RTX 4090" in made["note"]
    assert "0.99 to 1.02 TB/s" in made["note"]
    page = tables.render_result("t", tmp_path, only="cache,of_0,of_1000")
    assert "| 14 % | 99 % | 180 % |" in page


def test_a_gpu_as_it_is_has_no_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, rows in FILES.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"gpu": "an H100", "prefill": 2048, "rows": rows}))
    files = [str(tmp_path / f"{name}.json") for name in FILES]
    monkeypatch.setattr(
        sys, "argv", ["card_table.py", "t", *files, "--of", "an 8B", "--folder", str(tmp_path)]
    )
    card_table.main()
    made = json.loads((tmp_path / "t.json").read_text())
    assert made["note"].startswith("an H100; an 8B, batch 1")
    assert [each["cache"] for each in made["rows"]] == ["f16", "14 %", "small"]
