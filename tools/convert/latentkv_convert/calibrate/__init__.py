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
from typing import Any

from ..errors import ConvertError
from ..recipe import Recipe
from ..source.source import Source
from .sample import Sample, encode, read_text
from .store import Layers, Store


def collect(needs: Sequence[str], recipe: Recipe, source: Source) -> tuple[dict[str, Layers], Sample | None]:
    """Every needed statistic, from the store or by running the model; and the largest sample that was read.

    Raises:
        ConvertError: no --calib, a text that is too short, or activations that are not finite.
    """
    if not needs:
        return {}, None
    if recipe.calib is None:
        raise ConvertError(
            "--calib", f"a text file (--method {recipe.method} needs {', '.join(needs)})", "none"
        )
    store = Store(recipe.cache)
    text = encode(read_text(recipe.calib), source)
    identity = source.identity()
    stats: dict[str, Layers] = {}
    largest: Sample | None = None
    for name in needs:
        module: Any = importlib.import_module(f"{__name__}.{name}")
        n_tokens, window = module.sample(recipe)
        sample = Sample.draw(text, n_tokens, min(window, source.spec.n_ctx), recipe.seed)
        if largest is None or sample.tokens.size > largest.tokens.size:
            largest = sample
        settings = module.settings(recipe) if hasattr(module, "settings") else {}
        key = store.key(identity, sample.digest, name, module.VERSION, *settings.items())
        found = store.load(key, source.spec.n_layer)
        if found is None:
            from .stream import LayerStream

            stream = LayerStream(source, sample.tokens, recipe.device, name)
            stats[name] = store.save(key, source.spec.n_layer, module.collect(stream, **settings))
        else:
            stats[name] = found
    return stats, largest
