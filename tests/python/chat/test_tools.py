"""Tool calls, reasoning, schemas and prefills of chat completions."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from latentkv import LatentKVError, LlamaGrammar
from latentkv.chat.prompt import called_at_once, called_once
from latentkv.chat.template import ChatTemplate

sys.path.insert(0, str(Path(__file__).parent))
from chat_templates import BARE_JSON, THINKING

Build = Callable[..., Any]

ASK = [{"role": "user", "content": "Weather?"}]
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "Looks.", "parameters": CITY}}


WEATHER, TIME = tool("weather"), tool("time")
CALL = b'<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def say(script: Any, llm: Any, text: bytes, **options: Any) -> None:
    """The scripted model answers ASK with the bytes of `text`, a token each."""
    rendered = llm.chat_template.apply(ASK, **options)
    script.say(len(rendered.text.encode()), *[text[i : i + 1] for i in range(len(text))])


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that deltas add up to."""
    message: dict[str, Any] = {"role": "assistant", "content": None}
    for chunk in chunks:
        delta = chunk["choices"][0]["delta"]
        for key in ("content", "reasoning_content"):
            if key in delta:
                message[key] = (message.get(key) or "") + delta[key]
        for call in delta.get("tool_calls", []):
            calls = message.setdefault("tool_calls", [])
            if call["index"] == len(calls):
                calls.append(
                    {"type": call["type"], "function": {"name": "", "arguments": ""}, "id": call["id"]}
                )
            for key, text in call["function"].items():
                calls[call["index"]]["function"][key] += text
    return message


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """Made-up ids differ between two readings of one answer."""
    for call in message.get("tool_calls", []):
        assert call.pop("id").startswith("call_")
    return message


@pytest.mark.parametrize(
    ("template", "text", "wanted"),
    [
        (THINKING, CALL, {"content": None}),
        (THINKING, b"One moment.\n" + CALL, {"content": "One moment.\n"}),
        (THINKING, b"<think>\nHm.\n</think>\n\n" + CALL, {"content": None, "reasoning_content": "Hm.\n"}),
        (BARE_JSON, b'{"name": "weather", "parameters": {"city": "Rome"}}', {"content": None}),
    ],
)
def test_calls_whole_and_streamed(
    scripted: Build, script: Any, template: str, text: bytes, wanted: dict[str, Any]
) -> None:
    llm = scripted(chat_template=template, n_ctx=4096)
    say(script, llm, text, tools=[WEATHER])
    whole = llm.create_chat_completion(ASK, tools=[WEATHER])["choices"][0]
    assert whole["finish_reason"] == "tool_calls"
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    assert without_ids(whole["message"]) == {"role": "assistant", **wanted, "tool_calls": [call]}
    chunks = list(llm.create_chat_completion(ASK, tools=[WEATHER], stream=True))
    assert without_ids(joined(chunks)) == whole["message"]
    assert [c["choices"][0]["finish_reason"] for c in chunks[-2:]] == [None, "tool_calls"]


def test_a_call_is_text_where_no_tools_are_offered(scripted: Build, script: Any) -> None:
    llm = scripted(chat_template=THINKING, n_ctx=4096)
    for options in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        say(script, llm, CALL, tools=options.get("tools"))
        choice = llm.create_chat_completion(ASK, **options)["choices"][0]
        assert choice["message"] == {"role": "assistant", "content": CALL.decode()}
        assert choice["finish_reason"] == "stop"


