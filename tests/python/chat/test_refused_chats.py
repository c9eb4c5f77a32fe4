"""Conversations that a template refuses as they are, or leaves a part of out, are written in another form."""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from latentkv import LatentKVError
from latentkv.chat.formats import BUILT_IN, CHATML
from latentkv.chat.template import ChatTemplate

sys.path.insert(0, str(Path(__file__).parent))
from refusing_templates import BY_TURNS, NO_SYSTEM, NO_THOUGHTS, ONE_CALL, REFUSING, SIGNATURES, SYSTEM_FIRST

Messages = list[dict[str, Any]]

CITY = {"type": "object", "properties": {"city": {"type": "string", "description": "where"}}}


def tool(parameters: dict[str, Any] = CITY) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "look", "description": "d", "parameters": parameters}}


def said(*parts: str) -> Messages:
    """A message of each: "user one" of the user, "call x" with a call of this id, "tool x one" its result."""
    messages: Messages = []
    for part in parts:
        role, _, text = part.partition(" ")
        if role == "call":
            calls = [
                {"id": each, "type": "function", "function": {"name": "look", "arguments": "{}"}}
                for each in text.split()
            ]
            messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        elif role == "tool":
            name, _, text = text.partition(" ")
            messages.append({"role": "tool", "tool_call_id": name, "content": text})
        elif role == "thought":
            messages.append({"role": "assistant", "content": text, "reasoning_content": "Hm."})
        else:
            messages.append({"role": role, "content": text})
    return messages


CHATS = {
    "system alone": said("system S1"),
    "developer": said("developer D1", "user U1"),
    "system twice": said("system S1", "developer D1", "user U1"),
    "late system": said("system S1", "user U1", "assistant A1", "system S2", "user U2"),
    "late system at the end": said("user U1", "assistant A1", "user U2", "developer S2"),
    "user twice": said("system S1", "user U1", "user U2", "assistant A1", "user U3", "user U4"),
    "assistant twice": said("user U1", "assistant A1", "assistant A2", "user U2"),
    "assistant first": said("assistant A1", "user U1"),
    "assistant after system": said("system S1", "assistant A1", "user U1"),
    "call": said("system S1", "user U1", "call call_abcdef0123", "tool call_abcdef0123 R1"),
    "user after a result": said("user U1", "call c1", "tool c1 R1", "user U2", "assistant A1", "user U3"),
    "system after a result": said("system S1", "user U1", "call c1", "tool c1 R1", "system S2"),
    "two calls": said("user U1", "call c1 c2", "tool c2 R2", "tool c1 R1", "assistant A1", "user U2"),
    "no user": said("system S1", "call c1", "tool c1 R1"),
    "call without a result": said("user U1", "call c1", "user U2"),
    "thoughts": said("user U1", "thought A1", "user U2", "thought A2", "user U3"),
}


@cache
def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, "<s>", "</s>")


def written(source: str, messages: Messages, **options: Any) -> str:
    has_calls = any(message.get("tool_calls") for message in messages)
    tools = [tool()] if has_calls else None
    return template(source).apply(messages, tools=tools, **options).text


def sources() -> dict[str, str]:
    """Ours, and in LATENTKV_TEMPLATES those of a folder, such as llama.cpp's models/templates."""
    built_in = {name: source for name, (source, _) in BUILT_IN.items()}
    folder = os.environ.get("LATENTKV_TEMPLATES")
    found = sorted(Path(folder).glob("*.jinja")) if folder else []
    return REFUSING | built_in | {path.stem: path.read_text(encoding="utf-8") for path in found}


SOURCES = sources()


@pytest.mark.parametrize("name", SOURCES)
def test_every_text_is_written_in_order(name: str) -> None:
    for chat, messages in CHATS.items():
        text = written(SOURCES[name], messages)
        texts = [message["content"] for message in messages if message["content"]]
        missing = [each for each in texts if each not in text]
        assert not missing, (chat, text)
        if name in REFUSING and "two calls" not in chat:
            assert sorted(texts, key=text.index) == texts, (chat, text)


@pytest.mark.parametrize("name", REFUSING)
def test_a_turn_begins_as_the_one_before_it(name: str) -> None:
    """What the cache holds of a conversation stays of use."""
    for chat, messages in CHATS.items():
        if chat == "two calls" or chat == "thoughts":  # which this model does not write, or not again
            continue
        for end in range(1, len(messages)):
            is_asked = any(message["role"] == "user" for message in messages[:end])
            if is_asked and messages[end - 1]["role"] == "assistant" != messages[end]["role"]:
                begun = written(REFUSING[name], messages[:end], add_generation_prompt=False)
                whole = written(REFUSING[name], messages, add_generation_prompt=False)
                assert whole.startswith(begun), chat


