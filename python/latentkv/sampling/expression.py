"""GBNF as one regular expression of llguidance."""

from __future__ import annotations

from collections.abc import Sequence

from latentkv.sampling.gbnf import Characters, Group, Literal, Reference, Repeated, Rules, Sequence_
from latentkv.sampling.pattern import quoted

_LONGEST = 1 << 22  # characters
_MOST_NESTED = 100  # rules: it is written by recursion


class Expression:
    """Rules as one regular expression, if they do not call themselves."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._known: dict[str, str | None] = {}  # None: being written

    def of(self, rule: str) -> str | None:
        """The expression; None if there is none, or only a long one."""
        if rule not in self._known:
            self._known[rule] = None
            self._known[rule] = self._choice(self._rules[rule])
        return self._known[rule]

    def _choice(self, alternatives: Sequence[Sequence_]) -> str | None:
        sequences = [[self._item(item) for item in sequence] for sequence in alternatives]
        parts = [part for sequence in sequences for part in sequence]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts) or len(self._known) > _MOST_NESTED or sum(map(len, known)) > _LONGEST:
            return None
        return f"(?:{'|'.join(''.join(filter(None, sequence)) for sequence in sequences)})"

    def _item(self, item: Repeated) -> str | None:
        node = item.node
        if isinstance(node, Literal):
            one: str | None = f"(?:{quoted(node.text)})"
        elif isinstance(node, Reference):
            one = self.of(node.name)
        elif isinstance(node, Group):
            one = self._choice(node.alternatives)
        else:
            one = character_class(node) if isinstance(node, Characters) else None
        times = "" if item.most == 1 == item.least else f"{{{item.least},{item.most or ''}}}"
        return None if one is None else one + times if item.most != 0 else ""


def character_class(node: Characters) -> str:
    if not node.ranges:
        return "(?s:.)"
    inside = "".join(_code(a) if a == b else f"{_code(a)}-{_code(b)}" for a, b in node.ranges)
    return f"[{'^' if node.negated else ''}{inside}]"


def _code(code: int) -> str:
    return rf"\u{{{code:x}}}"
