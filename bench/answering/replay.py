"""A reference cache whose logits are computed once and read back for every cache that is compared with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentkv.measure.perplexity import Cache


@dataclass(frozen=True)
class Reference:
    """Stands for `cache` as the reference of latentkv.measure.perplexity.perplexity(): the first run is
    recorded in `path`, later ones with the same windows replay it."""

    cache: Cache
    path: Path

    @property
    def model(self) -> Any:
        return self.cache.model

    def session(self, windows: int, n_ctx: int, n_ubatch: int) -> Any:
        if self.path.exists():
            return Replay(self.path, self.model.n_vocab)
        return Recorder(self.cache.session(windows, n_ctx, n_ubatch), self.path.with_suffix(".partial"))

    def keep(self) -> None:
        """After a whole recorded run."""
        partial = self.path.with_suffix(".partial")
        if partial.exists():
            partial.replace(self.path)


class Recorder:
    """A session that also writes its logits [n_outputs, n_vocab] f32 to a file, in order."""

    def __init__(self, session: Any, path: Path) -> None:
        self._session = session
        self._path = path
        path.write_bytes(b"")

    def decode(self, tokens: Sequence[int], **options: Any) -> NDArray[np.float32]:
        logits: NDArray[np.float32] = self._session.decode(tokens, **options)
        with self._path.open("ab") as file:
            logits.tofile(file)
        return logits

    def clear(self) -> None:
        self._session.clear()

    def kv_bytes(self) -> dict[str, Any]:
        kv_bytes: dict[str, Any] = self._session.kv_bytes()
        return kv_bytes


class Replay:
    """The recorded rows, as many as each call asks for."""

    def __init__(self, path: Path, n_vocab: int) -> None:
        self._rows = np.memmap(path, dtype=np.float32, mode="r").reshape(-1, n_vocab)
        self._at = 0

    def decode(self, tokens: Sequence[int], *, output: Sequence[bool], **options: Any) -> NDArray[np.float32]:
        begin, self._at = self._at, self._at + sum(output)
        if self._at > len(self._rows):
            raise ValueError(
                f"[replay] expected at most {len(self._rows)} rows; got {self._at}; record again"
            )
        return np.array(self._rows[begin : self._at])

    def clear(self) -> None:
        """The recording runs over all windows in a row."""

    def kv_bytes(self) -> dict[str, Any]:
        return {"per_token": None}
