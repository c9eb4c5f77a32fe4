"""Statistics on disk, found by what they were computed from; written under a temporary name and renamed
whole."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ..ir import Array


def cache_root() -> Path:
    """$XDG_CACHE_HOME/latentkv or ~/.cache/latentkv."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "latentkv"


class Store:
    """A directory per key: {layer}.{array}.npy. Disabled, it keeps nothing and finds nothing."""

    def __init__(self, enabled: bool = True, root: Path | None = None) -> None:
        self.enabled = enabled
        self.root = (root or cache_root()) / "calibration"

    @staticmethod
    def key(*parts: object) -> str:
        return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:32]

    def load(self, key: str, n_layer: int) -> list[dict[str, Array]] | None:
        """Memory-mapped arrays of every layer, or None."""
        path = self.root / key
        if not self.enabled or not path.is_dir():
            return None
        layers: list[dict[str, Array]] = [{} for _ in range(n_layer)]
        for file in sorted(path.glob("*.npy")):
            layer, name, _ = file.name.split(".")
            layers[int(layer)][name] = np.load(file, mmap_mode="r")
        return layers if all(layers) else None

    def save(self, key: str, layers: Sequence[Mapping[str, Array]]) -> Sequence[Mapping[str, Array]]:
        """Writes the arrays and returns them memory-mapped; a disk that refuses only costs the reuse."""
        if not self.enabled:
            return layers
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=self.root))
        except OSError:
            return layers
        try:
            for layer, arrays in enumerate(layers):
                for name, array in arrays.items():
                    np.save(partial / f"{layer}.{name}.npy", array)
            shutil.rmtree(self.root / key, ignore_errors=True)
            os.replace(partial, self.root / key)
        except OSError:
            return layers
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return self.load(key, len(layers)) or layers
