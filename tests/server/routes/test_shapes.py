"""A fixed answer, read by OpenAI's and Anthropic's own packages in the events that the server writes."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from latentkv.chat.template import ChatTemplate
from latentkv.engine.request import Progress
from latentkv.generate.writer import Piece
from latentkv.server.blocks import Blocks

sys.path.insert(0, str(Path(__file__).parents[2] / "python" / "chat"))
from chat_templates import THINKING

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": CITY}} for name in ("weather", "time")]
THOUGHT, SAID = "<think>\nHm.\n</think>\n\n", "One moment."


def call(name: str, city: str) -> str:
    arguments = json.dumps({"city": city})
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


ANSWERS = {
    "text": SAID,
    "thought and text": THOUGHT + SAID,
    "a call": call("weather", "Rome"),
    "all": THOUGHT + SAID + "\n" + call("weather", "Rome") + "\n" + call("time", "Oslo"),
    "nothing": "",
    "a thought": THOUGHT,
}
WANTED = {
    "text": [("text", SAID)],
    "thought and text": [("reasoning", "Hm."), ("text", SAID)],
    "a call": [("call", '{"city": "Rome"}')],
    "all": [
        ("reasoning", "Hm."),
        ("text", SAID),
        ("call", '{"city": "Rome"}'),
        ("call", '{"city": "Oslo"}'),
    ],
    "nothing": [],
    "a thought": [("reasoning", "Hm.")],
}


def blocks() -> Blocks:
    rendered = ChatTemplate(THINKING).apply([{"role": "user", "content": "Weather?"}], tools=TOOLS)
    return Blocks(rendered.parser)


def pieces(text: str, reason: str = "stop", word: str | None = None) -> list[Piece]:
    """Three characters each."""
    return [*(Piece(text[at : at + 3]) for at in range(0, len(text), 3)), Piece("", (), reason, word)]


def progress() -> Progress:
    found = Progress(prompt_tokens=20, tokens=[0] * 7)
    found.timings.cached_n = 12
    return found


@pytest.mark.parametrize("name", ANSWERS)
def test_blocks_open_grow_and_close(name: str) -> None:
    reader = blocks()
    changes = [change for piece in pieces(ANSWERS[name]) for change in reader.push(piece)]
    assert [(block.kind, block.text.strip()) for block in reader.all] == WANTED[name]
    for block in reader.all:
        own = [change for change in changes if change.block is block]
        assert [own[0].what, own[-1].what] == ["opened", "closed"]
        assert "".join(change.text for change in own) == block.text
    whole = blocks()
    list(whole.push(Piece(ANSWERS[name], (), "stop")))
    assert [(b.kind, b.text, b.name) for b in whole.all] == [(b.kind, b.text, b.name) for b in reader.all]


def test_one_block_is_open_at_a_time() -> None:
    reader, n_open = blocks(), 0
    for piece in pieces(ANSWERS["all"]):
        for change in reader.push(piece):
            n_open += {"opened": 1, "grew": 0, "closed": -1}[change.what]
            assert n_open <= 1
    assert n_open == 0


def events_of(lines: list[str]) -> list[dict[str, Any]]:
    """What a wire that begins with `event: ` carries."""
    found = []
    for line in lines:
        name, data = line.split("\ndata: ", 1)
        found.append(json.loads(data))
        assert found[-1]["type"] == name
    return found


def response_shape(**body: Any) -> Any:
    from latentkv.sampling.options import SamplingOptions
    from latentkv.server.responses.body import ResponsesBody
    from latentkv.server.responses.shape import ResponseShape
    from latentkv.server.responses.stored import StoredResponses

    words = SimpleNamespace(tokenize=lambda text, *_: text.split())
    serving: Any = SimpleNamespace(
        sampling=SamplingOptions(), name="demo", model=words, responses=StoredResponses()
    )
    return ResponseShape(ResponsesBody(input="Weather?", **body), serving, blocks(), progress())


def without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        left = {"id", "call_id", "created_at", "completed_at"}
        return {name: without_ids(each) for name, each in value.items() if name not in left}
    return [without_ids(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_openais_package_builds_the_response(name: str, reason: str) -> None:
    from openai import omit
    from openai.lib.streaming.responses._responses import ResponseStreamState
    from openai.types.responses import Response, ResponseStreamEvent
    from pydantic import TypeAdapter

    shape = response_shape()
    events = shape.first()
    for piece in pieces(ANSWERS[name], reason):
        events += events_of(shape.lines(piece))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    state, known = ResponseStreamState(input_tools=omit, text_format=omit), TypeAdapter(ResponseStreamEvent)
    for event in events:
        state.handle_event(known.validate_python(event))
    last = events[-1]
    assert last["type"] == ("response.incomplete" if reason == "length" else "response.completed")
    Response.model_validate(last["response"])
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == last["response"]["output"]
    kinds = [kind for kind, _ in WANTED[name]]
    if set(kinds) <= {"reasoning"}:
        kinds.append("text")  # a response has at least an empty message
    shown = {"reasoning": "reasoning", "text": "message", "call": "function_call"}
    assert [item["type"] for item in done] == [shown[kind] for kind in kinds]
    whole = response_shape().whole(pieces(ANSWERS[name], reason))
    assert without_ids(whole) == without_ids(last["response"])
    details = whole["incomplete_details"]
    assert details == ({"reason": "max_output_tokens"} if reason == "length" else None)


def test_what_a_response_counts() -> None:
    usage = response_shape().whole(pieces(THOUGHT + SAID))["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] == 12
    assert usage["output_tokens_details"]["reasoning_tokens"] == 1
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (20, 7, 27)


def test_a_failure_ends_a_response() -> None:
    from latentkv.server.errors import Refused

    shape = response_shape()
    shape.first()
    (event,) = events_of(shape.failed(Refused(500, "[engine] expected a step that runs")))
    assert (event["type"], event["sequence_number"]) == ("response.failed", 2)
    assert event["response"]["error"]["message"].startswith("[engine]")


def message_shape(stops: tuple[str, ...] = (), omits: bool = False) -> Any:
    from latentkv.server.messages.shape import MessageShape

    return MessageShape("demo", blocks(), progress(), stops, omits)


@contextmanager
def answering(body: str) -> Iterator[str]:
    """The address of a server that streams this to everyone."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *said: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("name", ANSWERS)
