"""A conversion that was interrupted goes on from its finished layers and writes the same bytes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conftest import ROOT, TEXT
from latentkv_convert import cli
from latentkv_convert.calibrate.saved.store import Store
from latentkv_convert.calibrate.stream import LayerStream
from latentkv_convert.plan import waterfill

Tiny = Callable[..., Path]
SCRIPT = ROOT / "tools" / "convert" / "convert_lowrank.py"
N_LAYER = 5
WINDOWS = ["--calib-window", "192", "--calib-tokens", "768", "--fisher-tokens", "768"]
METHODS = {  # statistics: one forward pass; gradients; gradients by rows and a plan that is checked
    "zack": ["--method", "zack", "--keep", "0.5"],
    "palu": ["--method", "palu", "--keep", "0.5"],
    "waterfill": ["--kv-budget", "40%", "--sink", "4", "--recent", "32", "--gpu-times", "{times}"],
    "k-quants": ["--kv-budget", "40%", "--sink", "4", "--recent", "32", "--outtype", "q4_k_m"],
}


class Runs:
    """Counts the layers that are run for statistics, and interrupts instead of the one numbered `stop`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[str, int]] = []
        self.stop: int | None = None
        layer = LayerStream.layer

        def counted(stream: LayerStream, index: int, after: int | None = None) -> Any:
            if stream.label == "check":
                return layer(stream, index, after)
            if len(self.seen) == self.stop:
                raise KeyboardInterrupt
            self.seen.append((stream.label, index))
            return layer(stream, index, after)

        monkeypatch.setattr(LayerStream, "layer", counted)

    def take(self) -> list[tuple[str, int]]:
        seen, self.seen = self.seen, []
        return seen


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    return Runs(monkeypatch)


def command(tiny: Tiny, calib: Path, out: Path, method: str, *more: str) -> list[str]:
    words = [word for word in METHODS[method] if word not in ("--gpu-times", "{times}")]
    directory = tiny(num_hidden_layers=N_LAYER)
    return [str(directory), "-o", str(out), "--calib", str(calib), "--no-plot", *WINDOWS, *words, *more]


def use_cache(monkeypatch: pytest.MonkeyPatch, path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(path))
    return path / "latentkv" / "calibration"


@pytest.mark.parametrize("method", METHODS)
def test_finished_layers_are_not_run_again(
    tiny: Tiny,
    calib: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    runs: Runs,
    method: str,
) -> None:
    use_cache(monkeypatch, tmp_path / "whole")
    out = tmp_path / "out.gguf"
    assert cli.main(command(tiny, calib, out, method)) == 0
    expected, whole = out.read_bytes(), runs.take()
    out.unlink()
    for stop in range(1, len(whole), 3):
        root = use_cache(monkeypatch, tmp_path / f"stopped-{stop}")
        out.with_suffix(".report.json").unlink(missing_ok=True)
        runs.stop = stop
        capsys.readouterr()
        assert cli.main(command(tiny, calib, out, method)) == 130
        said = capsys.readouterr().err.splitlines()
        assert said[-1].startswith("error: [convert] interrupted; nothing written; ")
        assert not list(tmp_path.glob("out*"))
        first = runs.take()
        runs.stop = None
        assert cli.main(command(tiny, calib, out, method)) == 0
        assert out.read_bytes() == expected
        assert first + runs.take() == whole  # the one that was interrupted had not begun
        in_statistic = next(at for at, each in enumerate(whole) if each[0] == whole[stop][0])
        resumed = [line for line in capsys.readouterr().err.splitlines() if line.startswith("resuming: ")]
        assert len(resumed) == (stop > in_statistic)
        assert not list(root.glob(".partial-*"))
        out.unlink()


def test_what_is_said(
    tiny: Tiny, calib: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], runs: Runs
) -> None:
    """On the way up, at the top, and on the way down."""
    words = command(tiny, calib, tmp_path / "out.gguf", "waterfill")
    up = f"layers 0-4 of {N_LAYER} forward"
    for stop, done in (
        (0, ""),
        (3, f"layers 0-2 of {N_LAYER}"),
        (2, up),
        (3, f"{up} and 2-4 backward"),
    ):
        runs.stop = stop
        capsys.readouterr()
        assert cli.main(words) == 130
        *_, last = capsys.readouterr().err.splitlines()
        runs.take()
        if not done:
            assert last.endswith("no layer is finished")
            continue
        assert f"; {done} are kept (" in last
        assert last.endswith("the same command goes on from there")


