"""`auto`: how many layers on the GPU, how long a context and which budget fit in what is free.

What a choice takes is forecast by the runtime before any of it is allocated (Model.forecast); here is only
the search. A shorter context costs less than a layer on the CPU, down to `LEAST_CONTEXT` tokens of a
sequence, and a smaller budget less than either.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NoReturn

from latentkv import _core
from latentkv.errors import expected
from latentkv.plan.master import planned
from latentkv.plan.memory import free_on_gpu, free_on_host
from latentkv.quantities import bytes_text
from latentkv.ranges import N_CTX

AUTO = "auto"
# left alone: CUDA's and cuBLAS's own memory, and what other programs take meanwhile
MARGIN = 1 << 30
LEAST_CONTEXT = 4096
LEAST_BUDGET = 0.085  # of the f16 cache: below it no quality was measured (docs/results.md)
STEP = 256  # contexts are multiples of it
_FORECAST = (
    *("kv", "kv_k", "kv_v", "k_plan", "v_plan", "kv_sink", "kv_recent", "sink", "recent", "recent_ratio"),
    *("evict", "keep_tokens", "prefill"),
)


@dataclass(frozen=True)
class Asked:
    """`auto` where it is to be chosen. n_ctx: of all sequences together; 0 = as trained."""

    n_gpu_layers: int | str
    n_ctx: int | str
    n_seq_max: int = 1
    n_ubatch: int = 512


@dataclass(frozen=True)
class Fit:
    """What was chosen; options: Session's, with the budget that fits. said: one line, or "" where nothing was
    to be chosen."""

    n_gpu_layers: int
    n_ctx: int
    options: dict[str, Any]
    said: str = ""


def fit(path: str, latent_path: str, asked: Asked, options: Mapping[str, Any]) -> Fit:
    """options: Session's keywords and `kv_budget`.

    Raises:
        LatentKVError: nothing fits, or a budget is to be chosen for what is no master file.
    """
    sized = AUTO in (asked.n_ctx, options.get("kv_budget"))
    looks = sized or asked.n_gpu_layers == AUTO  # the first look at a GPU starts CUDA
    gpu = free_on_gpu() if looks and asked.n_gpu_layers != 0 else None
    if asked.n_gpu_layers == AUTO and (gpu is None or options.get("implementation") == "reference"):
        asked = replace(asked, n_gpu_layers=0)
    if not sized and asked.n_gpu_layers != AUTO:
        return Fit(int(asked.n_gpu_layers), int(asked.n_ctx), dict(options))
    if sized and options.get("implementation") == "reference":
        raise expected("auto", "fused attention, whose memory is forecast", "--implementation reference")
    return _Search(path, latent_path, asked, options, gpu, free_on_host() if sized else None).found()


@dataclass(frozen=True)
class Need:
    """Bytes on one device."""

    weights: int = 0
    cache: int = 0
    compute: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.compute

    def __str__(self) -> str:
        parts = (("weights", self.weights), ("cache", self.cache), ("compute", self.compute))
        return " + ".join(f"{name} {bytes_text(size)}" for name, size in parts)


def needs(forecast: Mapping[str, Any]) -> tuple[Need, Need]:
    """Of Model.forecast: on the GPU, and on the host."""
    of = forecast["host"]
    host = Need(of["weights"], of["cache"], of["compute"] + forecast["prefill"])
    gpu = Need(
        forecast["weights"] - of["weights"],
        forecast["total"] - of["cache"],
        forecast["compute"] - of["compute"],
    )
    return gpu, host


@dataclass(frozen=True)
class _Choice:
    n_gpu_layers: int
    n_ctx: int
    options: dict[str, Any]


class _Search:
    def __init__(
        self,
        path: str,
        latent_path: str,
        asked: Asked,
        options: Mapping[str, Any],
        gpu: int | None,
        host: int | None,
    ) -> None:
        """gpu: free bytes, None without one; host: too, None where what is there is not looked at."""
        self.asked = asked
        self.options = dict(options)
        self.gpu = gpu
        self.host = host
        self.model = cache(
            lambda n: _core.Model(path, latent_path=latent_path, n_gpu_layers=n, describe_only=True)
        )

    def found(self) -> Fit:
        if self.gpu is None:
            return self._said(self._best(0) or self._refuse(0))
        if self.asked.n_gpu_layers != AUTO:
            layers = int(self.asked.n_gpu_layers)
            return self._said(self._best(layers) or self._refuse(layers))
        n_layer = self.model(0).n_layer
        try:
            choice = self._best(n_layer, LEAST_CONTEXT) or self._part(n_layer)
        except ValueError as error:  # what a GPU does not take, or not beside the CPU
            why = str(error).split("; use -ngl 0")[0]
            rest = self._said(self._best(0) or self._refuse(0))
            return replace(rest, said=f"{rest.said}; not on the GPU: {why}")
        return self._said(choice or self._best(0) or self._refuse(0))

    def _part(self, n_layer: int) -> _Choice | None:
        """As many layers on the GPU as fit beside the shortest context."""
        low, high, found = 0, n_layer, None
        while high - low > 1:
            middle = (low + high) // 2
            if choice := self._best(middle, LEAST_CONTEXT):
                low, found = middle, choice
            else:
                high = middle
        return found

    def _best(self, layers: int, least: int = STEP) -> _Choice | None:
        """least: tokens of a sequence of an automatic context."""
        if self.options.get("kv_budget") != AUTO:
            n_ctx = self._context(layers, least, planned(self.model(layers), self.options))
            return None if n_ctx is None else _Choice(layers, n_ctx, self.options)
        n_ctx = self._most() if self.asked.n_ctx == AUTO else self._given()
        choice = self._budget(layers, n_ctx)
        if choice is not None or self.asked.n_ctx != AUTO:
            return choice
        smallest = self.options | {"kv_budget": f"{100 * LEAST_BUDGET:g}%"}
        shorter = self._context(layers, least, planned(self.model(layers), smallest))
        return None if shorter is None else _Choice(layers, shorter, smallest)

    def _context(self, layers: int, least: int, options: Mapping[str, Any]) -> int | None:
        """The longest context that fits; options: without a budget."""
        if self.asked.n_ctx != AUTO:
            return self._given() if self._over(layers, self._given(), options) <= 0 else None
        most = self._most()
        if self._over(layers, most, options) <= 0:
            return most
        low, high = min(most, least * self.asked.n_seq_max) // STEP, most // STEP
        if low == 0 or self._over(layers, low * STEP, options) > 0:
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._over(layers, middle * STEP, options) <= 0 else (low, middle)
        return low * STEP

    def _budget(self, layers: int, n_ctx: int) -> _Choice | None:
        """The largest budget that fits, down to LEAST_BUDGET; counted for one sequence, as budgets are."""
        model = self.model(layers)
        rows = planned(model, self.options | {"kv_budget": "100%"})
        cache = self._forecast(layers, n_ctx, rows)
        f16 = n_ctx * int(cache["f16_per_token"] + cache["cell_bytes"])
        size = min(f16, cache["total"] - self._over(layers, n_ctx, rows))
        while size >= LEAST_BUDGET * f16:
            options = self.options | {"kv_budget": f"{(10 * size >> 20) / 10}MiB@{n_ctx}"}
            over = self._over(layers, n_ctx, planned(model, options))
            if over <= 0:
                return _Choice(layers, n_ctx, options)
            size -= max(over, f16 >> 10)
        return None

    def _most(self) -> int:
        return min(self.model(0).n_ctx_train * self.asked.n_seq_max, N_CTX.high)

    def _given(self) -> int:
        return int(self.asked.n_ctx) or self.model(0).n_ctx_train

    def _forecast(self, layers: int, n_ctx: int, options: Mapping[str, Any]) -> dict[str, Any]:
        known: dict[str, Any] = {name: options[name] for name in _FORECAST if name in options}
        sizes: dict[str, Any] = {"n_seq_max": self.asked.n_seq_max, "n_ubatch": self.asked.n_ubatch}
        return self.model(layers).forecast(n_ctx, **known, **sizes)

    def _over(self, layers: int, n_ctx: int, options: Mapping[str, Any]) -> int:
        """Bytes by which it is too much, the margin counted; where nothing is too much at most 0."""
        on_gpu, on_host = needs(self._forecast(layers, n_ctx, options))
        free = ((on_gpu, self.gpu), (on_host, self.host))
        over = (need.total - (room - MARGIN) for need, room in free if room is not None and need.total)
        return max(over, default=0)

    def _said(self, choice: _Choice) -> Fit:
        layers, n_ctx = choice.n_gpu_layers, choice.n_ctx
        chosen = []
        if self.asked.n_gpu_layers == AUTO:
            chosen.append(f"-ngl {layers} of {self.model(0).n_layer}")
        if self.asked.n_ctx == AUTO:
            chosen.append(f"-c {n_ctx}")
        rows = planned(self.model(layers), choice.options)
        forecast = self._forecast(layers, n_ctx, rows)
        if self.options.get("kv_budget") == AUTO:
            share = forecast["per_token"] / (forecast["f16_per_token"] + forecast["cell_bytes"])
            chosen.append(f"--kv-budget {choice.options['kv_budget']} ({100 * share:.1f} % of f16)")
        parts = []
        on_gpu, on_host = needs(forecast)
        for name, need, free in (("GPU", on_gpu, self.gpu), ("host", on_host, self.host)):
            if need.total:
                of = "" if free is None else f" of {bytes_text(free)} free, {bytes_text(MARGIN)} left alone"
                parts.append(f"{need} = {bytes_text(need.total)} on the {name}{of}")
        if self.asked.n_gpu_layers != AUTO:
            layers = int(self.asked.n_gpu_layers)
        return Fit(layers, n_ctx, choice.options, f"fit: {' '.join(chosen)}: {'; '.join(parts)}")

    def _refuse(self, layers: int) -> NoReturn:
        """Says what the least of it takes."""
        rows = self.options
        where, hint = "-c", "choose a smaller --kv or another -ngl"
        n_ctx = self._given() if self.asked.n_ctx != AUTO else min(STEP * self.asked.n_seq_max, self._most())
        if rows.get("kv_budget") == AUTO:
            where, hint = "--kv-budget", "lower -c"
            rows = rows | {"kv_budget": f"{100 * LEAST_BUDGET:g}%"}
        on_gpu, on_host = needs(self._forecast(layers, n_ctx, planned(self.model(layers), rows)))
        short = self.gpu is not None and on_gpu.total + MARGIN > self.gpu
        name, need, free = ("GPU", on_gpu, self.gpu) if short else ("host", on_host, self.host)
        raise expected(
            where,
            f"{bytes_text(need.total + MARGIN)} free on the {name}, of which {bytes_text(MARGIN)} is left "
            f"alone, for {n_ctx} tokens ({need})",
            bytes_text(free or 0),
            hint,
        )
