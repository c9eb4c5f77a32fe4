"""An answer as it grows: what comes out piece by piece is the message that its whole text is read as, and the
time for it is linear in its length."""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from latentkv.chat.template import ChatTemplate
from latentkv.generate.chat import MessageStream

sys.path.insert(0, str(Path(__file__).parent))
from chat_templates import BARE_JSON, TAGGED, THINKING

PARAMETERS = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "text": {"type": "string"}, "lines": {"type": "integer"}},
    "required": ["path", "text"],
}
WRITE = {
    "type": "function",
    "function": {"name": "write", "description": "Writes.", "parameters": PARAMETERS},
}
STOP = {
    "type": "function",
    "function": {"name": "stop", "description": "Stops.", "parameters": {"type": "object"}},
}
ASK = [{"role": "user", "content": "Write a file."}]
PIECES = [
    *(
        "word ",
        "a < b",
        " and <i>so</i>",
        "\n",
        "\n\n",
        "  ",
        "\t",
        "é",
        "漢字",
        "🙂",
        "}",
        "{",
        "[1, 2]",
        '"',
        "'",
    ),
    *(
        "<",
        "</",
        "<tool",
        "<tool_call",
        "<think",
        "</think",
        "<function",
        "</parameter",
        "\\",
        "\\n",
        "\\u00e9",
        ":",
    ),
]


def words(rng: random.Random, count: int) -> str:
    return "".join(rng.choice(PIECES) for _ in range(count))


def arguments(rng: random.Random, count: int) -> dict[str, Any]:
    found: dict[str, Any] = {"path": words(rng, 3), "text": words(rng, count)}
    return found | ({"lines": rng.randrange(100)} if rng.random() < 0.5 else {})


def called(rng: random.Random, template: str, given: dict[str, Any]) -> str:
    """A call as models write it, with blanks of their own."""
    if template == TAGGED:
        written = "".join(
            f"<parameter={name}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
            for name, value in given.items()
        )
        return f"<tool_call>\n<function=write>\n{written}</function>\n</tool_call>"
    separators = rng.choice([(",", ":"), (", ", ": "), (" , ", " : ")])
    said = json.dumps(given, ensure_ascii=rng.random() < 0.5, separators=separators)
    if template == BARE_JSON:
        return f'{{"name": "write", "parameters": {said}}}'
    return f'<tool_call>\n{{"name": "write", "arguments": {said}}}\n</tool_call>'


def answers(rng: random.Random, template: str) -> str:
    thoughts = (
        f"<think>\n{words(rng, 8)}\n</think>\n\n" if template == THINKING and rng.random() < 0.5 else ""
    )
    text = "" if template == BARE_JSON else words(rng, rng.choice((0, 5, 40)))
    kind = rng.choice(("text", "call", "both"))
    if kind == "text":
        return thoughts + (text or "word") + words(rng, 10)
    call = called(rng, template, arguments(rng, rng.choice((0, 5, 60))))
    return thoughts + (f"{text}\n" if kind == "both" and template != BARE_JSON else "") + call


def parser(template: str, tools: bool = True, **options: Any) -> Any:
    offered = {"tools": [WRITE, STOP]} if tools else {}
    return ChatTemplate(template, bos_token="<s>", eos_token="</s>").apply(ASK, **offered, **options).parser


def added(message: dict[str, Any], deltas: list[str]) -> None:
    for line in deltas:
        delta = json.loads(line)
        for key in ("content", "reasoning_content"):
            message[key] = message.get(key, "") + delta.get(key, "")
        for part in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if part["index"] == len(calls):
                calls.append({"name": part["function"]["name"], "arguments": ""})
            calls[part["index"]]["arguments"] += part["function"]["arguments"]


def plain(message: dict[str, Any]) -> dict[str, Any]:
    calls = [call.get("function", call) for call in message.get("tool_calls", ())]
    shown = {key: message.get(key) or "" for key in ("content", "reasoning_content")}
    return shown | {"calls": [(call["name"], call["arguments"]) for call in calls]}


def pieces(rng: random.Random, text: str) -> list[str]:
    found, at = [], 0
    while at < len(text):
        step = rng.choice((1, 1, 2, 3, 5, 17))
        found.append(text[at : at + step])
        at += step
    return found


@pytest.mark.parametrize("tools", [True, False], ids=["tools", "no tools"])
@pytest.mark.parametrize("template", [THINKING, BARE_JSON, TAGGED], ids=["json", "bare", "tagged"])
def test_what_grows_is_what_the_whole_is_read_as(template: str, tools: bool) -> None:
    rng = random.Random(len(template))
    reading = parser(template, tools)
    n_read, n_calls = 0, 0
    for _ in range(150):
        text = answers(rng, template)
        try:
            whole = plain(json.loads(reading.parse(text, is_partial=False)))
        except ValueError:
            continue  # no answer in this format
        stream, message, before = MessageStream(reading), {}, {}
        for piece in pieces(rng, text):
            added(message, stream.push(piece))
            now = plain(message)
            assert now == plain(stream.message)
            assert all(now[key].startswith(before.get(key, "")) for key in ("content", "reasoning_content"))
            before = now
        added(message, stream.end("stop"))
        assert plain(message) == plain(stream.message) == whole, text
        n_read += 1
        n_calls += len(whole["calls"])
    assert n_read > 60
    assert (n_calls > 20) == tools


