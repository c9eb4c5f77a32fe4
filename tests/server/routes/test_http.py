"""latentkv serve: OpenAI's client unmodified, llama.cpp's routes, and what becomes of bad input."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PROMPT = "The clerk of the town wrote numbers into a book."


def test_a_completion_streams_what_it_says_at_once(openai: Any) -> None:
    options = {"model": "demo", "prompt": PROMPT, "max_tokens": 12, "extra_body": {"ignore_eos": True}}
    whole = openai.completions.create(**options)
    assert whole.usage.completion_tokens == 12
    assert whole.choices[0].finish_reason == "length"
    chunks = list(openai.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_choices_and_prompts(openai: Any) -> None:
    answer = openai.completions.create(
        model="demo", prompt=["The clerk", "Numbers"], n=2, max_tokens=4, temperature=1, seed=3
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    again = openai.completions.create(
        model="demo", prompt=["The clerk", "Numbers"], n=2, max_tokens=4, temperature=1, seed=3
    )
    assert [c.text for c in again.choices] == [c.text for c in answer.choices]
    tokens = openai.completions.create(model="demo", prompt=[[5, 6, 7]], max_tokens=1)
    assert tokens.usage.prompt_tokens == 3


def test_logprobs(openai: Any) -> None:
    answer = openai.completions.create(model="demo", prompt=PROMPT, max_tokens=3, logprobs=2)
    found = answer.choices[0].logprobs
    assert len(found.tokens) == len(found.token_logprobs) == answer.usage.completion_tokens
    assert all(
        max(top.values()) == own for top, own in zip(found.top_logprobs, found.token_logprobs, strict=True)
    )
    chat = openai.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": PROMPT}],
        max_tokens=3,
        logprobs=True,
        top_logprobs=2,
    )
    assert all(len(token.top_logprobs) == 2 for token in chat.choices[0].logprobs.content)


def test_a_chat_goes_on_in_its_own_cache(openai: Any) -> None:
    messages = [{"role": "user", "content": PROMPT * 3}]
    options = {"model": "demo", "max_tokens": 8}
    first = openai.chat.completions.create(messages=messages, **options)
    said = first.choices[0].message
    assert said.role == "assistant"
    messages += [{"role": "assistant", "content": said.content}, {"role": "user", "content": "And then?"}]
    second = openai.chat.completions.create(messages=messages, **options)
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens - 1
    chunks = list(openai.chat.completions.create(messages=messages, stream=True, **options))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == second.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")


def test_stop_strings(openai: Any) -> None:
    options = {"model": "demo", "prompt": PROMPT, "max_tokens": 20, "extra_body": {"ignore_eos": True}}
    text = openai.completions.create(**options).choices[0].text
    stop = text[6:9]
    cut = openai.completions.create(**options, stop=[stop]).choices[0]
    assert (cut.text, cut.finish_reason) == (text[: text.index(stop)], "stop")


BAD: list[tuple[str, bytes, int, str]] = [
    ("/v1/completions", b"{", 400, "expected JSON"),
    ("/v1/completions", b"[1]", 400, "an object"),
    ("/v1/completions", b"{}", 400, "prompt"),
    ("/v1/completions", b'{"prompt": ""}', 200, ""),  # the start token alone
    ("/v1/completions", b'{"prompt": []}', 400, "prompt"),
    ("/v1/completions", b'{"prompt": "x", "max_tokens": -2}', 400, "max_tokens"),
    ("/v1/completions", b'{"prompt": "x", "max_tokens": 0}', 400, "max_tokens"),
    ("/v1/completions", b'{"prompt": "x", "max_tokens": "9"}', 400, "max_tokens"),
    ("/v1/completions", b'{"prompt": "x", "temperature": -1}', 400, "temperature"),
    ("/v1/completions", b'{"prompt": "x", "top_p": 2}', 400, "top_p"),
    ("/v1/completions", b'{"prompt": "x", "n": 0}', 400, "n"),
    ("/v1/completions", b'{"prompt": "x", "cheese": 1}', 400, "cheese"),
    ("/v1/completions", b'{"prompt": "x", "stop": [5]}', 400, "stop"),
    ("/v1/completions", b'{"prompt": [70000]}', 400, "token ids"),
    ("/v1/completions", b'{"prompt": "x", "grammar": "root ::= ("}', 400, "grammar"),
    ("/v1/completions", b'{"prompt": "x", "grammar": "root ::= \\"a\\"{5,2}"}', 400, "m of at most n"),
    ("/v1/completions", b'{"prompt": "x", "grammar": "root ::= root"}', 400, "nothing matches"),
    (
        "/v1/chat/completions",
        b'{"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object", '
        b'"schema": {"properties": {"a": {"uniqueItems": true}}}}}',
        400,
        "/properties/a/uniqueItems",
    ),
    ("/v1/completions", b'{"prompt": "x", "logit_bias": {"a": 1}}', 400, "logit_bias"),
    ("/v1/completions", json.dumps({"prompt": "word " * 5000}).encode(), 400, "at most 2047 tokens"),
    ("/v1/completions", b'{"prompt": "\\ud800"}', 400, "UTF-8"),
    ("/v1/chat/completions", b'{"messages": []}', 400, "messages"),
    ("/v1/chat/completions", b'{"messages": [{"content": "no role"}]}', 400, "messages"),
    ("/v1/chat/completions", b'{"messages": "hi"}', 400, "[messages] expected a valid list; got 'hi'"),
    ("/v1/chat/completions", b'{"prompt": "hi"}', 400, "[messages] expected a value; got none"),
    ("/v1/chat/completions", b"", 400, "[body] expected a value; got none"),
    ("/v1/embeddings", b'{"input": ""}', 400, "at least one token"),
    ("/v1/rerank", b'{"query": "x"}', 501, "score head"),
    ("/v1/nothing", b"{}", 404, "[/v1/nothing] expected a route of this server"),
    ("/api/chat", b"{}", 404, "OpenAI's interface is at /v1"),
    ("/v1/models", b"{}", 405, "[/v1/models] expected GET; got POST"),
    ("/tokenize", b'{"content": 5}', 400, "content"),
    ("/detokenize", b'{"tokens": [-1]}', 400, "token ids"),
]


@pytest.mark.parametrize(("path", "body", "status", "said"), BAD, ids=[f"{b[0]} {b[1][:48]!r}" for b in BAD])
def test_bad_input_is_said(http: Any, path: str, body: bytes, status: int, said: str) -> None:
    answer = http.post(path, content=body)
    assert answer.status_code == status, answer.text
    if status != 200:
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert said in error["message"]
        assert "\n" not in error["message"]
    assert http.get("/health").json() == {"status": "ok"}


def test_a_body_of_100_mb_is_refused_unread(http: Any) -> None:
    assert http.post("/v1/completions", content=b"x" * (17 << 20)).status_code == 413
    pieces = (b"x" * (1 << 20) for _ in range(100))
    assert http.post("/v1/completions", content=pieces).status_code == 413
    assert http.get("/health").status_code == 200


def test_llama_cpps_routes(http: Any) -> None:
    assert http.get("/v1/models").json()["data"][0]["id"] == "demo"
    tokens = http.post("/tokenize", json={"content": "The clerk", "with_pieces": True}).json()["tokens"]
    assert "".join(token["piece"] for token in tokens).strip() == "The clerk"
    ids = [token["id"] for token in tokens]
    assert http.post("/detokenize", json={"tokens": ids}).json()["content"].strip() == "The clerk"
    props = http.get("/props").json()
    assert props["total_slots"] == 4
    cache = http.get("/cache").json()
    assert cache["total"] == props["cache"]["total"] == cache["k"] + cache["v"] + cache["cells"]
    assert [slot["id"] for slot in http.get("/slots").json()] == [0, 1, 2, 3]


def test_metrics_count(http: Any, openai: Any) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    def read() -> dict[str, float]:
        families = text_string_to_metric_families(http.get("/metrics").text)
        return {sample.name: sample.value for family in families for sample in family.samples}

    before = read()
    openai.completions.create(model="demo", prompt=PROMPT, max_tokens=5, extra_body={"ignore_eos": True})
    after = read()
    assert after["llamacpp:tokens_predicted_total"] - before["llamacpp:tokens_predicted_total"] == 5
    assert after["llamacpp:requests_processing"] == 0


def test_a_client_that_goes_away_frees_its_slot(http: Any, server: str) -> None:
    import httpx

    body = {"prompt": PROMPT, "max_tokens": 1500, "stream": True, "ignore_eos": True}
    for whole in (False, True):
        with httpx.Client(base_url=server) as client:
            if whole:
                with pytest.raises(httpx.ReadTimeout):
                    client.post("/v1/completions", json=body | {"stream": False}, timeout=0.3)
            else:
                with client.stream("POST", "/v1/completions", json=body) as stream:
                    next(stream.iter_lines())
        end = time.monotonic() + 10
        while any(slot["is_processing"] for slot in http.get("/slots").json()):
            assert time.monotonic() < end, "a slot is still at work"
            time.sleep(0.05)


def test_more_clients_than_slots(openai: Any) -> None:
    prompts = [f"{PROMPT} {number}" for number in range(12)]

    def say(prompt: str) -> str:
        text: str = openai.completions.create(model="demo", prompt=prompt, max_tokens=8).choices[0].text
        return text

    alone = [say(prompt) for prompt in prompts]
    together: dict[str, str] = {}
    threads = [
        threading.Thread(target=lambda prompt=prompt: together.update({prompt: say(prompt)}))
        for prompt in prompts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[prompt] for prompt in prompts] == alone


def test_a_key_is_asked_for(
    converted: Callable[..., Path], serve: Callable[..., Any], tmp_path: Path
) -> None:
    import httpx

    keys = tmp_path / "keys"
    keys.write_text("first\nsecond\n")
    plain = converted("--method", "none", "--outtype", "f32")
    with serve(plain, "--api-key-file", str(keys), "--cors", "http://page.example", "-c", "256") as address:
        for key, status in ((None, 401), ("wrong", 401), ("second", 200)):
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            answer = httpx.get(f"{address}/v1/models", headers=headers)
            assert answer.status_code == status
        assert httpx.get(f"{address}/health").status_code == 200
        assert httpx.get(f"{address}/").status_code == 200
        ask = {"Origin": "http://page.example", "Access-Control-Request-Method": "POST"}
        allowed = httpx.options(f"{address}/v1/completions", headers=ask).headers
        assert allowed["access-control-allow-origin"] == "http://page.example"
        other = httpx.options(f"{address}/v1/completions", headers=ask | {"Origin": "http://other.example"})
        assert "access-control-allow-origin" not in other.headers


def test_a_prompt_is_scored(openai: Any, converted: Callable[..., Path]) -> None:
    from latentkv import Llama

    options = {"prompt": PROMPT * 8, "max_tokens": 3, "logprobs": 2, "echo": True, "temperature": 0}
    got = openai.completions.create(model="demo", **options).choices[0]
    with Llama(
        str(converted("--method", "none", "--outtype", "f32")), n_ctx=512, kv="f32", n_threads=1
    ) as llama:
        want = llama.create_completion(**options)["choices"][0]
    assert got.text == want["text"]
    assert got.logprobs.tokens == want["logprobs"]["tokens"]
    assert got.logprobs.text_offset == want["logprobs"]["text_offset"]
    assert got.logprobs.token_logprobs[0] is None
    assert got.logprobs.token_logprobs[1:] == pytest.approx(want["logprobs"]["token_logprobs"][1:], abs=1e-4)


def test_echo_without_an_answer(openai: Any) -> None:
    only = openai.completions.create(model="demo", prompt=PROMPT, max_tokens=0, logprobs=1, echo=True)
    assert only.choices[0].finish_reason == "length"
    assert only.usage.completion_tokens == 0
    assert len(only.choices[0].logprobs.tokens) == only.usage.prompt_tokens
    both = openai.completions.create(model="demo", prompt=PROMPT, max_tokens=2, echo=True)
    assert both.choices[0].text.startswith(PROMPT)


CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Looks.", "parameters": CITY}}
# Llama 3.1's way: an answer that calls is nothing but {"name": ..., "parameters": ...}.
CALLING = r"""
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|im_start|>assistant\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- '}<|im_end|>' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' }}
        {%- if tools and loop.first %}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}{%- endif %}
        {{- message.content + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""


def test_a_chat_that_fits_a_schema(openai: Any) -> None:
    ask: list[Any] = [{"role": "user", "content": "Weather?"}]
    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    out = openai.chat.completions.create(model="", messages=ask, response_format=schema, max_tokens=100)
    assert json.loads(out.choices[0].message.content)["city"] in ("Rome", "Oslo")


@pytest.mark.parametrize("stream", [False, True])
def test_a_strict_tool_and_a_template_without_tools(openai: Any, stream: bool) -> None:
    strict: Any = {**WEATHER, "function": WEATHER["function"] | {"strict": True}}
    named = {"type": "function", "function": {"name": WEATHER["function"]["name"]}}
    ask: list[Any] = [{"role": "user", "content": "Weather?"}]
    for choice in ("required", named):
        options: Any = {"messages": ask, "tools": [strict], "tool_choice": choice, "max_tokens": 100}
        if not stream:
            out = openai.chat.completions.create(model="", **options)
            (call,) = out.choices[0].message.tool_calls
            arguments = call.function.arguments
        else:
            chunks = list(openai.chat.completions.create(model="", stream=True, **options))
            parts = [part for each in chunks for part in each.choices[0].delta.tool_calls or []]
            arguments = "".join(part.function.arguments or "" for part in parts)
        assert json.loads(arguments)["city"] in ("Rome", "Oslo")
    free = openai.chat.completions.create(model="", messages=ask, tools=[strict], max_tokens=8)
    assert free.choices[0].message.content


def test_calls_of_tools(converted: Callable[..., Path], serve: Callable[..., Any], tmp_path: Path) -> None:
    import httpx
    from openai import OpenAI

    (tmp_path / "calling.jinja").write_text(CALLING)
    plain = converted("--method", "none", "--outtype", "f32")
    options: dict[str, Any] = {
        "model": "",
        "messages": [{"role": "user", "content": "Weather?"}],
        "tools": [WEATHER],
        "tool_choice": "required",
        "max_tokens": 200,
    }
    with serve(
        plain, "-c", "2048", "--temp", "0", "--chat-template-file", tmp_path / "calling.jinja"
    ) as address:
        client = OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        # text may come before a call: the bias has this model begin with one
        found = httpx.post(f"{address}/tokenize", json={"content": "{"}).json()["tokens"]
        options["logit_bias"] = {str(found[0]): 100}
        (choice,) = client.chat.completions.create(**options).choices
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls
        assert call.function.name == "weather"
        assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
        chunks = list(client.chat.completions.create(**options, stream=True))
        calls = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or ()]
        assert "".join(part.function.arguments for part in calls) == call.function.arguments
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
