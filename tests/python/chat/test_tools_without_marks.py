"""Tools and chat templates that say nothing of tools, or whose calls have no mark that begins them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from latentkv import Llama
from latentkv.chat import bare
from latentkv.chat.formats import CHATML
from latentkv.chat.template import ChatTemplate

sys.path.insert(0, str(Path(__file__).parent))
from chat_templates import BARE_JSON
from test_tools import ASK, CALL, begins_with, joined, say, without_ids

Build = Callable[..., Any]

TRIP = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "Oslo"]},
        "days": {"type": "integer", "minimum": 2, "maximum": 5},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}


def strict(name: str, schema: dict[str, Any] = TRIP) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}


BOOK, TIME = strict("book"), strict("time")
NAMED = {"type": "function", "function": {"name": "time"}}
CALLED = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}


@pytest.fixture(scope="module", params=["chatml", BARE_JSON], ids=["no tools", "no mark"])
def llm(request: Any, plain_gguf: Path) -> Iterator[Any]:
    """The demo model, which has never seen a tool."""
    which = "chat_template" if request.param == BARE_JSON else "chat_format"
    with Llama(str(plain_gguf), n_ctx=1024, n_threads=1, **{which: request.param}) as llama:
        llama.begin = b"{" if request.param == BARE_JSON else b"<tool_call>\n"
        yield llama


def answers(llm: Any, **options: Any) -> list[dict[str, Any]]:
    """Whole, and what a stream adds up to."""
    begin = options.pop("begin", None)
    given = [{"logits_processor": begins_with(llm, begin)} if begin else {} for _ in range(2)]
    options = {"tools": [BOOK, TIME], "temperature": 1.0, "seed": 3, "max_tokens": 200} | options
    whole = llm.create_chat_completion(ASK, **options, **given[0])["choices"][0]["message"]
    chunks = llm.create_chat_completion(ASK, stream=True, **options, **given[1])
    return [without_ids(whole), without_ids(joined(list(chunks)))]


@pytest.mark.parametrize(
    ("choice", "names"),
    [("auto", {"book", "time"}), ("required", {"book", "time"}), (NAMED, {"time"})],
    ids=["auto", "required", "named"],
)
def test_strict_calls_obey(llm: Any, choice: Any, names: set[str]) -> None:
    whole, streamed = answers(llm, tool_choice=choice, begin=llm.begin if choice == "auto" else None)
    assert whole == streamed
    assert whole["content"] is None
    (call,) = whole["tool_calls"]
    assert call["function"]["name"] in names
    arguments = json.loads(call["function"]["arguments"])
    assert set(arguments) == {"city", "days"}
    assert arguments["city"] in ("Rome", "Oslo")
    assert 2 <= arguments["days"] <= 5


@pytest.mark.parametrize("text", [b"Use {x} and {y}.", b"Well, {"])
def test_an_answer_may_be_text(llm: Any, text: bytes) -> None:
    for message in answers(llm, begin=text, max_tokens=len(llm.tokenize(text, add_bos=False)) + 6):
        assert message["content"].lstrip().startswith(text.decode())
        assert "tool_calls" not in message


def test_tools_of_a_template_without_tools(scripted: Build, script: Any) -> None:
    llm = scripted(chat_format="chatml", n_ctx=4096)
    tools = [strict("weather", {"type": "object", "properties": {"city": {"enum": ["Rome"]}}})]
    say(script, llm, b"One moment.\n" + CALL, tools=tools)
    whole = llm.create_chat_completion(ASK, tools=tools)["choices"][0]
    assert whole["finish_reason"] == "tool_calls"
    assert without_ids(whole["message"])["tool_calls"] == [CALLED]
    assert whole["message"]["content"] == "One moment.\n"
    chunks = list(llm.create_chat_completion(ASK, tools=tools, stream=True))
    assert without_ids(joined(chunks)) == whole["message"]


def test_what_a_template_without_tools_writes() -> None:
    template = ChatTemplate(CHATML)
    call = {"id": "c", "type": "function", "function": {"name": "book", "arguments": '{"city": "Oslo"}'}}
    said = [
        {"role": "system", "content": "Be brief."},
        *ASK,
        {"role": "assistant", "content": "Hm.", "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "c", "content": "wet"},
        {"role": "tool", "tool_call_id": "c", "content": "dry"},
    ]
    text = template.render(said, tools=[BOOK])
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools")
    assert json.dumps(BOOK["function"]["parameters"]) in text
    assert '"strict"' not in text
    written = '<tool_call>\n{"name": "book", "arguments": {"city": "Oslo"}}\n</tool_call>'
    assert f"<|im_start|>assistant\nHm.\n{written}\n{written}<|im_end|>" in text
    results = "<tool_response>\nwet\n</tool_response>\n<tool_response>\ndry\n</tool_response>"
    assert f"<|im_start|>user\n{results}<|im_end|>\n<|im_start|>assistant\n" in text
    without = template.render(said)  # of a call that offers no tools any more
    assert without.startswith("<|im_start|>system\nBe brief.<|im_end|>")
    assert written in without
    assert "wet" in without
    assert "# Tools" not in template.render(ASK)


def test_the_system_message_is_the_tools_where_there_is_none() -> None:
    text = ChatTemplate(CHATML).render(ASK, tools=[BOOK])
    assert text.startswith("<|im_start|>system\n# Tools")
    assert text.count("<|im_start|>system") == 1


def test_grammars_of_another_form_are_left() -> None:
    assert bare.call_or_text("root ::= tool-call\n") is None
    required = 'root ::= "a" space until-7? tool-call\nuntil-7 ::= | [^{] until-7\n'
    assert (bare.call_or_text(required) or "").startswith('root ::= "a" space (tool-call | free-text)?\n')
    assert bare.call_or_text(required.replace("{", r"\[")) is None


@pytest.mark.parametrize(
    ("text", "content", "called"),
    [
        ("Use {x} in { y } here.", "Use {x} in { y } here.", False),
        ('return {"a": {"b": 1}}', 'return {"a": {"b": 1}}', False),
        ('{"a": 5}', '{"a": 5}', False),
        ("{", "{", False),
        ('{"name": "weath', '{"name": "weath', False),
        ('{"name": "other", "parameters": {}}', '{"name": "other", "parameters": {}}', False),
        ('{"name": "weather", "parameters": {"city": "Rome"}}', None, True),
        ('Sure {now}: {"name": "weather", "parameters": {"city": "Rome"}}', "Sure {now}: ", True),
        ('{"name": "weather", "arguments": {"city": "Rome"}}', None, True),
        ("", "", False),
        ("\n {", "\n {", False),
    ],
)
def test_a_brace_is_a_call_only_before_a_name(
    scripted: Build, script: Any, text: str, content: str | None, called: bool
) -> None:
    """Of tools that are not strict: a call may follow a text."""
    llm = scripted(chat_template=BARE_JSON, n_ctx=4096)
    tools = [{"type": "function", "function": {"name": "weather", "parameters": TRIP}}]
    say(script, llm, text.encode(), tools=tools)
    whole = without_ids(llm.create_chat_completion(ASK, tools=tools)["choices"][0]["message"])
    streamed = without_ids(joined(list(llm.create_chat_completion(ASK, tools=tools, stream=True))))
    assert (streamed["content"] or None) == (whole["content"] or None) == (content or None)
    assert streamed.get("tool_calls") == whole.get("tool_calls") == ([CALLED] if called else None)
