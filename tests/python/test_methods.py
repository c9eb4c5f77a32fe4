"""bench/methods.py: a recorded reference is the reference, finished rows are kept, curves are frontiers."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

import curves
import methods


def arguments(**changes: Any) -> argparse.Namespace:
    given: dict[str, Any] = {
        "checkpoint": methods.ROOT / "models" / "demo",
        "calib": Path("a.txt"),
        "text": Path("b.txt"),
        "save": "x",
        "ctx_size": 64,
        "chunks": 2,
        "parallel": 2,
        "methods": "palu, zack --group 2",
        "keep": "0.5,0.3",
        "kv": "f16,q4",
        "plan": ["palu --keep 0.4"],
        "convert": "",
        "needles": None,
        "needles_length": 1000,
        "threads": 1,
    }
    return argparse.Namespace(**(given | changes))


def test_a_replayed_reference_is_the_recorded_one(converted: Any, demo: Path, tmp_path: Path) -> None:
    from answering.replay import Reference
    from latentkv import _core
    from latentkv.measure.perplexity import Cache, perplexity

    plain = _core.Model(str(converted("--method", "none")))
    reference = Reference(Cache(plain, {"kv": "f16", "n_threads": 1}), tmp_path / "x.logits")
    args = arguments(text=demo / "sample-val.txt")
    itself = methods.measure(converted("--method", "none"), "f16", reference, args)
    assert reference.path.exists()
    assert itself["kld"] == 0
    replayed = methods.measure(converted("--method", "none"), "q4", reference, args)
    live = perplexity(
        Cache(plain, {"kv": "q4", "n_threads": 1}),
        args.text.read_text(encoding="utf-8"),
        n_ctx=64,
        chunks=2,
        decode=True,
        parallel=2,
        against=Cache(plain, {"kv": "f16", "n_threads": 1}),
    )
    assert replayed["kld"] == live["kld"]["mean"] > 0
    assert replayed["ppl"] == live["ppl"]
    assert replayed["share"] == live["kv_bytes_per_token"] / live["f16_bytes_per_token"]
    regions = methods.measure(converted("--method", "tale", "--group", "all"), "", reference, args)
    tokens = _core.Session(_core.Model(str(converted("--method", "tale", "--group", "all"))), n_ctx=64)
    assert regions["bytes"] == tokens.kv_bytes()["total"] / 64 > tokens.kv_bytes()["per_token"]
    with pytest.raises(ValueError, match="expected at most 62 rows; got"):
        methods.measure(converted("--method", "none"), "q4", reference, arguments(text=args.text, chunks=3))


def test_every_method_meets_every_fraction_and_format() -> None:
    made = list(methods.files(arguments()))
    assert [(file.method, file.keep) for file in made] == [
        ("none", None),
        *[(method, keep) for method in ("palu", "zack --group 2") for keep in (0.5, 0.3)],
        ("palu --keep 0.4", None),
    ]
    assert made[0].formats == ("f16", "q8_0", "q4_0")
    assert made[3].options == ["--method", "zack", "--group", "2", "--keep", "0.5"]
    assert made[-1].formats == ("",)
    assert len({file.name for file in made}) == len(made)


def test_rows_of_the_same_command_are_kept(tmp_path: Path) -> None:
    path, command = tmp_path / "x.json", methods.command_line(arguments())
    assert methods.finished(path, command, False) == []
    path.write_text(json.dumps({"command": command, "rows": [{"kv": "q4"}]}))
    assert methods.finished(path, command, False) == [{"kv": "q4"}]
    assert methods.finished(path, command, True) == []
    with pytest.raises(
        SystemExit, match=r"error: \[--save\] expected results of `python bench/methods.py models/demo"
    ):
        methods.finished(path, methods.command_line(arguments(chunks=3)), False)


def test_a_curve_leaves_out_what_is_beaten(tmp_path: Path) -> None:
    assert curves.frontier([(30, 0.1), (10, 0.5), (20, 0.6)]) == [(10, 0.5), (30, 0.1)]
    rows = [
        {"method": "none", "share": 1.0, "kld": 0.0},
        {"method": "none", "share": 0.3, "kld": 0.02},
        {"method": "palu", "share": 0.2, "kld": 0.03},
        {"method": "palu", "share": None, "kld": None},
    ]
    curves.draw(rows, tmp_path / "x.png", "title")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["x.png"]
