"""Saving what is cached, in memory or in a file, and going on from there."""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentkv import durable
from latentkv.errors import expected

# File: magic[8] · header length u32 · CRC-32 of all that follows u32 · header (JSON) · logits f32 · cache
# bytes
_MAGIC = b"LKVSTAT1"
_FIXED = struct.Struct("<8sII")


@dataclass
class LlamaState:
    """Tokens, cache bytes, the logits after the last token (or None) and the seed. `extra` is the caller's
    (JSON values)."""

    __module__ = "latentkv"

    input_ids: list[int]
    cache: bytes
    logits: NDArray[np.float32] | None
    seed: int
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def n_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def llama_state_size(self) -> int:
        """Bytes of the cache and the logits."""
        return len(self.cache) + (0 if self.logits is None else self.logits.nbytes)

    def write(self, path: str | Path, flushed: bool = True) -> None:
        """To a file, which is the old or the new one whatever interrupts: a power cut too, where flushed."""
        logits = b"" if self.logits is None else self.logits.astype("<f4").tobytes()
        header = json.dumps(
            {
                "input_ids": self.input_ids,
                "seed": self.seed,
                "logits": len(logits),
                "cache": len(self.cache),
                "extra": self.extra,
            }
        ).encode()
        crc = zlib.crc32(self.cache, zlib.crc32(logits, zlib.crc32(header)))
        target = Path(path)
        with durable.writing(target, flushed) as file:
            file.write(_FIXED.pack(_MAGIC, len(header), crc))
            for part in (header, logits, self.cache):
                file.write(part)

    @classmethod
    def read(cls, path: str | Path) -> LlamaState:
        """From a file that write() wrote; anything else, and any damage, is refused."""
        data = Path(path).read_bytes()
        if len(data) < _FIXED.size or data[:8] != _MAGIC:
            raise expected("state", "a file written by save_state", f"{path} ({len(data)} bytes)")
        _, header_length, crc = _FIXED.unpack_from(data)
        body = memoryview(data)[_FIXED.size :]
        if zlib.crc32(body) != crc:
            raise expected(
                "state", f"checksum {crc:08x}", f"{zlib.crc32(body):08x}: {path} is damaged or cut short"
            )
        header = json.loads(bytes(body[:header_length]))
        logits, cache = body[header_length:][: header["logits"]], body[header_length:][header["logits"] :]
        return cls(
            input_ids=header["input_ids"],
            cache=bytes(cache),
            logits=np.frombuffer(logits, "<f4").astype(np.float32) if len(logits) else None,
            seed=header["seed"],
            extra=header["extra"],
        )

    @staticmethod
    def read_head(path: str | Path) -> dict[str, Any]:
        """What a file says of itself (input_ids, extra), from its head; its rest is not looked at."""
        with Path(path).open("rb") as file:
            fixed = file.read(_FIXED.size)
            if len(fixed) < _FIXED.size or fixed[:8] != _MAGIC:
                raise expected("state", "a file written by save_state", path)
            _, length, _ = _FIXED.unpack(fixed)
            try:
                head: dict[str, Any] = json.loads(file.read(length))
                head["input_ids"], head["extra"]
            except (ValueError, KeyError, TypeError):
                raise expected("state", "a whole header", f"{path}, damaged or cut short") from None
        return head

    @staticmethod
    def read_tokens(path: str | Path) -> list[int]:
        """The tokens alone."""
        tokens: list[int] = LlamaState.read_head(path)["input_ids"]
        return tokens