def test_a_call_that_breaks_off(scripted: Build, script: Any) -> None:
    llm = scripted(chat_template=THINKING, n_ctx=4096)
    say(script, llm, CALL, tools=[WEATHER])
    options = {"tools": [WEATHER], "max_tokens": len(CALL) - 20}
    whole = llm.create_chat_completion(ASK, **options)["choices"][0]
    assert whole["finish_reason"] == "length"
    assert whole["message"]["tool_calls"][0]["function"]["name"] == "weather"
    assert '{"city": "Rome"}'.startswith(whole["message"]["tool_calls"][0]["function"]["arguments"])
    chunks = list(llm.create_chat_completion(ASK, stream=True, **options))
    assert without_ids(joined(chunks)) == without_ids(whole["message"])


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_is_whole_or_the_answer_says_why_not(scripted: Build, script: Any, stream: bool) -> None:
    """Wherever tokens run out or a stop string cuts: `tool_calls` promises arguments that parse."""
    llm = scripted(chat_template=THINKING, n_ctx=4096)
    say(script, llm, CALL, tools=[WEATHER])

    def ends(**options: Any) -> tuple[str, dict[str, Any]]:
        out = llm.create_chat_completion(ASK, tools=[WEATHER], stream=stream, **options)
        if not stream:
            return out["choices"][0]["finish_reason"], out["choices"][0]["message"]
        chunks = list(out)
        return chunks[-1]["choices"][0]["finish_reason"], joined(chunks)

    for count in range(1, len(CALL) + 1):
        reason, _ = ends(max_tokens=count)
        assert reason == "length"
    reason, message = ends(max_tokens=len(CALL) + 1)
    assert reason == "tool_calls"
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": "Rome"}
    for stop, said in (("Ro", "stop"), ("}", "stop"), ('"city', "stop"), ("</tool", "tool_calls")):
        reason, message = ends(stop=[stop])
        assert reason == said
        arguments = message["tool_calls"][0]["function"]["arguments"]
        assert (arguments == '{"city": "Rome"}') == (said == "tool_calls")


def test_what_only_begins_as_a_call_stays_text(scripted: Build, script: Any) -> None:
    llm = scripted(chat_template=THINKING, n_ctx=4096)
    say(script, llm, b"Use <tool_box>.", tools=[WEATHER])
    choice = llm.create_chat_completion(ASK, tools=[WEATHER])["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Use <tool_box>."}
    chunks = list(llm.create_chat_completion(ASK, tools=[WEATHER], stream=True))
    assert joined(chunks)["content"] == "Use <tool_box>."


def test_functions_answer_in_the_older_shape(scripted: Build, script: Any) -> None:
    llm = scripted(chat_template=THINKING, n_ctx=4096)
    say(script, llm, CALL, tools=[WEATHER])
    options = {"functions": [WEATHER["function"]], "function_call": "auto"}
    choice = llm.create_chat_completion(ASK, **options)["choices"][0]
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
    chunks = list(llm.create_chat_completion(ASK, stream=True, **options))
    assert chunks[-1]["choices"][0]["finish_reason"] == "function_call"
    arguments = [c["choices"][0]["delta"].get("function_call", {}).get("arguments", "") for c in chunks]
    assert "".join(arguments) == '{"city": "Rome"}'


