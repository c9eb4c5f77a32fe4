"""What one request may ask of a server that others use too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from latentkv.engine.request import Request, Ticket
from latentkv.generate.writer import Piece
from latentkv.sampling.options import SamplingOptions
from latentkv.server.access.guard import hosts_of
from latentkv.server.errors import Refused
from latentkv.server.schemas import CompletionBody

BAD: list[tuple[dict[str, Any], str]] = [
    ({"stop": ["x"] * 65}, "[stop] expected at most 64 strings; got 65"),
    ({"stop": "x" * 4097}, "[stop] expected strings of at most 4096 characters; got 4097"),
    ({"prompt": ["x"] * 33, "n": 32}, "[prompt] expected at most 1024 answers"),
    ({"grammar": "root ::= " + "(" * 20000 + '"a"' + ")" * 20000}, "[grammar] expected parentheses"),
    ({"grammar": 'root ::= "' + "a" * (1 << 16)}, "[grammar]"),
    ({"prompt": "a" * 4_000_000}, "[context] expected a prompt of at most 2047 tokens; got a text"),
]


@pytest.mark.parametrize(("fields", "said"), BAD, ids=[said[:40] for _, said in BAD])
def test_what_would_stop_others_is_refused(http: Any, fields: dict[str, Any], said: str) -> None:
    answer = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1} | fields)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]
    assert http.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"content": "a" * 4_000_000}),
        ("/detokenize", {"tokens": [5] * 2048}),
        ("/v1/completions", {"prompt": [5] * 2048}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 4_000_000}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}] * 100_000}),
    ],
)
def test_what_no_context_holds_is_refused_before_it_takes_time(
    http: Any, path: str, body: dict[str, Any]
) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"].startswith("[context] expected a prompt of at most 2047 tokens; got ")
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("name", ["n", "stream", "echo", "ignore_eos", "cache_prompt", "temperature", "stop"])
def test_null_is_as_if_left_out(name: str) -> None:
    left_out = CompletionBody.model_validate({"prompt": "x"})
    assert CompletionBody.model_validate({"prompt": "x", name: None}) == left_out


def test_a_limit_of_the_command_line_is_for_requests_without_one() -> None:
    assert CompletionBody.model_validate({"prompt": "x"}).limit(-1) == 16
    assert CompletionBody.model_validate({"prompt": "x"}).limit(9) == 9
    assert CompletionBody.model_validate({"prompt": "x", "max_tokens": 5}).limit(9) == 5


def test_choices_differ_where_the_command_line_has_a_seed() -> None:
    from latentkv.sampling.options import RANDOM_SEED, SamplingOptions

    body, defaults = CompletionBody.model_validate({"prompt": "x", "n": 2}), SamplingOptions(seed=5)
    assert [body.sampling(defaults, choice).seed for choice in (0, 1)] == [5, 6]
    anew = CompletionBody.model_validate({"prompt": "x", "seed": -1})
    assert anew.sampling(defaults).seed == RANDOM_SEED


def test_pages_of_other_origins_may_not_call(http: Any) -> None:
    body = '{"prompt": "x", "max_tokens": 1}'  # of no stated type, which a browser sends without asking first
    for origin, status in (("http://other.example", 403), ("null", 403), (str(http.base_url), 200)):
        headers = {"Origin": origin.rstrip("/")}
        assert http.post("/v1/completions", content=body, headers=headers).status_code == status


def test_a_name_that_was_made_to_lead_here_is_refused(http: Any) -> None:
    """DNS rebinding: the page's origin is the name that it calls the server by."""
    port = http.base_url.port
    for host, status in (
        (f"evil.example:{port}", 403),
        ("localhost.evil.example", 403),
        ("[::1", 403),
        (f"localhost:{port}", 200),
        ("LOCALHOST", 200),
        (f"127.0.0.1:{port}", 200),
        (f"[::1]:{port}", 200),
    ):
        answer = http.get("/v1/models", headers={"Host": host, "Origin": f"http://{host}"})
        assert answer.status_code == status, host
        if status == 403:
            error = answer.json()["error"]
            assert error["type"] == "permission_error"
            assert "[host] expected a name of this server" in error["message"]
            assert "--allowed-hosts" in error["message"]


def test_which_names_a_server_has() -> None:
    local = ["localhost", "127.0.0.1", "::1"]
    assert hosts_of("127.0.0.1", ["box"]) == [*local, "127.0.0.1", "box"]
    assert hosts_of("127.0.0.2") == [*local, "127.0.0.2"]
    assert hosts_of("0.0.0.0") == ["*"]
    assert hosts_of("0.0.0.0", ["box"]) == ["0.0.0.0", "box"]


def test_more_names_are_allowed(converted: Callable[..., Path], serve: Callable[..., Any]) -> None:
    import httpx

    plain = converted("--method", "none", "--outtype", "f32")
    with serve(plain, "-c", "256", "--allowed-hosts", "Box.example") as address:
        for host, status in (("box.example:99", 200), ("other.example", 403), ("localhost", 200)):
            assert httpx.get(f"{address}/health", headers={"Host": host}).status_code == status


def test_a_model_is_told_of_by_its_name(openai: Any) -> None:
    from openai import NotFoundError

    assert openai.models.retrieve("demo").id == "demo"
    with pytest.raises(NotFoundError, match="gpt-9"):
        openai.models.retrieve("gpt-9")


def test_choices_of_a_stream_have_one_id(openai: Any) -> None:
    chunks = list(openai.completions.create(model="demo", prompt=["a", "b"], n=2, max_tokens=2, stream=True))
    assert {chunk.choices[0].index for chunk in chunks} == {0, 1, 2, 3}
    assert len({chunk.id for chunk in chunks}) == 1


def test_an_echo_alone_writes_no_token(openai: Any) -> None:
    answer = openai.completions.create(model="demo", prompt="The clerk", max_tokens=0, echo=True)
    assert (answer.choices[0].text, answer.usage.completion_tokens) == ("The clerk", 0)


def test_a_client_that_never_reads_ends_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    from latentkv.server import answering

    class Endless:
        def submit(self, request: Request, put: Any, deliver: Any) -> Ticket:
            self.put = put
            return Ticket(request, put, deliver)

        def cancel(self, ticket: Ticket) -> None:
            ticket.cancel()

    shown: list[str] = []

    async def read() -> None:
        engine: Any = Endless()
        inbox = answering.Inbox()
        answer = answering.Answering(engine, Request([1], SamplingOptions()), inbox)
        for _ in range(9):
            engine.put(Piece("x"))
        assert answer.ticket.cancelled
        shown.extend(piece.text for _, piece in await inbox.take() if piece is not None)
        raise answer.error

    monkeypatch.setattr(answering, "MAX_UNREAD", 4)
    with pytest.raises(Refused, match="4 pieces unread"):
        asyncio.run(read())
    assert shown == ["x"] * 4