def test_after_the_calibration(
    tiny: Tiny,
    calib: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    runs: Runs,
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    words = command(tiny, calib, tmp_path / "out.gguf", "waterfill")
    with monkeypatch.context() as patch:
        patch.setattr(waterfill, "tables", interrupted)
        assert cli.main(words) == 130
    *_, last = capsys.readouterr().err.splitlines()
    assert "nothing written; the calibration and 1 step of the choice are kept (" in last
    assert last.endswith("): the same command goes on from there")
    runs.take()
    assert cli.main(words) == 0
    assert not runs.take()


@pytest.mark.parametrize("prefer", ["speed", "size"])
def test_a_plan_goes_on_from_every_layer_of_its_passes(
    tiny: Tiny,
    calib: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    prefer: str,
) -> None:
    """The layers that a plan is priced in, run on, and its loss divided among: none is computed twice, but
    for the one that was interrupted."""
    seen: list[str] = []
    stop: int | None = None

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def step(*given: Any, **named: Any) -> Any:
            if len(seen) == stop:
                raise KeyboardInterrupt
            seen.append(name)
            return call(*given, **named)

        return step

    layer = LayerStream.layer

    def checked(stream: LayerStream, index: int, after: int | None = None) -> Any:
        own = counted(f"{stream.label} {index}", layer) if stream.label == "check" else layer
        return own(stream, index, after)

    monkeypatch.setattr(LayerStream, "layer", checked)
    monkeypatch.setattr(waterfill, "tables", counted("tables", waterfill.tables))
    out = tmp_path / "out.gguf"
    words = command(tiny, calib, out, "waterfill", "--prefer", prefer)
    root = use_cache(monkeypatch, tmp_path / "whole")
    assert cli.main(words) == 0
    expected, whole = out.read_bytes(), list(seen)
    shutil.copytree(root, tmp_path / "measured")
    assert not list(root.glob(".partial-*"))
    for at in range(1, len(whole), 9):
        shutil.rmtree(root)
        shutil.copytree(tmp_path / "measured", root)
        out.unlink()
        seen.clear()
        stop = at
        assert cli.main(words) == 130
        (folder,) = root.glob(".partial-*")
        first, stop = list(seen), None
        capsys.readouterr()
        assert cli.main(words) == 0
        assert "resuming: " in capsys.readouterr().err
        assert out.read_bytes() == expected
        assert first + seen[at:] == whole
        assert not folder.exists()


def test_other_options_texts_and_sources_start_anew(
    tiny: Tiny, calib: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], runs: Runs
) -> None:
    out = tmp_path / "out.gguf"
    other = tmp_path / "other.txt"
    other.write_text(TEXT[::-1], encoding="utf-8")
    runs.stop = 2
    words = command(tiny, calib, out, "waterfill")
    assert cli.main(words) == 130
    runs.take()
    again = [[*words, "--seed", "1"], [*words, "--sink", "2"], [*words, "--calib", str(other)]]
    again.append([str(tiny(name="other", num_hidden_layers=N_LAYER, rms_norm_eps=1e-6)), *words[1:]])
    runs.stop = 1
    for each in again:
        capsys.readouterr()
        assert cli.main(each) == 130
        assert "resuming" not in capsys.readouterr().err
        runs.take()
    runs.stop = 0
    assert cli.main(words) == 130
    assert f"resuming: layers 0-1 of {N_LAYER} are done" in capsys.readouterr().err


@pytest.mark.parametrize("cut", [True, False])
def test_damaged_states_are_not_used(
    tiny: Tiny,
    calib: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    runs: Runs,
    cut: bool,
) -> None:
    """As a power failure leaves them: short, or with pages of zeros."""
    out = tmp_path / "out.gguf"
    words = command(tiny, calib, out, "waterfill")
    use_cache(monkeypatch, tmp_path / "whole")
    assert cli.main(words) == 0
    expected, whole = out.read_bytes(), runs.take()
    root = use_cache(monkeypatch, tmp_path / "damaged")
    runs.stop = 3
    assert cli.main(words) == 130
    (state,) = root.glob(".partial-*/states/h1.*.npy")
    size = state.stat().st_size
    os.truncate(state, size - 4096 if cut else 128)
    os.truncate(state, size - 4096 if cut else size)
    runs.take()
    runs.stop = None
    capsys.readouterr()
    assert cli.main(words) == 0
    assert "resuming" not in capsys.readouterr().err
    assert runs.take() == whole
    assert out.read_bytes() == expected


def test_too_little_disk_is_said_and_changes_nothing(
    tiny: Tiny,
    calib: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    runs: Runs,
) -> None:
    out = tmp_path / "out.gguf"
    words = command(tiny, calib, out, "waterfill")
    use_cache(monkeypatch, tmp_path / "whole")
    assert cli.main(words) == 0
    expected = out.read_bytes()
    use_cache(monkeypatch, tmp_path / "small")
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 29)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    capsys.readouterr()
    assert cli.main(words) == 0
    assert "warning: [cache] expected 1.0 GiB free at" in capsys.readouterr().err
    assert out.read_bytes() == expected


