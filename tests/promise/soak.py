"""Random operations on the sequences of one session, beside a slow model of what they are.

The model has, of every sequence, the operations that made it and the cells that it holds. A sequence has to
say what those operations say in a session of its own, and the cache has to hold what the model holds: so many
cells, first and last positions. Everything is a function of the seed.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from runtime import distance, session

N_SEQ = 4
LONGEST = 60  # operations of a sequence, which is forgotten then: its check repeats them
PROBE = 7


@dataclass(frozen=True)
class Setting:
    """A session's options, and what goes with them."""

    options: dict[str, Any]
    tolerance: float
    shares: bool = True  # exact windows keep of a shared token what any of its sequences wants
    shifts: bool = False
    cuts: bool = True  # anywhere, not at the end alone
    refuses: bool = False  # to remove or copy a part, where its rows are gone: nothing has changed then
    snapshots: bool = False  # of recurrent layers, of which a sequence alone has others
    n_ctx: int = 256
    evicts: bool = False  # each layer keeps tokens of its own choice, so cells are not those of the tokens


@dataclass
class Sequence:
    script: list[tuple[str, Any]] = field(default_factory=list)
    cells: dict[int, int] = field(default_factory=dict)  # position -> cell

    @property
    def next(self) -> int:
        return max(self.cells, default=-1) + 1


