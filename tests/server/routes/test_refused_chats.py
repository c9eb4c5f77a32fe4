"""Every route gives a template the form of a chat that it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

BY_TURNS = """{% for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) or m.role == 'system' %}
{{- raise_exception('Roles must alternate.') }}{% endif %}{{- m.role }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""

BRIEF, LATE = {"role": "system", "content": "Be brief."}, {"role": "system", "content": "It is May."}
HI, HELLO = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}
CALL = {"type": "tool_use", "id": "c", "name": "ls", "input": {}}
RESULT = [{"type": "tool_result", "tool_use_id": "c", "content": "a b"}, {"type": "text", "text": "go on"}]


@pytest.fixture(scope="module")
def client(
    serve: Callable[..., Any], converted: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    import httpx

    template = tmp_path_factory.mktemp("template") / "turns.jinja"
    template.write_text(BY_TURNS)
    plain = converted("--method", "none", "--outtype", "f32")
    options = ("-c", "1024", "--chat-template-file", str(template))
    with serve(plain, *options) as address, httpx.Client(base_url=address, timeout=60) as opened:
        yield opened


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [BRIEF, HI, HI, HELLO, LATE, HI], "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": [HELLO, HI], "max_tokens": 1}),
        ("/v1/messages", {"system": "Be brief.", "messages": [HI, HI, HELLO, HI, LATE], "max_tokens": 1}),
        (
            "/v1/messages",
            {
                "messages": [
                    HI,
                    {"role": "assistant", "content": [CALL]},
                    {"role": "user", "content": RESULT},
                ],
                "tools": [{"name": "ls", "input_schema": {"type": "object"}}],
                "max_tokens": 1,
            },
        ),
        (
            "/v1/responses",
            {
                "instructions": "Be brief.",
                "input": [LATE | {"role": "developer"}, HI],
                "max_output_tokens": 1,
            },
        ),
    ],
)
def test_a_chat_is_answered(client: Any, path: str, body: dict[str, Any]) -> None:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text


def test_what_the_model_sees(client: Any) -> None:
    answer = client.post("/apply-template", json={"messages": [BRIEF, HI, HI, HELLO, LATE, HI]})
    said = "user: Be brief.\nhi\n\nhi\nassistant: hello\nuser: It is May.\n\nhi\nassistant:"
    assert answer.json()["prompt"] == said


def test_what_nothing_helps_gets_the_words_of_the_template(client: Any) -> None:
    answer = client.post("/v1/chat/completions", json={"messages": [{"role": "critic", "content": "x"}]})
    assert answer.status_code == 400
    assert "Roles must alternate." in answer.json()["error"]["message"]
