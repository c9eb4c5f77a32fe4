"""Statistics on disk, found by what they were computed from; written under a temporary name and renamed
whole."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from ..errors import ConvertError
from ..ir import Array

Layers = Sequence[Mapping[str, Array]]  # one {array name: array} per layer


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

    def save(self, key: str, n_layer: int, layers: Iterable[tuple[int, Mapping[str, Array]]]) -> Layers:
        """Writes every layer's arrays as they come and returns all of them memory-mapped, so that a large
        model's statistics never lie in memory together.

        Raises:
            ConvertError: the cache directory cannot be written.
        """
        if not self.enabled:
            kept = dict(layers)
            return [kept[layer] for layer in range(n_layer)]
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=self.root))
        except OSError as error:
            raise self._refused(error) from None
        try:
            for layer, arrays in layers:
                for name, array in arrays.items():
                    self._write(partial / f"{layer}.{name}.npy", array)
            shutil.rmtree(self.root / key, ignore_errors=True)
            os.replace(partial, self.root / key)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        found = self.load(key, n_layer)
        assert found is not None
        return found

    def _write(self, path: Path, array: Array) -> None:
        try:
            np.save(path, array)
        except OSError as error:
            raise self._refused(error) from None

    def _refused(self, error: OSError) -> ConvertError:
        hint = "set XDG_CACHE_HOME or pass --no-cache"
        return ConvertError("cache", f"to write {self.root}", error.strerror or str(error), hint)
