"""Statistics of a model on a calibration text: one module each, collected layer by layer, kept in a store.

A module `calibrate/<name>.py` that is a statistic provides

    VERSION: int                                        raise it when the numbers change
    def sample(recipe) -> (tokens, window)              how much text it reads
    def collect(stream: LayerStream, **settings) -> Iterator    (layer, {array name: array}), in any order
    def settings(recipe) -> {name: value}               optional: what else the numbers depend on
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import ConvertError
from ..recipe import Recipe
from ..source.source import Source
from .arithmetic import model_arithmetic
from .sample import Encoded, Sample, encode, read_text
from .store import Layers, Store

if TYPE_CHECKING:
    from .stream import LayerStream


def collect(
    needs: Sequence[str], recipe: Recipe, source: Source, activations: bool = False
) -> tuple[dict[str, Layers], Sample | None]:
    """Every needed statistic, from the store or by running the model; and the largest sample that was read
    for `needs`. activations: that statistic too, from the first of the passes.

    Raises:
        ConvertError: no --calib, a text that is too short, or activations that are not finite.
    """
    if not needs and not activations:
        return {}, None
    if recipe.calib is None:
        raise ConvertError(
            "--calib", f"a text file (--method {recipe.method} needs {', '.join(needs)})", "none"
        )
    text = encode(read_text(recipe.calib), source)
    run = _Run(recipe, source, text, Store(recipe.cache), source.identity())
    watched = _Watched(run, needs[0] if needs else "activations") if activations else None
    stats: dict[str, Layers] = {}
    largest: Sample | None = None
    for name in needs:
        sample = run.sample(name)
        if largest is None or sample.tokens.size > largest.tokens.size:
            largest = sample
        stats[name] = run.statistic(name, sample, watched)
    if watched is not None:
        stats["activations"] = watched.layers()
    return stats, largest


@dataclass(frozen=True)
class _Run:
    """One model on one text."""

    recipe: Recipe
    source: Source
    text: Encoded
    store: Store
    identity: str

    @staticmethod
    def module(name: str) -> Any:
        return importlib.import_module(f"{__name__}.{name}")

    def sample(self, name: str) -> Sample:
        n_tokens, window = self.module(name).sample(self.recipe)
        return Sample.draw(self.text, n_tokens, min(window, self.source.spec.n_ctx), self.recipe.seed)

    def stream(self, name: str, sample: Sample) -> LayerStream:
        from .stream import LayerStream  # imports torch

        return LayerStream(self.source, sample.tokens, self.recipe.device, name)

    def statistic(self, name: str, sample: Sample, watched: _Watched | None) -> Layers:
        module, n_layer = self.module(name), self.source.spec.n_layer
        settings = module.settings(self.recipe) if hasattr(module, "settings") else {}
        key = self.store.key(self.identity, sample.digest, name, module.VERSION, *settings.items())
        found = self.store.load(key, n_layer)
        if found is not None:
            return found
        stream = self.stream(name, sample)
        if watched is not None:
            watched.join(stream)
        with model_arithmetic():
            return self.store.save(key, n_layer, module.collect(stream, **settings))


class _Watched:
    """Activations of the pass for the statistic `of`, or of one of their own."""

    def __init__(self, run: _Run, of: str) -> None:
        from . import activations

        self.run, self.of, self.meter = run, of, activations.Activations()
        self.sample, self.n_layer = run.sample(of), run.source.spec.n_layer
        self.key = run.store.key(run.identity, self.sample.digest, "activations", activations.VERSION, of)
        self.found: Layers | None = run.store.load(self.key, self.n_layer)

    def join(self, stream: LayerStream) -> None:
        if self.found is None and not len(self.meter):
            stream.watchers.append(self.meter.watch)

    def layers(self) -> Layers:
        if self.found is None:
            if not len(self.meter):
                stream = self.run.stream("activations", self.sample)
                self.join(stream)
                self.run.module("activations").run(stream)
            measured = ((index, self.meter.layer(index)) for index in range(self.n_layer))
            self.found = self.run.store.save(self.key, self.n_layer, measured)
        return self.found
