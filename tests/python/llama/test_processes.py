"""What happens to a model when its process forks, or ends while a thread generates."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

_BEGIN = """
import os, signal, sys, threading, time
from latentkv import Llama

path = sys.argv[1]
def opened(): return Llama(path, n_ctx=256, n_threads=2)
def say(llama, prompt="The cache", n=6):
    return llama(prompt, max_tokens=n, temperature=0)["choices"][0]["text"]
def child(work):
    "The exit status of a forked child that does the work; it has twenty seconds."
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        os._exit(0 if work() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""


def ends(code: str, path: Path) -> None:
    """A process of its own does this, says nothing and exits with 0."""
    quiet = "ignore::DeprecationWarning"  # from 3.12 on Python warns of every fork beside other threads
    command = [sys.executable, "-W", quiet, "-c", _BEGIN + textwrap.dedent(code), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, ""), (done.returncode, done.stdout, done.stderr)


def test_a_child_says_what_its_parent_does(plain_gguf: Path) -> None:
    ends(
        """
        llama = opened()
        said = say(llama)
        for _ in range(5):
            assert child(lambda: say(llama) == said) == 0
        llama.reset()
        assert child(lambda: child(lambda: say(llama) == said) == 0) == 0
        assert say(llama) == said
        """,
        plain_gguf,
    )


def test_a_pool_of_forked_workers(plain_gguf: Path) -> None:
    ends(
        """
        import multiprocessing
        llama = opened()
        prompts = [f"The clerk {i}" for i in range(6)]
        alone = []
        for prompt in prompts:
            llama.reset()
            alone.append(say(llama, prompt))
        def work(prompt):
            llama.reset()
            return say(llama, prompt)
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert pool.map_async(work, prompts).get(60) == alone
        """,
        plain_gguf,
    )


def test_a_child_that_ends_as_python_does(plain_gguf: Path) -> None:
    """sys.exit in the child: destructors run, and none waits for a thread that is not there."""
    ends(
        """
        llama = opened()
        said = say(llama)
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)
            assert say(llama) == said
            sys.exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        """,
        plain_gguf,
    )


def test_a_child_forked_while_another_thread_generates(plain_gguf: Path) -> None:
    """It has its own lock and an empty cache; other models, other streams and the parent go on."""
    ends(
        """
        llama, other = opened(), opened()
        said, told = say(llama), say(other, "The clerk")
        stop = False
        def on():
            while not stop: say(llama, "The keys", 60)
        thread = threading.Thread(target=on)
        thread.start()
        time.sleep(.3)
        for _ in range(6):
            assert child(lambda: say(llama) == said and say(other, "The clerk") == told) == 0
        stop = True
        thread.join()
        assert say(llama) == said
        """,
        plain_gguf,
    )


def test_a_stream_goes_on_in_parent_and_child(plain_gguf: Path) -> None:
    ends(
        """
        llama = opened()
        def rest(stream): return "".join(chunk["choices"][0]["text"] for chunk in stream)
        def begun():
            llama.reset()
            stream = llama("The cache", max_tokens=12, temperature=0, stream=True)
            return stream, next(stream)
        whole = rest(begun()[0])
        stream, _ = begun()
        assert child(lambda: rest(stream) == whole) == 0
        assert rest(stream) == whole
        """,
        plain_gguf,
    )


@pytest.mark.parametrize("n_tokens", [1, 200])
def test_the_interpreter_ends_while_a_daemon_thread_generates(plain_gguf: Path, n_tokens: int) -> None:
    ends(
        f"""
        llama = opened()
        def on():
            while True: say(llama, "The keys", {n_tokens})
        threading.Thread(target=on, daemon=True).start()
        time.sleep(.5)
        """,
        plain_gguf,
    )


def test_the_interpreter_ends_with_a_stream_open_and_a_thread_in_turn(plain_gguf: Path) -> None:
    """Closing the stream, and the model, must not wait for a thread that will never run again."""
    ends(
        """
        llama = opened()
        stream = llama("The cache", max_tokens=100, temperature=0, stream=True)
        next(stream)
        def on():
            while True: say(llama, "The keys", 100)
        threading.Thread(target=on, daemon=True).start()
        time.sleep(.5)
        """,
        plain_gguf,
    )


def test_another_thread_exits(plain_gguf: Path) -> None:
    ends(
        """
        llama = opened()
        def on():
            say(llama)
            sys.exit(3)
        thread = threading.Thread(target=on)
        thread.start()
        thread.join()
        say(llama)
        """,
        plain_gguf,
    )


def test_ctrl_c_ends_a_call_and_the_model_goes_on(plain_gguf: Path) -> None:
    ends(
        """
        llama = opened()
        said = say(llama)
        threading.Timer(.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        try:
            while True: say(llama, "The keys", 100)
        except KeyboardInterrupt:
            pass
        assert say(llama) == said
        """,
        plain_gguf,
    )


def test_ctrl_c_does_not_wait_for_the_end_of_a_ubatch(plain_gguf: Path) -> None:
    """Of one that it ends, nothing stays; the tokens before it do."""
    ends(
        """
        llama = Llama(path, n_ctx=8192, n_batch=8192, n_ubatch=8192, n_threads=1)
        llama.eval([5, 6, 7])
        threading.Timer(.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        begin = time.perf_counter()
        try:
            llama.eval([9] * 8000)
        except KeyboardInterrupt:
            assert llama.n_tokens == 3, llama.n_tokens
        else:
            raise AssertionError(f"it ended after {time.perf_counter() - begin} s")
        """,
        plain_gguf,
    )


def test_an_engine_is_not_inherited() -> None:
    """Its thread is not in the child: whoever asks is told, and does not wait."""
    code = """
import os
from latentkv.engine.engine import Closed, Engine
class Idle:
    def __getattr__(self, name): return lambda *a: False
engine = Engine(Idle())
if os.fork() == 0:
    try:
        engine.call(lambda scheduler: 1)
    except Closed as error:
        engine.close()
        os._exit(0 if "forked" in str(error) else 1)
    os._exit(2)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_sigterm_ends_a_command_that_generates(plain_gguf: Path) -> None:
    command = [sys.executable, "-m", "latentkv", "chat", plain_gguf, "--raw", "-p", "The"]
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.read(1)
    os.kill(process.pid, signal.SIGTERM)
    _, errors = process.communicate(timeout=30)
    assert process.returncode in (-signal.SIGTERM, 128 + signal.SIGTERM, 0)
    assert b"Traceback" not in errors