def test_thoughts(scripted: Build, script: Any) -> None:
    llm = scripted(chat_template=THINKING)
    text = b"<think>\nWhy not.\n</think>\n\nYes."
    say(script, llm, text)
    message = llm.create_chat_completion(ASK)["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "Yes.", "reasoning_content": "Why not.\n"}
    chunks = list(llm.create_chat_completion(ASK, stream=True, logprobs=True))
    assert joined(chunks) == message
    scored = [t["token"] for c in chunks for t in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert "".join(scored).encode() == text  # every token's log-probability comes with some chunk
    raw = llm.create_chat_completion(ASK, reasoning_format="none")["choices"][0]["message"]
    assert raw == {"role": "assistant", "content": text.decode()}


def test_template_variables(scripted: Build, script: Any) -> None:
    llm = scripted(chat_template=THINKING)
    off = {"enable_thinking": False}
    say(script, llm, b"Yes.", chat_template_kwargs=off)
    choice = llm.create_chat_completion(ASK, chat_template_kwargs=off)["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Yes."}
    assert llm.detokenize(llm.eval_tokens).endswith(b"<think>\n\n</think>\n\nYes.")


def test_the_answer_goes_on_with_the_last_message(scripted: Build, script: Any) -> None:
    llm = scripted(chat_format="chatml")
    begun = [*ASK, {"role": "assistant", "content": "It is"}]
    script.say(len(llm.chat_template.apply(begun, continue_final_message=True).text), b" ", b"wet", b".")
    message = llm.create_chat_completion(begun, continue_final_message=True)["choices"][0]["message"]
    assert message == {"role": "assistant", "content": " wet."}
    assert llm.detokenize(llm.eval_tokens).endswith(b"assistant\nIt is wet.")
    chunks = list(llm.create_chat_completion(begun, continue_final_message=True, stream=True))
    assert joined(chunks) == message
    with pytest.raises(LatentKVError, match=r"\[continue_final_message\] expected an assistant's message"):
        llm.create_chat_completion(ASK, continue_final_message=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"tools": [WEATHER], "tool_choice": "always"},
            r"\[tool_choice\] expected None, 'none', 'auto', 'required'",
        ),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "moon"}}},
            r"\[tool_choice\] expected a function of weather; got 'moon'",
        ),
        ({"tool_choice": "required"}, r"\[tool_choice\] expected .* with tools"),
        ({"functions": [WEATHER["function"]], "tools": [WEATHER]}, r"\[functions\] expected either"),
        ({"tools": [{"type": "function"}]}, r"\[tools\] expected OpenAI's function tools"),
        ({"tools": [WEATHER], "grammar": LlamaGrammar('root ::= "a"')}, r"\[grammar\] expected no tools"),
        ({"response_format": {"type": "json_schema"}}, r"\[response_format\]"),
        (
            {"response_format": {"type": "json_object", "schema": {"type": "no such type"}}},
            r"\[json_schema\] expected type to be one of null, boolean",
        ),
        ({"chat_template_kwargs": {"enable_thinking": 1}}, r"\[chat_template_kwargs\]"),
        ({"reasoning_format": "deep"}, r"\[reasoning_format\] expected none, auto"),
        ({"continue_final_message": "tools"}, r"\[continue_final_message\] expected true"),
    ],
)
def test_refusals(scripted: Build, options: dict[str, Any], message: str) -> None:
    with pytest.raises(LatentKVError, match=message) as error:
        scripted(chat_template=THINKING).create_chat_completion(ASK, **options)
    assert "\n" not in str(error.value)


def test_unknown_options_are_refused(scripted: Build) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'dry_multiplyer'"):
        scripted(chat_format="chatml").create_chat_completion(ASK, dry_multiplyer=1)


@pytest.mark.parametrize(
    "schema",
    [
        "{",
        "[]",
        '"object"',
        '{"type": "no such type"}',
        '{"$ref": "#/nowhere"}',
        '{"$ref": "http://127.0.0.1:9/x.json"}',
        '{"type": "string", "pattern": "^a($"}',
        '{"type": "string", "minLength": 3, "maxLength": "x"}',
        '{"type": "string", "minLength": 5, "maxLength": 2}',
        '{"properties": {"a": {"type": "integer", "minimum": 5, "maximum": 2}}}',
        '{"type": "array", "items": {"oneOf": []}}',
        '{"items":' * 300 + "true" + "}" * 300,
        '{"enum": []}',
    ],
)
def test_schemas_that_are_none(schema: str) -> None:
    with pytest.raises(LatentKVError, match=r"^\[json_schema\] expected") as error:
        LlamaGrammar.from_json_schema(schema)
    assert "\n" not in str(error.value)


def test_conversations_with_results_of_tools() -> None:
    """Arguments are text in OpenAI's messages and an object to the templates."""
    call = {"type": "function", "id": "c", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    talk = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "wet"},
    ]
    text = ChatTemplate(THINKING).render(talk, tools=[WEATHER])
    assert '{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>' in text
    assert "<tool_response>\nwet\n</tool_response>" in text


# The demo model, which has never seen a tool: the grammar alone makes a call of what it says.


