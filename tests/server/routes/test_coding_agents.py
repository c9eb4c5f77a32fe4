"""What Codex and Claude Code send, in their shapes: tools of every type, their own items and blocks, model
names of others, images in a history, and conversations that are too long."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from server_process import started, stopped

from latentkv.server.responses.items import messages_of
from latentkv.server.responses.tools import Tools

CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Looks.",
    "strict": False,
    "parameters": CITY,
}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /a+/"}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": GRAMMAR}
NOTES = {"type": "namespace", "name": "notes", "description": "Of the user.", "tools": [WEATHER, PATCH]}
SEARCH = {"type": "web_search", "external_web_access": False}
SAY = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Say hi."}]}]
CODEX: dict[str, Any] = {
    "model": "gpt-5-codex",
    "instructions": "You are an agent.",
    "input": SAY,
    "tools": [WEATHER, PATCH, NOTES, SEARCH, {"type": "image_generation", "output_format": "png"}],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "low", "summary": "auto", "context": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0",
    "text": {"verbosity": "low"},
    "client_metadata": {"x-codex-installation-id": "0"},
    "stream_options": {"reasoning_summary_delivery": "sequential_cutoff"},
}


@pytest.fixture
def http(calling: str) -> Iterator[Any]:
    import httpx

    with httpx.Client(base_url=calling, timeout=60) as client:
        yield client


def test_codex_starts(http: Any) -> None:
    answer = http.post("/v1/responses", json=CODEX | {"max_output_tokens": 2}).json()
    assert answer["model"] == "demo"
    assert [tool["type"] for tool in answer["tools"]] == ["function", "custom", "namespace"]


@pytest.mark.parametrize(
    ("choice", "kind", "namespace"),
    [
        ({"type": "custom", "name": "apply_patch"}, "custom_tool_call", None),
        ({"type": "function", "name": "weather", "namespace": "notes"}, "function_call", "notes"),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "local_shell"}]},
            "local_shell_call",
            None,
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_loop_of_calls(http: Any, choice: Any, kind: str, namespace: str | None, stream: bool) -> None:
    tools = [*CODEX["tools"], {"type": "local_shell"}]
    body = CODEX | {"tools": tools, "tool_choice": choice, "stream": stream, "max_output_tokens": 200}
    said = http.post("/v1/responses", json=body)
    events = [json.loads(line) for line in re.findall(r"^data: (.+)$", said.text, re.M)] if stream else []
    items = events[-1]["response"]["output"] if stream else said.json()["output"]
    call = items[-1]
    assert (call["type"], call.get("namespace")) == (kind, namespace)
    assert call["call_id"]
    if stream:
        done = [each["item"] for each in events if each["type"] == "response.output_item.done"]
        assert done == items
        added = [each["item"]["type"] for each in events if each["type"] == "response.output_item.added"]
        assert added == [item["type"] for item in items]
    if stream and kind == "custom_tool_call":
        parts = [each for each in events if each["type"].startswith("response.custom_tool_call_input.")]
        assert parts[0]["delta"] == parts[-1]["input"] == call["input"]
    output = {"type": f"{kind}_output", "call_id": call["call_id"], "id": call["call_id"], "output": "Done."}
    more = CODEX | {"input": [*SAY, *items, output], "tools": tools, "max_output_tokens": 2}
    assert http.post("/v1/responses", json=more).status_code == 200


def test_items_are_calls_and_their_results() -> None:
    items: list[dict[str, Any]] = [
        {"type": "custom_tool_call", "call_id": "1", "name": "apply_patch", "input": "a"},
        {"type": "custom_tool_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "A"}]},
        {"type": "local_shell_call", "call_id": "2", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "local_shell_call_output", "id": "2", "output": "B"},
        {"type": "shell_call", "call_id": "3", "action": {"commands": ["ls"], "timeout_ms": None}},
        {
            "type": "shell_call_output",
            "call_id": "3",
            "output": [{"stdout": "C", "stderr": "", "outcome": {"type": "exit", "exit_code": 1}}],
        },
        {"type": "apply_patch_call", "call_id": "4", "operation": {"type": "delete_file", "path": "x"}},
        {"type": "apply_patch_call_output", "call_id": "4", "status": "failed"},
        {"type": "tool_search_call", "call_id": "5", "execution": "client", "arguments": {"query": "q"}},
        {"type": "tool_search_output", "call_id": "5", "tools": [WEATHER]},
        {"type": "mcp_call", "id": "6", "server_label": "s", "name": "t", "arguments": "{}", "output": "F"},
        {"type": "function_call", "call_id": "7", "name": "t", "namespace": "mcp__s__", "arguments": "{}"},
    ]
    messages = messages_of(items, None)
    calls = [message["tool_calls"][0] for message in messages if message["role"] == "assistant"]
    found = [(call["id"], call["function"]["name"]) for call in calls]
    names = ("apply_patch", "local_shell", "shell", "apply_patch", "tool_search", "s__t", "mcp__s__t")
    assert found == [(str(at + 1), name) for at, name in enumerate(names)]
    assert json.loads(calls[0]["function"]["arguments"]) == {"input": "a"}
    assert json.loads(calls[1]["function"]["arguments"]) == {"command": ["ls"]}
    assert json.loads(calls[2]["function"]["arguments"]) == {"commands": ["ls"]}
    results = [message["content"][0]["text"] for message in messages if message["role"] == "tool"]
    assert results == ["A", "B", "C\n(exit code 1)", "failed", "weather", "F"]


def test_what_a_call_is_to_the_client() -> None:
    own = [{"type": "shell"}, {"type": "local_shell"}, {"type": "tool_search", "execution": "client"}]
    tools = Tools.of([*CODEX["tools"], *own, {"type": "shell", "environment": {"type": "container_auto"}}])
    names = [each["function"]["name"] for each in tools.functions]
    assert names == [
        *("weather", "apply_patch", "notes__weather", "notes__apply_patch"),
        *("shell", "local_shell", "tool_search"),
    ]
    assert "start: /a+/" in tools.functions[1]["function"]["description"]
    assert [each["function"]["description"] for each in tools.functions[2:4]] == [
        "Looks.\n\nOf the user.",
        tools.functions[1]["function"]["description"],
    ]
    assert tools.called("notes__apply_patch").item("c", '{"input": "a\\nb"}') == {
        "type": "custom_tool_call",
        "call_id": "c",
        "name": "apply_patch",
        "namespace": "notes",
        "input": "a\nb",
    }
    assert tools.called("apply_patch").item("c", '{"input": "a\\nb')["input"] == "a\nb"  # cut
    assert tools.called("apply_patch").item("c", '{"text": 5}')["input"] == '{"text": 5}'
    assert tools.called("shell").item("c", '{"commands": ["ls"]}')["action"]["commands"] == ["ls"]
    assert tools.called("tool_search").item("c", '{"query": "q"}')["arguments"] == {"query": "q"}
    assert tools.called("other").item("c", "{}")["type"] == "function_call"


CLAUDE: dict[str, Any] = {
    "model": "claude-sonnet-4-5",
    "max_tokens": 2,
    "system": [{"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
                {"type": "web_search_tool_result", "tool_use_id": "s", "content": [{"title": "a"}]},
                {"type": "text", "text": "Found."},
                {"type": "tool_use", "id": "c", "name": "bash", "input": {"command": "ls"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "c",
                    "is_error": True,
                    "content": [
                        {"type": "text", "text": "o"},
                        {"type": "tool_reference", "tool_name": "bash"},
                        {"type": "image", "source": {"type": "base64", "data": ""}},
                    ],
                },
                {"type": "document", "title": "D", "source": {"type": "text", "data": "words"}},
            ],
        },
    ],
    "tools": [
        {"name": "w", "description": "d", "input_schema": CITY, "eager_input_streaming": True},
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 9},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "thinking": {"type": "adaptive", "display": "updates"},
    "metadata": {"user_id": "me"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium", "task_budget": {"type": "tokens", "total": 9}},
}


@pytest.mark.parametrize("stream", [False, True])
def test_claude_code_starts(http: Any, stream: bool) -> None:
    answer = http.post("/v1/messages?beta=true", json=CLAUDE | {"stream": stream})
    assert answer.status_code == 200, answer.text
    assert '"model": "demo"' in answer.text if stream else answer.json()["model"] == "demo"
    counted = {name: value for name, value in CLAUDE.items() if name != "max_tokens"}
    assert http.post("/v1/messages/count_tokens", json=counted).json()["input_tokens"] > 0


def test_blocks_of_claude_code_are_a_chat() -> None:
    from latentkv.chat.messages import plain_messages
    from latentkv.server.left_out import readable
    from latentkv.server.messages.body import CountBody

    body = CountBody(**{name: value for name, value in CLAUDE.items() if name != "max_tokens"}).as_chat()
    messages = plain_messages(readable(body.messages))
    assert [message["role"] for message in messages] == [
        *("system", "user", "assistant", "tool", "assistant", "tool", "user")
    ]
    assert [message["content"] for message in messages[3:]] == [
        '[{"title": "a"}]',
        "Found.",
        "Error: o\nbash\n[image left out: this model reads text]",
        "D\nwords",
    ]
    names = [tool["function"]["name"] for tool in body.tools or ()]
    assert names == ["w", "bash", "str_replace_based_edit_tool"]


IMAGES: dict[str, Any] = {
    "/v1/chat/completions": {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}},
    "/v1/responses": {"type": "input_image", "image_url": "data:image/png;base64,"},
    "/v1/messages": {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}},
}


@pytest.mark.parametrize("path", IMAGES)
def test_an_image_is_refused_once(http: Any, path: str) -> None:
    text = {"type": "input_text" if path == "/v1/responses" else "text", "text": "What is it?"}
    shown = {"role": "user", "content": [text, IMAGES[path]]}
    later = [shown, {"role": "assistant", "content": "Hm."}, {"role": "user", "content": "And now?"}]

    def ask(messages: Any) -> Any:
        limit = {"max_output_tokens": 1} if path == "/v1/responses" else {"max_tokens": 1}
        name = "input" if path == "/v1/responses" else "messages"
        return http.post(path, json={name: messages, **limit})

    refused = ask([shown])
    assert refused.status_code == 400
    assert "[messages] expected text, which models here read" in refused.json()["error"]["message"]
    assert ask([*later[:-1], shown]).status_code == 400
    assert ask(later).status_code == 200
    assert ask([shown, later[-1]]).status_code == 200


def test_a_tool_that_returns_an_image_ends_no_turn(http: Any) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    chat = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [IMAGES["/v1/chat/completions"]]},
    ]
    shown = http.post("/apply-template", json={"messages": chat}).json()["prompt"]
    assert "[image left out: this model reads text]" in shown
    items = [
        *SAY,
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [IMAGES["/v1/responses"]]},
    ]
    assert http.post("/v1/responses", json={"input": items, "max_output_tokens": 1}).status_code == 200


LONG = "word " * 9000
TOO_LONG: dict[str, dict[str, Any]] = {
    "/v1/messages": {"messages": [{"role": "user", "content": LONG}], "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": LONG}], "max_tokens": 4},
    "/v1/completions": {"prompt": LONG, "max_tokens": 4},
    "/v1/responses": {"input": LONG, "max_output_tokens": 4},
}


@pytest.mark.parametrize("path", TOO_LONG)
@pytest.mark.parametrize("stream", [False, True])
def test_too_long_a_conversation_is_said_in_the_words_of_its_interface(
    http: Any, path: str, stream: bool
) -> None:
    answer = http.post(path, json=TOO_LONG[path] | {"stream": stream})
    if path == "/v1/responses" and stream:  # as OpenAI's service has it
        assert answer.status_code == 200
        last = json.loads(answer.text.strip().split("\n")[-1].removeprefix("data: "))
        error = last["response"]["error"]
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    else:
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
    if path == "/v1/messages":
        found = re.match(r"prompt is too long: (\d+) tokens > (\d+) maximum", error["message"])
        assert found, error
        assert int(found[1]) > int(found[2]) == 4095
    else:
        assert error["code"] == "context_length_exceeded"
        assert "maximum context length is 4096 tokens" in error["message"]


def test_a_text_that_is_not_even_counted_is_too_long(http: Any) -> None:
    body = {"messages": [{"role": "user", "content": "a" * 4_000_000}], "max_tokens": 4}
    said = http.post("/v1/messages", json=body).json()["error"]["message"]
    found = re.match(r"prompt is too long: at least (\d+) tokens > 4095 maximum", said)
    assert found, said
    assert int(found[1]) > 4095


EMPTY = ("", [""], ["", "zz"])


@pytest.mark.parametrize("path", [*TOO_LONG, "/completion"])
def test_empty_stop_strings_stop_nothing(http: Any, path: str) -> None:
    name = "stop_sequences" if path == "/v1/messages" else "stop"
    body = {"prompt": "x", "n_predict": 3} if path == "/completion" else TOO_LONG[path]
    body = {key: "Numbers" if value == LONG else value for key, value in body.items()}
    if "messages" in body:
        body["messages"] = [{"role": "user", "content": "Numbers"}]
    for stop in EMPTY[path == "/v1/messages" :]:
        answer = http.post(path, json=body | {name: stop})
        assert answer.status_code == 200, answer.text


def test_head_is_get_without_its_body(http: Any) -> None:
    for path in ("/", "/health", "/v1/models", "/v1/models/demo", "/v1/models/x", "/props", "/slots"):
        get, head = http.get(path), http.head(path)
        assert (head.status_code, head.content) == (get.status_code, b""), path
        assert head.headers["content-type"] == get.headers["content-type"]
    assert http.head("/v1/completions").status_code == 405


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    "/v1/completions": {"prompt": "x", "max_tokens": 1},
    "/v1/responses": {"input": "x", "max_output_tokens": 1},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    "/v1/embeddings": {"input": "x"},
    "/completion": {"prompt": "x", "n_predict": 1},
}


def test_the_model_answers_to_any_name_with_its_own(http: Any) -> None:
    for path, body in BODIES.items():
        for name in ("claude-haiku-4-5", "default", "", None, "demo"):
            answer = http.post(path, json=body | {"model": name})
            assert answer.status_code == 200, (path, name, answer.text)
            assert answer.json()["model"] == "demo"
    assert http.get("/v1/models/gpt-9").status_code == 404  # no such model is listed


def test_a_strict_model_has_one_name_and_left_out_tools_are_logged_once(
    converted: Callable[..., Path],
) -> None:
    import httpx

    plain = converted("--method", "none", "--outtype", "f32")
    process = started(plain, "-c", "2048", "--alias", "demo", "--strict-model")
    try:
        for path, body in BODIES.items():
            answer = httpx.post(f"{process.address}{path}", json=body | {"model": "gpt-9"})
            assert answer.status_code == 404, path
            assert "gpt-9" in answer.json()["error"]["message"]
            assert httpx.post(f"{process.address}{path}", json=body | {"model": "demo"}).status_code == 200
        tools = {"tools": [SEARCH, WEATHER], "tool_choice": "none"}
        for _ in range(2):
            body = BODIES["/v1/responses"] | tools
            assert httpx.post(f"{process.address}/v1/responses", json=body).status_code == 200
        shown = {"role": "user", "content": [IMAGES["/v1/chat/completions"]]}
        chat = {"messages": [shown, {"role": "user", "content": "x"}], "max_tokens": 1}
        httpx.post(f"{process.address}/v1/chat/completions", json=chat)
    finally:
        said = stopped(process)
    warnings = [line for line in said.splitlines() if line.startswith("warning: ")]
    assert warnings == [
        "warning: [tools] expected types that a client runs or a model reads; got web_search: left out",
        "warning: [messages] expected texts, which models here read; got image (1): left out",
    ]
