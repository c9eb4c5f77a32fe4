"""Whoever is killed, or finds the disk full or memory gone, leaves the old file or the new one, and one line.

LATENTKV_KILLS: how often each writer is killed (2)."""

from __future__ import annotations

import fcntl
import json
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from latentkv import LlamaDiskCache, LlamaState, durable
from latentkv.engine.store import PrefixStore

KILLS = int(os.environ.get("LATENTKV_KILLS", "2"))
Converted = Callable[..., Path]

SAVER = """
import sys
from latentkv import LlamaDiskCache, LlamaState
kind, place = sys.argv[1:]
cache = LlamaDiskCache(place) if kind == "cache" else None
print("ready", flush=True)
number = 0
while True:
    number += 1
    state = LlamaState([number % 7], bytes([number % 7]) * (4 << 20), None, 0)
    if cache is not None:
        cache[[number % 7]] = state
    else:
        state.write(place + "/talk.lkv")
"""


def child(code: str, *words: str, limit: tuple[int, int] | None = None) -> subprocess.Popen[str]:
    def limited() -> None:
        if limit is not None:
            resource.setrlimit(limit[0], (limit[1], limit[1]))

    command = [sys.executable, "-c", code, *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, preexec_fn=limited)


def kill_at_random(code: str, *words: str) -> None:
    """Some moment after its first writes."""
    process = child(code, *words)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(random.uniform(0.02, 0.3))
    assert process.poll() is None
    process.kill()
    process.communicate()


@pytest.mark.parametrize("kind", ["state", "cache"])
def test_a_killed_save_leaves_old_or_new(tmp_path: Path, kind: str) -> None:
    old = LlamaState([0], bytes(1 << 20), None, 0)
    old.write(tmp_path / "talk.lkv")
    for _ in range(KILLS):
        kill_at_random(SAVER, kind, str(tmp_path))
        found = list(tmp_path.glob("*.lkv"))
        assert found
        for path in found:
            state = LlamaState.read(path)  # its checksum holds
            assert set(state.cache) == {state.input_ids[0]}
        if kind == "cache":
            assert [3] in LlamaDiskCache(str(tmp_path)) or len(found) < 8


HOLDER = """
import fcntl, sys, time
file = open(sys.argv[1])
fcntl.flock(file, fcntl.LOCK_EX)
print("ready", flush=True)
time.sleep(60)
"""


def test_what_the_killed_have_left_goes_with_the_next_file(tmp_path: Path) -> None:
    """Whatever it is called; not what somebody is writing, nor what is not ours."""
    left, held = (tmp_path / f"latentkv-{number:08x}.partial" for number in (1, 2))
    other = tmp_path / "model.gguf.partial"
    for path in (left, held, other):
        path.write_bytes(b"half")
    process = child(HOLDER, str(held))
    assert process.stdout is not None
    process.stdout.readline()
    LlamaState([1], b"rows", None, 0).write(tmp_path / "talk.lkv")
    process.kill()
    process.communicate()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([held.name, other.name, "talk.lkv"])


def test_a_file_that_is_swept_before_it_is_held_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, seen = fcntl.flock, []

    def locked(handle: int, how: int) -> None:
        if not seen:
            (swept,) = tmp_path.iterdir()
            swept.unlink()
        seen.append(handle)
        lock(handle, how)

    monkeypatch.setattr(fcntl, "flock", locked)
    LlamaState([1], b"rows", None, 0).write(tmp_path / "talk.lkv")
    assert len(seen) == 2
    assert LlamaState.read(tmp_path / "talk.lkv").cache == b"rows"
    assert [path.name for path in tmp_path.iterdir()] == ["talk.lkv"]


def test_the_longest_name_is_saved(tmp_path: Path) -> None:
    target = tmp_path / ("n" * 255)
    LlamaState([1], b"rows", None, 0).write(target)
    assert LlamaState.read(target).cache == b"rows"


