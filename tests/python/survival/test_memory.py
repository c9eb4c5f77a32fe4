"""Memory that runs out costs what was asked for, in one line, and nothing that was open before."""

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