@pytest.fixture(scope="module")
def demo_llm(plain_gguf: Path) -> Iterator[Any]:
    from latentkv import Llama

    with Llama(str(plain_gguf), n_ctx=1024, n_threads=1, chat_format="chatml-function-calling") as llama:
        yield llama


def begins_with(llm: Any, text: bytes) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """A processor that makes the model say `text` first."""
    script = iter(llm.tokenize(text, add_bos=False, special=True))

    def push(ids: np.ndarray, logits: np.ndarray) -> np.ndarray:
        token = next(script, None)
        if token is not None:
            logits[token] = logits.max() + 200
        return logits

    return push


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("auto", ["weather", "time"]),
        ("required", ["weather", "time"]),
        ({"type": "function", "function": {"name": "time"}}, ["time"]),
    ],
)
def test_the_grammar_makes_a_call(demo_llm: Any, choice: Any, names: list[str]) -> None:
    options = {
        "tools": [WEATHER, TIME],
        "tool_choice": choice,
        "max_tokens": 200,
        "seed": 3,
        "temperature": 1.0,
    }
    options["logit_bias"] = {demo_llm.token_eos(): 100}  # one call, if the grammar lets it end there
    lead = b"<tool_call>\n"
    out = demo_llm.create_chat_completion(ASK, logits_processor=begins_with(demo_llm, lead), **options)
    reply = out["choices"][0]
    assert reply["finish_reason"] == "tool_calls"
    (call,) = reply["message"]["tool_calls"]
    assert call["function"]["name"] in names
    assert json.loads(call["function"]["arguments"])["city"] in ("Rome", "Oslo")
    stream = demo_llm.create_chat_completion(
        ASK, logits_processor=begins_with(demo_llm, lead), stream=True, **options
    )
    assert joined(list(stream))["tool_calls"][0]["function"] == call["function"]


def test_auto_leaves_other_answers_free(demo_llm: Any) -> None:
    options = {"max_tokens": 12, "temperature": 0}
    free = demo_llm.create_chat_completion(ASK, tools=[WEATHER], tool_choice="auto", **options)
    assert free["choices"][0]["message"]["content"]
    prompt = demo_llm.chat_template.render(ASK, tools=[WEATHER])
    plain = demo_llm.create_completion(demo_llm.tokenize(prompt.encode(), special=True), **options)
    assert free["choices"][0]["message"]["content"] == plain["choices"][0]["text"]


def test_answers_that_fit_a_schema(demo_llm: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}, "wet": {"type": "boolean"}},
        "required": ["city", "wet"],
        "additionalProperties": False,
    }
    for asked in (
        {"type": "json_object", "schema": schema},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    ):
        out = demo_llm.create_chat_completion(
            ASK, response_format=asked, seed=1, temperature=1.0, max_tokens=200
        )
        value = json.loads(out["choices"][0]["message"]["content"])
        assert value["city"] in ("Rome", "Oslo")
        assert isinstance(value["wet"], bool)
        assert out["choices"][0]["finish_reason"] == "stop"
    grammar = LlamaGrammar.from_json_schema(json.dumps(schema))
    text = demo_llm("A city: ", grammar=grammar, seed=1, temperature=1.0, max_tokens=200)["choices"][0][
        "text"
    ]
    assert set(json.loads(text)) == {"city", "wet"}


def test_any_json_object(demo_llm: Any) -> None:
    out = demo_llm.create_chat_completion(
        ASK,
        response_format={"type": "json_object"},
        logits_processor=begins_with(demo_llm, b'{"a":1}'),
        max_tokens=60,
        temperature=0,
    )
    assert json.loads(out["choices"][0]["message"]["content"]) == {"a": 1}


