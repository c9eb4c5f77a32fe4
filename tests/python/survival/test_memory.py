"""Memory that runs out costs what was asked for, in one line, and nothing that was open before. Weights that
are locked stay in memory, or a line says that they do not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# Opens a session, then others under limits that rise until one opens, and compares the first one's answers.
OPENING = """
import resource, sys
import numpy as np
from latentkv import _core

MIB = 2**20
ids = list(range(1, 40))

def session(model, n_ctx):
    return _core.Session(model, n_ctx=n_ctx, n_threads=2)

def used():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()

def limited(extra):
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (hard if extra is None else used() + extra, hard))

_core.set_log_level(0)
first = session(_core.Model(sys.argv[1]), 64)
want = first.decode(ids, output="last").copy()
refused = 0
for extra in range(0, 400 * MIB, int(sys.argv[2])):
    first.clear()
    limited(extra)
    try:
        other = session(_core.Model(sys.argv[1]), 4096)
        other.decode(ids, output="last")
    except MemoryError:
        refused += 1
    except _core.Error as error:
        assert str(error).startswith("[memory] "), str(error)
        refused += 1
    else:
        break
    finally:
        other = None
        got = first.decode(ids, output="last")
        limited(None)
        assert np.array_equal(got, want), "another answer of the session before"
else:
    raise SystemExit("no session opened in 400 MiB")
print(refused)
"""


@pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="expected /proc/self/statm; got another system"
)
def test_a_session_outlives_another_that_finds_no_memory(latent_gguf: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OPENING, str(latent_gguf), str(256 * 1024)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 10  # limits that refused it


# Locks a model's weights; with "limited" without the right to lock any number of bytes.
LOCKING = """
import ctypes, resource, sys
from latentkv import Llama

def locked():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("VmLck"))

if sys.argv[2] == "limited":
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, 64 << 10))
    libc = ctypes.CDLL(None, use_errno=True)
    sizes = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3
    held = (ctypes.c_uint32 * 6)()
    assert libc.capget(sizes, held) == 0
    held[0] &= ~(1 << 14)  # CAP_IPC_LOCK
    assert libc.capset(sizes, held) == 0
llm = Llama(sys.argv[1], use_mlock=True, n_threads=1)
llm("The cache", max_tokens=2)
print(locked())
llm.close()
print(locked())
"""


def locking(path: Path, how: str) -> tuple[list[int], str]:
    """KiB that are locked while the model is open, and after it; and what was said."""
    command = [sys.executable, "-c", LOCKING, str(path), how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return [int(line) for line in done.stdout.split()], done.stderr


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="expected Linux; got another system")
def test_weights_are_locked_as_long_as_the_model_is_open(plain_gguf: Path) -> None:
    (open_, closed), said = locking(plain_gguf, "any")
    if "[mlock]" in said:
        pytest.skip(f"expected the right to lock the weights; got {said}")
    assert open_ > 0.9 * plain_gguf.stat().st_size / 1024 - 1024  # but for the vocabulary
    assert closed == 0


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="expected Linux; got another system")
def test_weights_that_cannot_be_locked_are_told(plain_gguf: Path) -> None:
    (open_, closed), said = locking(plain_gguf, "limited")
    assert (open_ <= 64, closed) == (True, 0)
    assert said.startswith("warning: [mlock] expected to lock ")
    assert "as ulimit -l allows 64 KiB; raise it, or leave out --mlock / use_mlock" in said
    assert said.count("\n") == 1
