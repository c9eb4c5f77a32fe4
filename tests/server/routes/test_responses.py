"""POST /v1/responses, by OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

ASK = "The clerk of the town wrote numbers into a book."
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {"type": "function", "name": "weather", "parameters": CITY, "strict": True}


@pytest.fixture
def client(calling: str) -> Any:
    from openai import OpenAI

    return OpenAI(base_url=f"{calling}/v1", api_key="none", max_retries=0)


def test_a_text_comes_whole_and_streamed(client: Any) -> None:
    options: dict[str, Any] = {"model": "demo", "input": ASK, "max_output_tokens": 12}
    whole = client.responses.create(**options)
    assert whole.output_text
    assert whole.usage.output_tokens <= 12
    assert (whole.object, whole.store, whole.previous_response_id) == ("response", True, None)
    with client.responses.stream(**options) as stream:
        kinds = [event.type for event in stream]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:-1] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
    ]
    events = list(client.responses.create(**options, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    last = events[-1].response
    assert (last.output_text, last.status) == (whole.output_text, whole.status)
    assert last.usage.input_tokens == whole.usage.input_tokens
    assert last.usage.input_tokens_details.cached_tokens > 0


def test_no_room_is_incomplete(client: Any) -> None:
    options = {"model": "demo", "input": ASK, "max_output_tokens": 3, "extra_body": {"ignore_eos": True}}
    whole = client.responses.create(**options)
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert whole.output[0].status == "incomplete"
    assert whole.usage.output_tokens == 3
    last = list(client.responses.create(**options, stream=True))[-1]
    assert (last.type, last.response.status) == ("response.incomplete", "incomplete")


def test_a_tool_is_called_and_answered(client: Any) -> None:
    said: list[Any] = [{"role": "user", "content": "Weather?"}]
    options: dict[str, Any] = {"model": "demo", "tools": [WEATHER], "tool_choice": "required"}
    options["parallel_tool_calls"] = False
    first = client.responses.create(input=said, **options)
    calls = [item for item in first.output if item.type == "function_call"]
    assert first.status == "completed"
    assert json.loads(calls[0].arguments)["city"] in ("Rome", "Oslo")
    said += [item.model_dump(exclude_none=True) for item in first.output]
    outputs = [[{"type": "input_text", "text": "Sunny."}], "Rain."]
    for call, output in zip(calls, outputs, strict=False):
        said.append({"type": "function_call_output", "call_id": call.call_id, "output": output})
    second = client.responses.create(
        input=said, max_output_tokens=8, model="demo", tools=[WEATHER], tool_choice="none"
    )
    assert second.output[0].type == "message"
    with client.responses.stream(input="Weather?", **options) as stream:
        events = list(stream)
        final = stream.get_final_response()
    (streamed, *_) = [item for item in final.output if item.type == "function_call"]
    deltas = [
        event.delta
        for event in events
        if event.type == "response.function_call_arguments.delta" and event.item_id == streamed.id
    ]
    assert "".join(deltas) == streamed.arguments == calls[0].arguments


def test_a_choice_among_tools(client: Any) -> None:
    time = WEATHER | {"name": "time"}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "time"}]}
    for choice in ({"type": "function", "name": "time"}, allowed):
        answer = client.responses.create(
            model="demo", input="Time?", tools=[WEATHER, time], tool_choice=choice, parallel_tool_calls=False
        )
        assert [item.name for item in answer.output if item.type == "function_call"] == ["time"]


def test_a_schema(client: Any) -> None:
    wanted = {"format": {"type": "json_schema", "name": "city", "schema": CITY, "strict": True}}
    answer = client.responses.create(model="demo", input="Where?", text=wanted, max_output_tokens=60)
    assert json.loads(answer.output_text)["city"] in ("Rome", "Oslo")
    assert answer.text.format.type == "json_schema"
    anything = client.responses.create(
        model="demo", input="JSON?", text={"format": {"type": "json_object"}}, max_output_tokens=60
    )
    assert isinstance(json.loads(anything.output_text), dict)


def count(client: Any, **options: Any) -> int:
    found: int = client.responses.create(model="demo", max_output_tokens=1, **options).usage.input_tokens
    return found


def test_items_become_the_same_prompt_as_messages(client: Any) -> None:
    """As a chat of the same words has."""
    call = {"type": "function", "id": "c", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    chat = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "Sunny."},
        {"role": "user", "content": "And now?"},
    ]
    wanted = client.chat.completions.create(model="demo", messages=chat, max_tokens=1).usage.prompt_tokens
    text = [{"type": "output_text", "text": "I look.", "annotations": []}]
    items: list[Any] = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": text},
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call_output", "call_id": "c", "output": "Sunny."},
        {"role": "user", "content": "And now?"},
    ]
    assert count(client, instructions="Be short.", input=items) == wanted
    system = {"role": "developer", "content": "Be short."}
    assert count(client, input=[system, *items]) == wanted
    counted = client.responses.input_tokens.count(model="demo", instructions="Be short.", input=items)
    assert counted.input_tokens == wanted


BAD: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "[input]"),
    ({"input": [{"id": "msg_1"}]}, "'msg_1'"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "'msg_1'"),
    ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "web_search_call"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input_image"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "[input]"),
    ({"input": [{"role": "user", "content": [5]}]}, "[input]"),
    ({"input": [{"role": "tool", "content": "x"}]}, "'tool'"),
    ({"input": [{"role": "user"}]}, "[input]"),
    ({"input": [{"type": "reasoning", "content": [{"type": "reasoning_text"}]}]}, "[input]"),
    ({"input": [{"type": "function_call", "call_id": "c"}]}, "name"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": {}}]}, "[input]"),
    ({"input": [5]}, "input"),
    ({"input": 5}, "input"),
    ({}, "input"),
    ({"input": "x", "max_output_tokens": 0}, "[max_output_tokens]"),
    ({"input": "x", "max_tokens": 5}, "max_tokens"),
    ({"input": "x", "tools": [{"type": "web_search"}], "tool_choice": "required"}, "[tool_choice]"),
    ({"input": "x", "tools": [{"type": ["web_search"]}]}, "[tools]"),
    ({"input": "x", "tools": [{"type": "function"}]}, "[tools]"),
    ({"input": "x", "tools": [WEATHER], "tool_choice": {"type": "file_search"}}, "file_search"),
    ({"input": "x", "tool_choice": "required"}, "[tool_choice]"),
    ({"input": "x", "text": {"format": {"type": "grammar"}}}, "[response_format]"),
    ({"input": "x", "conversation": "conv_1"}, "[conversation]"),
]


@pytest.mark.parametrize(("body", "said"), BAD, ids=[str(body)[:60] for body, _ in BAD])
@pytest.mark.parametrize("stream", [False, True])
def test_bad_input_is_said(calling: str, body: dict[str, Any], said: str, stream: bool) -> None:
    import httpx

    answer = httpx.post(f"{calling}/v1/responses", json=body | {"stream": stream}, timeout=60)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert said in error["message"]
    assert "\n" not in error["message"]


def test_log_probabilities(client: Any) -> None:
    options: dict[str, Any] = {"model": "demo", "input": ASK, "max_output_tokens": 4, "top_logprobs": 2}
    options["include"] = ["message.output_text.logprobs"]
    scores = client.responses.create(**options).output[0].content[0].logprobs
    assert all(len(score.top_logprobs) == 2 for score in scores)
    events = client.responses.create(**options, stream=True)
    streamed = [
        score for event in events if event.type == "response.output_text.delta" for score in event.logprobs
    ]
    assert [score.token for score in streamed] == [score.token for score in scores]
    assert (
        not client.responses.create(model="demo", input=ASK, max_output_tokens=2)
        .output[0]
        .content[0]
        .logprobs
    )


def test_many_at_once(calling: str) -> None:
    from openai import AsyncOpenAI

    async def ask() -> list[str]:
        async with AsyncOpenAI(base_url=f"{calling}/v1", api_key="none", max_retries=0) as client:

            async def one() -> str:
                async with client.responses.stream(model="demo", input=ASK, max_output_tokens=8) as stream:
                    return "".join(
                        [event.delta async for event in stream if event.type == "response.output_text.delta"]
                    )

            return await asyncio.gather(*(one() for _ in range(4)))

    texts = asyncio.run(ask())
    assert len(set(texts)) == 1
    assert texts[0]
