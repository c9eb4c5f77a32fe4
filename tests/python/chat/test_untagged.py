"""Calls of tools that a model writes without the tags of its template."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from latentkv.chat.obeys import obeys
from latentkv.chat.untagged import begins_call, calls_in

sys.path.insert(0, str(Path(__file__).parent))
from chat_templates import THINKING
from test_tools import ASK, CALL, TIME, WEATHER, joined, say, without_ids

Build = Callable[..., Any]
NAMES = frozenset({"weather", "time"})
BARE = '{"name": "weather", "arguments": {"city": "Rome"}}'
ROME = {"name": "weather", "arguments": '{"city": "Rome"}'}
OTHER = BARE.replace("Rome", "Oslo")


def both(llm: Any, **options: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The choice of a whole answer, and the chunks of the same one streamed."""
    options = {"tools": [WEATHER, TIME]} | options
    whole = llm.create_chat_completion(ASK, **options)["choices"][0]
    return whole, list(llm.create_chat_completion(ASK, stream=True, **options))


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (BARE, [ROME]),
        (f"\n{BARE}\n", [ROME]),
        (f"```json\n{BARE}\n```", [ROME]),
        (f"```\n{BARE}\n```\n", [ROME]),
        (f"<tools>\n{BARE}\n</tools>", [ROME]),
        (json.dumps(json.loads(BARE), indent=2), [ROME]),
        (f"[{BARE}]", [ROME]),
        (f'{{"type": "function", "function": {BARE}}}', [ROME]),
        ('{"arguments": {"city": "Rome"}, "name": "weather"}', [ROME]),
        (f"{{{BARE}}}", [ROME]),  # the template of Qwen2.5-Coder has braces doubled by mistake
        (f"{{{BARE}}}\n{{{OTHER}}}", [ROME, ROME | {"arguments": '{"city": "Oslo"}'}]),
        (f"{BARE}\n{OTHER}", [ROME, ROME | {"arguments": '{"city": "Oslo"}'}]),
    ],
)
def test_whole_answers_that_are_calls(
    scripted: Build, script: Any, text: str, calls: list[dict[str, str]]
) -> None:
    llm = scripted(chat_template=THINKING, n_ctx=4096)
    say(script, llm, text.encode(), tools=[WEATHER, TIME])
    whole, chunks = both(llm)
    assert whole["finish_reason"] == "tool_calls"
    assert [call["function"] for call in whole["message"]["tool_calls"]] == calls
    assert whole["message"]["content"] is None
    assert without_ids(joined(chunks)) == without_ids(whole["message"])
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert all("content" not in chunk["choices"][0]["delta"] for chunk in chunks)


@pytest.mark.parametrize(
    "text",
    [
        "Hello!",
        '{"name": "Alice", "arguments": {}}',  # no tool on offer
        '{"name": "weather"}',
        '{"name": "weather", "arguments": "Rome"}',
        '{"name": "weather", "parameters": {"type": "object"}}',  # a description of a tool
        '{"name": "weather", "arguments": {"city": "Rome"}, "unit": "C"}',
        f"{BARE} is what I would call.",
        f"I call\n{BARE}",
        f"```json\n{BARE}",
        f"{{{BARE}",
        f"{{{BARE}, 1}}",
        '{"name": "weather", "arguments": {"city": "Rome"',
        f"```python\n{BARE}\n```",
        "[1, 2]",
    ],
)
def test_other_text_stays_text(scripted: Build, script: Any, text: str) -> None:
    llm = scripted(chat_template=THINKING, n_ctx=4096)
    say(script, llm, text.encode(), tools=[WEATHER, TIME])
    whole, chunks = both(llm)
    assert whole["finish_reason"] == "stop"
    assert whole["message"] == {"role": "assistant", "content": text}
    assert joined(chunks) == whole["message"]


TRIP = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "Oslo"]},
        "days": {"type": "integer", "minimum": 1},
        "stops": {"type": "array", "items": {"$ref": "#/$defs/stop"}},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {
        "stop": {
            "type": "object",
            "properties": {
                "at": {"type": "string", "pattern": "^[a-z ]+$"},
                "cost": {"type": ["number", "null"]},
            },
            "required": ["at", "cost"],
            "additionalProperties": False,
        }
    },
}
OBEYING = (
    '{"city": "Rome", "days": 2}',
    '{"days": 2.0, "city": "Rome"}',  # a validator knows no order of keys, and takes 2.0 for an integer
    '{"stops": [{"cost": 1.5, "at": "old town"}, {"at": "a", "cost": null}], "days": 1, "city": "Oslo"}',
)
DISOBEYING = (
    "{}",
    '{"city": "Rome"}',
    '{"city": "Paris", "days": 2}',
    '{"city": "Rome", "days": 0}',
    '{"city": "Rome", "days": "2"}',
    '{"city": "Rome", "days": 2, "hotel": true}',
    '{"city": "Rome", "days": 2, "stops": [{"at": "Old Town", "cost": 1}]}',
    '{"city": "Rome", "days": 2, "stops": [{"at": "a"}]}',
)


