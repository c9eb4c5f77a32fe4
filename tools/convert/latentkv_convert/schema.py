"""Key names, tensor names and enumerations of the file, from schema.json (the same file native code is built
from)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_SCHEMA: dict[str, Any] = json.loads((Path(__file__).parent / "schema.json").read_text(encoding="utf-8"))

VERSION: int = _SCHEMA["version"]
TENSORS: dict[str, str] = _SCHEMA["tensors"]
ENUMS: dict[str, list[str]] = _SCHEMA["enums"]
RANK_PAD: int = _SCHEMA["rank_pad"]
# latentkv.block.*: what a file with a block description always says, what it may say once for all layers,
# with defaults, and what it may say layer by layer.
BLOCK_WORDS: dict[str, Any] = _SCHEMA["block_words"]
BLOCK_OPTIONS: dict[str, Any] = {name: each["default"] for name, each in _SCHEMA["block_options"].items()}
BLOCK_LAYERS: list[str] = _SCHEMA["block_layers"]
BLOCK_KEYS: dict[str, str] = {
    name: f"latentkv.block.{name}" for name in (*BLOCK_WORDS, *BLOCK_OPTIONS, *BLOCK_LAYERS)
}
KEYS: dict[str, str] = _SCHEMA["keys"]
