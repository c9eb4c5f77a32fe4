"""Tools as clients write them: nulls, lists of parts, older shapes, and choices among them."""

from __future__ import annotations

from typing import Any

import pytest

ASK = [{"role": "user", "content": "Weather?"}]
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": CITY, **more}}


def post(calling: Any, **body: Any) -> Any:
    import httpx

    return httpx.post(
        f"{calling}/v1/chat/completions", json={"messages": ASK, "max_tokens": 80, **body}, timeout=60
    )


def prompt_tokens(calling: Any, **body: Any) -> int:
    answer = post(calling, **body | {"max_tokens": 1})
    assert answer.status_code == 200, answer.text
    found: int = answer.json()["usage"]["prompt_tokens"]
    return found


def test_null_in_tools_is_left_out(calling: str) -> None:
    plain = prompt_tokens(calling, tools=[tool("weather")])
    assert prompt_tokens(calling, tools=[tool("weather", description=None, strict=None)]) == plain
    assert prompt_tokens(calling, tools=[tool("weather", strict=True)]) == plain
    without = prompt_tokens(calling, tools=[{"type": "function", "function": {"name": "now"}}])
    assert prompt_tokens(calling, tools=[tool("now", parameters=None)]) == without
    none = {"type": "object", "properties": {}}
    assert prompt_tokens(calling, tools=[tool("now", parameters=none)]) == without


def test_null_in_calls_is_left_out(calling: str) -> None:
    function = {"name": "weather", "arguments": '{"city": "Rome"}'}

    def talk(call: dict[str, Any], result: dict[str, Any]) -> int:
        said = {"role": "assistant", "content": None, "tool_calls": [call]}
        return prompt_tokens(calling, messages=[*ASK, said, result], tools=[tool("weather")])

    result = {"role": "tool", "tool_call_id": "call_1", "content": "Sunny."}
    plain = talk({"id": "call_1", "type": "function", "function": function}, result)
    assert talk({"id": None, "type": None, "function": function}, result | {"tool_call_id": None}) == plain
    parts = [{"type": "text", "text": "Sunny."}]
    assert talk({"index": 0, "function": function}, result | {"content": parts}) == plain
    written = function | {"arguments": {"city": "Rome"}}
    assert talk({"function": written}, result | {"name": None}) == plain
    older = {"role": "assistant", "content": None, "function_call": function}
    answered = {"role": "function", "name": "weather", "content": "Sunny."}
    assert prompt_tokens(calling, messages=[*ASK, older, answered], tools=[tool("weather")]) == plain
    none = talk({"function": {"name": "weather", "arguments": None}}, result)
    assert none < plain
    assert talk({"function": {"name": "weather", "arguments": ""}}, result) == none
    for broken in ('{"city": ', "Rome", "[1]", '"Rome"'):  # an agent sends back what a model wrote
        assert talk({"function": {"name": "weather", "arguments": broken}}, result) > none


BAD: list[Any] = [
    5,
    {},
    {"type": "function"},
    {"type": "function", "function": None},
    {"type": "function", "function": "weather"},
    {"type": "function", "function": {"name": None}},
    {"type": "function", "function": {"name": ""}},
    {"type": "custom", "custom": {"name": "x"}},
    {"type": "web_search"},
    tool("x", description=5),
    tool("x", parameters=[]),
]


@pytest.mark.parametrize("given", BAD, ids=str)
def test_what_is_no_tool(calling: str, given: Any) -> None:
    answer = post(calling, tools=[given])
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"].startswith("[tools")


def allowed(mode: Any, *names: Any) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_only_allowed_tools_are_called_and_all_are_shown(calling: str) -> None:
    both = [tool("weather"), tool("time")]
    shown = prompt_tokens(calling, tools=both)
    assert prompt_tokens(calling, tools=both, tool_choice=allowed("auto", "time")) == shown
    assert prompt_tokens(calling, tools=both, tool_choice="none") == shown
    assert prompt_tokens(calling, tools=both[1:]) < shown
    for choice in (allowed("required", "time"), {"type": "function", "function": {"name": "time"}}):
        options = {"tools": both, "tool_choice": choice, "parallel_tool_calls": False}
        (found,) = post(calling, **options).json()["choices"]
        assert [call["function"]["name"] for call in found["message"]["tool_calls"]] == ["time"]
        assert found["finish_reason"] == "tool_calls"


CHOICES: list[Any] = [
    "sometimes",
    {"type": "function"},
    {"type": "function", "function": "weather"},
    {"type": "function", "function": {"name": "other"}},
    {"type": "custom", "custom": {"name": "weather"}},
    {"type": "allowed_tools"},
    {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": "weather"}},
    allowed("never", "weather"),
    allowed("auto", "other"),
    allowed("required"),
]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_what_is_no_choice(calling: str, choice: Any) -> None:
    answer = post(calling, tools=[tool("weather")], tool_choice=choice)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"].startswith("[tool_choice]")
