"""Commands whose standard streams are closed, full, or read by nobody."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from latentkv.cli import commands

CHAT = 'chat "$1" --raw -p The -n 4 -c 64 --temp 0 -q'
COMMANDS = {"chat": CHAT, "info": 'info "$1"', "help": "--help", "refused": "info none.gguf"}
CLOSED = {"no input": "<&-", "no output": ">&-", "no errors": "2>&-", "none": "<&- >&- 2>&-"}


def shell(command: str, path: Path) -> subprocess.CompletedProcess[str]:
    line = f'exec "$0" -m latentkv {command}'
    return subprocess.run(
        ["bash", "-c", line, sys.executable, str(path)], capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("closed", CLOSED)
@pytest.mark.parametrize("name", COMMANDS)
def test_closed_streams(latent_gguf: Path, name: str, closed: str) -> None:
    usual = shell(COMMANDS[name], latent_gguf)
    done = shell(f"{COMMANDS[name]} {CLOSED[closed]}", latent_gguf)
    assert done.returncode == usual.returncode == (2 if name == "refused" else 0)
    assert done.stdout == ("" if closed in ("no output", "none") else usual.stdout)
    assert done.stderr == ("" if closed in ("no errors", "none") else usual.stderr)


def test_a_conversation_without_input(latent_gguf: Path) -> None:
    done = shell('chat "$1" -c 64 <&-', latent_gguf)
    assert done.returncode == 2
    assert done.stderr == "error: [prompt] expected some text from -p, -f or the pipe; got nothing\n"


def test_a_model_is_not_opened_under_the_number_of_a_stream(latent_gguf: Path) -> None:
    """A file that is opened where standard error was would be written into."""
    before = latent_gguf.read_bytes()
    for closed in CLOSED.values():
        shell(f"{CHAT} {closed}", latent_gguf)
    assert latent_gguf.read_bytes() == before


@pytest.mark.parametrize("name", ["chat", "info", "help"])
def test_a_full_disk_is_one_line(latent_gguf: Path, name: str) -> None:
    done = shell(f"{COMMANDS[name]} >/dev/full", latent_gguf)
    assert (done.returncode, done.stderr) == (2, "error: [system] No space left on device\n")


@pytest.mark.parametrize("name", ["chat", "info", "help"])
def test_errors_that_nobody_can_read(latent_gguf: Path, name: str) -> None:
    done = shell(f"{COMMANDS[name]} 2>/dev/full", latent_gguf)
    assert done.returncode == 0
    assert done.stdout == shell(COMMANDS[name], latent_gguf).stdout


@pytest.mark.parametrize("name", ["chat", "info", "help"])
def test_a_reader_that_leaves(latent_gguf: Path, name: str) -> None:
    line = f'set -o pipefail; "$0" -m latentkv {COMMANDS[name]} | true'
    done = subprocess.run(
        ["bash", "-c", line, sys.executable, str(latent_gguf)], capture_output=True, text=True, timeout=120
    )
    assert done.stderr == ""
    assert done.returncode in (0, 141)


EMOJI = 'chat "$1" --raw -p The -n 40 -c 64 --temp 0 -q --grammar \'root ::= "one … é \U0001f600 two"\''


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_what_an_encoding_lacks_is_replaced(
    latent_gguf: Path, encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", encoding)
    line = f'"$0" -m latentkv {EMOJI}'
    done = subprocess.run(
        ["bash", "-c", line, sys.executable, str(latent_gguf)], capture_output=True, timeout=120
    )
    shown = {
        "ascii": b"one ... e ? two\n",
        "latin-1": b"one ... \xe9 ? two\n",
        "cp1252": b"one \x85 \xe9 ? two\n",
    }
    assert (done.returncode, done.stdout) == (0, shown[encoding]), done.stderr


@pytest.mark.parametrize("command", ["--help", *(f"{name} --help" for name in commands()), COMMANDS["info"]])
def test_every_page_in_ascii(latent_gguf: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = shell(command, latent_gguf)
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = shell(command, latent_gguf)
    assert (done.returncode, done.stderr) == (0, usual.stderr)
    assert done.stdout.isascii()
    assert len(done.stdout.splitlines()) == len(usual.stdout.splitlines())
