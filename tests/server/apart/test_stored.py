"""Responses that later ones go on from, by OpenAI's own clients: what they keep, for whom, and how much."""

from __future__ import annotations

import asyncio
import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from latentkv.server.errors import Refused
from latentkv.server.responses.stored import Stored, StoredResponses

ASK = "The clerk of the town wrote numbers into a book."
STOPS = [".", " the", " of", " and", " to"]  # a small model goes on for ever; none of them is in a call


@pytest.fixture
def create(openai: Any) -> Any:
    def call(**options: Any) -> Any:
        given = {"model": "demo", "input": ASK, "max_output_tokens": 6, **options}
        return openai.responses.create(**given)

    return call


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_goes_on_from_a_stored_one(create: Any, openai: Any, stream: bool) -> None:
    """As if all of it had been sent; of the instructions the last alone count."""
    first = create(instructions="Be brief.")
    options: dict[str, Any] = {"input": "And then?", "instructions": "Be long."}
    if stream:
        *_, last = create(**options, previous_response_id=first.id, stream=True)
        second = last.response
    else:
        second = create(**options, previous_response_id=first.id)
    sent = [{"role": "user", "content": ASK}, *(item.model_dump() for item in first.output)]
    whole = create(**options | {"input": [*sent, {"role": "user", "content": "And then?"}]})
    assert second.output_text == whole.output_text
    assert second.usage.input_tokens == whole.usage.input_tokens > first.usage.input_tokens
    assert (second.previous_response_id, second.store) == (first.id, True)
    third = create(input="So?", previous_response_id=second.id)
    assert third.usage.input_tokens > second.usage.input_tokens
    aside = create(input="And then?", instructions="Be long.", previous_response_id=first.id)  # a branch
    assert aside.output_text == second.output_text
    counted = openai.responses.input_tokens.count(
        model="demo", input="And then?", instructions="Be long.", previous_response_id=first.id
    )
    assert counted.input_tokens == second.usage.input_tokens


def test_a_stored_response_is_read_and_deleted(create: Any, openai: Any) -> None:
    from openai import NotFoundError

    made = create(input=[{"role": "user", "content": f"{n}?"} for n in range(5)])
    assert openai.responses.retrieve(made.id).model_dump() == made.model_dump()
    listed = list(openai.responses.input_items.list(made.id, limit=2, order="asc"))  # in three pages
    assert [item.content[0].text for item in listed] == [f"{n}?" for n in range(5)]
    assert len({item.id for item in listed}) == 5
    newest = openai.responses.input_items.list(made.id)
    assert [item.content[0].text for item in newest] == [f"{n}?" for n in reversed(range(5))]
    openai.responses.delete(made.id)
    for call in (openai.responses.retrieve, openai.responses.delete, openai.responses.input_items.list):
        with pytest.raises(NotFoundError, match=r"\[response_id\] expected a response that is stored here"):
            call(made.id)


def test_what_is_not_stored_is_404_in_openais_shape(create: Any, http: Any) -> None:
    for name in (create(store=False).id, "resp_" + "0" * 32, "../secret"):
        body = {"model": "demo", "input": ASK, "previous_response_id": name}
        for stream in (False, True):
            answer = http.post("/v1/responses", json=body | {"stream": stream})
            assert answer.status_code == 404
            error = answer.json()["error"]
            assert (error["param"], error["code"]) == ("previous_response_id", "previous_response_not_found")
            assert error["message"].endswith(f"got {name}")
    assert create(store=False).store is False
    first = create()
    second = create(previous_response_id=first.id)
    assert http.delete(f"/v1/responses/{first.id}").json()["deleted"] is True
    assert http.post("/v1/responses", json=body | {"previous_response_id": second.id}).status_code == 404
    cancelled = http.post(f"/v1/responses/{second.id}/cancel")
    assert (cancelled.status_code, "in the background" in cancelled.text) == (400, True)
    assert http.get(f"/v1/responses/{second.id}?stream=true").status_code == 501
    items = f"/v1/responses/{second.id}/input_items"
    assert [http.get(f"{items}?{q}").status_code for q in ("limit=0", "after=x", "order=up")] == [400] * 3


def test_each_salt_has_its_own(create: Any, openai: Any) -> None:
    from openai import NotFoundError

    mine = {"cache_salt": "mine"}
    made = create(extra_body=mine)
    assert openai.responses.retrieve(made.id, extra_query=mine).id == made.id
    assert create(previous_response_id=made.id, extra_body=mine).output_text
    for other in ({}, {"cache_salt": "others"}):
        with pytest.raises(NotFoundError):
            create(previous_response_id=made.id, extra_body=other)
        for call in (openai.responses.retrieve, openai.responses.delete, openai.responses.input_items.list):
            with pytest.raises(NotFoundError):
                call(made.id, extra_query=other)


