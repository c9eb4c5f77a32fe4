"""`auto`: finds how many layers, how long a context and which budget fit in free memory.

The runtime forecasts what each choice would allocate (Model.forecast); this file only searches. It would
rather shorten the context than move a layer to the CPU, down to `LEAST_CONTEXT` tokens of a sequence, and
would rather lower the budget than do either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NoReturn

from latentkv import _core
from latentkv.errors import expected
from latentkv.plan.gpus import BY_FREE_MEMORY, Gpus
from latentkv.plan.kv_budget import AUTO as AUTO_BUDGET
from latentkv.plan.kv_budget import KvBudget
from latentkv.plan.master import planned
from latentkv.plan.memory import free_on_gpus, free_on_host
from latentkv.plan.options import SessionOptions
from latentkv.quantities import bytes_text
from latentkv.ranges import N_CTX

AUTO = "auto"
STORED = "stored"  # weights in the file's types
MARGIN = _core.LEFT_ALONE  # bytes of each device
LEAST_CONTEXT = 4096
LEAST_BUDGET = KvBudget("8.5%", 0.085)  # of the f16 cache: below it no quality was measured (docs/results.md)
WHOLE = KvBudget("100%", 1.0)
STEP = 256  # contexts are multiples of it


@dataclass(frozen=True)
class Asked:
    """What the caller asked for, AUTO where fit() chooses. n_ctx: tokens of all sequences together; 0 = as
    trained."""

    n_gpu_layers: int | str
    n_ctx: int | str
    gpus: Gpus = BY_FREE_MEMORY
    weights: str = STORED


@dataclass(frozen=True)
class Fit:
    """What fit() chose. options: with the chosen budget, without the context. said: one line about it for
    the user, "" where there was nothing to choose."""

    n_gpu_layers: int
    n_ctx: int
    options: SessionOptions
    said: str = ""
    gpus: Gpus = BY_FREE_MEMORY
    weights: str = STORED
    free: tuple[int, ...] | None = None  # bytes of each GPU; None: nobody looked

    @property
    def placement(self) -> dict[str, Any]:
        """_core.Model's keywords of where the layers lie, and in which type."""
        return {"n_gpu_layers": self.n_gpu_layers, "weights": self.weights, **self.gpus.options()}


def fit(path: str, latent_path: str, asked: Asked, options: SessionOptions | Mapping[str, Any]) -> Fit:
    """Chooses what `asked` and `options` leave to AUTO.

    Raises:
        LatentKVError: nothing fits, dequantized weights do not, or the budget is AUTO and the file is not a
            master file.
    """
    found = _fit(path, latent_path, asked, SessionOptions.of(options))
    require_room(path, latent_path, found)
    return found


def require_room(path: str, latent_path: str, placed: Fit) -> None:
    """
    Raises:
        LatentKVError: the host has no room for weights that are not stored so; GPUs say it when they are
            filled.
    """
    if placed.weights == STORED:
        return
    model = models_of(path, latent_path, placed.gpus, placed.weights)(placed.n_gpu_layers)
    need = needs(model.forecast(STEP))[None].weights
    if need > (free := free_on_host()):
        smaller = "--weights f16 or stored" if placed.weights != "f16" else "--weights stored"
        wanted = f"{bytes_text(need)} free on the host, which weights take in {placed.weights}"
        raise expected("--weights", wanted, bytes_text(free), f"use {smaller}")