def test_no_cache_keeps_nothing(
    tiny: Tiny, calib: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], runs: Runs
) -> None:
    runs.stop = 3
    assert cli.main(command(tiny, calib, tmp_path / "out.gguf", "waterfill", "--no-cache")) == 130
    assert capsys.readouterr().err.splitlines()[-1].endswith("no layer is kept (--no-cache)")
    assert not (tmp_path / "cache").exists()


def layers() -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    yield 0, {"a": np.ones(2)}


def test_a_second_run_waits_for_the_first_and_takes_what_it_finds(tmp_path: Path) -> None:
    store, told = Store(root=tmp_path), threading.Event()
    found: list[Any] = []

    def second() -> None:
        with store.journal("key", 1, told.set):
            found.append(store.load("key", 1))

    with store.journal("key", 1) as first:
        thread = threading.Thread(target=second)
        thread.start()
        assert told.wait(10), "says that it waits"
        assert not found
        store.finish(first, "key", layers())
    thread.join(10)
    assert found[0] is not None
    assert not list(store.root.glob(".partial-*"))


def test_a_second_run_goes_on_where_the_first_was_stopped(tmp_path: Path) -> None:
    store = Store(root=tmp_path)
    with store.journal("key", 2) as first:
        first.write(0, {"a": np.ones(2)})
        first.keep("h1", torch.ones(1, 2, 3))
    with store.journal("key", 2, lambda: pytest.fail("nobody has it")) as second:
        assert second.reached == 1


def test_forgotten_ones_are_removed(tmp_path: Path) -> None:
    """What nobody came back for in a week."""
    store = Store(root=tmp_path)
    with store.journal("left", 1) as left:
        left.write(0, {"a": np.ones(2)})
    (folder,) = store.root.glob(".partial-*")
    with store.journal("other", 1):
        assert folder.is_dir()
    week = time.time() - 8 * 86400
    os.utime(folder, (week, week))
    with store.journal("other", 1):
        assert not folder.exists()


def test_the_cache_has_a_limit(tmp_path: Path) -> None:
    """What was not asked for longest goes first; what is in use stays, and what another one writes."""

    def filled(store: Store, key: str, age: int) -> None:
        store.save(key, 1, iter([(0, {"a": np.zeros(1 << 17)})]))  # 1 MiB
        at = time.time() - age
        os.utime(store.root / key, (at, at))

    for at, key in enumerate(("oldest", "old", "new")):
        filled(Store(root=tmp_path), key, 3600 * (3 - at))
    earlier = Store(root=tmp_path)
    assert earlier.load("oldest", 1)
    assert earlier.tidied() == "", "nothing was added"
    store = Store(root=tmp_path, limit=5 << 19)  # 2.5 MiB
    with earlier.journal("unfinished", 2) as journal:
        journal.write(0, {"a": np.zeros(4)})
        filled(store, "own", 9999)
        said = store.tidied()
    assert said.startswith("1 MiB kept at ")
    assert "2 MiB of others removed" in said
    assert "--no-cache" in said
    left = {path.name for path in store.root.iterdir() if not path.name.startswith(".")}
    assert left == {"oldest", "own"}, "asked for a moment ago, and the one that is in use"
    assert list(store.root.glob(".partial-*"))


def kept(cache: Path, pattern: str) -> bool:
    """Whether a file is there now, where others go as they are looked at."""
    try:
        return any(cache.rglob(pattern))
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("state", ["states/h2.*.npy", "*/states/r3.*.npy", "*/states/g3.*.npy"])
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_process_is_gone_on_with(
    tiny: Tiny, calib: Path, tmp_path: Path, how: signal.Signals, state: str
) -> None:
    out, cache = tmp_path / "out.gguf", tmp_path / "killed"
    calib.write_text(TEXT * 4, encoding="utf-8")
    more = ["--fisher-tokens", "4000"]
    words = [sys.executable, str(SCRIPT), *command(tiny, calib, out, "waterfill", *more)]
    environment = os.environ | {"XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment)
    while child.poll() is None and not kept(cache, f".partial-*/{state}"):
        time.sleep(0.005)
    child.send_signal(how)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == (143 if how == signal.SIGTERM else -how), errors
    assert "Traceback" not in errors
    assert not out.exists()
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0
    assert "resuming: " in done.stderr
    resumed = out.read_bytes()
    environment["XDG_CACHE_HOME"] = str(tmp_path / "whole")
    assert subprocess.run(words, capture_output=True, env=environment, check=False).returncode == 0
    assert out.read_bytes() == resumed