@pytest.mark.parametrize("arguments", OBEYING + DISOBEYING)
def test_arguments_of_a_strict_function_obey_or_stay_text(
    scripted: Build, script: Any, arguments: str
) -> None:
    llm = scripted(chat_template=THINKING, n_ctx=4096)
    trip = {"name": "trip", "parameters": TRIP}
    text = f'```json\n{{"name": "trip", "arguments": {arguments}}}\n```'
    is_obeyed = jsonschema.Draft202012Validator(TRIP).is_valid(json.loads(arguments))
    assert is_obeyed == (arguments in OBEYING)
    for strict in (True, False):
        tools = [{"type": "function", "function": trip | {"strict": strict}}, WEATHER]
        say(script, llm, text.encode(), tools=tools)
        whole, chunks = both(llm, tools=tools)
        assert without_ids(joined(chunks)) == without_ids(whole["message"])
        if is_obeyed or not strict:
            assert whole["finish_reason"] == "tool_calls"
            (call,) = whole["message"]["tool_calls"]
            assert json.loads(call["function"]["arguments"]) == json.loads(arguments)
        else:
            assert whole["finish_reason"] == "stop"
            assert whole["message"] == {"role": "assistant", "content": text}
    # one call that does not obey leaves the others text as well
    llm = scripted(chat_template=THINKING, n_ctx=4096)
    several = f"{BARE}\n{text}"
    tools = [{"type": "function", "function": trip | {"strict": True}}, WEATHER]
    say(script, llm, several.encode(), tools=tools)
    whole, _ = both(llm, tools=tools)
    assert len(whole["message"].get("tool_calls", ())) == (2 if is_obeyed else 0)


KEYS = st.sampled_from(["a", "b", "x y", "ü"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-9, 9) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)
SCHEMAS = st.recursive(
    st.sampled_from([{"type": kind} for kind in ("null", "boolean", "integer", "number", "string")])
    | st.just({"enum": ["a", 1, None]}),
    lambda inner: (
        st.builds(
            lambda parts, needed: {
                "type": "object",
                "properties": parts,
                "required": [key for key in parts if key in needed],
                "additionalProperties": False,
            },
            st.dictionaries(KEYS, inner, max_size=3),
            st.sets(KEYS),
        )
        | st.builds(lambda of: {"type": "array", "items": of}, inner)
        | st.builds(lambda one, other: {"anyOf": [one, other]}, inner, inner)
    ),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(schema=SCHEMAS, value=VALUES)
def test_what_obeys_is_what_a_validator_takes(schema: dict[str, Any], value: Any) -> None:
    assert obeys(schema, value) == jsonschema.Draft202012Validator(schema).is_valid(value)


def test_no_pattern_takes_exponential_time() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(a+)+$"}}}
    start = time.process_time()
    assert obeys(schema, {"a": "a" * 5000})
    assert not obeys(schema, {"a": "a" * 5000 + "b"})
    assert time.process_time() - start < 5


def test_text_is_shown_as_soon_as_it_is_no_call(scripted: Build, script: Any) -> None:
    llm = scripted(chat_template=THINKING, n_ctx=4096)
    text = '{"name": "Alice", "age": 3}'
    say(script, llm, text.encode(), tools=[WEATHER])
    chunks = llm.create_chat_completion(ASK, tools=[WEATHER], stream=True)
    deltas = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert next(filter(None, deltas)) == '{"name": "A'  # no tool begins so
    assert deltas.count("") < 5


def test_when_calls_need_their_tags(scripted: Build, script: Any) -> None:
    llm = scripted(chat_template=THINKING, n_ctx=4096)
    two = f"{BARE}\n{OTHER}"
    say(script, llm, two.encode(), tools=[WEATHER, TIME])
    whole, _ = both(llm, parallel_tool_calls=False)
    assert whole["message"]["content"] == two  # one call was asked for
    say(script, llm, BARE.encode(), tools=[WEATHER])
    whole, _ = both(llm, tools=[WEATHER], tool_choice="none")
    assert whole["message"]["content"] == BARE
    say(script, llm, BARE.encode(), tools=[TIME])
    whole, _ = both(llm, tools=[TIME])
    assert whole["message"]["content"] == BARE


def test_an_answer_that_breaks_off_is_text(scripted: Build, script: Any) -> None:
    llm = scripted(chat_template=THINKING, n_ctx=4096)
    say(script, llm, BARE.encode(), tools=[WEATHER])
    whole, chunks = both(llm, tools=[WEATHER], max_tokens=len(BARE) - 3)
    assert whole["finish_reason"] == "length"
    assert joined(chunks) == whole["message"] == {"role": "assistant", "content": BARE[:-3]}


def test_thoughts_before_a_call_without_tags(scripted: Build, script: Any) -> None:
    llm = scripted(chat_template=THINKING, n_ctx=4096)
    say(script, llm, b"<think>\nHm.\n</think>\n\n" + BARE.encode(), tools=[WEATHER])
    whole, chunks = both(llm, tools=[WEATHER])
    assert whole["message"]["reasoning_content"] == "Hm.\n"
    assert whole["message"]["tool_calls"][0]["function"] == ROME
    assert without_ids(joined(chunks)) == without_ids(whole["message"])


def test_calls_with_tags_come_as_they_are_written(scripted: Build, script: Any) -> None:
    llm = scripted(chat_template=THINKING, n_ctx=4096)
    say(script, llm, CALL, tools=[WEATHER])
    chunks = list(llm.create_chat_completion(ASK, tools=[WEATHER], stream=True))
    parts = [call for c in chunks for call in c["choices"][0]["delta"].get("tool_calls", ())]
    assert len(parts) > 3  # not held back to the end


def test_every_beginning_of_a_call_may_become_one() -> None:
    for text in (BARE, f"{{{BARE}}}", f"```json\n{BARE}\n```", f"<tools>{BARE}</tools>", f"[{BARE}]"):
        assert calls_in(text, NAMES)
        verdicts = [begins_call(text[:end], NAMES) for end in range(len(text) + 1)]
        assert False not in verdicts
        assert verdicts == sorted(verdicts, key=lambda each: each is True)  # once likely, always likely
    assert calls_in("[" * 100_000, NAMES) == []
