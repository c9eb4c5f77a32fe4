"""bench/tasks: programs of models stay within their limits, answers are judged, losses are counted."""

from __future__ import annotations

import json
import math
import random
import runpy
import subprocess
import sys
import threading
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

import record
from tasks import conversation, divergence, haystack, humaneval, limits, run, together
from tasks.backend import called
from tasks.caches import caches
from tasks.task import Client, Outcome, Problem, Refused, Task


@pytest.mark.parametrize(
    "program",
    [
        "tasks/bfcl",
        "tasks/conversation",
        "tasks/divergence",
        "tasks/humaneval",
        "tasks/ruler",
        "tasks/together",
        "curves",
    ],
)
def test_a_program_shows_its_options(
    program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [program, "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(record.ROOT / "bench" / f"{program}.py"), run_name="__main__")
    assert end.value.code == 0
    shown = "".join(capsys.readouterr().out.split())
    assert "--device" not in shown or "f16,q8_0,q4_0,small,28%,14%" in shown


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("print('shown nowhere')\nassert sorted([2, 1]) == [1, 2]", ""),
        ("import collections, heapq, math, re, typing", ""),
        ("assert 1 == 2", "AssertionError"),
        ("import sys\nsys.exit(0)", "SystemExit"),
        ("import os\nos._exit(0)", "status 0"),
        ("input()", "EOFError"),
        ("x = bytearray(1 << 33)", "MemoryError"),
        ("open('here', 'w')", "no file to write"),
        ("import socket\nsocket.create_connection(('127.0.0.1', 9))", "no socket."),
        ("import subprocess\nsubprocess.run(['true'])", "no subprocess."),
        ("import os\nos.fork()", "no os.fork"),
        ("import os\nos.kill(os.getppid(), 9)", "no os.kill"),
        ("import shutil\nshutil.rmtree('/nowhere')", "no shutil."),
    ],
)
def test_a_program_runs_within_its_limits(program: str, why: str) -> None:
    found = limits.passed(program)
    assert (why in found) if why else found == ""


def test_an_endless_program_is_ended() -> None:
    assert limits.passed("while True: pass", seconds=0.5) == "it took too long"


PROBLEM = {
    "prompt": "import math\n\n\ndef half(x):\n    return x / 2\n\n\ndef area(r):\n    '''Area.'''\n",
    "entry_point": "area",
    "test": "def check(candidate):\n    assert abs(candidate(2) - 2 * 3.14159) < 0.01\n",
}


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("Here:\n```python\ndef area(r):\n    return half(math.pi * r * r)\n```\nDone.", True),
        ("```\ndef area(r):\n    return half(math.pi * r * r)", True),  # cut off behind the code
        ("```python\nx = 1\n```\n```py\ndef area(r):\n    return half(math.pi * r * r)\n```", True),
        ("    return half(math.pi * r * r)", True),  # the body alone
        ("```python\ndef area(r):\n    return r\n```", False),
        ("I cannot do that.", False),
    ],
)
def test_the_code_of_an_answer_is_run(answer: str, right: bool) -> None:
    assert (limits.passed(humaneval.program(PROBLEM, answer)) == "") is right


def test_code_between_a_problem_and_its_request_is_of_others() -> None:
    every = [
        {
            "task_id": str(i),
            "entry_point": f"f{i}",
            "prompt": f"def f{i}():\n",
            "canonical_solution": "    pass\n" * 50,
        }
        for i in range(60)
    ]
    said = humaneval.message(every[3], every, "far")
    assert said.count("def f3()") == 1
    assert said.index("def f3()") < humaneval.OTHER < said.index("`f3`")
    assert said == humaneval.message(every[3], every, "far")


def test_a_call_holds_nothing_but_literals() -> None:
    assert called("cd", {"folder": "a'); import os; ('"}) == "cd(folder=\"a'); import os; ('\")"
    for name, arguments in (("os.system", {}), ("cd", {"a=1, b": 2}), ("f()", {})):
        with pytest.raises(ValueError, match="no such function"):
            called(name, arguments)