def test_anthropics_package_builds_the_message(name: str) -> None:
    anthropic = pytest.importorskip("anthropic", reason="needs anthropic (pip install '.[test]')")
    from anthropic.types import RawMessageStreamEvent
    from pydantic import TypeAdapter

    shape, known = message_shape(), TypeAdapter(RawMessageStreamEvent)
    lines = [line for piece in pieces(ANSWERS[name]) for line in shape.lines(piece)]
    for event in events_of(lines):
        assert event["type"] == "ping" or known.validate_python(event)
    ask: dict[str, Any] = {"model": "demo", "max_tokens": 9, "messages": [{"role": "user", "content": "?"}]}
    with answering("".join(f"event: {line}\n\n" for line in lines)) as address:
        client = anthropic.Anthropic(base_url=address, api_key="none", max_retries=0)
        with client, client.messages.stream(**ask) as stream:
            built = stream.get_final_message().model_dump(exclude_none=True)
    whole = message_shape().whole(pieces(ANSWERS[name]))
    anthropic.types.Message.model_validate(whole)
    assert without_ids(built["content"]) == without_ids(whole["content"])
    assert built["stop_reason"] == whole["stop_reason"]
    assert whole["stop_reason"] == ("tool_use" if "call" in str(WANTED[name]) else "end_turn")
    usage = {"input_tokens": 8, "cache_read_input_tokens": 12, "output_tokens": 7}
    assert usage.items() <= whole["usage"].items()
    assert usage.items() <= built["usage"].items()


def test_why_a_message_ends() -> None:
    def ended(reason: str, word: str | None) -> tuple[str, str | None]:
        whole = message_shape(stops=("END",)).whole(pieces(SAID, reason, word))
        return whole["stop_reason"], whole["stop_sequence"]

    assert ended("stop", None) == ("end_turn", None)
    assert ended("stop", "END") == ("stop_sequence", "END")
    assert ended("stop", "<|im_end|>") == ("end_turn", None)  # the template's
    assert ended("length", None) == ("max_tokens", None)


def test_a_call_that_breaks_off_is_shown_as_far_as_it_came() -> None:
    text = ANSWERS["a call"]
    cut = text[: text.index("Rome") + 2]
    whole = message_shape().whole(pieces(cut, "length"))
    assert whole["stop_reason"] == "max_tokens"
    assert whole["content"][0]["input"] == {"city": "Ro"}
    response = response_shape().whole(pieces(cut, "length"))
    assert response["output"][0]["status"] == response["status"] == "incomplete"


def test_thoughts_may_be_left_out() -> None:
    shape = message_shape(omits=True)
    events = [event for piece in pieces(THOUGHT + SAID) for event in events_of(shape.lines(piece))]
    assert not any(event.get("delta", {}).get("thinking") for event in events)
    whole = message_shape(omits=True).whole(pieces(THOUGHT + SAID))
    assert [block["type"] for block in whole["content"]] == ["thinking", "text"]
    assert whole["content"][0]["thinking"] == ""
