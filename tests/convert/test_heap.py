"""Memory that tensors have freed stays with a process that converts."""

from __future__ import annotations

import subprocess
import sys

import pytest

FAULTS = """
import resource, sys, threading
import torch
from latentkv_convert import heap
torch.set_num_threads(1)
if sys.argv[1] == "kept":
    heap.keep_freed()
def work():
    for _ in range(20):
        held = [torch.ones(n << 20) for n in (3, 7, 5)]
        del held
def together():
    threads = [threading.Thread(target=work) for _ in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
together()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
together()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    """Pages that the system hands to two threads, which make and drop 60 MiB twenty times."""
    done = subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_freed_memory_is_used_again() -> None:
    assert faults("kept") < 0.2 * faults("given back")