@pytest.mark.parametrize("source", [THINKING, BARE_JSON])
def test_a_required_call_comes_at_once(source: str) -> None:
    rendered = ChatTemplate(source, "<s>", "</s>").apply(ASK, tools=[WEATHER], tool_choice="required")
    assert rendered.grammar is not None
    assert re.search(r"^root .*until-\d+\? tool-call", rendered.grammar.text, re.MULTILINE)
    text = called_at_once(rendered.grammar, [WEATHER]).text
    root = next(line for line in text.splitlines() if line.startswith("root ::="))
    assert re.search(r"until-\d+\? tool-call", root) is None
    assert root.endswith(("tool-call", "tool-calls"))
    assert ("<think>" in root) == (source == THINKING)
    once = called_at_once(called_once(rendered.grammar), [WEATHER]).text
    assert ("(tool-call space)+" in text, "(tool-call space)+" in once) == (source == THINKING, False)


def tool(**parameters: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": parameters, "required": list(parameters)}
    return {"type": "function", "function": {"name": "book", "parameters": schema}}


UNSAID = tool(code={"type": "string", "pattern": "(?=x)"}, days={"type": "array", "uniqueItems": True})


@pytest.mark.parametrize("source", [THINKING, BARE_JSON])
def test_a_tool_that_is_only_offered_never_fails(source: str) -> None:
    rendered = ChatTemplate(source, "<s>", "</s>").apply(ASK, tools=[UNSAID])
    assert "(?=x)" in rendered.text  # the model is shown all of it
    assert "latentkv" not in rendered.text
    if source == THINKING:
        assert rendered.grammar is not None
        (schema,) = rendered.grammar.schemas.values()
        assert schema["required"] == ["code", "days"]
        assert "uniqueItems" not in schema["properties"]["days"]


@pytest.mark.parametrize(
    ("strict", "choice"), [(True, None), (False, "required"), (True, "required"), (True, "auto")]
)
def test_a_tool_that_binds_is_obeyed_or_refused(strict: bool, choice: str | None) -> None:
    asked = {**UNSAID, "function": UNSAID["function"] | {"strict": strict}}
    template = ChatTemplate(THINKING, "<s>", "</s>")
    with pytest.raises(
        LatentKVError, match=r"^\[tools\] expected of 'book' .*/properties/(code/pattern|days)"
    ):
        template.apply(ASK, tools=[asked], tool_choice=choice)
    template.apply(ASK, tools=[asked], tool_choice="none")


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("seed", [1, 2])
def test_arguments_obey_what_llama_cpp_drops(demo_llm: Any, choice: str, seed: int) -> None:
    asked = tool(
        phone={"type": "string", "pattern": r"^\d{3}-\d{4}$"},
        size={"type": "number", "minimum": 5, "maximum": 6},
        note={"type": "string", "maxLength": 2000},
    )
    out = demo_llm.create_chat_completion(
        ASK,
        tools=[asked],
        tool_choice=choice,
        logits_processor=begins_with(demo_llm, b"<tool_call>\n"),
        max_tokens=300,
        temperature=1.0,
        seed=seed,
        logit_bias={demo_llm.model.find_token('"'): 8.0},
    )
    call = out["choices"][0]["message"]["tool_calls"][0]["function"]
    arguments = json.loads(call["arguments"])
    assert re.fullmatch(r"\d{3}-\d{4}", arguments["phone"])
    assert 5 <= arguments["size"] <= 6


def test_an_answer_that_fits_a_schema_may_be_thought_about_first(plain_gguf: Path) -> None:
    from latentkv import Llama

    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 100, "maximum": 120}}}
    schema |= {"required": ["n"], "additionalProperties": False}
    with Llama(str(plain_gguf), n_ctx=1024, n_threads=1, chat_template=THINKING) as llama:
        for lead in (b"<think>\nHm, {1} </b>\n</think>\n\n", b"<think></think>```json\n", b""):
            out = llama.create_chat_completion(
                ASK,
                response_format={"type": "json_object", "schema": schema},
                logits_processor=begins_with(llama, lead),
                max_tokens=120,
                temperature=1.0,
                seed=5,
                logit_bias={llama.model.find_token("<"): -50.0} if not lead else None,
            )
            message = out["choices"][0]["message"]
            assert 100 <= json.loads(message["content"])["n"] <= 120
            assert ("Hm" in message.get("reasoning_content", "")) == (b"Hm" in lead)
