"""Statistics of a model on a calibration text: one module each, collected layer by layer, kept in a store.

A module `calibrate/<name>.py` that is a statistic provides

    VERSION: int                                        raise it when the numbers change
    def sample(recipe) -> (tokens, window)              how much text it reads
    def collect(stream: LayerStream, **settings) -> Iterator    (layer, {array name: array}), in any order
    def settings(recipe) -> {name: value}               optional: what else the numbers depend on
    def n_bytes(spec) -> int                            optional: of its arrays, where they are matrices
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import files
from ..compute.arithmetic import model_arithmetic, multiplies_bf16
from ..course import deep_window
from ..ir import Array
from ..recipe import Recipe
from ..source.source import Source
from .sample import Encoded, Sample, encode, read_texts
from .saved.journal import Journal
from .saved.store import Layers, Pass, Store
from .saved.trail import VERSION as TRAIL
from .saved.trail import Trail

if TYPE_CHECKING:
    from .watched import Watched


def collect(
    needs: Sequence[str], recipe: Recipe, source: Source, activations: bool = False, output: int = 0
) -> tuple[dict[str, Layers], Sample | None]:
    """Every needed statistic, from the store or by running the model; and the largest sample that was read
    for `needs`. activations: that statistic too, from the first of the passes. output: bytes of the file to
    be written.

    Raises:
        ConvertError: a text that is too short, activations that are not finite, or no room to keep them.
    """
    if not needs and not activations:
        return {}, None
    text, other = _texts(recipe, source)
    passes = Passes(recipe, source, text, other, Store(recipe.cache), source.identity())
    first = needs[0] if needs else "activations"
    watched = passes.watched(first) if activations else None
    passes.check_room(needs, output)
    stats: dict[str, Layers] = {}
    largest: Sample | None = None
    for name in needs:
        sample = passes.sample(name)
        if largest is None or sample.tokens.size > largest.tokens.size:
            largest = sample
        stats[name] = passes.statistic(name, sample, watched)
    if watched is not None:
        if watched.found is None:
            watched.found = passes.statistic("activations", passes.sample(first), key=watched.key)
        stats["activations"] = watched.found
    if line := passes.store.tidied():
        print(line, file=sys.stderr)
    return stats, largest


@contextlib.contextmanager
def trail(
    recipe: Recipe, source: Source, needs: Sequence[str], sample: Sample | None, measured: bool
) -> Iterator[Trail]:
    """For the passes of this recipe's plan. sample: what `collect` has found with `needs`. measured: anything
    lies in the store.

    Raises:
        Interrupted: Ctrl-C, with what is kept.
    """
    store = Store(recipe.cache and measured)
    versions = [(name, Passes.module(name).VERSION) for name in needs]
    windows = () if sample is None else (sample.digest, sample.spare.tobytes(), sample.deep.tobytes())
    own = replace(recipe, output=Path(), plot=False, cache=True)
    with store.trail(source.identity(), TRAIL, versions, *windows, own) as found:
        yield found


def _texts(recipe: Recipe, source: Source) -> tuple[Encoded, Encoded | None]:
    """What --calib names, or the mix and its part of other documents, to check a plan on."""
    if recipe.calib:
        return encode(read_texts(recipe.calib), source), None
    from .text import chats, mix

    own = "--calib FILE fits the file to a text of yours"
    print(f"measuring on the default text ({', '.join(mix.KINDS)}); {own}", file=sys.stderr)
    render = chats.renderer(source)
    fitted, checked = (encode(mix.text(render, part=part), source) for part in (mix.FITTED, mix.CHECKED))
    return fitted, checked


@dataclass(frozen=True)
class Passes:
    """Passes of one text through one model, each for a statistic."""

    recipe: Recipe
    source: Source
    text: Encoded
    other: Encoded | None  # to check plans on; None: a part of the text
    store: Store
    identity: str

    @staticmethod
    def module(name: str) -> Any:
        return importlib.import_module(f"{__name__}.{name}")

    def sample(self, name: str) -> Sample:
        n_tokens, window = self.module(name).sample(self.recipe)
        n_ctx = self.source.spec.n_ctx
        size = min(window, n_ctx)
        deep = deep_window(size, n_ctx)
        return Sample.draw(self.text, n_tokens, size, self.recipe.seed, deep, self.other)

    def key(self, name: str, sample: Sample, *settings: object) -> str:
        return self.store.key(self.identity, sample.digest, name, self.module(name).VERSION, *settings)

    def settings(self, name: str) -> dict[str, Any]:
        """What else the numbers of a statistic depend on."""
        found = getattr(self.module(name), "settings", None)
        return found(self.recipe) if found else {}

    def settled_key(self, name: str, sample: Sample) -> str:
        return self.key(name, sample, *self.settings(name).items())

    def check_room(self, names: Sequence[str], output: int) -> None:
        """Before the first pass. output: bytes of the file, which may come to the same disk.

        Raises:
            ConvertError: the store cannot be written, or has too little room for what is not in it yet.
        """
        spec, store = self.source.spec, self.store
        n_bytes = sum(
            self.module(name).n_bytes(spec)
            for name in names
            if hasattr(self.module(name), "n_bytes")
            and not store.load(self.settled_key(name, self.sample(name)), spec.n_layer)
        )
        if store.enabled:
            files.check_store(self.recipe, store.root, n_bytes, output)

    def watched(self, name: str) -> Watched:
        """Activations of the pass for this statistic."""
        from .watched import Watched  # imports torch

        return Watched(self.store, self.key("activations", self.sample(name), name), self.source.spec.n_layer)

    def statistic(
        self, name: str, sample: Sample, watched: Watched | None = None, key: str | None = None
    ) -> Layers:
        """watched: also sees the layers, if it still has to and the pass is run. key: in the store."""
        module, n_layer, device = self.module(name), self.source.spec.n_layer, self.recipe.device
        settings = self.settings(name)
        key = key or self.settled_key(name, sample)
        found = self.store.load(key, n_layer)
        if found is not None:
            return found
        watched = watched if watched is not None and watched.joins() else None

        def run(journal: Journal) -> Pass:
            from .stream import LayerStream  # imports torch

            reduced = multiplies_bf16(device)
            with model_arithmetic(device, reduced):
                stream = LayerStream(self.source, sample.tokens, device, name, journal, reduced)
                if watched is not None:
                    watched.join(stream)
                layers: Iterator[tuple[int, Mapping[str, Array]]] = module.collect(stream, **settings)
                yield from layers
                if watched is not None:
                    watched.save()

        return self.store.computed(key, n_layer, run, device, watched is not None)