def test_what_a_template_takes_is_given_as_it_is() -> None:
    late = CHATS["late system"]
    turns = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in late)
    assert written(CHATML, late, add_generation_prompt=False) == turns
    twice = CHATS["user twice"]
    assert written(SYSTEM_FIRST, twice).count("<|im_start|>user") == 4


def test_a_switch_that_a_template_obeys_is_left_out() -> None:
    """No reason for another form: the system message would not be one."""
    source = "{% for m in messages %}{{ m.role }}: {{ m.content | replace('/no_think', '') }}\n{% endfor %}"
    for text in ("Be brief. /no_think", "/no_think\nBe brief.", "/no_think"):
        shown = written(source, said(f"system {text}", "user U1"))
        assert shown == f"system: {text.replace('/no_think', '')}\nuser: U1\n"


def turn(role: str, text: str = "") -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


@pytest.mark.parametrize(
    ("source", "chat", "text"),
    [
        (SYSTEM_FIRST, "late system", turn("assistant", "A1") + turn("user", "S2") + turn("user", "U2")),
        (SYSTEM_FIRST, "system twice", turn("system", "S1\n\nD1") + turn("user", "U1")),
        (BY_TURNS, "late system", turn("assistant", "A1") + turn("user", "S2\n\nU2")),
        (BY_TURNS, "user twice", turn("user", "U1\n\nU2") + turn("assistant", "A1")),
        (BY_TURNS, "user after a result", turn("tool", "R1") + turn("assistant") + turn("user", "U2")),
        (NO_SYSTEM, "system alone", turn("user", "S1")),
        (NO_SYSTEM, "assistant after system", turn("user", "S1") + turn("assistant", "A1")),
        (NO_SYSTEM, "user after a result", "<tool_response>\nR1\n</tool_response>\n\nU2<|im_end|>"),
        (ONE_CALL, "two calls", turn("tool", "R1") + "<|im_start|>assistant\n<tool_call>"),
        (NO_THOUGHTS, "thoughts", "[INST]U1[/INST]A1</s>[INST]U2[/INST]A2</s>[INST]U3[/INST]"),
    ],
)
def test_forms(source: str, chat: str, text: str) -> None:
    assert text in written(source, CHATS[chat])


def test_nothing_helps() -> None:
    """The template's own words, about the conversation as it was given."""
    own = "{% for m in messages %}{{ raise_exception('no ' + m.role + ' ' + m.content) }}{% endfor %}"
    with pytest.raises(LatentKVError, match=r"expected messages that it accepts; got no system S1$"):
        written(own, CHATS["system twice"])


ODD: dict[str, Any] = {
    "list": {"type": ["integer", "null"]},
    "none": {},
    "any": True,
    "choice": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#/$defs/D"}}]},
    "one": {"oneOf": [{"type": "string"}, {"type": "integer"}]},
    "all": {"allOf": [{"type": "object", "properties": {"x": {}}}, {"description": "both"}]},
    "named": {"$ref": "#/$defs/D", "description": "a D"},
    "circle": {"$ref": "#/$defs/C"},
    "lost": {"$ref": "https://example.com/schema.json"},
    "words": {"enum": ["a", "b"]},
    "value": {"const": 5},
    "items": {"type": "array"},
}
DEFINITIONS = {
    "D": {"type": "object", "properties": {"y": {"type": "integer"}}},
    "C": {"anyOf": [{"$ref": "#/$defs/C"}, {"type": "null"}]},
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("choice", ["auto", "none"])
def test_parameters_without_one_type(name: str, choice: str) -> None:
    parameters = {"type": "object", "properties": {name: ODD[name]}, "$defs": DEFINITIONS}
    rendered = ChatTemplate(SIGNATURES).apply(said("user U1"), tools=[tool(parameters)], tool_choice=choice)
    kinds = {"choice": "list[dict]", "all": "dict", "named": "dict", "items": "list[str]"}
    kinds |= {"list": "number", "value": "number"}
    note = {"all": "both", "named": "a D"}.get(name, "")
    assert rendered.text.startswith(f"def look({name}: {kinds.get(name, 'str')} # {note}\n):\n")


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_types_that_a_template_reads_are_the_given_ones(choice: str) -> None:
    """Not those of the marks that stand for schemas in a grammar."""
    specs = {name: {"type": name, "description": "x"} for name in ("integer", "string", "boolean", "object")}
    rendered = ChatTemplate(SIGNATURES).apply(
        said("user U1"), tools=[tool({"type": "object", "properties": specs})], tool_choice=choice
    )
    kinds = "integer: number # x\nstring: str # x\nboolean: bool # x\nobject: dict # x\n"
    assert rendered.text.startswith(f"def look({kinds}):")
    assert rendered.grammar is not None
    assert any(
        schema.get("properties", {}).keys() == specs.keys() for schema in rendered.grammar.schemas.values()
    )
