"""latentkv.engine.store: sequences outlive their place in the cache, and the process."""

from __future__ import annotations

import signal
import subprocess
import sys
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from latentkv.engine.pieces import CHUNK
from latentkv.engine.store import PrefixStore
from latentkv.errors import LatentKVError
from latentkv.session.prefix import common


def longest(store: PrefixStore, prompt: list[int]) -> tuple[str, int]:
    return store.best(lambda tokens: common(tokens, prompt))


def test_the_longest_beginning_is_found() -> None:
    store = PrefixStore("m", 1000)
    store.put([1, 2, 3], lambda cuts: [b"a" * 10])
    store.put([1, 2, 9, 9], lambda cuts: [b"b" * 10])
    key, worth = longest(store, [1, 2, 3, 4])
    assert (store.take(key), worth) == ([b"a" * 10], 3)
    assert longest(store, [5]) == ("", 0)


def test_what_begins_another_is_not_kept_twice() -> None:
    store = PrefixStore("m", 1000)
    store.put([1, 2], lambda cuts: [b"short"])
    store.put([1, 2, 3], lambda cuts: [b"long"])
    store.put([1], lambda cuts: [b"shorter"])
    assert len(store) == 1
    assert store.take(longest(store, [1, 2, 3])[0]) == [b"long"]


def test_the_longest_unused_goes_first() -> None:
    store = PrefixStore("m", 30)
    for token in (1, 2, 3):
        store.put([token, 0], lambda cuts: [bytes(10)])
    store.take(longest(store, [1])[0])
    store.put([4, 0], lambda cuts: [bytes(10)])
    assert longest(store, [2]) == ("", 0)
    assert all(longest(store, [token])[1] for token in (1, 3, 4))
    assert store.ram_used == 30


def test_rows_are_not_asked_for_where_nothing_is_kept() -> None:
    def rows(cuts: Sequence[int]) -> list[bytes]:
        raise AssertionError("rows of a sequence come from the device")

    PrefixStore("m", 0).put([1], rows)
    PrefixStore("m", 0, None, 1000).put([1], rows)  # room on a disk without a folder


def test_files_take_what_memory_does_not(tmp_path: Path) -> None:
    store = PrefixStore("m", 20, tmp_path, 1000)
    for token in range(5):
        store.put([token, 7], lambda cuts, token=token: [bytes([token]) * 10])
    assert store.ram_used == 20
    assert store.disk_used > 0
    assert store.take(longest(store, [0])[0]) == [bytes(10)]
    store.close()
    again = PrefixStore("m", 20, tmp_path, 10_000)
    assert len(again) == 5
    assert [again.take(longest(again, [token])[0]) for token in range(5)] == [
        [bytes([t]) * 10] for t in range(5)
    ]
    assert len(PrefixStore("another", 20, tmp_path, 1000)) == 0


def test_rows_of_other_formats_are_found_and_stay(tmp_path: Path) -> None:
    fine = PrefixStore("m", 0, tmp_path, 10_000, formats="q8")
    fine.put([1, 2, 3], lambda cuts: [b"f" * 100])
    fine.close()
    coarse = PrefixStore("m", 0, tmp_path, 10_000, formats="q4")
    key, worth = longest(coarse, [1, 2, 3])
    assert (worth, coarse.is_own(key), coarse.take(key)) == (3, False, [b"f" * 100])
    coarse.put([1, 2, 3], lambda cuts: [b"c" * 50])  # is not the same
    assert len(coarse) == 2
    own, _ = longest(coarse, [1, 2, 3])
    assert (coarse.is_own(own), coarse.take(own)) == (True, [b"c" * 50])
    coarse.pass_over(key)
    coarse.put([1, 2, 3, 4], lambda cuts: [b"d" * 50])
    assert longest(coarse, [1, 2, 3])[0] != key
    coarse.close()
    again = PrefixStore("m", 0, tmp_path, 10_000, formats="q8")
    assert again.take(longest(again, [1, 2, 3])[0]) == [b"f" * 100]
    assert len(again) == 2


def test_a_closed_store_keeps_nothing(tmp_path: Path) -> None:
    store = PrefixStore("m", 20, tmp_path, 1000)
    store.put([1, 2], lambda cuts: [b"x" * 10])
    store.close()
    store.put([3, 4], lambda cuts: [b"y" * 10])
    assert len(store) == 0
    assert len(PrefixStore("m", 20, tmp_path, 1000)) == 1