@pytest.mark.parametrize("template", [THINKING, TAGGED], ids=["json", "tagged"])
def test_an_answer_that_breaks_off_anywhere(template: str) -> None:
    rng = random.Random(5)
    reading = parser(template)
    text = "One.\n" + called(rng, template, arguments(rng, 30))
    for end in range(1, len(text)):
        stream, message = MessageStream(reading), {}
        for piece in pieces(rng, text[:end]):
            added(message, stream.push(piece))
        added(message, stream.end("length"))
        assert plain(message) == plain(json.loads(reading.parse(text[:end], is_partial=True))), text[:end]


def test_prose_comes_as_it_is_written() -> None:
    """No piece waits for the next one, where no mark of the format may begin in it."""
    stream = MessageStream(parser(THINKING))
    for at in range(300):
        assert [json.loads(line) for line in stream.push(f"word{at} ")] == [{"content": f"word{at} "}]
    assert [json.loads(line) for line in stream.push("a <tool")] == [{"content": "a "}]
    assert [json.loads(line) for line in stream.push("s>")] == [{"content": "<tools>"}]


def test_a_schema_is_read_as_it_grows() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    reading = parser(THINKING, tools=False, json_schema=schema)
    text = json.dumps({"a": words(random.Random(3), 200)})
    stream, message = MessageStream(reading), {}
    for piece in pieces(random.Random(4), text):
        added(message, stream.push(piece))
    added(message, stream.end("stop"))
    assert message["content"] == text


@pytest.mark.parametrize("begin", ["Look: ", "<think>\nHm.\n</think>\n\nLook: "], ids=["prose", "thoughts"])
@pytest.mark.parametrize("tools", [True, False], ids=["tools", "no tools"])
def test_a_model_may_open_any_number_of_brackets(tools: bool, begin: str) -> None:
    """Half-open intervals, for instance, are never closed."""
    said = "Look: " + "[0, 1) {" * 300 + " and so on"
    text = begin.removesuffix("Look: ") + said
    reading = parser(THINKING, tools)
    stream, message = MessageStream(reading), {}
    for piece in pieces(random.Random(6), text):
        added(message, stream.push(piece))
    added(message, stream.end("stop"))
    assert message["content"] == said
    assert plain(message) == plain(json.loads(reading.parse(text, is_partial=False)))


def test_arguments_that_nest_too_deep_stay_text() -> None:
    call = '<tool_call>\n{"name": "write", "arguments": {"path": ' + "[" * 100_000
    whole = plain(json.loads(parser(THINKING).parse(call, is_partial=False)))
    assert sum(text.count("[") for _, text in whole["calls"]) + whole["content"].count("[") == 100_000


@pytest.mark.parametrize("kind", ["prose", "thoughts", "call", "tagged", "numbers"])
def test_the_time_is_linear(kind: str) -> None:
    def seconds(n_pieces: int) -> float:
        prose = "The clerk of the town. " * n_pieces
        lines = "".join(f"line {at}\n" for at in range(n_pieces))
        begin, body = {
            "prose": ("", prose),
            "thoughts": ("<think>\n", prose),
            "call": (
                '<tool_call>\n{"name": "write", "arguments": {"path": "a", "text": "',
                json.dumps(lines)[1:],
            ),
            "tagged": (
                "<tool_call>\n<function=write>\n<parameter=path>\na\n</parameter>\n<parameter=text>\n",
                lines,
            ),
            "numbers": (
                '<tool_call>\n{"name": "write", "arguments": {"path": "a", "text": [',
                "1, 2, " * n_pieces,
            ),
        }[kind]
        stream = MessageStream(parser(TAGGED if kind == "tagged" else THINKING))
        stream.push(begin)
        start = time.process_time()
        for at in range(n_pieces):
            stream.push(body[4 * at : 4 * at + 4])
        return time.process_time() - start

    seconds(500)
    short, long = min(seconds(1000) for _ in range(3)), min(seconds(8000) for _ in range(2))
    assert long < 20 * short  # 8 for a line, 64 for a square


@pytest.mark.parametrize("template", [THINKING, BARE_JSON, TAGGED], ids=["json", "bare", "tagged"])
def test_an_answer_of_brackets_is_text(template: str) -> None:
    stream, message = MessageStream(parser(template)), {}
    for text in ("[" * 150, "[" * 150, "[" * 700):
        added(message, stream.push(text))
    added(message, stream.end("stop"))
    assert plain(message) == {"content": "[" * 1000, "reasoning_content": "", "calls": []}
