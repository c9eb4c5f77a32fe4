"""What starts a lazy grammar: until then any text may come, as llama.cpp's grammars wait for a tool call."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from latentkv.errors import expected

if TYPE_CHECKING:
    from latentkv import _core
    from latentkv.sampling.matcher import TokenMatcher


class Triggers:
    """{"type": "word" | "pattern" | "pattern_full" | "token", "value", "token"} each. From the first group of
    a pattern on, else from its match on, the text is the grammar's; pattern_full has to match all of the
    text so far."""

    def __init__(self, given: Sequence[Mapping[str, Any]]) -> None:
        if not given:
            raise expected("grammar", "at least one trigger for a lazy grammar", "none")
        of = {kind: [each for each in given if each.get("type") == kind] for kind in _KINDS}
        if sum(map(len, of.values())) < len(given):
            raise expected("grammar", f"triggers of the types {', '.join(_KINDS)}", f"{given!r}")
        self.tokens = frozenset(int(each["token"]) for each in of["token"])
        self._words = [each["value"].encode() for each in of["word"]]
        self._patterns = [_compiled(each["value"]) for each in of["pattern"]]
        self._patterns += [_compiled(rf"^(?:{each['value']})$") for each in of["pattern_full"]]

    def start(self, text: bytes, n_new: int) -> int:
        """Where the grammar's text begins in a text whose last n_new bytes are new; -1 where it does not
        yet."""
        found = [text.find(word, max(0, len(text) - n_new - len(word))) for word in self._words]
        for pattern in self._patterns:
            match = pattern.search(text)
            if match is not None:
                found.append(
                    next(
                        (match.start(i) for i in range(1, len(match.groups()) + 1) if match[i]), match.start()
                    )
                )
        return min((at for at in found if at >= 0), default=-1)


_KINDS = ("word", "pattern", "pattern_full", "token")


def _compiled(pattern: str) -> re.Pattern[bytes]:
    try:
        return re.compile(pattern.encode())
    except re.error as error:
        raise expected("grammar", "regular expressions in triggers", f"{error} in {pattern!r}") from None


class LazyMatcher:
    """Allows any text until a trigger comes, then follows `matcher`."""

    def __init__(self, model: _core.Model, matcher: TokenMatcher, triggers: Triggers) -> None:
        self._model, self._matcher, self._triggers = model, matcher, triggers
        self._waits = True
        self._text = b""

    def allows(self, token: int) -> bool:
        return self._waits or self._matcher.allows(token)

    def allowed(self) -> bytes:
        return b"\xff" * (self._model.n_vocab // 8 + 1) if self._waits else self._matcher.allowed()

    def accept(self, token: int) -> None:
        if not self._waits:
            self._matcher.accept(token)
            return
        piece = self._model.token_to_piece(token, True)
        self._text += piece
        if token in self._triggers.tokens:
            self._start([token])
        elif (at := self._triggers.start(self._text, len(piece))) >= 0:
            self._start(list(self._model.tokenize(self._text[at:], False, True)))

    def _start(self, tokens: Sequence[int]) -> None:
        self._waits = False
        for token in tokens:
            if not self._matcher.allows(token):
                got = repr(self._model.token_to_piece(token, True).decode(errors="replace"))
                raise expected("grammar", "text that it describes after its trigger", got)
            self._matcher.accept(token)

    def reset(self) -> None:
        self._waits, self._text = True, b""
        self._matcher.reset()

    def clone(self) -> LazyMatcher:
        copy = LazyMatcher(self._model, self._matcher.clone(), self._triggers)
        copy._waits, copy._text = self._waits, self._text
        return copy
