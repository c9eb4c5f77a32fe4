"""latentkv.chat.thoughts: where a thought begins and ends, and which tokens end it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from thinking import FREE, OPENS

from latentkv.chat.formats import CHATML
from latentkv.chat.prompt import chat_request
from latentkv.chat.template import ChatTemplate
from latentkv.chat.thoughts import CLOSING, ThoughtCloser, ThoughtLimit, ThoughtTags, thinking_kwargs

ASK = [{"role": "user", "content": "Numbers?"}]


@pytest.fixture(scope="module")
def model(converted: Callable[..., Path]) -> Any:
    from latentkv import _core

    return _core.Model(str(converted("--method", "none", "--outtype", "f32")))


def tags(model: Any, source: str, **options: Any) -> ThoughtTags | None:
    return chat_request(model, ChatTemplate(source, model=model), ASK, **options).thoughts


def test_templates_say_where_thoughts_stand(model: Any) -> None:
    assert tags(model, OPENS) == ThoughtTags("<think>", ["</think>"], is_open=True)
    assert tags(model, FREE) == ThoughtTags("<think>", ["</think>"], is_open=False)
    off = thinking_kwargs(None, 0)
    assert tags(model, OPENS, chat_template_kwargs=off) == tags(model, FREE)
    assert tags(model, CHATML) is None
    assert thinking_kwargs({"enable_thinking": True, "a": 1}, 0) == {"enable_thinking": True, "a": 1}
    assert thinking_kwargs(None, 5) is None
    assert ThoughtLimit.of(None, 5) is ThoughtLimit.of(tags(model, FREE), -1) is None


def written(model: Any, limit: ThoughtLimit, text: str, n_more: int = 40) -> str:
    """What comes of a model that writes `text` whatever it reads, and then x for ever."""
    closer, said = ThoughtCloser(model, limit), list[int]()
    wanted = list(model.tokenize(text.encode(), False, True))
    row = np.zeros(model.n_vocab, np.float32)
    for _ in range(len(wanted) + n_more):
        if closer.forces:
            token = int(np.argmax(closer.applied(row)))
        else:
            token = wanted.pop(0) if wanted else model.find_token("x")
        said.append(token)
        closer.push(token)
    return b"".join(model.token_to_piece(token, True) for token in said).decode(errors="replace")


def count(model: Any, text: str) -> int:
    return len(model.tokenize(text.encode(), False, True))


@pytest.mark.parametrize("budget", [1, 3, 10])
def test_a_thought_has_as_many_tokens_as_it_may(model: Any, budget: int) -> None:
    limit = ThoughtLimit(ThoughtTags("<think>", ["</think>"], is_open=False), budget)
    text = "Well. <think>" + "one two three four five six seven eight nine ten eleven twelve"
    said = written(model, limit, text)
    before, _, rest = said.partition("<think>")
    thought, end, answer = rest.partition(f"{CLOSING}</think>")
    assert before == "Well. "
    assert end
    assert abs(count(model, thought) - budget) <= 1
    assert "x" in answer
    assert "</think>" not in answer


def test_what_ends_by_itself_is_let_be(model: Any) -> None:
    limit = ThoughtLimit(ThoughtTags("<think>", ["</think>", "<call>"], is_open=True), 30)
    for end in ("</think>", "<call>"):
        assert written(model, limit, f"Brief.{end}An answer", 60) == f"Brief.{end}An answer" + "x" * 60
    assert written(model, limit, "No thought", 80).count("</think>") == 1


def test_each_thought_has_its_own(model: Any) -> None:
    limit = ThoughtLimit(ThoughtTags("<think>", ["</think>"], is_open=True), 4, "")
    said = written(model, limit, "a</think> b <think> c d e f g h i j k l m n")
    assert said.count("</think>") == 2


def test_without_tokens_there_is_no_thought_and_no_line(model: Any) -> None:
    tags = ThoughtTags("<think>", ["</think>"], is_open=True)
    assert written(model, ThoughtLimit(tags, 0), "Well", 9).startswith("</think>Well")
    closed = ThoughtTags("<think>", ["</think>"], is_open=False)
    assert written(model, ThoughtLimit(closed, 0), "a<think>b", 9).startswith("a<think></think>")


def test_a_character_is_not_cut(model: Any) -> None:
    """Of several tokens: the budget ends within it, and the line comes behind it."""
    tags = ThoughtTags("<think>", ["</think>"], is_open=True)
    text = "\U0001f600" * 4
    for budget in range(1, 9):
        said = written(model, ThoughtLimit(tags, budget, "!"), text, 30)
        assert "�" not in said
        assert "!</think>" in said


def test_a_grammar_that_does_not_let_it_come_goes_on(model: Any) -> None:
    closer = ThoughtCloser(model, ThoughtLimit(ThoughtTags("<think>", ["</think>"], is_open=True), 1))
    token = model.find_token("x")
    closer.push(token)
    assert closer.forces
    closer.push(token)  # another than the first of the line
    for _ in range(20):
        assert not closer.forces
        closer.push(token)
