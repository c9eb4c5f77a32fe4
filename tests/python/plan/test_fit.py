"""`auto` chooses the most that fits in what is free, and forecasts what is then allocated."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from latentkv.errors import LatentKVError

MIB = 1 << 20


@pytest.fixture(scope="module")
def master(converted: Any) -> str:
    options = ("--method", "waterfill", "--fisher-tokens", "4096", "--calib-window", "512", "--segment", "32")
    return str(converted(*options, "--master"))


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch, master: str) -> Any:
    """free(n): so many bytes of the host are free beside the margin."""
    from latentkv.plan import fit

    def leave(n_bytes: int) -> None:
        monkeypatch.setattr(fit, "free_on_host", lambda: n_bytes + fit.MARGIN)

    return leave


def chosen(path: str, n_ctx: int | str, options: dict[str, Any], **asked: Any) -> Any:
    from latentkv.plan.fit import Asked, fit

    return fit(path, "", Asked(0, n_ctx), options | asked)


def forecast(path: str, n_ctx: int, options: dict[str, Any], **sizes: Any) -> int:
    from latentkv import _core
    from latentkv.plan.fit import needs
    from latentkv.plan.master import planned

    model = _core.Model(path, describe_only=True)
    return needs(model.forecast(n_ctx, **planned(model, {**options, **sizes})))[None].total


@pytest.mark.parametrize("kv", ["f16", "q4"])
@pytest.mark.parametrize("n_seq_max", [1, 3])
def test_the_longest_context_that_fits(master: str, free: Any, kv: str, n_seq_max: int) -> None:
    options = {"kv": kv}
    sizes = {"n_seq_max": n_seq_max}
    room = (forecast(master, 768, options, **sizes) + forecast(master, 4096, options, **sizes)) // 2
    free(room)
    found = chosen(master, "auto", options, n_seq_max=n_seq_max)
    assert found.n_ctx % 256 == 0
    assert forecast(master, found.n_ctx, options, n_seq_max=n_seq_max) <= room
    assert forecast(master, found.n_ctx + 256, options, n_seq_max=n_seq_max) > room
    assert f"-c {found.n_ctx}:" in found.said
    assert "1.00 GiB left alone" in found.said


def test_no_longer_than_trained(master: str, free: Any) -> None:
    free(1 << 40)
    assert chosen(master, "auto", {}).n_ctx == 4096
    assert chosen(master, "auto", {}, n_seq_max=3).n_ctx == 3 * 4096


@pytest.mark.parametrize("share", [0.15, 0.2, 0.3])
@pytest.mark.parametrize("n_seq_max", [1, 4])
def test_the_best_budget_that_fits(master: str, free: Any, share: float, n_seq_max: int) -> None:
    from latentkv import _core

    told = _core.Model(master, describe_only=True).forecast(8192)
    f16 = int(8192 * told["f16_per_token"])
    room = told["weights"] + told["compute"] + int(share * f16)
    free(room)
    found = chosen(master, 8192, {"kv_budget": "auto"}, n_seq_max=n_seq_max)
    assert found.n_ctx == 8192
    takes = forecast(master, 8192, found.options, n_seq_max=n_seq_max)
    # of several sequences exact tokens change their format at once: 2.9 % were left where f16 did not fit
    assert room - (0.015 if n_seq_max == 1 else 0.04) * f16 <= takes <= room
    assert str(found.options.kv_budget) in found.said


def test_a_budget_has_a_floor_and_then_the_context_is_cut(master: str, free: Any) -> None:
    room = forecast(master, 2048, {"kv_budget": "8.5%"})
    free(room)
    found = chosen(master, "auto", {"kv_budget": "auto"})
    assert str(found.options.kv_budget) == "8.5%"
    assert 1024 < found.n_ctx <= 2048
    assert forecast(master, found.n_ctx, found.options) <= room
    with pytest.raises(LatentKVError, match=r"\[--kv-budget\] expected .* for 4096 tokens .*; lower -c$"):
        chosen(master, 4096, {"kv_budget": "auto"})


def test_refused_in_one_line(master: str, converted: Any, free: Any) -> None:
    free(3 * MIB)
    with pytest.raises(LatentKVError, match=r"^\[-c\] expected .* free on the host, .*; got 1.00 GiB; .*$"):
        chosen(master, "auto", {})
    plain = str(converted("--method", "none"))
    with pytest.raises(LatentKVError, match="not a master file"):
        chosen(plain, 512, {"kv_budget": "auto"})
    with pytest.raises(LatentKVError, match="reference"):
        chosen(plain, "auto", {"implementation": "reference"})
    command = [sys.executable, "-m", "latentkv", "chat", plain, "-p", "a", "-n", "1"]
    for words in (["-c", "most"], ["-ngl", "many"], ["--kv-budget", "auto"]):
        run = subprocess.run([*command, *words], capture_output=True, text=True, check=False)
        assert run.returncode == 2
        assert len(run.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"kv": "f16"},
        {"kv": "q4", "recent": 200},
        {"kv_budget": "14%", "n_seq_max": 4},
        {"kv_budget": "auto", "n_ctx": "auto"},
        {"kv": "q2", "n_ubatch": 64, "n_ctx": 4096},
    ],
)
def test_what_is_forecast_is_allocated(master: str, options: dict[str, Any]) -> None:
    from latentkv import Llama
    from latentkv.plan.fit import needs
    from latentkv.plan.master import planned

    with Llama(master, **({"n_ctx": 2048} | options)) as llama:
        llama.eval([1 + i % 1000 for i in range(2000)])  # some have left the exact rows
        sizes = {"n_seq_max": options.get("n_seq_max", 1), "n_ubatch": options.get("n_ubatch", 512)}
        rows = planned(llama.model, {"kv": options.get("kv", ""), "recent": options.get("recent", -1)})
        if budget := llama.fit.options.kv_budget:
            rows = planned(llama.model, {"kv_budget": budget})
        told = llama.model.forecast(llama.n_ctx(), **rows, **sizes)
        allocated = llama.session.kv_bytes()["total"] + llama.session.compute_bytes() + told["weights"]
        assert needs(told)[None].total == pytest.approx(allocated, rel=0.02)
        # a whole ubatch that is exact beside compressed tokens takes most, and not every context has that
        taken = llama.session.compute_bytes()
        assert 0.98 * taken <= told["compute"] <= 1.08 * taken
        assert ("fit: -c" in llama.fit.said) == ("auto" in options.values())


@pytest.mark.parametrize("kv_budget", ["14%", "auto"])
def test_a_plan_is_bought_once(
    master: str, free: Any, monkeypatch: pytest.MonkeyPatch, kv_budget: str
) -> None:
    """Whatever contexts are tried, and whoever opens the file then."""
    from latentkv import Llama
    from latentkv.plan import master as plans

    bought: list[tuple[int, ...]] = []

    def buying(groups: Any, rooms: Any, *rest: Any) -> Any:
        bought.append(tuple(rooms.values()))
        return allocate(groups, rooms, *rest)

    allocate = plans.allocate_beside
    monkeypatch.setattr(plans, "allocate_beside", buying)
    free(forecast(master, 2048, {"kv_budget": "14%"}))
    bought.clear()
    plans._bought.cache_clear()
    for _ in range(2):
        with Llama(master, n_ctx="auto", kv_budget=kv_budget, n_threads=1) as llama:
            assert llama.n_ctx() >= 1024
    assert len(bought) == len(set(bought))
    assert len(bought) == 1 or kv_budget == "auto"


@pytest.mark.parametrize("n_ctx", [4096, "auto"])
def test_layers_that_fit_on_the_gpu(master: str, free: Any, monkeypatch: Any, n_ctx: int | str) -> None:
    from latentkv import _core
    from latentkv.plan import fit
    from latentkv.plan.options import SessionOptions

    def takes(layers: int, options: Any = {"kv": "f16"}) -> Any:  # noqa: B006
        model = _core.Model(master, n_gpu_layers=layers, describe_only=True)
        return fit.needs(model.forecast(4096, **options))

    def with_room(n_bytes: int, **options: Any) -> Any:
        monkeypatch.setattr(fit, "free_on_gpus", lambda: [n_bytes + fit.MARGIN])
        return fit.fit(master, "", fit.Asked("auto", n_ctx), {"kv": "f16"} | options)

    free(1 << 40)
    n_layer = _core.Model(master, describe_only=True).n_layer
    whole = takes(n_layer)[0].total
    for layers in range(1, n_layer):
        on_gpu, on_host = takes(layers)[0], takes(layers)[None]
        assert on_gpu.cache + on_host.cache == takes(n_layer)[0].cache
        assert on_gpu.total < takes(layers + 1)[0].total
    for layers in (1, 3, n_layer - 1):
        found = with_room(takes(layers)[0].total)
        assert (found.n_gpu_layers, found.n_ctx) == (layers, 4096)
        assert found.said.startswith(f"fit: -ngl {layers} of {n_layer}")
        assert "on the GPU" in found.said
        assert "on the host" in found.said
    assert with_room(whole).n_gpu_layers == n_layer
    assert "on the host" not in with_room(whole).said
    assert with_room(1000).n_gpu_layers == 0
    if n_ctx != "auto":  # all layers on one device
        evicting = {"evict": "h2o", "keep_tokens": "1024"}
        assert with_room(whole, **evicting).n_gpu_layers == n_layer
        found = with_room(takes(3)[0].total, **evicting)
        assert found.n_gpu_layers == 0
        assert "not on the GPU: [evict]" in found.said
    monkeypatch.setattr(fit, "free_on_gpus", list)
    assert fit.fit(master, "", fit.Asked("auto", 512), {}) == fit.Fit(0, 512, SessionOptions())


def test_long_ubatches_take_what_memory_is_left(master: str, free: Any, monkeypatch: Any) -> None:
    from latentkv import _core
    from latentkv.plan import fit
    from latentkv.quantities import bytes_text

    def takes(layers: int, **options: Any) -> Any:
        model = _core.Model(master, n_gpu_layers=layers, describe_only=True)
        return model.forecast(4096, **{"kv": "f16"} | options)

    def with_room(n_bytes: int) -> Any:
        monkeypatch.setattr(fit, "free_on_gpus", lambda: [n_bytes + fit.MARGIN])
        return fit.fit(master, "", fit.Asked("auto", "auto"), {"kv": "f16"})

    free(1 << 40)
    n_layer = _core.Model(master, describe_only=True).n_layer
    assert takes(n_layer) == takes(n_layer, n_ubatch=2048)
    for layers, options in ((0, {}), (n_layer - 1, {}), (n_layer, {"evict": "h2o", "keep_tokens": "4096"})):
        assert takes(layers, **options) == takes(layers, n_ubatch=512, **options)
    usual, long = (fit.needs(takes(n_layer, n_ubatch=n))[0].total for n in (512, 2048))
    assert usual < long
    for room, n_ubatch, needed in ((usual, 512, usual), (long - 1, 512, usual), (long, 2048, long)):
        found = with_room(room)
        assert (found.n_gpu_layers, found.n_ctx) == (n_layer, 4096)
        assert (
            takes(n_layer, free=found.free, **found.options)["n_ubatch"] == n_ubatch
        )  # as when it is opened
        assert f" = {bytes_text(needed)} on the GPU of" in found.said


def test_layers_that_fit_on_two_gpus(master: str, free: Any, monkeypatch: Any) -> None:
    from latentkv import Llama, _core
    from latentkv.plan import fit
    from latentkv.plan.gpus import Gpus

    def with_room(*n_bytes: int, gpus: Gpus = Gpus(), **options: Any) -> Any:  # noqa: B008
        monkeypatch.setattr(fit, "free_on_gpus", lambda: [n + fit.MARGIN for n in n_bytes])
        return fit.fit(
            master, "", fit.Asked("auto", 4096, gpus=gpus), {"kv": "f16", "n_ubatch": 512} | options
        )

    def takes(*shares: float) -> Any:
        model = _core.Model(master, n_gpu_layers=99, tensor_split=shares, describe_only=True)
        forecast = model.forecast(4096, kv="f16", n_ubatch=512)
        assert sum(run["weights"] for run in forecast["runs"]) == forecast["weights"]
        assert sum(run["cache"] for run in forecast["runs"]) == forecast["k"] + forecast["v"]
        return fit.needs(forecast)

    free(1 << 40)
    n_layer = _core.Model(master, describe_only=True).n_layer
    whole, halves = takes(1)[0].total, takes(1, 1)
    assert [
        run["layers"]
        for run in _core.Model(master, n_gpu_layers=4, tensor_split=[3, 1], describe_only=True).forecast(
            4096
        )["runs"]
    ] == [n_layer - 4, 3, 1]
    larger = max(halves[0].total, halves[1].total)
    assert larger < whole
    found = with_room(larger, larger)  # more than either takes, less than all
    assert (found.n_gpu_layers, found.gpus.tensor_split) == (n_layer, (larger + fit.MARGIN,) * 2)
    assert "on GPU 0 of" in found.said
    assert "on GPU 1 of" in found.said
    assert with_room(larger).n_gpu_layers < n_layer
    asked = Gpus((1.0, 0.0))
    assert with_room(larger, whole, gpus=asked).n_gpu_layers < n_layer
    assert with_room(whole, 1000, gpus=asked).placement == {
        "weights": "stored",
        "n_gpu_layers": n_layer,
        "tensor_split": [1.0, 0.0],
        "main_gpu": 0,
        "split_mode": "layer",
    }
    # on one device alone
    for options in ({"evict": "h2o", "keep_tokens": "1024"}, {"prefill": "lazy"}):
        found = with_room(1000, whole * 2, **options)
        assert (found.n_gpu_layers, found.gpus) == (n_layer, Gpus(main_gpu=1, split_mode="none"))
    with pytest.raises(LatentKVError, match=r"expected no more than the 1 GPUs that there are; got 2 shares"):
        with_room(whole, gpus=Gpus((1.0, 1.0)))
    with pytest.raises(LatentKVError, match=r"\[-ngl\] expected a GPU for --tensor-split"):
        with_room(gpus=Gpus((1.0, 1.0)))
    with pytest.raises(ValueError, match=r"\[tensor_split\] expected layers on a GPU beside it"):
        Llama(master, tensor_split=[1, 1])


def test_free_memory_is_what_the_system_and_the_group_leave(tmp_path: Path) -> None:
    from latentkv.plan.memory import free_on_host

    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    with pytest.raises(LatentKVError, match=r"\[auto\] expected Linux"):
        free_on_host(tmp_path)
    write("proc/meminfo", "MemTotal:       100 kB\nMemAvailable:       90 kB\n")
    assert free_on_host(tmp_path) == 90 << 10
    write("proc/self/cgroup", "3:cpu:/\n0::/a/b\n")
    write("sys/fs/cgroup/a/b/memory.max", "max\n")
    write("sys/fs/cgroup/a/memory.max", "65536\n")
    write("sys/fs/cgroup/a/memory.current", "32768\n")
    write("sys/fs/cgroup/a/memory.stat", "anon 5\ninactive_file 1000\n")
    assert free_on_host(tmp_path) == 32768 + 1000
    write("proc/self/cgroup", "4:memory:/x\n")
    write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    write("sys/fs/cgroup/memory/memory.usage_in_bytes", "7\n")
    write("sys/fs/cgroup/memory/memory.stat", "total_inactive_file 0\n")
    assert free_on_host(tmp_path) == 90 << 10
    write("sys/fs/cgroup/memory/memory.limit_in_bytes", "5000\n")
    assert free_on_host(tmp_path) == 4993