class Soak:
    """step() does one operation, check() compares a sequence with its script."""

    def __init__(self, model: Any, setting: Setting, seed: int) -> None:
        self.model, self.setting = model, setting
        self.random = random.Random(seed)
        self.session = self.fresh(N_SEQ)
        self.sequences = [Sequence() for _ in range(N_SEQ)]
        self.cell = 0
        self.done: Counter[str] = Counter()

    def fresh(self, n_seq: int) -> Any:
        threads = self.random.choice((1, 2))
        options = {
            "n_ctx": self.setting.n_ctx,
            "n_seq_max": n_seq,
            "n_threads": threads,
            "n_threads_batch": threads,
        }
        return session(self.model, **options, **self.setting.options)

    def step(self) -> None:
        verbs = [self.decode] * 8 + [self.remove] * 3 + [self.restore_all, self.restore_one, self.keep]
        verbs += [self.overfill] if not self.setting.evicts else []
        verbs += [self.copy] * 2 if self.setting.shares else []
        verbs += [self.shift] if self.setting.shifts else []
        verbs += [self.guess] * 3 if {**self.setting.options}.get("mtp") else []
        verb = self.random.choice(verbs)
        verb()
        self.done[verb.__name__] += 1
        for s, sequence in enumerate(self.sequences):
            if len(sequence.script) > LONGEST:
                self.session.seq_rm(s, -1, -1)
                self.sequences[s] = Sequence()

    def n_cells(self) -> int:
        return len({cell for sequence in self.sequences for cell in sequence.cells.values()})

    def check(self) -> None:
        for s, sequence in enumerate(self.sequences):
            assert self.session.seq_pos_max(s) == max(sequence.cells, default=-1)
            if not self.setting.evicts:
                assert self.session.seq_pos_min(s) == min(sequence.cells, default=-1)
        if not self.setting.evicts:
            assert self.session.n_cells_used() == self.n_cells()
        s = self.random.randrange(N_SEQ)
        sequence = self.sequences[s]
        if not sequence.cells or self.n_cells() + 1 > self.setting.n_ctx // 2:
            return
        alone = self.replay(sequence)
        expected = alone.decode([PROBE], pos=[sequence.next])
        got = self.session.decode([PROBE], seq=[s], pos=[sequence.next])
        error = distance(got, expected)
        assert error < self.setting.tolerance, f"sequence {s} is {error:.2g} from {sequence.script}"
        self.extend(s, [PROBE], sequence.next)

    def replay(self, sequence: Sequence) -> Any:
        alone = self.fresh(1)
        tokens: dict[int, int] = {}  # by position
        for verb, arguments in sequence.script:
            if verb == "decode":
                ids, first = arguments
                positions = list(range(first, first + len(ids)))
                alone.decode(ids, pos=positions, output="none")
                tokens |= dict(zip(positions, ids, strict=True))
            elif verb == "rm":
                p0, p1 = arguments
                tokens = {p: token for p, token in tokens.items() if p < p0 or 0 <= p1 <= p}
                if not alone.seq_rm(0, p0, p1):
                    assert self.setting.snapshots, f"{arguments} was removed beside other sequences"
                    assert alone.seq_rm(0)
                    alone.decode(list(tokens.values()), pos=list(tokens), output="none")
            else:
                alone.seq_add(0, *arguments)
        return alone

    # operations

    def extend(self, s: int, ids: list[int], first: int) -> None:
        self.sequences[s].script.append(("decode", (ids, first)))
        for i in range(len(ids)):
            self.sequences[s].cells[first + i] = self.cell
            self.cell += 1

    def decode(self) -> None:
        """A batch of some sequences; at times behind a gap of positions."""
        chosen = self.random.sample(range(N_SEQ), self.random.randint(1, N_SEQ))
        batch: list[tuple[int, list[int], int]] = []
        room = self.setting.n_ctx // 2 - self.n_cells()
        for s in chosen:
            n = min(self.random.choice((1, 1, 1, 2, 5, 9, 24)), room)
            if n > 0:
                gap = self.random.choice((0, 0, 0, 3)) if self.setting.cuts else 0
                batch.append((s, self.ids(n), self.sequences[s].next + gap))
                room -= n
        if not batch:
            return self.remove()
        tokens = [token for _, ids, _ in batch for token in ids]
        seq = [s for s, ids, _ in batch for _ in ids]
        pos = [first + i for _, ids, first in batch for i in range(len(ids))]
        self.session.decode(tokens, seq=seq, pos=pos, output="none")
        for s, ids, first in batch:
            self.extend(s, ids, first)

    def ids(self, n: int) -> list[int]:
        return [self.random.randrange(self.model.n_vocab) for _ in range(n)]

    def remove(self) -> None:
        s = self.random.randrange(N_SEQ)
        sequence = self.sequences[s]
        if self.random.random() < 0.3 or not sequence.cells:
            assert self.session.seq_rm(s, -1, -1)
            self.sequences[s] = Sequence()
            return
        p0 = self.random.choice(sorted(sequence.cells))
        p1 = p0 + self.random.randint(1, 12) if self.setting.cuts and self.random.random() < 0.5 else -1
        if not self.session.seq_rm(s, p0, p1):
            assert self.setting.refuses
            self.done["refused"] += 1
            return
        sequence.script.append(("rm", (p0, p1)))
        sequence.cells = {p: c for p, c in sequence.cells.items() if p < p0 or 0 <= p1 <= p}

    def copy(self) -> None:
        a, b = self.random.sample(range(N_SEQ), 2)
        source = self.sequences[a]
        if not source.cells:
            return
        assert self.session.seq_rm(b, -1, -1)
        p1 = self.random.choice([-1, *sorted(source.cells)[1:]])
        try:
            self.session.seq_cp(a, b, -1, p1)
        except ValueError:
            assert self.setting.refuses
            self.sequences[b] = Sequence()
            self.done["refused"] += 1
            return
        script = list(source.script) + ([("rm", (p1, -1))] if p1 >= 0 else [])
        self.sequences[b] = Sequence(script, {p: c for p, c in source.cells.items() if p1 < 0 or p < p1})

    def guess(self) -> None:
        """Which shows in no sequence."""
        s, most = self.random.randrange(N_SEQ), self.random.randint(1, 5)
        guesses = self.session.guess(s, PROBE, most)
        assert len(guesses) in (0, most)
        assert all(0 <= token < self.model.n_vocab for token in guesses)
        self.done["guessed"] += len(guesses)

    def keep(self) -> None:
        s = self.random.randrange(N_SEQ)
        self.session.seq_keep(s)
        self.sequences = [each if i == s else Sequence() for i, each in enumerate(self.sequences)]

    def shift(self) -> None:
        """Of a sequence that shares no cell: a cell has one position."""
        s = self.random.randrange(N_SEQ)
        sequence = self.sequences[s]
        others = {c for i, each in enumerate(self.sequences) if i != s for c in each.cells.values()}
        if not sequence.cells or others & set(sequence.cells.values()):
            return
        by = self.random.choice((-min(sequence.cells), 5))
        self.session.seq_add(s, -1, -1, by)
        sequence.script.append(("add", (-1, -1, by)))
        sequence.cells = {p + by: c for p, c in sequence.cells.items()}

    def restore_all(self) -> None:
        state = self.session.state_bytes()
        self.session = self.fresh(N_SEQ)
        assert self.session.set_state(state) == ""

    def restore_one(self) -> None:
        a, b = self.random.randrange(N_SEQ), self.random.randrange(N_SEQ)
        source = self.sequences[a]
        if not source.cells or self.n_cells() + len(source.cells) > self.setting.n_ctx:
            return
        assert self.session.set_seq_state(b, self.session.seq_state_bytes(a)) == ""
        self.sequences[b] = Sequence(list(source.script))
        for p in source.cells:
            self.sequences[b].cells[p] = self.cell
            self.cell += 1

    def overfill(self) -> None:
        """Too many tokens are refused, and nothing has changed."""
        n = self.setting.n_ctx - self.n_cells() + 1
        with pytest.raises(ValueError, match=r"^\[context\] expected at most"):
            self.session.decode(self.ids(n), seq=[0] * n, output="none")
