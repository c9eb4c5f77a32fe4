"""JSON answers that have no room left are closed: they parse, and fit their schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from latentkv import LlamaGrammar
from latentkv.sampling.closing import JsonClosing, required, shortest

ASK = [{"role": "user", "content": "Tell me about the clerk."}]
TEXT = {"type": "string"}


def thing(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


ENDLESS = {
    "string": thing(text=TEXT),
    "strings": {"type": "array", "items": TEXT},
    "numbers": {"type": "array", "items": {"type": "number"}},
    "then more": thing(first=TEXT, second=thing(third=TEXT, fourth={"enum": ["one", "another one"]})),
    "nested": thing(a={"type": "array", "items": thing(b={"type": "array", "items": TEXT})}),
    "any": {"type": "object"},
}


@pytest.fixture(scope="module")
def llm(plain_gguf: Path) -> Iterator[Any]:
    from latentkv import Llama

    with Llama(str(plain_gguf), n_ctx=512, n_threads=1, chat_format="chatml") as llama:
        yield llama


@pytest.mark.parametrize("name", ENDLESS)
def test_answers_without_end_are_closed(llm: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    schema, closed, applied = ENDLESS[name], [], JsonClosing.applied

    def watched(self: JsonClosing, logits: np.ndarray, left: int) -> np.ndarray:
        result = applied(self, logits, left)
        closed.append(result is not logits)
        return result

    monkeypatch.setattr(JsonClosing, "applied", watched)
    # nothing ends of itself: what closes is unlikely, and what strings and numbers go on with is likely
    ends = [token for token in range(llm.n_vocab()) if set(llm.detokenize([token])) & set(b"]}`")]
    endless = dict.fromkeys(ends, -30.0) | {llm.model.find_token("a"): 30.0, llm.model.find_token("1"): 20.0}
    for seed in range(3):
        for n in (90, 120):
            out = llm.create_chat_completion(
                ASK,
                response_format={"type": "json_object", "schema": schema},
                max_tokens=n,
                temperature=0.8,
                seed=seed,
                logit_bias=endless if seed else None,
            )
            choice = out["choices"][0]
            assert choice["finish_reason"] == "stop", choice
            value = json.loads(choice["message"]["content"])
            assert isinstance(value, list if schema["type"] == "array" else dict)
            assert set(schema.get("required", [])) <= set(value)
    assert any(closed)
    assert not all(closed)


@pytest.mark.parametrize("n", [60, 90])
@pytest.mark.parametrize("seed", [0, 1])
def test_calls_without_end_are_closed(plain_gguf: Path, n: int, seed: int) -> None:
    from latentkv import Llama

    note = {
        "type": "function",
        "function": {"name": "note", "parameters": thing(text=TEXT, tags={"type": "array"})},
    }
    with Llama(str(plain_gguf), n_ctx=1024, n_threads=1, chat_format="chatml-function-calling") as llama:
        ends = [token for token in range(llama.n_vocab()) if set(llama.detokenize([token])) & set(b"]}")]
        out = llama.create_chat_completion(
            ASK,
            tools=[note],
            tool_choice={"type": "function", "function": {"name": "note"}},
            max_tokens=n,
            temperature=0.8,
            seed=seed,
            logit_bias=dict.fromkeys(ends, -30.0) | {llama.model.find_token("a"): 30.0},
        )
    choice = out["choices"][0]
    assert choice["finish_reason"] == "tool_calls", choice
    assert set(json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"])) == {"text", "tags"}


def test_plain_completions_too(llm: Any) -> None:
    grammar = LlamaGrammar.from_json_schema(json.dumps(ENDLESS["string"]))
    out = llm("The clerk", grammar=grammar, max_tokens=40, temperature=0.8, seed=1)
    assert out["choices"][0]["finish_reason"] == "stop"
    assert set(json.loads(out["choices"][0]["text"])) == {"text"}


def enough(llm: Any, closing: JsonClosing) -> int:
    """The fewest tokens with which nothing is closed."""
    logits = np.arange(llm.n_vocab(), dtype=np.float32)
    return next(n for n in range(400) if closing.applied(logits, n) is logits)


def test_an_answer_with_room_is_left_alone(llm: Any) -> None:
    closing = JsonClosing(llm.model, ENDLESS["then more"])
    least = [enough(llm, closing)]
    for piece in (
        b"{",
        b'"first',
        b'": "[[[ \\"{',
        b'", "second": {',
        b'"third": "',
        b'", "fourth": "one"}',
        b"}",
    ):
        closing.push(piece)
        least.append(enough(llm, closing))
    assert 20 < least[0] < 80
    assert least[1] == least[2] == least[0] + 3  # a bracket opened
    assert least[3] < least[2]  # a key has come, and the brackets of its string are none
    assert least[4] < least[3] + 3  # a bracket more, a key less
    assert least[-1] == 11


def test_a_string_ends_behind_an_escaped_backslash(llm: Any) -> None:
    least = []
    for first in (rb"\\", rb"--"):
        closing = JsonClosing(llm.model, ENDLESS["then more"])
        closing.push(b'{"first": "' + first + b'", "second": {"third": "')
        least.append(enough(llm, closing))
    assert least[0] == least[1]


@pytest.mark.parametrize(
    ("schema", "keys", "text"),
    [
        (ENDLESS["then more"], ["first", "second", "third", "fourth"], "{}"),
        ({"type": "array", "items": {"const": 7}, "minItems": 3}, [], "[7, 7, 7]"),
        ({"type": "array", "items": TEXT}, [], "[]"),
        ({"type": "array", "items": thing(a=TEXT), "minItems": 2}, ["a", "a"], "[{}, {}]"),
        ({"type": "string", "minLength": 9}, [], '"xxxxxxxxx"'),
        ({"anyOf": [{"type": "null"}, thing(a=TEXT)]}, ["a"], "x" * 24),
        (True, [], "x" * 24),
    ],
)
def test_what_a_schema_takes_at_least(schema: Any, keys: list[str], text: str) -> None:
    assert [key for key, _ in required(schema)] == keys
    assert shortest(schema) == text


def test_schemas_that_refer_to_themselves_end() -> None:
    schema: dict[str, Any] = {"type": "object", "required": ["a"]}
    schema["properties"] = {"a": schema}
    assert 5 < len(required(schema)) < 20
