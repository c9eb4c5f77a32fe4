"""Room and permission are tried before anything is computed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from latentkv import durable
from latentkv_convert import calibrate, cli, files

Tiny = Callable[..., Path]
SMALL = ["--calib-window", "192", "--fisher-tokens", "768", "--recent", "32", "--no-plot"]


@pytest.fixture
def refused(
    tiny: Tiny,
    calib: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., str]:
    """The one line of a conversion that ends before its text has passed the model."""

    directory = str(tiny())

    def line(*more: str) -> str:
        monkeypatch.setattr(calibrate.Passes, "statistic", lambda *_: pytest.fail("computed"))
        capsys.readouterr()
        before = sorted(path.name for path in tmp_path.iterdir() if path.name != "cache")
        words = [directory, "-o", str(tmp_path / "out.gguf"), "--calib", str(calib), "--kv-budget", "60%"]
        assert cli.main([*words, *SMALL, *more]) == 2
        assert sorted(path.name for path in tmp_path.iterdir() if path.name != "cache") == before
        (said,) = capsys.readouterr().err.splitlines()
        return said

    return line


def free(monkeypatch: pytest.MonkeyPatch, n_bytes: Callable[[Path], int]) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=n_bytes(Path(path))))


def test_a_folder_that_nobody_may_write_to(
    refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def denied(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & os.O_CREAT and Path(path).parent == tmp_path:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", denied)
    assert refused() == f"error: [output] expected to write {tmp_path}/out.gguf; got Permission denied"


def test_a_file_that_only_its_owner_may_replace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of another user in /tmp."""
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "out.gguf").touch()
    shared.chmod(0o1777)
    durable.rehearse(shared / "out.gguf", 1 << 40)
    monkeypatch.setattr(os, "geteuid", lambda: shared.stat().st_uid + 4711)
    durable.rehearse(shared / "new.gguf", 0)
    with pytest.raises(PermissionError, match="not permitted"):
        durable.rehearse(shared / "out.gguf", 0)
    assert [path.name for path in shared.iterdir()] == ["out.gguf"]


def test_a_disk_that_is_too_full_for_the_file(
    refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free(monkeypatch, lambda path: 4096)
    said = refused()
    assert said.startswith("error: [output] expected ")
    assert said.endswith(f" free at {tmp_path}; got 4.00 KiB; choose another folder for it")


def test_a_disk_that_is_too_full_for_the_store(
    refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free(monkeypatch, lambda path: 1 << 40 if path == tmp_path else 4096)
    said = refused()
    assert said.startswith("error: [cache] expected ")
    assert said.endswith("; got 4.00 KiB; set XDG_CACHE_HOME or pass --no-cache")


def test_a_store_that_cannot_be_written(
    refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    said = refused()
    assert said.startswith("error: [cache] expected to write ")
    assert said.endswith("; set XDG_CACHE_HOME or pass --no-cache")


@pytest.mark.parametrize(
    "more",
    [
        ["--kv-budget", "90%"],
        ["--kv-budget", "100%", "--prefer", "size"],
        ["--kv-budget", "60%", "--master"],
        ["--method", "palu", "--keep", "1.0"],
        ["--method", "none"],
    ],
    ids=" ".join,
)
def test_no_file_is_larger_than_was_said(
    tiny: Tiny, calib: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    said: list[int] = []
    monkeypatch.setattr(files, "check_room", lambda recipe, n_bytes: said.append(n_bytes))
    own = [*SMALL[:4], *(SMALL[4:6] if "--method" not in more else []), "--no-plot", "--calib-tokens", "768"]
    out = tmp_path / "out.gguf"
    assert cli.main([str(tiny()), "-o", str(out), "--calib", str(calib), *own, *more]) == 0
    assert out.stat().st_size <= said[0] < 2 * out.stat().st_size + (64 << 10)
