"""Bodies that are nearly right, on every route that takes a conversation: an answer, or one line with 400."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

FUNCTION = {"name": "w", "description": "d", "parameters": {"type": "object", "properties": {}}}
ALLOWED = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "w"}}]}
CHAT: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "r",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "w", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "y"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": {"type": "allowed_tools", "allowed_tools": ALLOWED},
    "response_format": None,
    "reasoning_effort": "low",
    "max_tokens": 2,
    "stop": ["zz"],
    "modalities": ["text"],
    "chat_template_kwargs": {"a": 1},
    "stream_options": {"include_usage": True},
    "metadata": {"a": "b"},
}
RESPONSE: dict[str, Any] = {
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "x"}]},
        {"type": "function_call", "call_id": "c", "name": "w", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "o"}]},
        {"type": "custom_tool_call", "call_id": "d", "name": "p", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "d", "output": "o"},
        {"type": "shell_call", "call_id": "e", "action": {"commands": ["ls"]}},
        {
            "type": "shell_call_output",
            "call_id": "e",
            "output": [{"stdout": "o", "outcome": {"type": "exit"}}],
        },
        {"type": "tool_search_output", "call_id": "f", "tools": [{"type": "function", "name": "v"}]},
    ],
    "instructions": "i",
    "tools": [
        {"type": "function", "strict": True, **FUNCTION},
        {"type": "custom", "name": "p", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
        {"type": "namespace", "name": "n", "description": "d", "tools": [{"type": "function", **FUNCTION}]},
        {"type": "shell", "environment": {"type": "local"}},
    ],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "w"}]},
    "text": {"format": {"type": "text"}, "verbosity": "low"},
    "reasoning": {"effort": "low", "summary": "auto"},
    "max_output_tokens": 2,
    "include": ["reasoning.encrypted_content"],
    "metadata": {"a": "b"},
}
MESSAGE: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": ""},
                {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
                {"type": "web_search_tool_result", "tool_use_id": "s", "content": [{"title": "a"}]},
                {"type": "tool_use", "id": "c", "name": "w", "input": {"c": "x"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "o"}]},
                {"type": "document", "title": "t", "source": {"type": "text", "data": "x"}},
            ],
        },
    ],
    "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
    "tools": [{"name": "w", "description": "d", "input_schema": FUNCTION["parameters"]}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 5},
    "stop_sequences": ["zz"],
    "max_tokens": 2,
    "output_config": {"effort": "low"},
}
COUNTED = {name: value for name, value in MESSAGE.items() if name not in ("max_tokens", "stop_sequences")}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/responses": RESPONSE,
    "/v1/responses/input_tokens": RESPONSE,
    "/v1/messages": MESSAGE,
    "/v1/messages/count_tokens": COUNTED,
}
JUNK: list[Any] = [
    *(None, 5, -1, 1.5, True, "", "x", [], {}, [None], [5], ["x"], [[]], [{}], "\ud800", 1e300, 2**70),
    *({"type": "x"}, {"type": None}, {"type": ["x"]}, {"x": 1}, "required", "auto", "user", "tool"),
    *({"type": "function"}, {"type": "text"}, {"type": "json_schema"}, [{"role": "user", "content": "x"}]),
]


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if above:
        yield above
    if isinstance(value, dict | list):
        for name in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[name], (*above, name))


def broken(body: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    body = copy.deepcopy(body)
    for _ in range(rng.choice([1, 1, 2])):
        *above, name = rng.choice(list(places(body)))
        owner: Any = body
        for each in above:
            owner = owner[each]
        if rng.random() < 0.2:
            del owner[name]
        else:
            owner[name] = copy.deepcopy(rng.choice(JUNK))
    return body


@pytest.mark.parametrize("path", ROUTES)
def test_a_body_that_is_nearly_right(calling: str, path: str) -> None:
    import httpx

    rng = random.Random(path)
    with httpx.Client(base_url=calling, timeout=60) as client:
        for _ in range(60):
            body = broken(ROUTES[path], rng)
            for limit in ("max_tokens", "max_output_tokens"):
                if limit in ROUTES[path] and not isinstance(body.get(limit), int):
                    body[limit] = 2
            headers = {"content-type": "application/json"}
            answer = client.post(path, content=json.dumps(body), headers=headers)
            assert answer.status_code in (200, 400), (answer.text, body)
            if answer.status_code == 400:
                said = answer.json()["error"]["message"]
                assert said.startswith("["), (said, body)
                assert "\n" not in said, (said, body)