def test_damage_is_forgotten(tmp_path: Path) -> None:
    store = PrefixStore("m", 0, tmp_path, 10_000)
    store.put([1, 2], lambda cuts: [b"x" * 100])
    store.put([3, 4], lambda cuts: [b"y" * 100])
    store.close()
    first, second = sorted(tmp_path.rglob("*.state"))
    first.write_bytes(first.read_bytes()[:-3])
    second.write_bytes(b"nonsense")
    again = PrefixStore("m", 0, tmp_path, 10_000)
    assert len(again) == 1  # a head that is whole; its rows are not
    assert again.take(longest(again, again.tokens(next(iter(again._entries))))[0]) is None
    assert len(again) == 0
    assert not list(tmp_path.rglob("*.state"))


def test_a_full_disk_loses_rows_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    store = PrefixStore("m", 5, tmp_path, 1000)
    monkeypatch.setattr("latentkv.engine.pieces.LlamaState.write", full)
    store.put([1, 2], lambda cuts: [b"x" * 10])
    assert len(store) == 0
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"warning: [--cache-dir] expected to write {tmp_path}/")
    assert line.endswith("got No space left on device; free the disk")


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LatentKVError, match=r"\[--cache-dir\] expected a folder to write to"):
        PrefixStore("m", 0, tmp_path / "file", 10)


WRITER = """
import sys
from latentkv.engine.store import PrefixStore
store = PrefixStore("m", 0, sys.argv[1], 1 << 30)
print("ready", flush=True)
number = 0
while True:
    number += 1
    store.put([1, 2, number], lambda cuts: [bytes([number % 256]) * (1 << 20)])
"""


def test_killed_while_writing_leaves_old_or_new(tmp_path: Path) -> None:
    for delay in (0.02, 0.05, 0.11):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(delay)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        store = PrefixStore("m", 0, tmp_path, 1 << 30)
        assert not list(tmp_path.rglob("*.partial"))
        for key in list(store._entries):
            rows = store.take(key)
            assert rows == [bytes([store.tokens(key)[2] % 256]) * (1 << 20)]
        store.close()


HOLDER = """
import sys
from latentkv.engine.store import PrefixStore
store = PrefixStore("m", 0, sys.argv[1], 1 << 20)
store.put([1, 2], lambda cuts: [b"x" * 100])
print("ready", flush=True)
sys.stdin.read()
store.close()
"""


def test_a_folder_is_one_servers_at_a_time(tmp_path: Path) -> None:
    def holder() -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLDER, str(tmp_path)]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    first = holder()
    said = rf"\[--cache-dir\] expected a folder without another server .* by process {first.pid}; choose"
    with pytest.raises(LatentKVError, match=said):
        PrefixStore("m", 0, tmp_path, 1 << 20)
    other = PrefixStore("another", 0, tmp_path, 1 << 20)  # of another model: a folder of its own
    other.put([5, 6], lambda cuts: [b"z" * 100])
    other.close()
    assert first.communicate("", timeout=30) == ("", "")
    mine = PrefixStore("m", 0, tmp_path, 1 << 20)
    assert mine.take(longest(mine, [1, 2])[0]) == [b"x" * 100]
    mine.close()
    killed = holder()  # the lock goes with its process
    killed.kill()
    killed.communicate()
    assert len(PrefixStore("m", 0, tmp_path, 1 << 20)) == 1


