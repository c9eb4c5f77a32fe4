"""A model that is closed, or that nobody has any more, is gone at once: no collection of circles is waited
for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# `left()`: what the process has: resident MiB, mappings of the file, threads, descriptors.
USED = """
import contextlib, gc, os, sys
gc.disable()
from latentkv import Llama, LlamaGrammar, LlamaPromptLookupDecoding, LlamaRAMCache

PATH = sys.argv[1]
ASKED = [{"role": "user", "content": "Say what a cache holds."}]
streams = []

def opened(**options):
    return Llama(PATH, n_ctx=512, n_threads=2, **options)

def ask(llm):
    llm("The cache", max_tokens=4, logprobs=2, echo=True)
    llm.create_chat_completion(ASKED, max_tokens=4)
    llm("{", max_tokens=8, grammar=LlamaGrammar.from_json_schema({"type": "object"}))
    llm.embed("A text.")
    llm.load_state(llm.save_state())
    with contextlib.suppress(ValueError):
        llm("word " * 900)
    llm.set_cache(LlamaRAMCache())
    for stream in (
        llm("Once", max_tokens=40, stream=True),
        llm.create_chat_completion(ASKED, max_tokens=40, stream=True),
        llm.generate(llm.tokenize(b"Twice")),
    ):
        next(stream)
        streams.append(stream)
    streams.append(llm("Never begun", stream=True))

def mapped():
    with open("/proc/self/maps") as lines:
        return sum(PATH in line for line in lines)

def left():
    with open("/proc/self/status") as lines:
        sizes = {word[0]: word[1] for line in lines if len(word := line.replace(":", "").split()) > 1}
    resident = (int(sizes["RssAnon"]) + int(sizes["RssFile"])) >> 10
    return resident, mapped(), int(sizes["Threads"]), len(os.listdir("/proc/self/fd"))
"""

CLOSED = """
for i in range(17):
    llm = opened(draft_model=LlamaPromptLookupDecoding() if i % 2 else None)
    ask(llm)
    assert mapped()
    llm.close()  # while streams are open
    if i == 0:
        first = left()
now = left()
assert now[0] <= first[0] + 20, (first, now)
assert now[1:] == first[1:] and now[1] == 0, (first, now)
for stream in streams:
    try:
        next(stream)
    except AttributeError as error:
        assert "got a closed one" in str(error), error
    else:
        raise AssertionError("a stream of a closed model went on")
"""

DROPPED = """
def dropped():
    llm = opened()
    ask(llm)
    streams.clear()

def forgotten():
    with opened() as llm:
        ask(llm)
    with contextlib.suppress(KeyError), opened() as llm:
        llm("x", max_tokens=2)
        raise KeyError

def refused():
    beside = opened()
    for wrong in ({"pooling_type": "x"}, {"seed": -5}, {"kv": "x"}, {"keep_tokens": 3, "evict": "h2o"}):
        with contextlib.suppress(ValueError):
            opened(**wrong)
    for path in ("/", "no.gguf", PATH + "x"):
        with contextlib.suppress(ValueError):
            Llama(path)

def copied():
    import copy, pickle
    llm = opened()
    ask(llm)
    streams.clear()
    for other in (copy.copy(llm), pickle.loads(pickle.dumps(llm))):
        other("x", max_tokens=2)
    copy.deepcopy(llm.save_state())

for case in (dropped, forgotten, refused, copied):
    case()
    streams.clear()
    assert mapped() == 0, case
"""

ENGINE = """
from latentkv import _core
from latentkv.engine.engine import Engine
from latentkv.engine.request import Request
from latentkv.engine.scheduler import Scheduler
from latentkv.engine.store import PrefixStore
from latentkv.sampling.options import SamplingOptions

def served():
    model = _core.Model(PATH)
    session = _core.Session(model, n_ctx=512, n_seq_max=2, n_threads=2)
    with Engine(Scheduler(model, session, store=PrefixStore("x", 1 << 20))) as engine:
        list(engine.submit(Request([1, 2, 3], SamplingOptions(), max_tokens=4, logprobs=1)))
        next(iter(engine.submit(Request([1, 2], SamplingOptions(), max_tokens=400))))
    assert mapped()

served()
assert mapped() == 0
"""

SERVER = """
import asyncio
from types import SimpleNamespace
from latentkv.server.app import create_app

def served():
    llm = opened()
    app = create_app(SimpleNamespace(llm=llm, close=lambda: None), with_page=False)

    async def run():
        async with app.router.lifespan_context(app):
            assert mapped()

    asyncio.run(run())

served()
assert mapped() == 0
"""


@pytest.mark.skipif(
    not Path("/proc/self/maps").exists(), reason="expected /proc/self/maps; got another system"
)
@pytest.mark.parametrize("what", ["CLOSED", "DROPPED", "ENGINE", "SERVER"])
def test_models_are_gone_at_once(what: str, plain_gguf: Path) -> None:
    if what == "SERVER":
        pytest.importorskip("fastapi")
    command = [sys.executable, "-c", USED + globals()[what], str(plain_gguf)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
