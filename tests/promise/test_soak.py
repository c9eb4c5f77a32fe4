"""Thousands of random operations on sequences, and none of them shows in another one.

`make soak` runs for LATENTKV_SOAK_SECONDS with seeds from LATENTKV_SOAK_SEED on; a failure names its seed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hybrid_files import layer_that_guesses, write
from runtime import DEMO, WATERFILL, model, session
from soak import Setting, Soak

SECONDS = float(os.environ.get("LATENTKV_SOAK_SECONDS", "24"))
SEED = int(os.environ.get("LATENTKV_SOAK_SEED", "0"))
OPERATIONS = int(os.environ.get("LATENTKV_SOAK_OPERATIONS", "400"))  # of one seed
WINDOW = 48
PALU = ("--method", "palu", "--keep", "0.5", "--group", "2", "--outtype", "f32")
PLAIN = ("--method", "none", "--outtype", "f32")


def of_master(opened: Any) -> Setting:
    """Its plan is chosen when the session is opened."""
    from latentkv.plan.master import planned

    return Setting(planned(opened, {"kv_budget": "20%"}), 0.02, shares=False, cuts=False)


def of(options: dict[str, Any], tolerance: float, **what: int) -> Callable[[Any], Setting]:
    return lambda _: Setting(options, tolerance, **what)


EXACT = {"kv_sink": "f32", "kv_recent": "f32"}
EVICTING = {"kv": "f32", "evict": "h2o", "keep_tokens": "68", "sink": 4, "recent": 0, "prefill": "eager"}
# Rows of 8 bits and fewer: a sum that lies between two codes may fall on either side.
CASES: dict[str, tuple[tuple[str, ...], Callable[[Any], Setting]]] = {
    "rebuilt keys, f32": (PALU, of({"kv": "f32"}, 1e-5, shifts=True)),
    "full rows, q8_0": (PLAIN, of({"kv": "q8_0"}, 0.01)),
    # the same numbers wherever a token is: what moves between regions, and when, shows nowhere
    "windows that grow": (PLAIN, of({"kv": "f32", "sink": 4, "recent": 32} | EXACT, 1e-4, n_ctx=1024)),
    "a plan with windows": (WATERFILL, of({}, 0.02, shares=False, cuts=False)),
    "a master's budget": ((*WATERFILL, "--segment", "32", "--master"), of_master),
    "a ring": (PLAIN, of({"kv": "f32", "n_ubatch": 32}, 1e-4, cuts=False, refuses=True)),
    "recurrent layers": ((), of({"kv": "f32", "n_ubatch": 32}, 1e-4, refuses=True, snapshots=True)),
    "guesses": ((), of({"kv": "f32", "n_ubatch": 32, "mtp": True}, 1e-4, refuses=True, snapshots=True)),
    # of two tokens that gathered about as much, either may go where sums of another batch round otherwise
    "eviction": (PLAIN, of(EVICTING, 0.15, shares=False, cuts=False, refuses=True, evicts=True)),
}


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with a sliding window in every layer."""
    folder = tmp_path_factory.mktemp("windowed")
    for path in DEMO.iterdir():
        (folder / path.name).symlink_to(path)
    config = json.loads((DEMO / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").unlink()
    config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": WINDOW}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


# Beside other programs and under a sanitizer, the operations of one seed alone take minutes.
@pytest.mark.timeout(1800 + 2 * SECONDS)
@pytest.mark.parametrize("case", CASES)
def test_sequences_stay_what_they_are(case: str, converted: Any, windowed: Path, tmp_path: Path) -> None:
    options, setting_of = CASES[case]
    if not options:
        pytest.importorskip("torch")
        given = layer_that_guesses() if case == "guesses" else {}
        opened = model(write(tmp_path / "hybrid.gguf", given=given).path)
    else:
        opened = model(converted(*options, source=windowed if case == "a ring" else DEMO))
    setting = setting_of(opened)
    is_ring = session(opened, **setting.options).window > 0
    assert is_ring == (case == "a ring")
    end = time.monotonic() + SECONDS / len(CASES)
    seed, n = SEED, 0
    while seed == SEED or time.monotonic() < end:
        soak = Soak(opened, setting, seed)
        for i in range(OPERATIONS):
            try:
                soak.step()
                if i % 10 == 9:
                    soak.check()
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                raise AssertionError(f"seed {seed}, operation {i} of {dict(soak.done)}: {error}") from error
        seed, n = seed + 1, n + OPERATIONS
    print(f"{case}: {n} operations, seeds {SEED} to {seed - 1}")