@pytest.mark.parametrize("kind", ["niah_single_1", "niah_multikey_3", "niah_multivalue", "vt"])
def test_what_is_asked_for_is_in_the_text(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    niah = {
        "template": "Some {type_needle_v}.\n{context}\nWhat are all {query}?",
        "answer_prefix": " They are",
    }
    vt = {"template": "{context}\nWhich are {query}?", "answer_prefix": " {num_v}: "}
    monkeypatch.setattr(haystack, "templates", lambda: {"niah": niah, "variable_tracking": vt})
    monkeypatch.setattr(haystack, "words", lambda *lists: [f"{lists[0]}{i}" for i in range(50)])
    monkeypatch.setattr(haystack, "essay", lambda: ["Here is a sentence."] * 9000)
    question = haystack.longest(kind, "seed", 3000, lambda text: len(text) // 4)
    assert 2000 < len(question.text) // 4 + question.limit <= 3000
    assert all(question.text.count(each) >= 1 for each in question.need)
    assert question.score(", ".join(question.need).upper()) == 1
    assert question.score(question.need[0]) == 1 / len(question.need)
    assert question == haystack.longest(kind, "seed", 3000, lambda text: len(text) // 4)


def test_numbers_of_a_stock_list_are_unique() -> None:
    parts = [part for page in conversation.stock(random.Random(1), conversation.TURNS) for part in page]
    assert len(parts) == conversation.PARTS * conversation.TURNS // 2
    assert len({part["serial"] for part in parts}) == len({part["part"] for part in parts}) == len(parts)


def test_tasks_stand_in_one_table() -> None:
    def result(score: float, *caches: str) -> dict[str, Any]:
        units = {"share": "%", "few": "%", "lost": ""}
        columns = [{"key": key, "label": f"so {key}", "unit": unit} for key, unit in units.items()]
        rows = [
            {"cache": cache, "share": 50, "few": score, "lost": at or None, "won": at or None}
            for at, cache in enumerate(caches)
        ]
        return {"columns": columns, "rows": rows}

    second = result(2, "f16", "x", "q8_0")
    second["rows"][2]["share"] = 51  # another file of the same budget
    columns, rows = together.merged([("a", result(1, "f16", "q8_0")), ("b", second)])
    assert [column.label for column in columns[2:4]] == ["a: of f16", "a, so few"]
    keys = ["cache", "share", "a_share", "a_few", "b_share", "b_few", "lost", "won"]
    assert [column.key for column in columns] == keys
    assert [row["cache"] for row in rows] == ["f16", "q8_0", "x"]
    assert rows[1] == dict(zip(keys, ("q8_0", 50, 50, 1, 51, 2, 3, 3), strict=True))
    assert (rows[2]["a_few"], rows[0]["lost"]) == (None, None)


def arguments(path: Path, out: Path, *words: str) -> Namespace:
    made = run.parser("").parse_args([str(path), "--work", str(out.parent), "--out", str(out), *words])
    return Namespace(**vars(made) | {"threads": 1})


def test_losses_are_counted_and_finished_caches_kept(converted: Any, tmp_path: Path) -> None:
    asked: list[str] = []

    def solve(client: Client, problem: Problem) -> list[Outcome]:
        answer = client.chat([{"role": "user", "content": problem.name}], 2)
        asked.append(problem.name)
        number = len(asked)
        score = float(number != 2) if number <= 3 else float(number != 4)
        return [Outcome(score, answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"], "")]

    def task(args: Namespace) -> Task:
        problems = [Problem(f"number {i}", "few", {}) for i in range(4)]
        return Task("task", "A task;", {"few": 128}, problems, solve)

    path, out = converted("--method", "none"), tmp_path / "task.json"
    words = ("--caches", "f16,q8_0", "--problems", "3", "--parallel", "1")
    assert run.main(arguments(path, out, *words), task) == 0
    result = json.loads(out.read_text())
    rows = {row["cache"]: row for row in result["rows"]}
    assert rows["f16"]["few"] == rows["q8_0"]["few"] == pytest.approx(200 / 3)
    assert (rows["f16"]["lost"], rows["q8_0"]["lost"], rows["q8_0"]["won"]) == (None, 1, 1)
    assert 50 < rows["q8_0"]["share"] < 56
    assert rows["q8_0"]["written"] <= 2
    assert result["scores"]["q8_0"]["few"] == "0 1 1"
    assert asked == ["number 0", "number 1", "number 2"] * 2
    assert run.main(arguments(path, out, *words), task) == 0
    assert len(asked) == 6
    answers = (tmp_path / f"{path.stem.lower()}-task" / "q8_0.jsonl").read_text().splitlines()
    assert [json.loads(line)["problem"] for line in answers[1:]] == ["number 0", "number 1", "number 2"]


def test_a_cache_ends_in_time_and_goes_on_where_it_was(converted: Any, tmp_path: Path) -> None:
    asked: list[str] = []
    ended = threading.Event()

    def solve(client: Client, problem: Problem) -> list[Outcome]:
        asked.append(problem.name)
        if problem.name == "b 1" and asked.count("b 1") == 1:
            ended.wait(60)
        return [Outcome(1.0, 1, 1, "")]

    def task(args: Namespace) -> Task:
        problems = [Problem(f"{group} {i}", group) for group in "ab" for i in range(2)]
        return Task("task", "A task;", {"a": 128, "b": 128}, problems, solve)

    path, out = converted("--method", "none"), tmp_path / "task.json"
    for seconds, answered in (("6", 3), ("60", 4)):
        words = ("--caches", "f16,q8_0", "--parallel", "4", "--seconds", seconds)
        assert run.main(arguments(path, out, *words), task) == 0
        ended.set()
        result = json.loads(out.read_text())
        assert [(row["answered"], row["asked"]) for row in result["rows"]] == [(answered, 4), (4, 4)]
        assert result["scores"]["f16"] == {"a": "1 1", "b": "1 nan" if answered == 3 else "1 1"}
        assert [row["b"] for row in result["rows"]] == [100, 100]
    assert sorted(asked) == sorted(["a 0", "b 0", "a 1", "b 1"] * 2 + ["b 1"])
    cut = tmp_path / f"{path.stem.lower()}-task" / "f16.jsonl"
    lines = cut.read_text().splitlines(True)
    lost = json.loads(lines[-1])["problem"]
    cut.write_text("".join(lines)[:-9])  # as where a program was killed
    again = tmp_path / "again.json"
    assert run.main(arguments(path, again, "--caches", "q8_0,f16,q4_0", "--score"), task) == 0
    rows = json.loads(again.read_text())["rows"]
    assert [(row["cache"], row["answered"], row["asked"]) for row in rows] == [("f16", 3, 3), ("q8_0", 3, 3)]
    assert lost in {"a 1", "b 1"}
    pairs = tmp_path / "pairs.json"
    assert run.main(arguments(path, pairs, "--caches", "q8_0,f16", "--pairs"), task) == 0
    found = json.loads(pairs.read_text())
    assert "answered" in [column["key"] for column in found["columns"]]
    assert [(row["answered"], row["lost"]) for row in found["rows"]] == [(3, None), (3, 0)]
    assert len(asked) == 9


def test_a_difference_is_told_with_how_likely_it_is_by_chance() -> None:
    made = run.Run.__new__(run.Run)
    made.scores = {"f16": {"a": [1, 1, 1, 1, 1, 0, 1]}, "q4_0": {"a": [0, 0, 0, 0, 0, 1, math.nan]}}
    beside = made.beside_f16(made.scores["q4_0"])
    assert (beside["lost"], beside["won"]) == (5, 1)
    assert (beside["there"], beside["here"]) == pytest.approx((100 * 5 / 6, 100 / 6))
    assert beside["chance"] == pytest.approx(2 * (1 + 6) / 64)
    assert made.beside_f16(made.scores["f16"])["lost"] is None


def test_divergence_of_caches_is_measured(converted: Any, tmp_path: Path) -> None:
    out = tmp_path / "nats.json"
    words = ["--caches", "f16,q8_0,q2", "-c", "64", "--chunks", "2", "--samples", "0", "-t", "1"]
    words += ["--work", str(tmp_path), "--out", str(out)]
    program = [sys.executable, str(Path(divergence.__file__)), str(converted("--method", "none")), *words]
    done = subprocess.run(program, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    f16, q8, q2 = json.loads(out.read_text())["rows"]
    assert f16["kld"] < q8["kld"] < q2["kld"]
    assert (f16["share"], q2["cache"]) == (100, "q2")
    program[program.index("f16,q8_0,q2")] = "q8_0"
    done = subprocess.run(program, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "error: [--caches] expected f16 first; got q8_0\n")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--groups", "many"), "error: [--groups] expected few; got many"),
        (("--problems", "-1"), "error: [--problems] expected a number from 0; got -1"),
        (("--seconds", "-1"), "error: [--seconds] expected a number from 0; got -1"),
        (("--parallel", "0"), "error: [--parallel] expected a positive number; got 0"),
        (("--caches", "f16,x%"), "error: [--caches] expected a share such as 14%; got x%"),
        (("--caches", "f16"), "error: [server] expected 200; got 400"),
    ],
)
def test_a_wrong_command_ends_in_one_line(
    words: tuple[str, ...], why: str, converted: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(client: Client, problem: Problem) -> list[Outcome]:
        raise Refused("error: [server] expected 200; got 400")

    task = Task("task", "", {"few": 128}, [Problem("one", "few")], refused)
    args = arguments(converted("--method", "none"), tmp_path / "x.json", *words)
    assert run.main(args, lambda _: task) == 2
    assert capsys.readouterr().err == f"{why}\n"


def test_a_preset_has_a_share_of_f16(plain_gguf: Path, tmp_path: Path) -> None:
    small, full = (each.share(plain_gguf) for each in caches("small,f16", plain_gguf, tmp_path, "demo"))
    assert 20 < small < 60
    assert full == 100
