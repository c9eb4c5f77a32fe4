"""Conversations as a model reads them: in its own chat template, or after `User:` and `Assistant:`."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

from latentkv.chat.template import ChatTemplate
from latentkv.errors import LatentKVError

from ...source.source import Source
from .mix import Message, Render

_TODAY = datetime.datetime(2025, 1, 1)  # for templates that write the date: the same text every day


def renderer(source: Source) -> Render:
    keys = source.keys()

    def value(name: str) -> Any:
        found = keys.get(f"tokenizer.{name}")
        return getattr(found, "data", found)

    template, tokens = value("chat_template"), value("ggml.tokens")
    if template is None or tokens is None:
        return plain

    def token(name: str) -> str:
        index = value(f"ggml.{name}_token_id")
        return "" if index is None else _string(tokens[int(index)])

    made = ChatTemplate(_string(template), token("bos"), token("eos"), now=lambda: _TODAY)
    try:
        made.render([{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}])
    except LatentKVError:  # for other roles than these
        return plain
    return lambda messages: made.render(messages, add_generation_prompt=False)


def _string(value: Any) -> str:
    """A GGUF's strings are bytes."""
    return bytes(value).decode("utf-8", "replace") if isinstance(value, (bytes, bytearray)) else str(value)


def plain(messages: Sequence[Message]) -> str:
    return "\n\n".join(f"{each['role'].capitalize()}: {each['content']}" for each in messages)
