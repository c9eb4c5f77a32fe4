"""GBNF as llguidance takes it (its variant of Lark): character by character, so that no lexer decides what
belongs together. Its parser is an Earley parser with limits: no grammar makes it hang, left recursion and
repetitions of any count among them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from latentkv.errors import expected
from latentkv.sampling.expression import Expression, character_class
from latentkv.sampling.gbnf import (
    Characters,
    Group,
    Literal,
    Node,
    Reference,
    Repeated,
    Rules,
    Sequence_,
    Token,
)

MOST_SYMBOLS = 65_000  # of a grammar: llguidance counts them in 16 bits
# nothing is written ahead where only one text may come: of a{1000000} that would take long
_HEAD = '%llguidance {"no_forcing": true}'


def written(
    rules: Rules,
    root: str = "root",
    holes: Mapping[str, str] | None = None,
    token_id: Callable[[str], int] | None = None,
    split: Callable[[str], Sequence[str | int]] = lambda text: [text],
) -> str:
    """A Lark grammar; of a long list of words, which is no recursion, one regular expression.

    holes: rules whose place JSON schemas take, as JSON. token_id: of a token's text. split: a literal as
    text and special tokens, which are ids.
    """
    lines = _Writer(rules, holes or {}, token_id, split).lines(root)
    if sum(len(line.split()) for line in lines if "%json" not in line) <= MOST_SYMBOLS:
        return "\n".join(lines)
    if holes or (expression := Expression(rules).of(root)) is None:
        raise expected("grammar", f"at most {MOST_SYMBOLS} characters and rules in it", "more")
    return f"{_HEAD}\nstart: /{expression}/"


class _Writer:
    def __init__(
        self,
        rules: Rules,
        holes: Mapping[str, str],
        token_id: Callable[[str], int] | None,
        split: Callable[[str], Sequence[str | int]],
    ) -> None:
        self._rules, self._holes, self._token_id, self._split = rules, holes, token_id, split
        self._lines: list[str] = [_HEAD]
        self._names: dict[str, str] = {}
        self._waiting: list[str] = []
        self._parts: list[tuple[str, list[list[str]]]] = []  # ends of alternatives that begin alike
        self._groups: list[tuple[str, Group]] = []
        self._n_parts = 0

    def lines(self, root: str) -> list[str]:
        self._lines.append(f"start: {self._name(root)}")
        while self._waiting or self._parts or self._groups:
            if self._groups:
                name, group = self._groups.pop()
                self._lines.append(f"{name}: {self._alternatives(group.alternatives)}")
                continue
            if self._parts:
                name, branches = self._parts.pop()
                self._lines.append(f"{name}: {self._branches(branches)}")
                continue
            rule = self._waiting.pop()
            self._lines.append(f"{self._names[rule]}: {self._body(rule)}")
        return self._lines

    def _name(self, rule: str) -> str:
        if rule not in self._names:
            self._names[rule] = f"r{len(self._names)}"
            self._waiting.append(rule)
        return self._names[rule]

    def _body(self, rule: str) -> str:
        if rule in self._holes:
            return f"%json {self._holes[rule]}"
        states = _states(self._rules, rule)
        return self._from_the_left(states) if states else self._alternatives(self._rules[rule])

    def _from_the_left(self, states: Mapping[str, Sequence[_Step]]) -> str:
        """Rules that only go on at their ends, as steps from state to state, said by what came before:
        an Earley parser takes a recursion at the left in its stride, and pays for one at the right with the
        length of the text."""
        names = {state: f"s{self._n_parts + i}" for i, state in enumerate(states)}
        self._n_parts += len(states)
        into: dict[str, list[str]] = {state: [] for state in states}
        into[next(iter(states))].append('""')
        ends: list[str] = []
        for state, steps in states.items():
            for sign, following in steps:
                text = names[state] if sign is None else f"{names[state]} {self._item(Repeated(sign))[0]}"
                (ends if following is None else into[following]).append(text)
        self._lines += [f"{names[state]}: {' | '.join(each)}" for state, each in into.items() if each]
        return " | ".join(ends)

    def _alternatives(self, alternatives: Sequence[Sequence_]) -> str:
        return self._branches([self._symbols(sequence) for sequence in alternatives])

    def _branches(self, branches: list[list[str]]) -> str:
        """The alternatives with common beginnings written once: of thousands of words the parser then follows
        only those that are still possible."""
        if len(branches) == 1:
            return " ".join(branches[0]) or '""'
        by_first: dict[str, list[list[str]]] = {}
        for branch in branches:
            by_first.setdefault(branch[0] if branch else "", []).append(branch[1:])
        out = []
        for first, rests in by_first.items():
            if not first:
                out.append('""')
            elif len(rests) == 1:
                out.append(" ".join([first, *rests[0]]))
            else:
                out.append(f"{first} {self._part(rests)}")
        return " | ".join(out)

    def _part(self, branches: list[list[str]]) -> str:
        """A rule for one part, as parentheses would nest as deep as words are long."""
        common = []
        while all(branches) and len({branch[0] for branch in branches}) == 1:
            common.append(branches[0][0])
            branches = [branch[1:] for branch in branches]
        name = f"p{self._n_parts}"
        self._n_parts += 1
        self._parts.append((name, branches))
        return " ".join([*common, name])

    def _symbols(self, sequence: Sequence_) -> list[str]:
        return [symbol for item in sequence for symbol in self._item(item)]

    def _item(self, item: Repeated) -> list[str]:
        node = item.node
        symbols = self._literal(node.text) if isinstance(node, Literal) else [self._node(node)]
        if (item.least, item.most) == (1, 1):
            return symbols
        if not symbols or item.most == 0:
            return []
        one = symbols[0] if len(symbols) == 1 else f"({' '.join(symbols)})"
        times = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((item.least, item.most))
        return [one + (times or f"{{{item.least},{'' if item.most is None else item.most}}}")]

    def _literal(self, text: str) -> list[str]:
        out = []
        for part in self._split(text):
            out += [f"<[{part}]>"] if isinstance(part, int) else [json.dumps(sign) for sign in part]
        return out

    def _node(self, node: Node) -> str:
        if isinstance(node, Reference):
            return self._name(node.name)
        if isinstance(node, Group):
            return self._group(node)
        if isinstance(node, Token):
            return self._token(node)
        assert isinstance(node, Characters)
        return f"/{character_class(node)}/"

    def _group(self, group: Group) -> str:
        """A rule for one group, so that nesting is not passed on."""
        name = f"p{self._n_parts}"
        self._n_parts += 1
        self._groups.append((name, group))
        return name

    def _token(self, token: Token) -> str:
        inside = token.name[1:-1]
        is_id = token.name == f"[{inside}]" and inside.isdecimal()
        number = int(inside) if is_id else -1 if self._token_id is None else self._token_id(f"<{token.name}>")
        if number < 0:
            raise expected("grammar", "tokens of the vocabulary", f"<{token.name}>")
        return f"<[{'^' if token.negated else ''}{number}]>"


# A character (None: nothing) and the rule that follows (None: the end).
_Step: TypeAlias = "tuple[Node | None, str | None]"


def _states(rules: Rules, first: str) -> dict[str, list[_Step]]:
    """A rule that calls itself again, and those between, where every alternative of them is one character
    and perhaps another of them; else {}."""
    found: dict[str, list[_Step]] = {}
    waiting = [first]
    calls_itself = False
    while waiting:
        rule = waiting.pop()
        if rule in found:
            continue
        found[rule] = []
        for alternative in rules[rule]:
            nodes = [item.node for item in alternative if (item.least, item.most) == (1, 1)]
            following = nodes[-1].name if nodes and isinstance(nodes[-1], Reference) else None
            signs = nodes if following is None else nodes[:-1]
            is_one = all(
                isinstance(n, Characters) or (isinstance(n, Literal) and len(n.text) == 1) for n in signs
            )
            if len(nodes) != len(alternative) or len(signs) > 1 or not is_one or (following and not signs):
                return {}
            found[rule].append((signs[0] if signs else None, following))
            if following is not None:
                calls_itself = calls_itself or following in found
                waiting.append(following)
    has_end = any(following is None for steps in found.values() for _, following in steps)
    return found if calls_itself and has_end else {}
