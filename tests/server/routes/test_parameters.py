"""Every parameter of OpenAI's calls, as the installed package declares them: taken, refused by name, and
null as if it was left out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

ASK = [{"role": "user", "content": "Numbers?"}]
FUNCTION = {"name": "weather", "description": "Looks.", "parameters": {"type": "object", "properties": {}}}
FORMAT = {"type": "json_object"}
CHAT: dict[str, tuple[Any, ...]] = {  # values that are taken
    "messages": (ASK,),
    "model": ("demo",),
    "frequency_penalty": (0.5,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({"5": 1},),
    "logprobs": (True,),
    "max_completion_tokens": (3,),
    "max_tokens": (3,),
    "metadata": ({"a": "b"},),
    "modalities": (["text"],),
    "n": (2,),
    "parallel_tool_calls": (True, False),
    "presence_penalty": (0.5,),
    "prompt_cache_key": ("key",),
    "prompt_cache_options": ({"mode": "implicit"},),
    "prompt_cache_retention": ("in_memory", "24h"),
    "reasoning_effort": ("none", "minimal", "low", "medium", "high", "xhigh"),
    "response_format": ({"type": "text"}, FORMAT),
    "safety_identifier": ("me",),
    "seed": (3,),
    "service_tier": ("auto", "flex"),
    "stop": ("x", ["x", "y"]),
    "store": (True, False),
    "stream": (True, False),
    "stream_options": ({"include_usage": True, "include_obfuscation": False},),
    "temperature": (0, 0.5),
    "tool_choice": ("auto", "none"),
    "tools": ([],),
    "top_logprobs": (2,),
    "top_p": (0.9,),
    "user": ("me",),
    "verbosity": ("low", "medium", "high"),
}
CHAT_REFUSED: dict[str, tuple[Any, ...]] = {
    "audio": ({"voice": "alloy", "format": "wav"},),
    "modalities": (["text", "audio"],),
    "moderation": ({"model": "omni-moderation-latest"},),
    "prediction": ({"type": "content", "content": "x"},),
    "web_search_options": ({},),
    "tools": ([{"type": "custom", "custom": {"name": "x"}}],),
    "verbosity": ("loud",),
}
COMPLETION: dict[str, tuple[Any, ...]] = {
    "prompt": ("Numbers",),
    "best_of": (1,),
    "echo": (True,),
    "logprobs": (1,),
} | {
    name: CHAT[name]
    for name in (
        *("model", "frequency_penalty", "logit_bias", "max_tokens", "n", "presence_penalty", "seed", "stop"),
        *("stream", "stream_options", "temperature", "top_p", "user"),
    )
}
COMPLETION_REFUSED: dict[str, tuple[Any, ...]] = {"best_of": (2,), "suffix": ("x",)}
RESPONSE: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "client_metadata": ({"installation": "0"},),
    "include": (["reasoning.encrypted_content"], ["message.output_text.logprobs"]),
    "input": ("Numbers?", ASK),
    "instructions": ("Be short.",),
    "max_output_tokens": (3,),
    "max_tool_calls": (3,),
    "reasoning": ({"effort": "low", "summary": "auto"}, {"effort": None}),
    "text": ({"verbosity": "low"}, {"format": {"type": "text"}}, {"format": FORMAT}),
    "truncation": ("disabled",),
} | {
    name: CHAT[name]
    for name in (
        *("metadata", "model", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_options"),
        *("prompt_cache_retention", "safety_identifier", "service_tier", "store", "stream", "temperature"),
        *("tool_choice", "tools", "top_logprobs", "top_p", "user"),
    )
}
RESPONSE["stream_options"] = ({"include_obfuscation": False},)
RESPONSE["tools"] = ([], [{"type": "web_search"}], [{"type": "mcp", "server_label": "x"}])  # left out
RESPONSE_REFUSED: dict[str, tuple[Any, ...]] = {
    "access_programs": ({"cyber": "standard"},),
    "background": (True,),
    "background_options": ({},),
    "context_management": ([{"type": "compaction"}],),
    "conversation": ("conv_1",),
    "image": ({"context_compression": "auto"},),
    "include": (["everything"],),
    "moderation": ({"model": "omni-moderation-latest"},),
    "previous_response_id": (5, "x" * 65),
    "prompt": ({"id": "pmpt_1"},),
    "tools": ([{"type": "custom"}], [{"type": "namespace", "name": "x"}]),
    "truncation": ("auto",),
}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": ASK, "max_tokens": 2},
    "/v1/completions": {"prompt": "Numbers", "max_tokens": 2},
    "/v1/responses": {"input": "Numbers?", "max_output_tokens": 2},
}
TAKEN = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION, "/v1/responses": RESPONSE}
REFUSED = {
    "/v1/chat/completions": CHAT_REFUSED,
    "/v1/completions": COMPLETION_REFUSED,
    "/v1/responses": RESPONSE_REFUSED,
}
NEEDED = ("messages", "prompt", "input")


def declared(path: str) -> set[str]:
    from openai.types import completion_create_params
    from openai.types.chat import completion_create_params as chat_create_params
    from openai.types.responses import response_create_params

    return {
        *{
            "/v1/chat/completions": chat_create_params.CompletionCreateParamsBase,
            "/v1/completions": completion_create_params.CompletionCreateParamsBase,
            "/v1/responses": response_create_params.ResponseCreateParamsBase,
        }[path].__annotations__,
        "stream",
    }


def body_with(path: str, name: str, value: Any) -> dict[str, Any]:
    body = {key: each for key, each in BODIES[path].items() if (key, name) != ("max_tokens", LONGER)}
    return {**body, name: value}


LONGER = "max_completion_tokens"  # which stands for max_tokens


def test_every_parameter_is_known() -> None:
    for path in BODIES:
        known = TAKEN[path].keys() | REFUSED[path].keys()
        assert declared(path) <= known, path


@pytest.mark.parametrize("path", BODIES)
def test_null_is_left_out(http: Any, path: str) -> None:
    every = {name for each in BODIES for name in TAKEN[each].keys() | REFUSED[each].keys()}
    body = BODIES[path]
    wanted = http.post(path, json=body | {"temperature": 0}).json()["usage"]
    for name in sorted(every - {*NEEDED, *body}):
        answer = http.post(path, json=body | {"temperature": 0, name: None})
        assert answer.status_code == 200, (name, answer.text)
        assert answer.json()["usage"].keys() == wanted.keys()
    for name in NEEDED:
        answer = http.post(path, json=body | {name: None})
        assert answer.status_code == (400 if name in body else 200), (name, answer.text)
    unknown = http.post(path, json=body | {"cheese": None})
    assert unknown.status_code == 400
    assert "cheese" in unknown.json()["error"]["message"]


def values(of: dict[str, dict[str, tuple[Any, ...]]]) -> list[Any]:
    return [
        pytest.param(path, name, value, id=f"{path} {name}={value!r}")
        for path, names in of.items()
        for name, each in names.items()
        for value in each
    ]


@pytest.mark.parametrize(("path", "name", "value"), values(TAKEN))
def test_what_is_taken(http: Any, path: str, name: str, value: Any) -> None:
    answer = http.post(path, json=body_with(path, name, value))
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(("path", "name", "value"), values(REFUSED))
def test_what_is_refused_by_name(http: Any, path: str, name: str, value: Any) -> None:
    answer = http.post(path, json=body_with(path, name, value))
    assert answer.status_code == 400, answer.text
    said = answer.json()["error"]["message"]
    assert said.startswith(f"[{name}"), said
    assert "\n" not in said


def test_max_tokens_of_a_completion_are_16(http: Any) -> None:
    body = {"prompt": "Numbers", "ignore_eos": True, "temperature": 0}
    for given in ({}, {"max_tokens": None}):
        answer = http.post("/v1/completions", json=body | given).json()
        assert answer["usage"]["completion_tokens"] == 16


PARTS: list[Any] = [
    *(
        {"type": "text"},
        {"type": "text", "text": None},
        {"type": "text", "text": 5},
        {"type": "text", "text": []},
    ),
    *(
        {"type": "refusal"},
        {"type": "image_url", "image_url": {"url": "data:"}},
        {"type": ["text"]},
        {},
        5,
        None,
    ),
    *({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "text"),
]


@pytest.mark.parametrize("role", ["user", "system", "developer", "assistant", "tool"])
@pytest.mark.parametrize("part", PARTS, ids=str)
def test_parts_without_a_text(http: Any, role: str, part: Any) -> None:
    message = {"role": role, "content": [part]}
    answer = http.post("/v1/chat/completions", json={"messages": [*ASK, message], "max_tokens": 1})
    if role == "tool" and isinstance(part, dict) and part.get("type") in ("image_url", "input_audio"):
        assert answer.status_code == 200, answer.text  # a text stands for what a tool returns
        return
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"].startswith("[messages] expected")


MESSAGES: list[Any] = [
    {"content": "no role"},
    {"role": None, "content": "x"},
    {"role": 5, "content": "x"},
    {"role": "user", "content": 5},
    {"role": "user", "content": {"type": "text", "text": "x"}},
    {"role": "user", "content": "x", "name": 5},
    {"role": "tool", "content": "x", "tool_call_id": 5},
    {"role": "assistant", "content": "x", "reasoning_content": 5},
    {"role": "assistant", "tool_calls": 5},
    {"role": "assistant", "tool_calls": [5]},
    {"role": "assistant", "tool_calls": [{"type": "custom", "custom": {"name": "x", "input": ""}}]},
    {"role": "assistant", "tool_calls": [{"type": "function"}]},
    {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": None}}]},
    {"role": "assistant", "tool_calls": [{"function": {"name": "x", "arguments": "{}"}, "id": 5}]},
    {"role": "assistant", "audio": {"id": "audio_1"}},
    5,
]


@pytest.mark.parametrize("message", MESSAGES, ids=str)
def test_messages_that_are_none(http: Any, message: Any) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": [*ASK, message], "max_tokens": 1})
    assert answer.status_code == 400, answer.text
    assert "\n" not in answer.json()["error"]["message"]


def asked(http: Any, messages: list[Any], **more: Any) -> int:
    """Prompt tokens."""
    answer = http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1, **more})
    assert answer.status_code == 200, answer.text
    found: int = answer.json()["usage"]["prompt_tokens"]
    return found


def test_null_in_messages_is_left_out(http: Any) -> None:
    plain = [*ASK, {"role": "assistant", "content": "One."}, {"role": "user", "content": "Two?"}]
    counted = http.post("/v1/chat/completions/input_tokens", json={"messages": plain}).json()
    assert counted == {"object": "response.input_tokens", "input_tokens": asked(http, plain)}
    names = ("name", "tool_calls", "function_call", "refusal", "audio", "tool_call_id", "reasoning_content")
    nulls = dict.fromkeys(names)
    assert asked(http, [message | nulls for message in plain]) == asked(http, plain)
    parts = [message | {"content": [{"type": "text", "text": message["content"]}]} for message in plain]
    assert asked(http, parts) == asked(http, plain)
    refusal = {"role": "assistant", "content": None, "refusal": "One."}
    assert asked(http, [plain[0], refusal, plain[2]]) == asked(http, plain)
    part = {"role": "assistant", "content": [{"type": "refusal", "refusal": "One."}]}
    assert asked(http, [plain[0], part, plain[2]]) == asked(http, plain)
    system = [{"role": "system", "content": "Be short."}, *ASK]
    assert asked(http, [{"role": "developer", "content": "Be short."}, *ASK]) == asked(http, system)


def test_an_effort_is_the_templates_to_read() -> None:
    from latentkv.server.messages.body import CountBody
    from latentkv.server.responses.body import ResponsesBody
    from latentkv.server.schemas import ChatBody

    def chat(effort: str | None, **kwargs: Any) -> Any:
        body = {"messages": ASK, "reasoning_effort": effort, "chat_template_kwargs": kwargs or None}
        return ChatBody(**body).template_kwargs()

    assert chat(None) is None
    assert chat("low") == {"reasoning_effort": "low"}
    assert chat("low", reasoning_effort="high", mood="calm") == {"reasoning_effort": "low", "mood": "calm"}
    assert chat("none", reasoning_effort="high", mood="calm") == {"enable_thinking": False, "mood": "calm"}
    response = ResponsesBody(input="x", reasoning={"effort": "high"})
    assert response.as_chat().template_kwargs() == {"reasoning_effort": "high"}

    def message(**body: Any) -> Any:
        return CountBody(messages=ASK, **body).as_chat().template_kwargs()

    assert message(thinking={"type": "disabled"}) == {"enable_thinking": False}
    assert message(thinking={"type": "enabled", "budget_tokens": 9}) == {"enable_thinking": True}
    assert message(output_config={"effort": "max"}) == {"reasoning_effort": "max"}


def test_what_a_file_recommends_is_the_default(
    serve: Any, converted: Any, demo: Path, tmp_path: Path
) -> None:
    """Of what neither a flag nor a request says."""
    folder = tmp_path / "demo"
    shutil.copytree(demo, folder)
    makers = {"temperature": 0.25, "top_k": 7, "min_p": 0.125, "repetition_penalty": 1.25}
    (folder / "generation_config.json").write_text(json.dumps(makers))
    with serve(converted("--method", "none", source=folder), "-c", "256", "--top-k", "9") as address:
        drawn = httpx.get(f"{address}/props").json()["default_generation_settings"]["params"]
        assert (drawn["temperature"], drawn["min_p"], drawn["repeat_penalty"]) == (0.25, 0.125, 1.25)
        assert (drawn["top_k"], drawn["top_p"], drawn["repeat_last_n"]) == (9, 0.95, -1)
        body = {"prompt": "a", "n_predict": 1, "temperature": 0.5}
        said = httpx.post(f"{address}/completion", json=body).json()["generation_settings"]
        assert (said["temperature"], said["min_p"], said["top_k"]) == (0.5, 0.125, 9)
