"""`latentkv chat`: one-shot, piped, and in a terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PROMPT = b"> "
FIGURES = b" of "  # ends the line after an answer: "KV 1.00 MiB of 2.00 MiB"


class Terminal:
    """The command behind a pseudo-terminal, as a user has it; a dumb one has no line editor."""

    def __init__(self, *args: object, **environment: str) -> None:
        self._master, slave = pty.openpty()
        given = {"TERM": "dumb", "NO_COLOR": "1", "COLUMNS": "200"} | environment
        self.process = subprocess.Popen(
            [sys.executable, "-m", "latentkv", "chat", *map(str, args)],
            stdin=slave, stdout=slave, stderr=slave, env=os.environ | given, start_new_session=True,
            preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),
        )  # fmt: skip
        os.close(slave)

    def read_until(self, end: bytes, seconds: float = 120) -> str:
        """What is printed up to `end`; fails with it when `end` does not come."""
        seen, deadline = b"", time.monotonic() + seconds
        while end not in seen:
            if time.monotonic() > deadline:
                pytest.fail(f"no {end!r} in {seen!r}")
            if select.select([self._master], [], [], 0.1)[0]:
                try:
                    seen += os.read(self._master, 4096)
                except OSError:  # the other side is closed
                    pytest.fail(f"no {end!r} in {seen!r}")
        return seen.decode(errors="replace")

    def send(self, data: bytes) -> None:
        os.write(self._master, data)

    def interrupt(self) -> None:
        """Ctrl-C at the prompt, not at once: before Python waits for a key only the next key shows it."""
        time.sleep(0.5)
        self.send(b"\x03")

    def turn(self, line: str) -> str:
        """Sends a line; what is printed until the next prompt."""
        self.send(line.encode() + b"\n")
        return self.read_until(b"\n" + PROMPT)

    def status(self) -> int:
        return self.process.wait(timeout=60)

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        os.close(self._master)


@pytest.fixture
def terminal(latent_gguf: Path, request: pytest.FixtureRequest) -> Iterator[Terminal]:
    options = getattr(request, "param", ["-c", 1024, "-n", 12, "--temp", 0])
    opened = Terminal(latent_gguf, "-t", 1, *options)
    yield opened
    opened.close()


@pytest.mark.parametrize(("trained", "default"), [(131072, 8192), (2048, 2048)])
def test_the_context_that_is_taken_by_itself(trained: int, default: int) -> None:
    from latentkv.cli._options import default_context

    assert default_context({"general.architecture": "qwen3", "qwen3.context_length": trained}) == default


def test_one_shot(run: Any, latent_gguf: Path) -> None:
    args = ["chat", latent_gguf, "-p", "What is a cat?", "-n", 12, "--temp", 0, "-t", 1, "--kv", "q4"]
    done = run(*args)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert re.search(
        r"prompt .* t/s \(\d+ tokens\) \| answer .* \| context \d+/4096 tokens \| KV .* of .*", done.stderr
    )
    assert run(*args, "-q").stderr == ""
    assert run(*args, "-q").stdout == done.stdout


def test_piped_text_is_the_prompt(run: Any, latent_gguf: Path, tmp_path: Path) -> None:
    options = ["-n", 12, "--temp", 0, "-t", 1, "-q"]
    asked = run("chat", latent_gguf, "-p", "What is a cat?", *options).stdout
    assert run("chat", latent_gguf, *options, input="What is a cat?\n").stdout == asked
    (tmp_path / "prompt.txt").write_text("What is a cat?\n", encoding="utf-8")
    assert run("chat", latent_gguf, "-f", tmp_path / "prompt.txt", *options).stdout == asked


def test_raw_system_and_seed(run: Any, latent_gguf: Path) -> None:
    options = ["-n", 12, "-t", 1, "-q", "-s", 11]
    raw = run("chat", latent_gguf, "-p", "What is a cat?", "--raw", *options).stdout
    chat = run("chat", latent_gguf, "-p", "What is a cat?", *options).stdout
    system = run("chat", latent_gguf, "-p", "What is a cat?", "-sys", "Speak of the sea.", *options).stdout
    assert len({raw, chat, system}) == 3
    assert run("chat", latent_gguf, "-p", "What is a cat?", *options).stdout == chat


def test_prompt_larger_than_the_context(run: Any, latent_gguf: Path) -> None:
    done = run("chat", latent_gguf, "-c", 32, "-p", "word " * 100, "-t", 1)
    assert done.returncode == 2
    assert re.fullmatch(
        r"error: \[context\] expected a prompt of at most 31 tokens; got \d+; raise -c / n_ctx\n", done.stderr
    )


def test_conversation(terminal: Terminal, tmp_path: Path) -> None:
    assert "/help" in terminal.read_until(PROMPT)
    first = terminal.turn("What is a cat?")
    assert "cached" not in first
    assert "context" in first
    assert re.search(r", \d\d+ cached\)", terminal.turn("And a dog?"))
    assert "unknown command /nope; the commands are /reset " in terminal.turn("/nope")
    assert "/save FILE" in terminal.turn("/help")
    assert "bytes per token" in terminal.turn("/stats")
    assert "saved 4 messages" in terminal.turn(f"/save {tmp_path}/talk.lkv")
    assert "context 0/1024" in terminal.turn("/reset")
    assert "loaded 4 messages | context " in terminal.turn(f"/load {tmp_path}/talk.lkv")
    assert " cached)" in terminal.turn("/regen")
    assert "system message: Be a cat." in terminal.turn("/system Be a cat.")
    assert "error: [file] expected to open" in terminal.turn(f"/load {tmp_path}/none")
    terminal.send(b"/exit\n")
    assert terminal.status() == 0


# A temperature at which this model never ends by itself.
ENDLESS = ["-c", 4096, "--temp", 5, "--top-k", 0, "--top-p", 1, "--min-p", 0, "-s", 1]


@pytest.mark.parametrize("terminal", [ENDLESS], indirect=True)
def test_ctrl_c_stops_the_answer_and_not_the_program(terminal: Terminal) -> None:
    terminal.read_until(PROMPT)
    terminal.send(b"Tell me about files.\n")
    terminal.read_until(b"\n")  # the echo
    time.sleep(1.5)
    terminal.send(b"\x03")
    assert "(stopped)" in terminal.read_until(b"\n" + PROMPT)
    assert "context" in terminal.turn("/stats")
    terminal.interrupt()
    assert "press Ctrl-C again or Ctrl-D to exit" in terminal.read_until(b"\n" + PROMPT)
    terminal.interrupt()
    assert terminal.status() == 130


@pytest.mark.parametrize("terminal", [["-c", 96, *ENDLESS[2:]]], indirect=True)
def test_full_context_says_how_to_go_on(terminal: Terminal) -> None:
    terminal.read_until(PROMPT)
    assert "the context of 96 tokens is full: /reset starts over, a larger -c" in terminal.turn("Tell me.")
    assert "is full" in terminal.turn("And now?")
    assert "context 0/96" in terminal.turn("/reset")
    terminal.send(b"\x04")
    assert terminal.status() == 0


def test_ctrl_c_during_one_shot(latent_gguf: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "latentkv",
        "chat",
        str(latent_gguf),
        "-p",
        "Files?",
        "-t",
        "1",
        *map(str, ENDLESS),
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(20)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in errors


@pytest.mark.parametrize("locale", ["C.UTF-8", "C"])
def test_a_line_that_is_not_utf8_is_refused(
    latent_gguf: Path, monkeypatch: pytest.MonkeyPatch, locale: str
) -> None:
    monkeypatch.setenv("LC_ALL", locale)
    terminal = Terminal(latent_gguf, "-t", 1, "-c", 256, "-n", 4, "--temp", 0)
    try:
        terminal.read_until(b"\n" + PROMPT)
        for line in (b"a\xff\xfe", b"/system \xff"):
            terminal.send(line + b"\n")
            said = terminal.read_until(b"\n" + PROMPT)
            assert re.search(r"error: \[prompt\] expected UTF-8; got byte 0xff at offset \d", said), said
            assert "Traceback" not in said
        assert "answer" in terminal.turn("Hello")
        terminal.send(b"/exit\n")
        assert terminal.status() == 0
    finally:
        terminal.close()


def test_the_line_editor(latent_gguf: Path, tmp_path: Path) -> None:
    environment = {
        "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "XDG_STATE_HOME": str(tmp_path),
    }  # fmt: skip
    prompt = b"\x1b[2C"  # the cursor behind it
    terminal = Terminal(latent_gguf, "-t", 1, *ENDLESS, **environment)
    try:
        terminal.read_until(prompt)
        terminal.send(b"/st")
        terminal.read_until(b"context, cache bytes")  # the menu
        terminal.send(b"\t\r")
        assert "bytes per token" in terminal.read_until(prompt)
        terminal.send(b"\x1b[200~one\ntwo\x1b[201~\r")
        time.sleep(1.5)
        terminal.send(b"\x03")
        assert "(stopped)" in terminal.read_until(prompt)
        terminal.send(b"a\xff\r")
        assert "[prompt] expected UTF-8; got byte 0xff" in terminal.read_until(prompt)
        terminal.send(b"\x04")
        assert terminal.status() == 0
    finally:
        terminal.close()
    kept = (tmp_path / "latentkv/chat_history").read_text(encoding="utf-8")
    assert [line for line in kept.splitlines() if line.startswith("+")] == ["+/stats", "+one", "+two", "+a?"]
    terminal = Terminal(latent_gguf, "-t", 1, **environment)
    try:
        terminal.read_until(prompt)
        terminal.send(b"\x1b[A\x1b[A")
        assert "two" in terminal.read_until(b"two")
        terminal.send(b"\x03")
        terminal.read_until(prompt)
        terminal.send(b"\x03")
        assert terminal.status() == 130
    finally:
        terminal.close()
