"""Reasoning budgets of requests and of the command line, through every interface that has thoughts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from thinking import FREE, OPENS

from latentkv.chat.thoughts import CLOSING

ASK = [{"role": "user", "content": "Numbers?"}]
LINE = CLOSING.strip()


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("templates")
    (folder / "opens.jinja").write_text(OPENS)
    (folder / "free.jinja").write_text(FREE)
    return folder


@pytest.fixture(scope="module")
def thinking(serve: Callable[..., Any], converted: Callable[..., Path], templates: Path) -> Iterator[Any]:
    """A model that thinks for ever."""
    options = ("-c", "2048", "--parallel", "2", "--kv", "f32", "--temp", "0", "--alias", "demo")
    plain = converted("--method", "none", "--outtype", "f32")
    given = ("--chat-template-file", str(templates / "opens.jinja"))
    with serve(plain, *options, *given) as address, httpx.Client(base_url=address, timeout=60) as client:
        yield client


def chat(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    body = {"messages": ASK, "max_tokens": 80, "logit_bias": {}, "ignore_eos": True, **fields}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()["choices"][0]["message"]
    return found


def n_tokens(client: httpx.Client, text: str) -> int:
    return len(client.post("/tokenize", json={"content": text}).json()["tokens"])


def test_without_a_budget_it_never_answers(thinking: httpx.Client) -> None:
    for fields in ({}, {"reasoning_budget_tokens": -1}):
        message = chat(thinking, **fields)
        assert not message["content"]
        assert n_tokens(thinking, message["reasoning_content"]) > 70


@pytest.mark.parametrize("name", ["reasoning_budget_tokens", "thinking_budget_tokens"])
@pytest.mark.parametrize("budget", [4, 12])
def test_a_budget_ends_the_thought(thinking: httpx.Client, name: str, budget: int) -> None:
    free = chat(thinking)["reasoning_content"]
    message = chat(thinking, **{name: budget})
    thought, _, rest = message["reasoning_content"].partition(LINE)
    assert not rest.strip()
    assert free.startswith(thought.rstrip())
    assert abs(n_tokens(thinking, thought.rstrip()) - budget) <= 2
    assert len(message["content"]) > 20


def test_a_budget_of_none_is_no_thought(thinking: httpx.Client) -> None:
    message = chat(thinking, reasoning_budget_tokens=0)
    assert not message.get("reasoning_content")
    assert LINE not in message["content"]
    assert len(message["content"]) > 20
    forced = chat(thinking, reasoning_budget_tokens=0, chat_template_kwargs={"enable_thinking": True})
    assert not forced.get("reasoning_content")  # the template opens a thought all the same
    assert forced["content"]


def test_the_line_is_the_requests(thinking: httpx.Client) -> None:
    message = chat(thinking, reasoning_budget_tokens=8, reasoning_budget_message=" So be it.")
    assert message["reasoning_content"].endswith(" So be it.")
    bare = chat(thinking, reasoning_budget_tokens=8, reasoning_budget_message="")
    assert n_tokens(thinking, bare["reasoning_content"]) <= 9
    assert bare["content"]


def test_streams_say_the_same(thinking: httpx.Client) -> None:
    whole = chat(thinking, reasoning_budget_tokens=12)
    body = {"messages": ASK, "max_tokens": 80, "ignore_eos": True, "reasoning_budget_tokens": 12}
    answer = thinking.post("/v1/chat/completions", json=body | {"stream": True})
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    deltas = [json.loads(event)["choices"][0]["delta"] for event in events]
    for name in ("reasoning_content", "content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == whole[name]


def test_a_schema_is_obeyed_behind_the_thought(thinking: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    message = chat(thinking, reasoning_budget_tokens=6, response_format=wanted, ignore_eos=False)
    assert set(json.loads(message["content"])) == {"n"}


def test_anthropics_and_openais_other_interface(thinking: httpx.Client) -> None:
    from anthropic import Anthropic
    from openai import OpenAI

    budget = {"type": "enabled", "budget_tokens": 12}
    claude = Anthropic(base_url=str(thinking.base_url), api_key="none", max_retries=0)
    options: dict[str, Any] = {"model": "demo", "messages": ASK, "max_tokens": 80, "thinking": budget}
    message = claude.messages.create(**options)
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert LINE in message.content[0].thinking
    with claude.messages.stream(**options) as stream:
        streamed = stream.get_final_message()
    assert [b.model_dump() for b in streamed.content] == [b.model_dump() for b in message.content]
    off = claude.messages.create(**options | {"thinking": {"type": "disabled"}})
    assert [block.type for block in off.content] == ["text"]
    opened = OpenAI(base_url=f"{thinking.base_url}/v1".replace("//v1", "/v1"), api_key="none", max_retries=0)
    fields = {"reasoning_budget_tokens": 12}
    made = opened.responses.create(model="demo", input="Numbers?", max_output_tokens=80, extra_body=fields)
    assert [item.type for item in made.output] == ["reasoning", "message"]
    assert made.usage.output_tokens_details.reasoning_tokens < 50


@pytest.mark.parametrize(
    ("path", "fields", "said"),
    [
        (
            "/v1/chat/completions",
            {"reasoning_budget_tokens": -2},
            "[reasoning_budget_tokens] expected greater",
        ),
        (
            "/v1/chat/completions",
            {"thinking_budget_tokens": "8"},
            "[thinking_budget_tokens] expected a valid",
        ),
        ("/v1/chat/completions", {"reasoning_budget_message": "x" * 4097}, "[reasoning_budget_message]"),
        ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": -1}}, "[thinking.budget_tokens]"),
    ],
)
def test_bad_budgets_are_refused(thinking: httpx.Client, path: str, fields: Any, said: str) -> None:
    answer = thinking.post(path, json={"messages": ASK, "max_tokens": 1} | fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(said)


def test_the_command_lines_budget_is_the_default(
    serve: Callable[..., Any], converted: Callable[..., Path], templates: Path
) -> None:
    given = ("--chat-template-file", str(templates / "opens.jinja"), "--reasoning-budget", "12")
    options = ("-c", "512", "--kv", "f32", "--temp", "0", *given, "--reasoning-budget-message", " Enough.")
    plain = converted("--method", "none", "--outtype", "f32")
    with serve(plain, *options) as address, httpx.Client(base_url=address, timeout=60) as client:
        assert chat(client)["reasoning_content"].endswith(" Enough.")
        assert n_tokens(client, chat(client, reasoning_budget_tokens=30)["reasoning_content"]) > 28
        assert not chat(client, reasoning_budget_tokens=0).get("reasoning_content")


def test_chat_and_llama(
    converted: Callable[..., Path], templates: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from latentkv import Llama
    from latentkv.cli import main

    path = str(converted("--method", "none", "--outtype", "f32"))
    with Llama(path, n_ctx=256, chat_template=OPENS, verbose=False) as llama:
        options: dict[str, Any] = {"max_tokens": 60, "temperature": 0, "reasoning_budget_tokens": 8}
        message = llama.create_chat_completion(ASK, **options)["choices"][0]["message"]
        assert LINE in message["reasoning_content"]
        assert message["content"]
    plain = ["chat", path, "-c", "256", "-p", "Numbers?", "-n", "60", "--temp", "0", "-q"]
    opens = ["--chat-template-file", str(templates / "opens.jinja")]
    assert main([*plain, *opens]) == 0
    assert not capfd.readouterr().out.strip()  # thoughts are not shown, and it thinks for ever
    assert main([*plain, *opens, "--reasoning-budget", "8"]) == 0
    assert message["content"].strip() in capfd.readouterr().out
    assert main([*plain, "--reasoning-budget", "8"]) == 0
    assert "note: --reasoning-budget limits nothing" in capfd.readouterr().err
    assert main([*plain, *opens, "--reasoning-budget-message", "x"]) != 0
    assert "[--reasoning-budget-message] expected --reasoning-budget beside it" in capfd.readouterr().err
    assert main([*plain, "--raw", "--reasoning-budget", "8"]) != 0
    assert "no --reasoning-budget beside it" in capfd.readouterr().err
