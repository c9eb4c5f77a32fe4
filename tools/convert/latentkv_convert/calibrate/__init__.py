"""Statistics of a model on a calibration text: one module each, collected layer by layer, kept in a store.

A module `calibrate/<name>.py` that is a statistic provides

    VERSION: int                                        raise it when the numbers change
    def sample(recipe) -> (tokens, window)              how much text it reads
    def collect(stream: LayerStream, **settings) -> Iterator    (layer, {array name: array}), in any order
    def settings(recipe) -> {name: value}               optional: what else the numbers depend on
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..compute.arithmetic import model_arithmetic, multiplies_bf16
from ..errors import Interrupted
from ..ir import Array
from ..recipe import Recipe
from ..source.source import Source
from .journal import Journal
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
        ConvertError: a text that is too short, or activations that are not finite.
    """
    if not needs and not activations:
        return {}, None
    text = encode(_text(recipe, source), source)
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
    if line := run.store.tidied():
        print(line, file=sys.stderr)
    return stats, largest


def _text(recipe: Recipe, source: Source) -> str:
    """What --calib names, or the mix."""
    if recipe.calib is not None:
        return read_text(recipe.calib)
    from . import chats, mix

    own = "--calib FILE takes a text of the kind that will be read"
    print(f"measuring on {', '.join(mix.KINDS)} at hand; {own}", file=sys.stderr)
    return mix.text(chats.renderer(source))


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

    def stream(self, name: str, sample: Sample, journal: Journal) -> LayerStream:
        from .stream import LayerStream  # imports torch

        device = self.recipe.device
        reduced = multiplies_bf16(device)
        return LayerStream(self.source, sample.tokens, device, name, journal, reduced)

    def key(self, name: str, sample: Sample, *settings: object) -> str:
        return self.store.key(self.identity, sample.digest, name, self.module(name).VERSION, *settings)

    def statistic(self, name: str, sample: Sample, watched: _Watched | None) -> Layers:
        module, n_layer = self.module(name), self.source.spec.n_layer
        settings = module.settings(self.recipe) if hasattr(module, "settings") else {}
        key = self.key(name, sample, *settings.items())
        found = self.store.load(key, n_layer)
        if found is not None:
            return found
        watched = watched if watched is not None and watched.joins() else None

        def run(stream: LayerStream) -> Iterator[tuple[int, Mapping[str, Array]]]:
            if watched is not None:
                watched.join(stream)
            layers = module.collect(stream, **settings)
            return layers if watched is None else watched.settled(layers)

        return self.collected(name, sample, key, run, watched is not None)

    def collected(
        self,
        name: str,
        sample: Sample,
        key: str,
        run: Callable[[LayerStream], Iterator[tuple[int, Mapping[str, Array]]]],
        *settings: object,
    ) -> Layers:
        """What `run` yields, saved as `key`; it goes on where a run with these settings was interrupted."""
        n_layer, device = self.source.spec.n_layer, self.recipe.device
        partial = self.store.key(key, device, *settings)
        with (
            self.store.journal(partial, n_layer, _say_waiting) as journal,
            model_arithmetic(device, multiplies_bf16(device)),
        ):
            found = self.store.load(key, n_layer)  # another process may have finished it meanwhile
            if found is not None:
                return found
            if journal.done():
                print(f"resuming: {journal.done()} are done", file=sys.stderr)
            try:
                return self.store.finish(journal, key, run(self.stream(name, sample, journal)))
            except KeyboardInterrupt:
                journal.settle()
                raise Interrupted(_kept(journal)) from None


def _say_waiting() -> None:
    said = "another conversion is measuring this model on this text: waiting for what it finds"
    print(f"{said} (--no-cache: measure it here as well)", file=sys.stderr, flush=True)


def _kept(journal: Journal) -> str:
    """After an interruption."""
    if journal.folder is None:
        return "no layer is kept (--no-cache)"
    if not journal.done():
        return "no layer is finished"
    size = f"{journal.n_bytes() / 2**20:.0f} MiB at {journal.folder}"
    return f"{journal.done()} are kept ({size}): the same command goes on from there"


class _Watched:
    """Activations of the pass for the statistic `of`, or of one of their own."""

    def __init__(self, run: _Run, of: str) -> None:
        from . import activations

        self.run, self.of, self.meter = run, of, activations.Activations()
        self.sample, self.n_layer = run.sample(of), run.source.spec.n_layer
        self.key = run.key("activations", self.sample, of)
        self.found: Layers | None = run.store.load(self.key, self.n_layer)

    def joins(self) -> bool:
        """Whether the next pass is to be watched."""
        return self.found is None and not len(self.meter)

    def join(self, stream: LayerStream) -> None:
        from . import activations

        journal = stream.journal
        known = {layer: journal.read(layer, "watched") for layer in journal.finished("watched")}
        self.meter = activations.Activations(known)
        stream.watchers.append(self.meter)

    def settled(self, layers: Iterator[tuple[int, Mapping[str, Array]]]) -> Iterator[Any]:
        """The same layers; what was seen on the way is saved before they end."""
        yield from layers
        measured = ((index, self.meter.layer(index)) for index in range(self.n_layer))
        self.found = self.run.store.save(self.key, self.n_layer, measured)

    def layers(self) -> Layers:
        if self.found is None:
            from .activations import collect as alone

            self.found = self.run.collected("activations", self.sample, self.key, alone)
        return self.found
