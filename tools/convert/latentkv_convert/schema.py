"""Key names, tensor names and enumerations of the file, from schema.json (the same file native code is built
from)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_SCHEMA: dict[str, Any] = json.loads((Path(__file__).parent / "schema.json").read_text(encoding="utf-8"))

VERSION: int = _SCHEMA["version"]
KEYS: dict[str, str] = _SCHEMA["keys"]
TENSORS: dict[str, str] = _SCHEMA["tensors"]
ENUMS: dict[str, list[str]] = _SCHEMA["enums"]
RANK_PAD: int = _SCHEMA["rank_pad"]
