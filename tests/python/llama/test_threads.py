"""Threads that share one Llama."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

# A second process: what this guards against ends the interpreter, not the test.
_TWO_THREADS = """
import sys, threading
from latentkv import Llama

llama = Llama(sys.argv[1], n_ctx=128, n_threads=1)
prompts = [f"{word} {i}" for word in ("Cache", "The clerk") for i in range(10)]
say = lambda prompt: llama(prompt, max_tokens=6, temperature=0)["choices"][0]["text"]
alone = {prompt: say(prompt) for prompt in prompts}
together = {}

def work(mine):
    for prompt in mine:
        together[prompt] = say(prompt)
        llama.kv_bytes(), llama.save_state()

threads = [threading.Thread(target=work, args=(mine,)) for mine in (prompts[:10], prompts[10:])]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert len(set(alone.values())) > 5, alone
assert together == alone, (together, alone)
"""


def test_two_threads_take_turns(plain_gguf: Path) -> None:
    command = [sys.executable, "-c", _TWO_THREADS, str(plain_gguf)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, (done.returncode, done.stderr)


def elsewhere(work: Callable[[], Any]) -> Any:
    """What `work` gives in another thread, which must not wait for this one."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    thread.join(timeout=20)
    assert results, "the other thread waits"
    return results[0]


def test_a_paused_stream_blocks_no_other_thread(script: Any, scripted: Callable[..., Any]) -> None:
    llama = scripted()
    script.say(2, b"a", b"b", b"c")
    stream = llama("xy", max_tokens=3, stream=True)
    assert next(stream)["choices"][0]["text"] == "a"
    # Each step may come from another thread, and other calls may come between steps.
    assert elsewhere(lambda: next(stream))["choices"][0]["text"] == "b"
    assert elsewhere(lambda: llama("zz", max_tokens=3))["choices"][0]["text"] == "abc"
    assert elsewhere(lambda: next(stream))["choices"][0]["text"] == "c"
