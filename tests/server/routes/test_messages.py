"""POST /v1/messages, by Anthropic's own client."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("anthropic", reason="needs anthropic (pip install '.[test]')")

ASK = [{"role": "user", "content": "The clerk of the town wrote numbers into a book."}]
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
WEATHER: dict[str, Any] = {"name": "weather", "description": "Looks.", "input_schema": CITY}
ANY = {"type": "any", "disable_parallel_tool_use": True}
TIME = WEATHER | {"name": "time", "type": "custom", "cache_control": {"type": "ephemeral"}}


@pytest.fixture
def client(calling: str) -> Any:
    from anthropic import Anthropic

    return Anthropic(base_url=calling, api_key="none", max_retries=0)


def test_a_text_comes_whole_and_streamed(client: Any) -> None:
    options: dict[str, Any] = {"model": "demo", "messages": ASK, "max_tokens": 12}
    whole = client.messages.create(**options)
    assert (whole.type, whole.role, whole.model) == ("message", "assistant", "demo")
    (block,) = whole.content
    assert whole.stop_reason in ("max_tokens", "end_turn")
    events = list(client.messages.create(**options, stream=True))
    assert [event.type for event in events[:2]] == ["message_start", "content_block_start"]
    assert [event.type for event in events[-3:]] == ["content_block_stop", "message_delta", "message_stop"]
    texts = [event.delta.text for event in events if event.type == "content_block_delta"]
    assert "".join(texts) == block.text
    with client.messages.stream(**options) as stream:
        final = stream.get_final_message()
    assert final.content[0].text == block.text
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def test_the_prompt_is_counted_without_what_was_cached(client: Any) -> None:
    messages = [{"role": "user", "content": "One two three four five six seven eight nine ten. " * 4}]
    counted = client.messages.count_tokens(model="demo", messages=messages).input_tokens
    for _ in range(2):
        usage = client.messages.create(model="demo", messages=messages, max_tokens=2).usage
        assert usage.input_tokens + usage.cache_read_input_tokens == counted
    assert usage.cache_read_input_tokens > counted // 2
    with client.messages.stream(model="demo", messages=messages, max_tokens=2) as stream:
        begun = next(event for event in stream if event.type == "message_start").message.usage
    assert begun.cache_read_input_tokens > counted // 2
    assert begun.input_tokens + begun.cache_read_input_tokens == counted


def test_why_an_answer_ends(client: Any) -> None:
    options: dict[str, Any] = {"model": "demo", "messages": ASK, "extra_body": {"ignore_eos": True}}
    whole = client.messages.create(**options, max_tokens=20)
    assert (whole.stop_reason, whole.stop_sequence) == ("max_tokens", None)
    assert whole.usage.output_tokens == 20
    text = whole.content[0].text
    stop = text[6:9]
    for stream in (False, True):
        if stream:
            with client.messages.stream(**options, max_tokens=20, stop_sequences=["%%", stop]) as events:
                cut = events.get_final_message()
        else:
            cut = client.messages.create(**options, max_tokens=20, stop_sequences=["%%", stop])
        assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
        assert cut.content[0].text == text[: text.index(stop)]


def test_a_tool_is_called_and_answered(client: Any) -> None:
    said: list[Any] = [{"role": "user", "content": "Weather?"}]
    options: dict[str, Any] = {"model": "demo", "tools": [WEATHER, TIME], "max_tokens": 120}
    first = client.messages.create(messages=said, tool_choice=ANY, **options)
    assert first.stop_reason == "tool_use"
    calls = [block for block in first.content if block.type == "tool_use"]
    assert calls[0].input["city"] in ("Rome", "Oslo")
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "Sunny."}]}
        for call in calls
    ]
    content = [*results, {"type": "text", "text": "And now?"}]
    said += [{"role": "assistant", "content": first.content}, {"role": "user", "content": content}]
    second = client.messages.create(messages=said, tool_choice={"type": "none"}, **options)
    assert all(block.type == "text" for block in second.content)
    choice = {"type": "tool", "name": "time", "disable_parallel_tool_use": True}
    with client.messages.stream(messages=said[:1], tool_choice=choice, **options) as stream:
        final = stream.get_final_message()
    (call,) = [block for block in final.content if block.type == "tool_use"]
    assert (call.name, list(call.input)) == ("time", ["city"])


def count(client: Any, **options: Any) -> int:
    found: int = client.messages.count_tokens(model="demo", **options).input_tokens
    return found


def test_blocks_become_the_same_prompt_as_messages(client: Any, calling: str) -> None:
    from openai import OpenAI

    call = {"type": "function", "id": "c", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    chat: list[Any] = [
        {"role": "system", "content": "Be short.\n\nBe kind."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "Error: no network"},
        {"role": "user", "content": "And now?\nSay."},
    ]
    openai = OpenAI(base_url=f"{calling}/v1", api_key="none", max_retries=0)
    wanted = openai.chat.completions.create(model="demo", messages=chat, max_tokens=1).usage.prompt_tokens
    cached = {"cache_control": {"type": "ephemeral"}}
    billing = "x-anthropic-billing-header: cc_version=2.1; cch=a5145;"
    system = [{"type": "text", "text": text} | cached for text in (billing, "Be short.", "Be kind.")]
    asked: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "Weather?"} | cached]},
        {
            "role": "assistant",
            "content": [
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "c", "name": "weather", "input": {"city": "Rome"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c", "content": "no network", "is_error": True},
                {"type": "text", "text": "And now?"},
                {"type": "text", "text": "Say."},
            ],
        },
    ]
    assert count(client, system=system, messages=asked) == wanted
    middle = [{"role": "system", "content": "Be short.\n\nBe kind."}, *asked]
    assert count(client, messages=middle) == wanted


def test_an_answer_goes_on_with_the_assistants_last_words(client: Any) -> None:
    options: dict[str, Any] = {"model": "demo", "max_tokens": 8, "extra_body": {"ignore_eos": True}}
    whole = client.messages.create(messages=ASK, **options).content[0].text
    begun = [*ASK, {"role": "assistant", "content": whole[:9]}]
    more = client.messages.create(messages=begun, **options).content[0].text
    assert (whole[:9] + more).startswith(whole)


def test_a_schema(client: Any) -> None:
    import json

    wanted = {"format": {"type": "json_schema", "schema": CITY}, "effort": "low"}
    answer = client.messages.create(
        model="demo", messages=ASK, max_tokens=60, extra_body={"output_config": wanted}
    )
    assert json.loads(answer.content[0].text)["city"] in ("Rome", "Oslo")


def test_what_belongs_to_the_service_is_taken(client: Any) -> None:
    ignored = {
        "metadata": {"user_id": "me"},
        "service_tier": "auto",
        "cache_control": {"type": "ephemeral"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "mcp_servers": None,
        "system": None,
        "top_k": 5,
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "x"}
    for name, value in ignored.items():
        client.messages.create(
            model="demo", messages=ASK, max_tokens=1, extra_body={name: value}, extra_headers=headers
        )


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": [5]}, "messages"),
    ({"messages": [{"role": "user"}]}, "[messages]"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "'tool'"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "image"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "[messages]"),
    ({"messages": [{"role": "user", "content": [5]}]}, "[messages]"),
    ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "document"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "x"}]}]}, "input"),
    ({"messages": ASK, "system": [{"type": "image"}]}, "image"),
    ({"messages": ASK, "system": 5}, "system"),
    ({"messages": ASK, "tools": [{"type": "bash_20250124"}]}, "[tools]"),
    ({"messages": ASK, "tools": [{"type": 5}]}, "[tools]"),
    ({"messages": ASK, "tools": [{"name": "x", "input_schema": 5}]}, "[tools]"),
    ({"messages": ASK, "tools": [{"input_schema": CITY}]}, "[tools]"),
    ({"messages": ASK, "tool_choice": {"type": "any"}}, "[tool_choice]"),
    ({"messages": ASK, "tool_choice": {"type": "tool"}, "tools": [WEATHER]}, "[tool_choice]"),
    ({"messages": ASK, "tool_choice": {"type": "maybe"}}, "tool_choice"),
    ({"messages": ASK, "max_tokens": 0}, "max_tokens"),
    ({"messages": ASK, "max_tokens": "9"}, "max_tokens"),
    ({"messages": ASK, "thinking": {"type": "hard"}}, "thinking"),
    ({"messages": ASK, "output_config": {"format": {"type": "xml"}}}, "[output_config]"),
    ({"messages": ASK, "container": "c"}, "[container]"),
    ({"messages": ASK, "cheese": 1}, "cheese"),
    ({"messages": [{"role": "user", "content": "word " * 9000}]}, "[context]"),
]


@pytest.mark.parametrize(("body", "said"), BAD, ids=[str(body)[:60] for body, _ in BAD])
@pytest.mark.parametrize("stream", [False, True])
def test_bad_input_is_said_in_anthropics_shape(
    calling: str, body: dict[str, Any], said: str, stream: bool
) -> None:
    import httpx

    answer = httpx.post(f"{calling}/v1/messages", json=body | {"stream": stream}, timeout=60)
    assert answer.status_code == 400, answer.text
    shown = answer.json()
    assert (shown["type"], shown["error"]["type"]) == ("error", "invalid_request_error")
    assert said in shown["error"]["message"]
    assert "\n" not in shown["error"]["message"]


def test_other_errors(client: Any) -> None:
    from anthropic import NotFoundError

    with pytest.raises(NotFoundError) as caught:
        client.post("/v1/messages/batches", body={}, cast_to=object)
    assert caught.value.body["error"]["type"] == "not_found_error"


def test_a_key_in_either_header(converted: Callable[..., Path], serve: Callable[..., Any]) -> None:
    from anthropic import Anthropic, AuthenticationError

    plain = converted("--method", "none", "--outtype", "f32")
    with serve(plain, "--api-key", "secret", "-c", "256") as address:
        for given in ({"api_key": "secret"}, {"auth_token": "secret"}):
            client = Anthropic(base_url=address, max_retries=0, **given)
            assert client.messages.count_tokens(model="", messages=ASK).input_tokens > 0
        with pytest.raises(AuthenticationError) as caught:
            Anthropic(base_url=address, api_key="wrong", max_retries=0).messages.count_tokens(
                model="", messages=ASK
            )
        assert caught.value.body["error"]["type"] == "authentication_error"
