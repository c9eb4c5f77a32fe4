"""GGUFs whose bytes were changed: one line says what is wrong, and nothing aborts."""

from __future__ import annotations

import struct
import sys
import time
from pathlib import Path
from typing import Any

import pytest

EPSILON = "llama.attention.layer_norm_rms_epsilon"


def patched(source: Path, target: Path, key: str, value: bytes) -> Path:
    """A copy in which the scalar of `key` has other bytes."""
    data = bytearray(source.read_bytes())
    at = data.index(key.encode()) + len(key) + 4  # its type
    data[at : at + len(value)] = value
    target.write_bytes(data)
    return target


def core() -> Any:
    from latentkv import _core

    return _core


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e-5, 2.0])
def test_an_epsilon_out_of_range(latent_gguf: Path, tmp_path: Path, value: float) -> None:
    path = patched(latent_gguf, tmp_path / "bad.gguf", EPSILON, struct.pack("<f", value))
    with pytest.raises(
        ValueError, match=rf"^\[{EPSILON}\] expected a number from 0 to 1; got -?[0-9.einfa-]+$"
    ):
        core().Model(str(path))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -10000.0, 0.0])
def test_a_rotary_base_out_of_range(latent_gguf: Path, tmp_path: Path, value: float) -> None:
    path = patched(latent_gguf, tmp_path / "bad.gguf", "llama.rope.freq_base", struct.pack("<f", value))
    with pytest.raises(
        ValueError, match=r"^\[llama.rope.freq_base\] expected a number from 1 to 1e\+15; got "
    ):
        core().Session(core().Model(str(path)), n_ctx=64, n_threads=1)


def test_a_kept_share_that_is_no_number(latent_gguf: Path, tmp_path: Path) -> None:
    first = struct.pack("<IQf", 6, 8, float("nan"))  # an array's type, its length, an element
    path = patched(latent_gguf, tmp_path / "bad.gguf", "latentkv.k.energy", first)
    with pytest.raises(ValueError, match=r"^\[latentkv.k.energy\] expected shares from 0 to 1; got -?nan$"):
        core().Model(str(path))


def test_bytes_that_are_no_text(run: Any, latent_gguf: Path, tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(latent_gguf.read_bytes().replace(b"latentkv.k.energy", b"latentkv.k.energ\xff"))
    said = r"[gguf] expected only latentkv.* keys of version 1 (docs/gguf.md); got 'latentkv.k.energ\xff'"
    with pytest.raises(ValueError) as error:  # noqa: PT011
        core().Model(str(path))
    assert type(error.value) is core().Error
    assert str(error.value) == said
    done = run("info", path)
    assert (done.returncode, done.stderr) == (2, f"error: {said}\n")


def test_a_warning_says_so_once(run: Any, latent_gguf: Path, tmp_path: Path) -> None:
    data = latent_gguf.read_bytes()
    entries = b"".join(
        struct.pack("<Q", len(key)) + key + value
        for key, value in (
            (b"latentkv.regions.recent", struct.pack("<II", 4, 64)),
            (b"x", struct.pack("<IQ", 8, 4) + b"fill"),
        )
    )
    assert len(entries) % 32 == 0  # the tensors stay aligned
    (n_keys,) = struct.unpack_from("<Q", data, 16)
    path = tmp_path / "window.gguf"
    path.write_bytes(data[:16] + struct.pack("<Q", n_keys + 2) + entries + data[24:])
    done = run("chat", path, "-p", "x", "-n", "1", "-c", "128", "-t", "1", "--recent", "1", "--temp", "0")
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if "[recent]" in line] == [
        "warning: [recent] expected at least 64 recent tokens, the window this file's plan was fitted for; "
        "got 1"
    ]


def test_a_forecast_costs_no_memory(latent_gguf: Path) -> None:
    """2^28 cells are 3 GiB of positions and sequences, and take seconds to write."""
    model = core().Model(str(latent_gguf))
    small, start = model.forecast(1 << 12), time.process_time()
    large = model.forecast(1 << 28)
    assert time.process_time() - start < 0.5
    assert large["total"] == small["total"] << 16
    with pytest.raises(ValueError, match=r"^\[n_ctx\] expected a value from 1 to 268435456; got 268435457$"):
        model.forecast((1 << 28) + 1)


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
def test_a_cache_that_the_system_refuses_is_refused_at_once(latent_gguf: Path) -> None:
    """Its rows come before its cells, whose pages are written."""
    import resource

    model = core().Model(str(latent_gguf))
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    start = time.process_time()
    resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 30), before[1]))
    try:
        with pytest.raises(ValueError, match=r"^\[memory\] expected \d+ bytes; got "):
            core().Session(model, n_ctx=1 << 28, n_threads=1)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert time.process_time() - start < 0.5
