"""How long a ubatch is: chosen in one place, whoever asks, by what depends on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from runtime import WATERFILL, session

FIXED: dict[str, Any] = {"fixed_window": True}
CPU, GPU = 0, 99


@pytest.fixture(scope="module")
def files(converted: Any) -> dict[str, Path]:
    return {"plain": converted("--method", "none", "--outtype", "f32"), "latents": converted(*WATERFILL)}


def opened(path: Path, layers: int = CPU) -> Any:
    from latentkv import _core

    return _core.Model(str(path), n_gpu_layers=layers, describe_only=True)


@pytest.mark.parametrize(
    ("file", "layers", "options", "length"),
    [
        ("plain", CPU, {}, 512),
        ("plain", GPU, {}, 2048),
        ("plain", 3, {}, 512),  # some layers on the CPU
        ("plain", GPU, {"n_ubatch": 700}, 700),
        ("plain", GPU, {"n_batch": 100}, 100),
        ("plain", GPU, {"n_batch": 1000}, 1000),  # between both lengths
        ("plain", GPU, {"n_batch": 100, "n_ubatch": 300}, 100),
        ("plain", GPU, {"n_batch": 5000, "n_ubatch": 300}, 300),
        ("plain", CPU, FIXED | {"recent": 64}, 128),  # tokens enter an exact window whole
        ("plain", CPU, {"recent": 64}, 512),  # which grows
        ("plain", CPU, {"recent": 64, "n_ubatch": 50}, 50),
        ("plain", GPU, FIXED | {"recent": 64}, 512),  # where they cannot see each other's rows
        ("plain", GPU, {"recent": 64}, 2048),
        ("latents", CPU, FIXED, 128),
        ("latents", CPU, {}, 512),
        ("latents", GPU, {}, 2048),
        ("latents", GPU, FIXED | {"recent": 513}, 512),
        ("latents", GPU, {"recent_ratio": 0.1}, 512),
        ("plain", GPU, {"evict": "h2o", "keep_tokens": "1000"}, 250),  # a quarter of what is kept
        ("plain", CPU, {"evict": "h2o", "keep_tokens": "1000", "recent": 200}, 128),
    ],
    ids=str,
)
def test_the_length_of_a_ubatch(
    files: dict[str, Path], file: str, layers: int, options: dict[str, Any], length: int
) -> None:
    model = opened(files[file], layers)
    assert model.kv_bytes(4096, **options)["n_ubatch"] == length
    assert model.forecast(4096, **options)["n_ubatch"] == length
    assert model.kv_bytes(40, **options)["n_ubatch"] <= 40


@pytest.mark.parametrize("options", [{}, {"recent": 64}, {"n_batch": 100}, {"n_ubatch": 300, "n_batch": 200}])
def test_sessions_have_what_is_foreseen(files: dict[str, Path], options: dict[str, Any]) -> None:
    from latentkv import _core

    model = _core.Model(str(files["plain"]))
    live = session(model, n_ctx=1024, **options)
    assert live.n_ubatch == model.kv_bytes(1024, **options)["n_ubatch"]


def test_a_call_of_llama_is_no_shorter_than_a_ubatch(files: dict[str, Path]) -> None:
    from latentkv import Llama

    for sizes, length in (({"n_batch": 100}, 100), ({"n_batch": 700, "n_ubatch": 600}, 600), ({}, 512)):
        with Llama(str(files["plain"]), n_ctx=1024, n_threads=1, **sizes) as llama:
            assert llama.session.n_ubatch == length


def test_memory_is_asked_only_where_nobody_chose(files: dict[str, Path]) -> None:
    """On each GPU, beside its weights."""
    from latentkv import _core
    from latentkv.plan.fit import needs

    model = opened(files["plain"], GPU)
    need = needs(model.forecast(4096))[0].total + _core.LEFT_ALONE
    for free, length in ((need, 2048), (need - 1, 512), (0, 512)):
        told = model.forecast(4096, [free])
        assert told["n_ubatch"] == length
        assert told == model.forecast(4096, n_ubatch=length)
        assert model.forecast(4096, [free], n_ubatch=1500)["n_ubatch"] == 1500
    halves = _core.Model(
        str(files["plain"]), n_gpu_layers=GPU, tensor_split=[1.0, 1.0], main_gpu=0, describe_only=True
    )
    each = [needs(halves.forecast(4096))[gpu].total + _core.LEFT_ALONE for gpu in (0, 1)]
    assert halves.forecast(4096, each)["n_ubatch"] == 2048
    for short in ([each[0] - 1, each[1]], [each[0], each[1] - 1]):
        assert halves.forecast(4096, short)["n_ubatch"] == 512
