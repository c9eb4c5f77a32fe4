"""Activations (activations.py) that are measured while the pass for another statistic runs."""

from __future__ import annotations

from .activations import Activations
from .saved.store import Layers, Store
from .stream import LayerStream


class Watched:
    """They are saved as `key`."""

    def __init__(self, store: Store, key: str, n_layer: int) -> None:
        self.store, self.key, self.n_layer = store, key, n_layer
        self.meter = Activations()
        self.found: Layers | None = store.load(key, n_layer)

    def joins(self) -> bool:
        """Whether the next pass is to be watched."""
        return self.found is None and not len(self.meter)

    def join(self, stream: LayerStream) -> None:
        journal = stream.journal
        known = {layer: journal.read(layer, "watched") for layer in journal.finished("watched")}
        self.meter = Activations(known)
        stream.watchers.append(self.meter)

    def save(self) -> None:
        """After the pass."""
        measured = ((index, self.meter.layer(index)) for index in range(self.n_layer))
        self.found = self.store.save(self.key, self.n_layer, measured)
