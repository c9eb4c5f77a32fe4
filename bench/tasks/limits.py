"""Runs a Python program that a model wrote, in a process with limits.

    python bench/tasks/limits.py < program.py        status 0: it ran to its end

The process has its own empty folder and environment, no network, no other process, no file to write, and
limits of time, memory and file size. An audit hook refuses what would reach outside; namespaces and another
user are added where the system lets. That stops accidents and ordinary malice, not an attack on Python.
"""

from __future__ import annotations

import os
import resource
import secrets
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from typing import Any

SECONDS = 10  # of wall time; of processor time it is less
MEMORY = 2 << 30  # bytes
FILE = 1 << 20  # bytes
NOBODY = 65534
NEW_USER, NEW_NET = 0x10000000, 0x40000000  # flags of unshare(2)
REFUSED = (
    "socket.",
    "subprocess.",
    "os.system",
    "os.fork",
    "os.exec",
    "os.posix_spawn",
    "os.kill",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.link",
    "os.symlink",
    "os.truncate",
    "os.chmod",
    "os.chown",
    "os.putenv",
    "shutil.",
    "ctypes.",
    "urllib.",
    "ftplib.",
    "http.client.",
)


def passed(program: str, seconds: float = SECONDS) -> str:
    """Why the program did not run to its end, or ""."""
    token = secrets.token_hex(16)
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        with subprocess.Popen(
            [sys.executable, "-I", os.path.abspath(__file__), token],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
            start_new_session=True,
        ) as process:
            try:
                said = process.communicate(program.encode(), seconds)[0].decode("utf-8", "replace")
            except subprocess.TimeoutExpired:
                return "it took too long"
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    if said.endswith(token):
        return ""
    return said.strip()[:300] or f"it ended with status {process.returncode}"


def confine(seconds: int) -> None:
    """Takes from this process what a program of a model must not have."""
    import ctypes

    unshare = getattr(ctypes.CDLL(None), "unshare", None)  # Linux has it
    if unshare is not None and unshare(NEW_NET) != 0:  # root may, others in a user namespace
        unshare(NEW_USER | NEW_NET)
    limits = {
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_AS: MEMORY,
        resource.RLIMIT_FSIZE: FILE,
        resource.RLIMIT_NOFILE: 32,
        resource.RLIMIT_CORE: 0,
    }
    for name, limit in limits.items():
        resource.setrlimit(name, (limit, limit))
    if os.geteuid() == 0 and others_read(os.__file__):
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
    sys.addaudithook(_refuse)


def others_read(path: str) -> bool:
    """Whether another user finds this file of Python's library."""
    while os.stat(path).st_mode & 0o005 and path != "/":
        path = os.path.dirname(path)
    return path == "/"


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event.startswith(REFUSED):
        raise PermissionError(f"[limits] expected no {event}")
    if event == "open":
        _, mode, flags = arguments
        writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
        if set(mode or "") & set("wax+") or (isinstance(flags, int) and flags & writes):
            raise PermissionError("[limits] expected no file to write")


def main(token: str) -> None:
    program = sys.stdin.read()
    if "numpy" in program:  # it needs more than the program may have, to be imported
        with suppress(ImportError):
            import numpy  # noqa: F401
    answer = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    confine(SECONDS - 2)
    why = ""
    try:
        exec(compile(program, "answer.py", "exec"), {"__name__": "__main__"})
    except BaseException as error:
        why = f"{type(error).__name__}: {error}"
    os.write(answer, (why or token).encode())


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        why = passed(sys.stdin.read())
        sys.exit(f"error: [limits] {why}" if why else 0)