def _fit(path: str, latent_path: str, asked: Asked, options: SessionOptions) -> Fit:
    sized = asked.n_ctx == AUTO or options.kv_budget == AUTO_BUDGET
    looks = sized or asked.n_gpu_layers == AUTO  # the first look at a GPU starts CUDA
    gpus = free_on_gpus() if looks and asked.n_gpu_layers != 0 else []
    if asked.n_gpu_layers == AUTO and (not gpus or options.implementation == "reference"):
        if asked.gpus.tensor_split or asked.gpus.main_gpu:
            raise expected("-ngl", "a GPU for --tensor-split or --main-gpu", "none", "leave them out")
        asked = replace(asked, n_gpu_layers=0)
    if gpus and max(len(asked.gpus.tensor_split), asked.gpus.main_gpu + 1) > len(gpus):
        known = f"no more than the {len(gpus)} GPUs that there are"
        got = f"{len(asked.gpus.tensor_split)} shares and main GPU {asked.gpus.main_gpu}"
        raise expected("--tensor-split, --main-gpu", known, got)
    if not sized and asked.n_gpu_layers != AUTO:
        return Fit(int(asked.n_gpu_layers), int(asked.n_ctx), options, gpus=asked.gpus, weights=asked.weights)
    if sized and options.implementation == "reference":
        raise expected("auto", "fused attention, whose memory is forecast", "--implementation reference")
    asked = replace(asked, gpus=_shared(asked, options, gpus))
    host = free_on_host() if sized else None
    models = models_of(path, latent_path, asked.gpus, asked.weights)
    return _Search(asked, options, gpus, host, models).found()


Models = Callable[[int], _core.Model]  # number of layers on GPUs -> a model opened to be described only


def models_of(path: str, latent_path: str, gpus: Gpus = BY_FREE_MEMORY, weights: str = STORED) -> Models:
    """Opens the file for a number of GPU layers, once for each."""
    return cache(
        lambda n: _core.Model(
            path,
            latent_path=latent_path,
            n_gpu_layers=n,
            describe_only=True,
            weights=weights,
            **(gpus if n else BY_FREE_MEMORY).options(),
        )
    )


@dataclass(frozen=True)
class OnCard:
    """Bytes on a GPU that holds all layers and the longest context that fits beside them."""

    free: int
    n_ctx: int  # 0: no context fits
    weights: int
    states: int  # of recurrent layers
    rows: int  # and positions of tokens
    compute: int


def on_card(
    path: str, latent_path: str, options: SessionOptions, free: int, models: Models | None = None
) -> OnCard:
    """What a GPU with `free` bytes would hold, by the numbers that `-c auto` uses. The GPU need not exist.
    models: models_of() the file, to share between calls."""
    options = replace(options, kv_budget=None) if options.kv_budget == AUTO_BUDGET else options
    models = models or models_of(path, latent_path)
    n_layer = models(0).n_layer
    search = _Search(Asked(n_layer, AUTO), options, [free], None, models)
    choice = search.best(n_layer)
    held = choice or Choice(n_layer, STEP, options.kv_budget)
    states, need = int(search.forecast(held)["states"]), search.needs(held)[0]
    found = 0 if choice is None else choice.n_ctx
    return OnCard(free, found, need.weights, states, need.cache - states, need.compute)


def _shared(asked: Asked, options: SessionOptions, free: list[int]) -> Gpus:
    """How layers are shared between GPUs: as asked, else in proportion to free memory, so that the forecast
    and the model agree. Where all layers must be on one device, the GPU with the most. free: bytes of each
    GPU."""
    if len(free) < 2 or asked.gpus != BY_FREE_MEMORY:
        return asked.gpus
    alone = options.evicts or options.prefill == "lazy"
    if alone and asked.n_gpu_layers == AUTO:
        return Gpus(main_gpu=free.index(max(free)), split_mode="none")
    return Gpus(tuple(free))


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


Device = int | None  # a GPU; None: the host


def needs(forecast: Mapping[str, Any]) -> dict[Device, Need]:
    """Bytes by device, from Model.forecast: each GPU that has layers, and last the host. On the host
    all copies of recurrent states that may come to exist are counted."""
    found: dict[Device, Need] = {}
    host = Need(cache=forecast["snapshots_most"], compute=forecast["prefill"])
    alone = len(forecast["runs"]) == 1
    for run in forecast["runs"]:
        if run["gpu"] is None:
            cells = forecast["cells"] if alone else 0
            held = run["cache"] + cells + forecast["snapshots_most"]
            host = Need(run["weights"], held, run["compute"] + forecast["prefill"])
        else:
            found[run["gpu"]] = Need(run["weights"], run["cache"] + forecast["cells"], run["compute"])
    return found | {None: host}