def test_a_second_server_says_so(
    converted: Callable[..., Path], serve: Callable[..., Any], tmp_path: Path
) -> None:
    options = ["-c", "256", "--cache-dir", str(tmp_path)]
    plain = converted("--method", "none", "--outtype", "f32")
    with serve(plain, *options) as address:
        command = [
            sys.executable,
            "-m",
            "latentkv",
            "serve",
            str(plain),
            "--port",
            "1",
            *options,
            "--kv",
            "q8",
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert line.startswith(
            "error: [--cache-dir] expected a folder without another server of this model; got"
        )
        assert address.startswith("http")
    with serve(plain, *options):  # the first has gone
        pass


def whole(store: PrefixStore, tokens: list[int]) -> list[int]:
    """What is kept of a sequence, where each token's row is the token."""
    rows = store.take(longest(store, tokens)[0])
    assert rows is not None
    return list(array("i", b"".join(rows)))


def kept(store: PrefixStore, tokens: list[int], settled: int) -> list[list[int]]:
    """Puts a sequence; the cuts that it was asked for."""
    asked: list[list[int]] = []

    def rows(cuts: Sequence[int]) -> list[bytes]:
        asked.append(list(cuts))
        ends = [*cuts[1:], len(tokens)]
        return [array("i", tokens[a:b]).tobytes() for a, b in zip(cuts, ends, strict=True)]

    store.put(tokens, rows, settled)
    return asked


@pytest.mark.parametrize("sink", [0, 4])
def test_what_sequences_begin_with_is_kept_once(tmp_path: Path, sink: int) -> None:
    shared = list(range(5000))
    one, two = [*shared, *range(10_000, 11_000)], [*shared, *range(20_000, 21_000)]
    for folder, ram in ((None, 1 << 20), (tmp_path, 0)):
        store = PrefixStore("m", ram, folder, 1 << 20, sink=sink)
        assert kept(store, one, settled=5900)[0][0] == 0
        alone = store.ram_used + store.disk_used
        (cuts,) = kept(store, two, settled=5900)
        assert 5000 - CHUNK <= cuts[0] <= 5000  # rows that are there are not asked for
        used = store.ram_used + store.disk_used
        assert used - alone < 1.2 * 4 * (1000 + CHUNK) + (folder is not None) * 60_000  # names of the tokens
        assert store.unshared - used > 3.9 * (5000 - CHUNK)
        assert whole(store, one) == one
        assert whole(store, two) == two
        # what is not settled is the sequence's own
        three = [*shared, 7]
        (cuts,) = kept(store, three, settled=1000)
        assert cuts[0] == len(range(sink + CHUNK, 1001, CHUNK)) * CHUNK + sink
        assert whole(store, three) == three
        store.close()
    again = PrefixStore("m", 0, tmp_path, 1 << 20, sink=sink)
    assert len(again) == 3
    assert [whole(again, each) for each in (one, two, three)] == [one, two, three]


def test_a_piece_stays_as_long_as_a_sequence_has_it(tmp_path: Path) -> None:
    shared = list(range(1000))
    one, two = [*shared, 1], [*shared, 2]
    store = PrefixStore("m", 0, tmp_path, 1 << 20)
    for tokens in (one, two):
        kept(store, tokens, settled=1000)
    store._drop(longest(store, one)[0])
    assert whole(store, two) == two
    n_files = len(list(tmp_path.rglob("*.rows")))
    assert n_files == 1000 // CHUNK
    kept(store, [*two, 3], settled=1000)  # goes on
    assert len(store) == 1
    assert len(list(tmp_path.rglob("*.rows"))) == n_files
    store._drop(longest(store, two)[0])
    assert not list(tmp_path.rglob("*.rows"))
    assert (store.disk_used, store.unshared) == (0, 0)


def test_a_piece_that_is_damaged_or_gone(tmp_path: Path) -> None:
    shared = list(range(1000))
    store = PrefixStore("m", 0, tmp_path, 1 << 20)
    for more in (1, 2):
        kept(store, [*shared, more], settled=1000)
    other = list(range(5000, 5600))
    kept(store, other, settled=500)
    store.close()
    again = PrefixStore("m", 0, tmp_path, 1 << 20)
    (piece,) = [each for each in again._pieces if each.holders == 2][:1]
    assert piece.path is not None
    piece.path.write_bytes(b"nonsense")
    assert again.take(longest(again, shared)[0]) is None
    assert len(again) == 1  # both had it
    assert whole(again, other) == other
    again.close()
    next(iter(tmp_path.rglob("*.rows"))).unlink()
    assert len(PrefixStore("m", 0, tmp_path, 1 << 20)) == 0
    assert not list(tmp_path.rglob("*.rows"))  # which no sequence has


def test_the_oldest_sequences_go_and_shared_pieces_stay() -> None:
    shared = list(range(2048))
    store = PrefixStore("m", 4 * 2048 + 4 * 600)
    for at in range(8):
        kept(store, [*shared, *range(10_000 * at, 10_000 * at + 200)], settled=2048)
    assert 2 <= len(store) <= 3
    newest = [*shared, *range(70_000, 70_200)]
    assert whole(store, newest) == newest
    assert store.ram_used <= 4 * 2048 + 4 * 600
