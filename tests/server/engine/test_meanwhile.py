"""What takes seconds runs on a thread: the server answers others meanwhile."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from latentkv.chat.template import template_of
from latentkv.engine.engine import Engine
from latentkv.engine.scheduler import Scheduler
from latentkv.sampling.options import SamplingOptions
from latentkv.server.app import create_app
from latentkv.server.serving import Serving

TEXT = (Path(__file__).parents[3] / "models" / "demo" / "sample-calib.txt").read_text(encoding="utf-8")
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}


class Slow:
    """A model whose tokenizer waits to be let go."""

    def __init__(self, model: Any) -> None:
        self.model, self.has_begun, self.may_go = model, threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def tokenize(self, *args: Any) -> Any:
        self._wait()
        return self.model.tokenize(*args)

    def detokenize(self, *args: Any) -> Any:
        self._wait()
        return self.model.detokenize(*args)

    def _wait(self) -> None:
        self.has_begun.set()
        assert self.may_go.wait(5), "the event loop stands still"


@pytest.fixture(scope="module")
def model(converted: Callable[..., Path]) -> Any:
    from latentkv import _core

    return _core.Model(str(converted("--method", "none", "--outtype", "f32")))


@pytest.fixture
def serving(model: Any) -> Iterator[Serving]:
    from latentkv import _core

    session = _core.Session(model, n_ctx=512, n_seq_max=2, n_threads=1)
    slow: Any = Slow(model)
    with Engine(Scheduler(model, session)) as engine:
        yield Serving(slow, engine, template_of(model), "demo", SamplingOptions(), {})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"content": "x"}),
        ("/detokenize", {"tokens": [5]}),
        ("/v1/completions", {"prompt": "x", "max_tokens": 1}),
        ("/v1/chat/completions", CHAT),
    ],
)
def test_a_slow_tokenizer_stops_nobody(serving: Any, path: str, body: dict[str, Any]) -> None:
    import httpx

    async def ask() -> None:
        transport = httpx.ASGITransport(create_app(serving))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            work = asyncio.create_task(client.post(path, json=body))
            while not serving.model.has_begun.is_set():
                await asyncio.sleep(0.01)
            assert not serving.model.may_go.is_set()
            assert (await client.get("/health")).status_code == 200
            serving.model.may_go.set()
            assert (await work).status_code == 200

    asyncio.run(ask())


@pytest.mark.parametrize("back", [False, True], ids=["tokenize", "detokenize"])
def test_tokens_are_found_beside_other_threads(model: Any, back: bool) -> None:
    text = TEXT.encode() * 30
    tokens = model.tokenize(text) * 10 if back else []
    thread = threading.Thread(target=lambda: model.detokenize(tokens) if back else model.tokenize(text))
    thread.start()
    begin, turns = time.perf_counter(), 0
    while thread.is_alive():
        time.sleep(0.001)
        turns += 1
    assert time.perf_counter() - begin > 0.05, "too short to tell"
    assert turns > 20