def test_a_later_server_knows_them_and_each_key_its_own(
    serve: Callable[..., Any], converted: Callable[..., Path], tmp_path: Path
) -> None:
    from openai import NotFoundError, OpenAI

    plain = converted("--method", "none", "--outtype", "f32")
    keys = ("--api-key", "alice", "--api-key", "bob", "--isolate")
    options = ("-c", "512", "--kv", "f32", "--temp", "0", "--cache-dir", str(tmp_path), *keys)
    asked: dict[str, Any] = {"model": "demo", "max_output_tokens": 4}
    with serve(plain, *options) as address:
        alice = OpenAI(base_url=f"{address}/v1", api_key="alice", max_retries=0)
        first = alice.responses.create(**asked, input=ASK)
        more = alice.responses.create(**asked, input="So?", previous_response_id=first.id)
    files = list(tmp_path.rglob("resp_*.json"))
    assert {path.stem for path in files} == {first.id, more.id}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    with serve(plain, *options) as address:
        alice = OpenAI(base_url=f"{address}/v1", api_key="alice", max_retries=0)
        bob = OpenAI(base_url=f"{address}/v1", api_key="bob", max_retries=0)
        again = alice.responses.create(**asked, input="So?", previous_response_id=first.id)
        assert again.output_text == more.output_text
        with pytest.raises(NotFoundError):
            bob.responses.create(**asked, input="So?", previous_response_id=first.id)
        with pytest.raises(NotFoundError):
            bob.responses.delete(first.id)
        alice.responses.delete(first.id)
    assert first.id not in {path.stem for path in tmp_path.rglob("resp_*.json")}
    with serve(plain, *options, "--stored-responses", "0") as address:
        alice = OpenAI(base_url=f"{address}/v1", api_key="alice", max_retries=0)
        made = alice.responses.create(**asked, input=ASK)
        assert made.store is False
        with pytest.raises(NotFoundError):
            alice.responses.retrieve(made.id)


def test_an_agent_sends_only_what_is_new(calling: str) -> None:
    """openai-agents calls a tool, and goes on by itself from what it was answered."""
    pytest.importorskip("agents", reason="needs openai-agents (pip install '.[test]')")
    from agents import (
        Agent,
        ModelSettings,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    sent: list[dict[str, Any]] = []

    @function_tool
    def now() -> str:
        """The time."""
        return "Noon."

    async def run() -> Any:
        async def seen(request: httpx.Request) -> None:
            sent.append(json.loads(request.content))

        client = httpx.AsyncClient(event_hooks={"request": [seen]}, timeout=60)
        async with AsyncOpenAI(
            base_url=f"{calling}/v1", api_key="none", max_retries=0, http_client=client
        ) as opened:
            model = OpenAIResponsesModel(model="demo", openai_client=opened)
            settings = ModelSettings(tool_choice="now", parallel_tool_calls=False, extra_body={"stop": STOPS})
            agent: Any = Agent(name="clerk", model=model, model_settings=settings, tools=[now])
            first = await Runner.run(agent, "What time is it?", max_turns=3, auto_previous_response_id=True)
            more = await Runner.run(
                agent, "And now?", max_turns=3, previous_response_id=first.last_response_id
            )
            return first, more

    first, more = asyncio.run(run())
    kinds = [type(item).__name__ for item in first.new_items]
    assert kinds[:2] == ["ToolCallItem", "ToolCallOutputItem"]
    assert isinstance(more.final_output, str)
    assert [item["type"] for item in sent[1]["input"]] == ["function_call_output"]
    assert all(each.get("previous_response_id") for each in sent[1:])


def stored(size: int, previous: str = "", salt: str = "") -> Stored:
    return Stored(b'{"output": ["%s"]}' % (b"x" * size), b'["asked"]', previous, salt)


def name(n: int) -> str:
    return f"resp_{n:032x}"


def test_the_longest_unused_goes_first_and_of_a_chain_its_end(tmp_path: Path) -> None:
    kept = StoredResponses(1000, tmp_path / "responses")
    kept.put(name(1), stored(300))
    kept.put(name(2), stored(300, name(1)))
    assert kept.conversation(name(2), "") == ["asked", "x" * 300] * 2
    kept.put(name(3), stored(400))
    for n, there in ((1, True), (2, False), (3, True)):
        if there:
            assert kept.get(name(n), "").n_bytes > 300
        else:
            with pytest.raises(Refused, match="expected a response that is stored here"):
                kept.get(name(n), "")
    kept.put(name(4), stored(5000))  # more than there is room for
    with pytest.raises(Refused):
        kept.get(name(4), "")
    assert {path.stem for path in (tmp_path / "responses").iterdir()} <= {name(1), name(3)}


def test_damaged_files_are_left_out(tmp_path: Path) -> None:
    kept = StoredResponses(1 << 20, tmp_path)
    for n in range(3):
        kept.put(name(n), stored(10, salt="s"))
    whole = (tmp_path / f"{name(0)}.json").read_bytes()
    (tmp_path / f"{name(0)}.json").write_bytes(whole[:-3])
    (tmp_path / f"{name(1)}.json").write_bytes(b"")
    (tmp_path / "mine.json").write_bytes(b"not ours")
    loop = stored(10, name(5), "s").written()
    (tmp_path / f"{name(5)}.json").write_bytes(loop)  # goes on from itself
    again = StoredResponses(1 << 20, tmp_path)
    assert again.conversation(name(2), "s") == ["asked", "x" * 10]
    assert again.conversation(name(5), "s") == ["asked", "x" * 10]
    for n in (0, 1):
        with pytest.raises(Refused):
            again.get(name(n), "s")
    assert {path.name for path in tmp_path.iterdir()} == {f"{name(2)}.json", f"{name(5)}.json", "mine.json"}


def test_a_full_disk_loses_files_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "responses").write_text("in the way")
    kept = StoredResponses(1 << 20, tmp_path / "responses")
    kept.put(name(1), stored(10))
    assert kept.get(name(1), "") == stored(10)
    assert "warning: [--cache-dir] expected to write" in capfd.readouterr().err
