"""Every field of every body with values that it may not have expected: an answer, or one line with 4xx."""

from __future__ import annotations

import json
from typing import Any

import pytest

MESSAGES = [{"role": "user", "content": "x"}]
LIMITS = ("max_tokens", "n_predict", "max_completion_tokens", "max_output_tokens")


def bodies() -> dict[str, tuple[Any, dict[str, Any]]]:
    from latentkv.server import embeddings, schemas
    from latentkv.server.llama_cpp import body as native
    from latentkv.server.messages import body as messages
    from latentkv.server.responses import body as responses

    return {
        "/v1/chat/completions": (schemas.ChatBody, {"messages": MESSAGES, "max_tokens": 1}),
        "/v1/completions": (schemas.CompletionBody, {"prompt": "x", "max_tokens": 1}),
        "/v1/responses": (responses.ResponsesBody, {"input": "x", "max_output_tokens": 1}),
        "/v1/messages": (messages.MessagesBody, {"messages": MESSAGES, "max_tokens": 1}),
        "/v1/embeddings": (embeddings.EmbeddingBody, {"input": "x"}),
        "/completion": (native.NativeBody, {"prompt": "x", "n_predict": 1}),
        "/tokenize": (schemas.TokenizeBody, {"content": "x"}),
        "/detokenize": (schemas.DetokenizeBody, {"tokens": [5]}),
    }


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"a": value}
    return value


VALUES: list[Any] = [
    *(None, True, -5, 2**31, 2**70, 0.5, 1e300, float("nan")),
    *(
        "",
        "x",
        "\ud800",
        "a\x00b",
        [],
        ["x"],
        [1],
        [None],
        [{}],
        ["\udfff"],
        {},
        {"a": 1},
        {"a": float("nan")},
    ),
    *(nested(300), [nested(300)]),
]


@pytest.mark.parametrize("path", bodies())
def test_any_value_of_any_field(http: Any, path: str) -> None:
    from latentkv.server.schemas import Sampling

    model, body = bodies()[path]
    shared = Sampling.model_fields if path != "/completion" else {}  # tried on one route
    for name in model.model_fields.keys() - shared.keys():
        for value in VALUES:
            if name in LIMITS and (value is None or isinstance(value, int)):
                continue
            given = json.dumps({**body, name: value})
            answer = http.post(path, content=given)
            assert answer.status_code in (200, 400, 404), (answer.text, given[:300])
            if answer.status_code == 200:
                assert "NaN" not in answer.text, given[:300]
                continue
            said = answer.json()["error"]["message"]
            assert said.startswith("["), (said, given[:300])
            assert "expected" in said.partition("; got ")[0], (said, given[:300])
            assert len(said) < 2100, given[:300]


BROKEN = [
    (b"", "expected a value; got none"),
    (b"{", "got an error at line 1, column 2: expecting property name"),
    (b'{"messages": [}', "got an error at line 1, column 15: expecting value"),
    (b'{"messages": 1} x', "got an error at line 1, column 17: extra data"),
    (b'{"a": "\xe9"}', "got byte 0xe9 at offset 7, which is no UTF-8"),
    (b"[" * 100_000, "got values nested too deeply"),
    (b'{"a":' * 100_000, "got values nested too deeply"),
    (b'{"max_tokens": ' + b"9" * 5000 + b"}", "got a number of too many digits"),
    (b"5", "expected an object; got 5"),
]


@pytest.mark.parametrize(("body", "said"), BROKEN, ids=[said[:40] for _, said in BROKEN])
def test_what_is_wrong_with_a_body_is_said(http: Any, body: bytes, said: str) -> None:
    for path in ("/v1/chat/completions", "/v1/messages", "/tokenize", "/completion"):
        for long in (b"", b" " * (1 << 18)):
            answer = http.post(path, content=long + body if body else body)
            assert answer.status_code == 400
            found = answer.json()["error"]["message"]
            assert found.startswith("[body] expected "), found
            assert said.partition(" at ")[0] in found if long else said in found, found


def test_the_content_type_has_no_say(http: Any) -> None:
    body = json.dumps({"messages": MESSAGES, "max_tokens": 1})
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        answer = http.post("/v1/chat/completions", content=body, headers={"content-type": kind})
        assert answer.status_code == 200, answer.text


FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
TOO_MUCH: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"tools": [FUNCTION] * 513}, "[tools] expected at most 512; got 513"),
    ("/v1/chat/completions", {"tools": [FUNCTION | {"x": "y" * 4_000_000}]}, "[context] expected a prompt"),
    ("/completion", {"dry_sequence_breakers": ["x"] * 17}, "[dry_sequence_breakers] expected at most 16"),
    ("/completion", {"dry_sequence_breakers": ["x" * 41]}, "[dry_sequence_breakers] expected strings of at"),
    ("/completion", {"n_probs": 2000, "n_predict": 500}, "[n_probs] expected n_probs times n_predict of at"),
    ("/v1/embeddings", {"input": "x", "content": "y"}, "[content] expected input or content; got both"),
    ("/v1/completions", {"suffix": "x"}, "[suffix] expected null"),
    ("/v1/completions", {"mirostat": 3}, "[mirostat] expected less than or equal to 2; got 3"),
    ("/v1/completions", {"repeat_last_n": -2}, "[repeat_last_n] expected greater than or equal to -1"),
    ("/v1/completions", {"stop": 5}, "[stop] expected a text or a list of texts; got 5"),
    ("/v1/completions", {"prompt": [True]}, "[prompt] expected a text or a list of integers or a list of"),
    ("/v1/chat/completions", {"messages": []}, "[messages] expected at least 1 items; got 0"),
    ("/v1/chat/completions", {"messages": [{"role": "user"}]}, "[messages] expected a message of user with"),
]


@pytest.mark.parametrize(("path", "fields", "said"), TOO_MUCH, ids=[said[:44] for *_, said in TOO_MUCH])
def test_what_is_refused_and_why(http: Any, path: str, fields: dict[str, Any], said: str) -> None:
    answer = http.post(path, json=bodies()[path][1] | fields)
    assert answer.status_code == 400, answer.text
    assert said in answer.json()["error"]["message"]


def test_a_tool_of_many_parameters_takes_no_time(http: Any) -> None:
    """Each is read by itself: a copy of the whole for each took 20 seconds for 3000."""
    properties = {f"p{i}": {"type": "string"} for i in range(1500)}
    function = {"name": "f", "parameters": {"type": "object", "properties": properties}}
    body = {"messages": MESSAGES, "tools": [{"type": "function", "function": function}]}
    answer = http.post("/v1/chat/completions/input_tokens", json=body)
    assert answer.elapsed.total_seconds() < 5, answer.text[:200]


def test_penalties_see_as_much_of_a_prompt_as_is_asked_for(http: Any) -> None:
    word = http.post("/v1/completions", json={"prompt": "The", "max_tokens": 1, "logprobs": 0}).json()
    token = http.post("/tokenize", json={"content": word["choices"][0]["text"]}).json()["tokens"][-1]
    far = [token, *http.post("/tokenize", json={"content": "the clerk " * 60}).json()["tokens"]]
    ask = {"prompt": far, "max_tokens": 1, "presence_penalty": 1e6, "n_probs": 1, "post_sampling_probs": True}
    ask |= {"logit_bias": [[token, 1e3]], "temperature": 0}
    near = http.post("/completion", json=ask | {"repeat_last_n": 64}).json()
    assert near["completion_probabilities"][0]["id"] == token
    for window in (len(far), 1 << 24, -1):
        answer = http.post("/completion", json=ask | {"repeat_last_n": window}).json()
        assert answer["completion_probabilities"][0]["id"] != token, window


def test_a_prompt_that_is_only_read_has_its_time(http: Any) -> None:
    answer = http.post("/completion", json={"prompt": "The clerk sat there", "n_predict": 0}).json()
    assert answer["timings"]["prompt_ms"] > 0


def test_neither_a_new_message_nor_an_open_one(http: Any) -> None:
    ask = {"messages": [*MESSAGES, {"role": "assistant", "content": "y"}]}
    texts = [
        http.post("/apply-template", json=ask | more).json()["prompt"]
        for more in ({}, {"add_generation_prompt": True}, {"add_generation_prompt": False})
    ]
    assert texts[0] == texts[1]
    assert texts[0].removeprefix(texts[2]) not in ("", texts[0])
    open_ended = {"continue_final_message": True, "add_generation_prompt": False}
    assert texts[2].startswith(http.post("/apply-template", json=ask | open_ended).json()["prompt"])
    both = http.post("/apply-template", json=ask | open_ended | {"add_generation_prompt": True})
    assert both.status_code == 400
    assert "[add_generation_prompt] expected false" in both.json()["error"]["message"]