def test_two_writers_of_one_file_write_two(tmp_path: Path) -> None:
    target = tmp_path / "model.gguf"
    with durable.replacing(target) as first:
        with durable.replacing(target) as second:
            second.write_bytes(b"second")
            first.write_bytes(b"first, longer")
        assert target.read_bytes() == b"second"
    assert target.read_bytes() == b"first, longer"
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_an_error_names_the_file_that_was_asked_for(tmp_path: Path) -> None:
    target = tmp_path / "none" / "talk.lkv"
    with pytest.raises(FileNotFoundError) as caught:
        LlamaState([1], b"rows", None, 0).write(target)
    assert caught.value.filename == str(target)


def test_data_and_names_are_on_the_disk_before_and_after_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synced(handle: int) -> None:
        seen.append("folder" if os.path.isdir(f"/proc/self/fd/{handle}") else "file")
        fsync(handle)

    def replaced(partial: Path, target: Path) -> None:
        seen.append("rename")
        replace(partial, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    LlamaState([1], b"rows", None, 0).write(tmp_path / "talk.lkv")
    assert seen == ["file", "rename", "folder"]


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB."""
    place = tmp_path / "small"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to mount a tmpfs")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_keeps_the_old_state(small: Path, capfd: pytest.CaptureFixture[str]) -> None:
    old = LlamaState([1], bytes(1 << 19), None, 0)
    old.write(small / "talk.lkv")
    big = LlamaState([2], bytes(4 << 20), None, 0)
    with pytest.raises(OSError, match="No space left") as caught:
        big.write(small / "talk.lkv")
    assert caught.value.filename == str(small / "talk.lkv")
    assert LlamaState.read(small / "talk.lkv").input_ids == [1]
    cache = LlamaDiskCache(str(small))
    cache[[2]] = big  # the answer that it is of has been given
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("warning: [set_cache] expected to write ")
    assert line.endswith("got No space left on device; free the disk")
    assert [path.name for path in small.iterdir()] == ["talk.lkv"]
    with pytest.raises(ZeroDivisionError), durable.writing(small / "talk.lkv"):
        raise ZeroDivisionError
    assert [path.name for path in small.iterdir()] == ["talk.lkv"]


def test_a_store_on_a_full_disk_reads_what_is_there(small: Path, capfd: pytest.CaptureFixture[str]) -> None:
    store = PrefixStore("m", 0, small, 1 << 30)
    store.put([1, 2], lambda cuts: [b"x" * 100])
    store.close()
    (small / "others").write_bytes(b"")
    with pytest.raises(OSError, match="No space left"):
        (small / "others").write_bytes(bytes(4 << 20))
    again = PrefixStore("m", 0, small, 1 << 30)
    assert [again.take(key) for key in list(again._entries)] == [[b"x" * 100]]
    again.put([3, 4], lambda cuts: [bytes(1 << 20)])
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("warning: [--cache-dir] expected to write ")
    assert [again.take(key) for key in list(again._entries)] == [[b"x" * 100]]
    assert not list(small.rglob("*.partial"))
    again.close()


WRITERS = """
import sys
from pathlib import Path
from latentkv.cli import main
base, calib, place = sys.argv[1:]
some = ["--calib", calib, "--calib-tokens", "512", "--calib-window", "128"]
latent = ["--method", "palu", "--keep", "0.5", "--allocate", "uniform", *some]
kinds = {"copied": ["--method", "none"], "latent": latent, "sidecar": [*latent, "--sidecar"]}
seed = 0
while True:
    for name, options in kinds.items():
        out = Path(place) / f"{name}.gguf"
        if main(["convert", base, "-o", str(out), "--no-plot", "--seed", str(seed % 2), *options]) != 0:
            sys.exit(1)
        if not (kept := out.with_suffix(f".{seed % 2}")).exists():
            kept.write_bytes(out.read_bytes())
    seed += 1
    if seed == 2:
        print("ready", flush=True)
"""


def test_killed_conversions_of_a_gguf_leave_old_or_new(
    converted: Converted, demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of one seed are followed by those of another."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    place = tmp_path / "files"
    place.mkdir()
    base = converted("--method", "none", "--outtype", "f32")
    while_writing = 0
    for _ in range(KILLS):
        process = child(WRITERS, str(base), str(demo / "sample-calib.txt"), str(place))
        assert process.stdout is not None
        while process.stdout.readline() not in ("ready\n", ""):
            pass
        time.sleep(random.uniform(0, 1))
        end = time.monotonic() + 20
        while not list(place.glob("latentkv-*.partial")) and time.monotonic() < end:
            time.sleep(0.001)
        time.sleep(random.uniform(0, 0.03))
        assert process.poll() is None
        process.kill()
        process.communicate()
        while_writing += len(list(place.glob("*.partial")))
        for name in ("copied", "latent", "sidecar"):
            found = (place / f"{name}.gguf").read_bytes()
            assert found in [(place / f"{name}.{seed}").read_bytes() for seed in (0, 1)]
            json.loads((place / f"{name}.report.json").read_text(encoding="utf-8"))
    print(f"{while_writing} of {KILLS} kills while a file was written")
    LlamaState([1], b"rows", None, 0).write(place / "talk.lkv")
    assert not list(place.glob("*.partial"))


def conversion(demo: Path, out: Path) -> list[str]:
    return ["convert", str(demo), "-o", str(out), "--method", "none", "--outtype", "f32", "--no-plot"]


RUN = "import sys\nfrom latentkv.cli import main\nsys.exit(main(sys.argv[1:]))"


def test_a_conversion_that_is_killed_or_has_no_room(converted: Converted, demo: Path, tmp_path: Path) -> None:
    whole = converted("--method", "none", "--outtype", "f32").read_bytes()
    out = tmp_path / "model.gguf"
    out.write_bytes(b"old")
    words = conversion(demo, out)
    for _ in range(KILLS // 2):
        process = child(RUN, *words)
        while process.poll() is None and not list(tmp_path.glob("latentkv-*.partial")):
            time.sleep(0.001)
        time.sleep(random.uniform(0, 0.05))
        process.kill()
        process.communicate()
        assert out.read_bytes() in (b"old", whole)
    process = child(RUN, *words, limit=(resource.RLIMIT_FSIZE, 1 << 20))
    _, said = process.communicate(timeout=120)
    assert process.returncode == 2
    assert said.splitlines()[-1] == f"error: [output] expected to write {out}; got File too large"
    assert out.read_bytes() in (b"old", whole)
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]
    again = child(RUN, *words)
    _, said = again.communicate(timeout=120)
    assert again.returncode == 0, said
    assert out.read_bytes() == whole


NO_MEMORY = """
import resource, sys
import numpy as np
from latentkv import _core
_core.set_log_level(0)
model = _core.Model(sys.argv[1])
one = _core.Session(model, n_ctx=256, kv="q8", n_threads=1, n_ubatch=512)
one.decode(list(range(5, 45)), output="none")
state = one.state_bytes()
want = one.decode([9])
one.set_state(state)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (24 << 20), used + (24 << 20)))
wide = dict(n_ctx=1 << 16, kv="f32", n_threads=1)
tries = {
    "model": lambda: _core.Model(sys.argv[1]),
    "session": lambda: _core.Session(model, **wide),
    "batch": lambda: one.decode(list(range(5, 205)), output="all"),
    "state": lambda: [one.state_bytes() for _ in range(3)],
}
for name, attempt in tries.items():
    try:
        attempt()
        print(name, "done")
    except (_core.Error, MemoryError) as error:
        print(name, "refused", type(error).__name__, " ".join(str(error).split()))
one.set_state(state)
print("same", bool(np.array_equal(one.decode([9]), want)))
"""


def test_a_session_outlives_what_finds_no_memory(converted: Converted) -> None:
    process = child(NO_MEMORY, str(converted("--method", "none", "--outtype", "f32")))
    out, said = process.communicate(timeout=120)
    assert process.returncode == 0, said[-2000:]
    lines = out.splitlines()
    assert any(line.startswith("session refused") for line in lines), out
    assert all(line.startswith("[") for line in said.splitlines()), said
    assert lines[-1] == "same True"
