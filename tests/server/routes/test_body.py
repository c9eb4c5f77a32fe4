"""Long bodies are read as short ones are, while others go on."""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from typing import Any

import pytest

from latentkv.server.body import LONG, parsed


def any_value(rng: random.Random, depth: int = 4) -> Any:
    kind = rng.randrange(8 if depth else 6)
    if kind == 6:
        return [any_value(rng, depth - 1) for _ in range(rng.randrange(5))]
    if kind == 7:
        return {f"k{rng.random()}é": any_value(rng, depth - 1) for _ in range(rng.randrange(5))}
    return [None, True, rng.randrange(-9, 99), rng.random(), 'é"\\\n\ud83d\ude00', ""][kind]


def test_what_is_read_is_what_was_written() -> None:
    rng = random.Random(5)
    for _ in range(300):
        value = any_value(rng)
        for options in ({}, {"indent": 1}, {"ensure_ascii": False}):
            text = json.dumps(value, **options)
            body = f" \n{text}\t".encode("utf-8", "surrogatepass")
            assert parsed(body) == json.loads(body)


BROKEN = [
    *(b"", b" ", b"{", b'{"a"', b'{"a":', b'{"a": 1,}', b"[1, 2", b"[1,]", b"{} x", b"nope"),
    *(b'{"a": "\n"}', b"[1 2]", b'{"a": [{"b": nope}]}'),
]


@pytest.mark.parametrize("body", BROKEN, ids=str)
def test_what_is_no_json(body: bytes) -> None:
    with pytest.raises(json.JSONDecodeError) as wanted:
        json.loads(body)
    with pytest.raises(json.JSONDecodeError) as got:
        parsed(body)
    assert (got.value.msg.split()[0], got.value.pos) == (wanted.value.msg.split()[0], wanted.value.pos)


def test_others_run_between_pieces() -> None:
    body = json.dumps({"prompt": [1] * 3_000_000}).encode()
    longest, last, done = 0.0, time.perf_counter(), threading.Event()

    def read() -> None:
        parsed(body)
        done.set()

    thread = threading.Thread(target=read)
    thread.start()
    turns = 0
    while not done.is_set():
        time.sleep(0.001)
        now = time.perf_counter()
        longest, last, turns = max(longest, now - last), now, turns + 1
    thread.join()
    assert turns > 20  # json.loads lets nobody in
    assert sys.getswitchinterval() < 0.01


def test_long_bodies_are_answered(http: Any) -> None:
    long = {"prompt": "The clerk", "max_tokens": 2, "stop": ["x" * 4000] * 64, "model": "demo"}
    body = json.dumps(long) + " " * LONG
    answer = http.post("/v1/completions", content=body)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 2
    broken = http.post("/v1/completions", content='{"prompt": ' + " " * LONG + "]")
    assert broken.status_code == 400
    said = "[body] expected JSON; got an error at line 1, column 262156: expecting value"
    assert broken.json()["error"]["message"] == said
