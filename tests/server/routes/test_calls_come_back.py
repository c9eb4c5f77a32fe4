"""An agent sends its call back with the next request, and the tokens of that call are found in the cache, on
the routes of OpenAI's Responses and Anthropic's Messages too."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("anthropic", reason="needs anthropic (pip install '.[test]')")

ASK = "The clerk of the town wrote numbers into a book. " * 4
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
FEW = 32  # tokens: the result, and what the template writes around it


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_messages(calling: str, stream: bool) -> None:
    from anthropic import Anthropic

    client = Anthropic(base_url=calling, api_key="none", max_retries=0)
    tool = {"name": "weather", "description": "Looks.", "input_schema": CITY}
    options: dict[str, Any] = {"model": "demo", "tools": [tool], "max_tokens": 60}
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"{ASK}{stream}"}]
    any_tool = {"type": "any", "disable_parallel_tool_use": True}
    if stream:
        with client.messages.stream(messages=messages, tool_choice=any_tool, **options) as events:
            first = events.get_final_message()
    else:
        first = client.messages.create(messages=messages, tool_choice=any_tool, **options)
    (use,) = (block for block in first.content if block.type == "tool_use")
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "12 degrees"}
    messages += [
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": use.id, "name": use.name, "input": use.input}],
        },
        {"role": "user", "content": [result]},
    ]
    usage = client.messages.create(messages=messages, **options).usage
    before = first.usage.input_tokens + first.usage.cache_read_input_tokens
    assert usage.cache_read_input_tokens >= before + first.usage.output_tokens - 1
    assert usage.input_tokens <= FEW


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_responses(calling: str, stream: bool) -> None:
    from openai import OpenAI

    client = OpenAI(base_url=f"{calling}/v1", api_key="none", max_retries=0)
    tool = {"type": "function", "name": "weather", "description": "Looks.", "parameters": CITY}
    options: dict[str, Any] = {"model": "demo", "tools": [tool], "max_output_tokens": 60}
    options["parallel_tool_calls"] = False
    items: list[Any] = [{"role": "user", "content": f"{ASK}{stream}!"}]
    if stream:
        with client.responses.stream(input=items, tool_choice="required", **options) as events:
            first = events.get_final_response()
    else:
        first = client.responses.create(input=items, tool_choice="required", **options)
    call = next(item for item in first.output if item.type == "function_call")
    assert json.loads(call.arguments)["city"] in ("Rome", "Oslo")
    said = {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments}
    items += [said, {"type": "function_call_output", "call_id": call.call_id, "output": "12 degrees"}]
    usage = client.responses.create(input=items, **options).usage
    assert usage.input_tokens_details.cached_tokens >= first.usage.total_tokens - 1
    assert usage.input_tokens - usage.input_tokens_details.cached_tokens <= FEW