def device_name(gpu: Device, n_gpus: int) -> str:
    """`the host`, `the GPU`, or `GPU 1` of several."""
    if gpu is None:
        return "the host"
    return "the GPU" if n_gpus < 2 else f"GPU {gpu}"


@dataclass(frozen=True)
class Choice:
    n_gpu_layers: int
    n_ctx: int
    budget: KvBudget | None


class _Search:
    def __init__(
        self, asked: Asked, options: SessionOptions, gpus: list[int], host: int | None, models: Models
    ) -> None:
        """gpus: free bytes of each GPU. host: free bytes of the host; None: any amount fits."""
        self.asked = asked
        self.options = options
        self.gpus = gpus
        self.free: dict[Device, int | None] = dict(enumerate(gpus))
        self.free[None] = host
        self.model = models
        self.rows = cache(self._rows)
        self.forecast = cache(self._forecast)

    def _rows(self, layers: int, budget: KvBudget | None) -> SessionOptions:
        """The options with what the budget buys."""
        return planned(self.model(layers), replace(self.options, kv_budget=budget))

    def _forecast(self, choice: Choice) -> dict[str, Any]:
        rows = self.rows(choice.n_gpu_layers, choice.budget)
        return self.model(choice.n_gpu_layers).forecast(choice.n_ctx, self.gpus, **rows)

    def needs(self, choice: Choice) -> dict[Device, Need]:
        return needs(self.forecast(choice))

    def found(self) -> Fit:
        if not self.gpus:
            return self._said(self.best(0) or self._refuse(0))
        if self.asked.n_gpu_layers != AUTO:
            layers = int(self.asked.n_gpu_layers)
            return self._said(self.best(layers) or self._refuse(layers))
        n_layer = self.model(0).n_layer
        try:
            choice = self.best(n_layer, LEAST_CONTEXT) or self._part(n_layer)
        except ValueError as error:  # the GPU cannot run this model, or not together with the CPU
            why = str(error).split("; use -ngl 0")[0]
            rest = self._said(self.best(0) or self._refuse(0))
            return replace(rest, said=f"{rest.said}; not on the GPU: {why}")
        return self._said(choice or self.best(0) or self._refuse(0))

    def _part(self, n_layer: int) -> Choice | None:
        """The choice with the most layers on GPUs that fits, at the shortest context."""
        low, high, found = 0, n_layer, None
        while high - low > 1:
            middle = (low + high) // 2
            if choice := self.best(middle, LEAST_CONTEXT):
                low, found = middle, choice
            else:
                high = middle
        return found

    def best(self, layers: int, least: int = STEP) -> Choice | None:
        """The choice with this many layers on GPUs; None: nothing fits. least: the shortest automatic
        context, in tokens of a sequence."""
        if self.options.kv_budget != AUTO_BUDGET:
            return self._longest(layers, least, self.options.kv_budget)
        choice = self._largest(layers, self._most() if self.asked.n_ctx == AUTO else self._given())
        if choice is not None or self.asked.n_ctx != AUTO:
            return choice
        return self._longest(layers, least, LEAST_BUDGET)

    def _longest(self, layers: int, least: int, budget: KvBudget | None) -> Choice | None:
        """The choice with the longest context that fits, or the one that was asked for."""

        def fits(n_ctx: int) -> Choice | None:
            choice = Choice(layers, n_ctx, budget)
            return choice if self._over(choice) <= 0 else None

        if self.asked.n_ctx != AUTO:
            return fits(self._given())
        most = self._most()
        if whole := fits(most):
            return whole
        low, high = min(most, least * self.options.n_seq_max) // STEP, most // STEP
        found = fits(low * STEP) if low else None
        while found and high - low > 1:
            middle = (low + high) // 2
            if choice := fits(middle * STEP):
                low, found = middle, choice
            else:
                high = middle
        return found

    def _largest(self, layers: int, n_ctx: int) -> Choice | None:
        """The choice with the largest budget that fits, at least LEAST_BUDGET. Budgets are counted for one
        sequence."""
        whole = Choice(layers, n_ctx, WHOLE)
        rows = self.forecast(whole)
        f16, states = rows["f16_total"], rows["states"] // self.options.n_seq_max
        size = min(f16, rows["total"] - rows["states"] - self._over(whole))
        while size >= (LEAST_BUDGET.share or 0) * f16:
            choice = Choice(layers, n_ctx, KvBudget.of_bytes(size + states, n_ctx))
            over = self._over(choice)
            if over <= 0:
                return choice
            size -= max(over, f16 >> 10)
        return None

    def _most(self) -> int:
        return min(self.model(0).n_ctx_train * self.options.n_seq_max, N_CTX.high)

    def _given(self) -> int:
        return int(self.asked.n_ctx) or self.model(0).n_ctx_train

    def _over(self, choice: Choice) -> int:
        """Bytes that are missing on the fullest device, margin included; 0 or less: everything fits."""
        over = (
            need.total - (room - MARGIN)
            for device, need in self.needs(choice).items()
            if (room := self.free[device]) is not None and need.total
        )
        return max(over, default=0)

    def _said(self, choice: Choice) -> Fit:
        layers, n_ctx = choice.n_gpu_layers, choice.n_ctx
        chosen = []
        if self.asked.n_gpu_layers == AUTO:
            chosen.append(f"-ngl {layers} of {self.model(0).n_layer}")
        if self.asked.n_ctx == AUTO:
            chosen.append(f"-c {n_ctx}")
        if self.options.kv_budget == AUTO_BUDGET:
            share = f"{100 * self.forecast(choice)['share']:.1f} % of f16"
            chosen.append(f"--kv-budget {choice.budget} ({share})")
        parts = []
        for device, need in self.needs(choice).items():
            free = self.free[device]
            if need.total:
                of = "" if free is None else f" of {bytes_text(free)} free, {bytes_text(MARGIN)} left alone"
                where = device_name(device, len(self.gpus))
                parts.append(f"{need} = {bytes_text(need.total)} on {where}{of}")
        if self.asked.n_gpu_layers != AUTO:
            layers = int(self.asked.n_gpu_layers)
        said = f"fit: {' '.join(chosen)}: {'; '.join(parts)}"
        gpus = self.asked.gpus if layers or self.asked.n_gpu_layers != AUTO else BY_FREE_MEMORY
        options = replace(self.options, kv_budget=choice.budget)
        return Fit(layers, n_ctx, options, said, gpus, self.asked.weights, tuple(self.gpus))

    def _refuse(self, layers: int) -> NoReturn:
        """The error for the smallest choice, which does not fit either."""
        budget = self.options.kv_budget
        where, hint = "-c", "choose a smaller --kv or another -ngl"
        n_ctx = (
            self._given() if self.asked.n_ctx != AUTO else min(STEP * self.options.n_seq_max, self._most())
        )
        if budget == AUTO_BUDGET:
            where, hint, budget = "--kv-budget", "lower -c", LEAST_BUDGET
        needed = self.needs(Choice(layers, n_ctx, budget))
        short = (gpu for gpu in needed if gpu is not None and needed[gpu].total + MARGIN > self.gpus[gpu])
        device = next(short, None)
        need = needed[device]
        raise expected(
            where,
            f"{bytes_text(need.total + MARGIN)} free on {device_name(device, len(self.gpus))}, of which "
            f"{bytes_text(MARGIN)} is left alone, for {n_ctx} tokens ({need})",
            bytes_text(self.free[device] or 0),
            hint,
        )
