"""What clients send that models here cannot read and nothing here runs: images, audio, files, and tools of a
service. The former leave a text in their place, the latter nothing, and the log says so."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from latentkv.console.printable import printable
from latentkv.errors import expected

MEDIA = {  # types of parts and blocks of the three interfaces
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "input_audio": "audio",
    "document": "file",
    "file": "file",
    "input_file": "file",
}


def readable(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """A chat's messages with texts in place of media that users sent and tools returned: an agent sends them
    again with every later turn. Raises LatentKVError for one in the message of the user that waits for an
    answer, which would be about something else."""
    asked = _asked(messages)
    found = Counter[str]()
    read = [_read(message, at == asked, found) for at, message in enumerate(messages)]
    if found:
        counted = ", ".join(f"{kind} ({count})" for kind, count in found.items())
        _log(f"[messages] expected texts, which models here read; got {counted}: left out")
    return read


def _asked(messages: Sequence[Mapping[str, Any]]) -> int:
    """Where the last message of the user is, if no answer follows it."""
    for at in range(len(messages) - 1, -1, -1):
        if messages[at].get("role") in ("user", "assistant"):
            return at if messages[at]["role"] == "user" else -1
    return -1


def _read(message: Mapping[str, Any], is_asked: bool, found: Counter[str]) -> Mapping[str, Any]:
    content = message.get("content")
    if message.get("role") not in ("user", "tool", "function") or not isinstance(content, list):
        return message
    kinds = [_kind(part) for part in content]
    if not any(kinds):
        return message
    if is_asked:
        got = next(part["type"] for part, kind in zip(content, kinds, strict=True) if kind)
        raise expected(
            "messages", "text, which models here read, in the last message", f"a part of type {got}"
        )
    found.update(kind for kind in kinds if kind)
    parts = [
        {"type": "text", "text": f"[{kind} left out: this model reads text]"} if kind else part
        for part, kind in zip(content, kinds, strict=True)
    ]
    return {**message, "content": parts}


def _kind(part: Any) -> str | None:
    kind = part.get("type") if isinstance(part, Mapping) else None
    return MEDIA.get(kind) if isinstance(kind, str) else None


@lru_cache(maxsize=64)  # an agent sends them with every turn; the log says it once
def say_left_out(where: str, kind: str) -> None:
    """kind: a type of tools or of items that only their service can run or read."""
    _log(f"[{where}] expected types that a client runs or a model reads; got {kind[:64]}: left out")


def _log(line: str) -> None:
    print(f"warning: {printable(line)}", file=sys.stderr, flush=True)
