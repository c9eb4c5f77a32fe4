"""Parsers of answers that take the place of the native one, which nothing can derive from."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from latentkv._core import ChatParser, ChatStream
else:
    ChatParser = ChatStream = object


class StreamParser(ChatParser):
    """Parses a whole answer as its stream() does."""

    def parse(self, text: str, is_partial: bool) -> str:
        stream = self.stream()
        stream.push(text)
        if not is_partial:
            stream.push("", False)
        return stream.message
