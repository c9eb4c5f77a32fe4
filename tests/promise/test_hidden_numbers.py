"""The questions of bench/inputs/hide.py can be answered from the text, and only from there."""

from __future__ import annotations

from pathlib import Path

from inputs import hide

TEXT = (Path(__file__).resolve().parents[2] / "models" / "demo" / "sample-val.txt").read_text(
    encoding="utf-8"
)


def test_every_number_stands_once_in_its_passage() -> None:
    made = hide.questions(TEXT, n=24, chars=3000)
    assert len({q["answer"] for q in made}) == 24
    for question in made:
        prompt, answer = str(question["prompt"]), str(question["answer"])
        assert prompt.count(answer) == 1
        assert answer not in TEXT
        word = prompt.rsplit(" ", 1)[1].rstrip("?")
        assert f"The magic number for {word} is {answer}. " in prompt


def test_the_same_seed_asks_the_same_questions() -> None:
    assert hide.questions(TEXT, 3, 3000, seed=1) == hide.questions(TEXT, 3, 3000, seed=1)
    assert hide.questions(TEXT, 3, 3000, seed=1) != hide.questions(TEXT, 3, 3000, seed=2)
