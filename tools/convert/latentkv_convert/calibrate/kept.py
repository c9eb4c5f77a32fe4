"""Parts of a model that stay in memory from one pass to the next: reading them anew takes a GPU, which waits
for the host, most of a pass."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ..course import n_weights
from ..source.source import Source

if TYPE_CHECKING:
    import torch

    from .decoder import Ends, Layer

ROOM = 0.5  # share of the free memory that layers are kept in


class Kept:
    """The ends of a model, and layers as far as there is room. reduced: large products are of bf16
    numbers."""

    def __init__(self) -> None:
        self.layers: dict[int, Layer] = {}
        self.reduced = False
        self._ends: dict[bool, Ends] = {}
        self._room: int | None = None  # bytes that are left; None: nobody has asked

    def make_room(self, source: Source, device: torch.device, repeats: bool) -> None:
        """For layers: on a device that is not the host, and where a model runs many times. These run in bf16
        where the room is not enough for a model in f32."""
        if self._room is None or (repeats and not self._room and not self.layers):
            is_kept = repeats or device.type != "cpu"
            self._room = int(ROOM * _free_bytes(device)) if is_kept else 0
        size = self._room + sum(map(_size, self.layers.values()))
        reduced = repeats and device.type == "cuda" and 4 * n_weights(source) > size
        if reduced != self.reduced:
            self.layers.clear()
            self.reduced, self._room = reduced, size

    def ends(self, source: Source, device: torch.device, reduced: bool) -> Ends:
        from .decoder import Ends

        if reduced not in self._ends:
            self._ends = {reduced: Ends(source, reduced).to(device)}
        return self._ends[reduced]

    def offer(self, index: int, live: Layer) -> None:
        """A layer that was read, to be kept if there is room."""
        if self._room is not None and (size := _size(live)) <= self._room:
            self._room -= size
            self.layers[index] = live

    def clear(self) -> None:
        self.layers.clear()
        self._ends.clear()
        self._room = None


def _size(live: Layer) -> int:
    return sum(each.nbytes for each in live.parameters())


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        import torch

        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
