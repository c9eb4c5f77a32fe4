"""What is in the cache: its tokens, the logits after them, and how both change together. And whose it is: a
stream that other calls interrupt finds its rows again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from latentkv import ranges
from latentkv.errors import NoAttribute, absent, expected
from latentkv.session import prefix
from latentkv.session.lock import SessionLock, ShuttingDown, locked
from latentkv.session.state import LlamaState
from latentkv.session.timings import Timings

if TYPE_CHECKING:
    from latentkv import _core

SEQ = 0  # the only sequence used here
PIECE = 128  # tokens of a text that is scored whose logits, a row of n_vocab each, are there at once


@dataclass(frozen=True)
class SetAside:
    """The rows and tokens of a stream whose place in the cache another call has taken."""

    tokens: list[int]
    rows: bytes  # bit for bit, in their slots: the stream goes on as if alone
    logits: NDArray[np.float32] | None
    mark: tuple[int, NDArray[np.float32]] | None
    scores: NDArray[np.float32] | None  # [n_tokens, n_vocab]


class Stream(Protocol):
    """Who takes steps in the cache, and may be left half-way."""

    def let_go(self) -> None:
        """Drops what keeps the model open: it is closed."""


class Evaluator:
    """Consecutive tokens in sequence 0 of a session. The cache is the truth: after an interrupted or
    failed call the token list is what the cache says. Threads take turns, a call each.

    A stream holds the cache from its first step to its last. Who changes the cache in between, another
    stream or a call, sets the stream's rows aside, in memory; its next step brings them back."""

    def __init__(
        self,
        session: _core.Session | None,
        n_batch: int,
        logits_all: bool,
        reopen: Callable[[], _core.Session] | None = None,
    ) -> None:
        """reopen: makes an empty session like this one."""
        self.lock = SessionLock(self.left_behind)
        self._reopen = reopen
        self._streams: WeakSet[Stream] = WeakSet()  # all that are not forgotten
        self._lost: object = None  # the stream whose tokens a fork left in the parent
        self.n_batch = n_batch
        self.timings = Timings()  # of the call that had the cache last
        self._holder: object = None  # the stream whose tokens are in the cache
        self._set_aside: dict[object, SetAside] = {}  # of streams that others interrupted
        self._session = session
        self._logits_all = logits_all
        self._tokens: list[int] = []
        self._logits: NDArray[np.float32] | None = None  # of the last evaluated token, [n_vocab]
        # How many tokens the last prompt had, and the logits at its end.
        self._mark: tuple[int, NDArray[np.float32]] | None = None
        self._scores: NDArray[np.float32] | None = None  # logits_all: of every cached token, [n_ctx, n_vocab]

    @property
    def session(self) -> _core.Session:
        """Cache and graph."""
        if self._session is None and self._reopen is not None:
            self._session = self._reopen()
        if self._session is None:
            raise _closed()
        return self._session

    @property
    def n_tokens(self) -> int:
        """Tokens in the cache. Setting a smaller number forgets the ones after it."""
        return len(self._tokens)

    @n_tokens.setter
    def n_tokens(self, count: int) -> None:
        if not 0 <= count <= len(self._tokens):
            raise expected("n_tokens", f"0 … {len(self._tokens)}", count)
        self.hold(None)
        self.truncate(count)

    @property
    def input_ids(self) -> NDArray[np.intc]:
        """The cached tokens, [n_tokens]."""
        return np.array(self._tokens, dtype=np.intc)

    @property
    def eval_tokens(self) -> list[int]:
        return list(self._tokens)

    @property
    def logits(self) -> NDArray[np.float32]:
        """Logits after the last evaluated token, [n_vocab]."""
        if self._logits is None:
            raise absent(
                "logits", "an evaluated token", "none since the last change of the cache", "call eval()"
            )
        return self._logits

    @property
    def has_logits(self) -> bool:
        return self._logits is not None

    @property
    def scores(self) -> NDArray[np.float32]:
        """Logits of every cached token, [n_tokens, n_vocab]."""
        if self._scores is None:
            raise absent(
                "scores", "Llama(…, logits_all=True) and an evaluated token", f"logits_all={self._logits_all}"
            )
        return self._scores[: len(self._tokens)]

    @property
    def eval_logits(self) -> list[list[float]]:
        rows: list[list[float]] = (self.scores if self._logits_all else self.logits[np.newaxis]).tolist()
        return rows

    # Whose the cache is.

    def add(self, stream: Stream) -> None:
        """Once, before its first step: it may outlive the model."""
        self._streams.add(stream)

    @locked
    def hold(self, owner: object) -> None:
        """Gives the cache to a stream, with the tokens that it had there, or to a call that is no stream
        (None). The tokens of the stream before are kept as well, for a prompt that begins like them."""
        if owner is not None and self._session is None and self._reopen is None:
            raise _closed()
        if owner is self._holder:
            return
        if owner is not None and owner is self._lost:
            raise expected(
                "stream",
                "to go on in the process that began it",
                "a child that was forked within another call",
            )
        if self._holder is not None:
            self._set_aside[self._holder] = SetAside(
                list(self._tokens),
                self.session.state_bytes(),
                self._logits,
                self._mark,
                self.scores.copy() if self._scores is not None else None,
            )
        self._holder = owner
        found = self._set_aside.pop(owner, None)
        if found is None:
            return
        self._replace(found.rows, found.tokens)
        self._logits, self._mark = found.logits, found.mark
        if found.scores is not None:
            self._keep_scores(0, found.scores)

    def leave(self, owner: object) -> None:
        """The stream has ended. Its tokens stay in the cache until others need the room."""
        with contextlib.suppress(ShuttingDown), self.lock:
            self._set_aside.pop(owner, None)
            if self._holder is owner:
                self._holder = None

    def left_behind(self) -> None:
        """Called in a child of fork() if another thread of the parent was changing the session. Starts with
        an empty session; the tokens of the stream that held the cache are lost."""
        session, self._session = self._session, None
        if session is not None:
            session.leave()
        self._lost, self._holder = self._holder, None
        self._tokens, self._logits, self._mark, self._scores = [], None, None, None

    def is_held_by(self, owner: object) -> bool:
        return self._holder is owner

    # Computing. Streams that hold the cache call compute(), everyone else eval().

    @locked
    def eval(self, tokens: Sequence[int]) -> None:
        """Runs `tokens` after the cached ones. Raises when they do not fit; an interrupted call keeps what
        is computed."""
        self.hold(None)
        self.compute(ranges.token_ids("eval", tokens))

    @locked
    def eval_all(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """eval() that returns the logits of all `tokens`, [len(tokens), n_vocab]."""
        self.hold(None)
        return self.compute_all(ranges.token_ids("eval_all", tokens))

    def compute(self, tokens: Sequence[int]) -> None:
        """eval() for callers that already hold the cache."""
        for batch, n_behind in self._batches(tokens):
            before = len(self._tokens)
            output = "all" if self._logits_all else "none" if n_behind else "last"
            logits = self._decode(batch, output)
            if self._logits_all:
                self._keep_scores(before, logits)
            if not n_behind:
                self._logits = np.array(logits[-1])

    def compute_all(self, tokens: Sequence[int], n_guesses: int = 0) -> NDArray[np.float32]:
        """eval_all() for callers that already hold the cache. n_guesses: how many of the last tokens are
        guesses, which rewind() may remove."""
        parts = []
        for batch, n_behind in self._batches(tokens):
            parts.append(self._decode(batch, "all", n_guesses=min(len(batch), max(0, n_guesses - n_behind))))
        rows = np.concatenate(parts)
        if self._logits_all:
            self._keep_scores(len(self._tokens) - len(rows), rows)
        self._logits = np.array(rows[-1])
        return rows

    def compute_each(self, tokens: Sequence[int], take: Callable[[NDArray[np.float32]], None]) -> None:
        """compute() that hands on the logits of all tokens, in order, in pieces [n, n_vocab] of which none is
        kept."""
        done = len(self._tokens)
        last: list[NDArray[np.float32]] = []

        def each(rows: NDArray[np.float32]) -> None:
            nonlocal done
            if self._logits_all:
                self._keep_scores(done, rows)
            done += len(rows)
            last[:] = [rows[-1].copy()]
            take(rows)

        for batch, _ in self._batches(tokens, PIECE):
            self._decode(batch, "all", take=each)
        self._logits = last[0]

    @locked
    def compute_states(
        self,
        tokens: Sequence[int],
        output: Sequence[bool],
        take: Callable[[NDArray[np.float32]], object],
    ) -> None:
        """Runs `tokens` through an empty cache, which is empty again afterwards. Hands on the hidden states
        after the last norm of those with a flag in `output`, in order, in pieces [n, n_embd]."""
        self.reset()
        try:
            for batch, n_behind in self._batches(tokens):
                end = len(tokens) - n_behind
                self._decode(batch, output[end - len(batch) : end], take=take, states=True)
        finally:
            self.reset()

    def _keep_scores(self, before: int, rows: NDArray[np.float32]) -> None:
        if self._scores is None:
            self._scores = np.empty((self.session.n_ctx, rows.shape[1]), np.float32)
        self._scores[before : before + len(rows)] = rows

    def _batches(self, tokens: Sequence[int], most: int | None = None) -> Iterator[tuple[Sequence[int], int]]:
        """Yields the tokens of each call, at most `most`, and how many tokens come after them. A prompt that
        is prefilled lazily is one call."""
        self.session.require_room(len(tokens))
        is_lazy = self.session.prefill == "lazy" and not self._tokens
        size = max(1, len(tokens)) if is_lazy else min(self.n_batch, most or self.n_batch)
        for start in range(0, len(tokens), size):
            batch = tokens[start : start + size]
            yield batch, len(tokens) - start - len(batch)

    def _decode(
        self,
        batch: Sequence[int],
        output: str | Sequence[bool],
        n_guesses: int = 0,
        take: Callable[[NDArray[np.float32]], object] | None = None,
        states: bool = False,
    ) -> NDArray[np.float32]:
        self._logits = None
        self._tokens += [int(token) for token in batch]
        try:
            new = self._tokens[-len(batch) :]
            guessed = [at >= len(new) - n_guesses for at in range(len(new))] if n_guesses else ()
            return self.session.decode(new, output=output, guessed=guessed, take=take, states=states)
        finally:
            # The cache knows how far an interrupted or failed batch came.
            del self._tokens[self.session.seq_pos_max(SEQ) + 1 :]

    @locked
    def reuse_prefix(self, tokens: Sequence[int]) -> int:
        """keep_prefix() for callers that do not hold the cache."""
        self.hold(None)
        return self.keep_prefix(tokens)

    def keep_prefix(self, tokens: Sequence[int]) -> int:
        """Forgets what `tokens` do not begin with; returns how many of them the cache holds.

        At most all but one, unless their logits are still at hand: those of the cache's end and those of the
        last prompt are. prefix.kept() says what a rewind costs.
        """
        common = prefix.common(self._tokens, tokens)
        if common == len(tokens) == len(self._tokens) and self.has_logits:
            return common
        mark = self._mark
        if mark is not None and common == len(tokens) == mark[0] and not self.session.n_recent(common):
            if self._rewind(common):
                self._logits = mark[1]
            return len(self._tokens)
        keep = prefix.kept(self._tokens, tokens, self.session.n_recent, self.session.rewinds)
        self._rewind(keep)
        return len(self._tokens)

    def mark_prompt(self) -> None:
        """Keeps the logits at the prompt's end. The same prompt again then starts from the same numbers:
        computed anew they would differ in the last bits, as its tokens go through in other pieces, and a
        coarse cache amplifies that."""
        self._mark = (len(self._tokens), self.logits)

    @locked
    def truncate(self, count: int) -> None:  # for callers that hold the cache
        """Keeps the first `count` cached tokens. Where layers with a sliding window have no rows of them any
        more, or recurrent layers no snapshot, they are computed anew."""
        kept = self._tokens[:count]
        if not self._rewind(count):
            self.compute(kept[len(self._tokens) :])
            self._logits = None

    def _rewind(self, count: int) -> bool:
        """Keeps the first `count` cached tokens. False: it could only keep fewer, as rows or states of the
        others are gone."""
        if count == len(self._tokens):
            return True
        self._logits = None
        kept = self.session.seq_rm(SEQ, count, -1)
        left = count
        if not kept:
            left = self.session.seq_resumable(SEQ, count) if self.session.is_recurrent else 0
            self.session.seq_rm(SEQ, left, -1)
        del self._tokens[left:]
        if self._mark is not None and len(self._tokens) < self._mark[0]:
            self._mark = None
        return kept

    @locked
    def rewind(self, count: int, logits: NDArray[np.float32]) -> None:
        """truncate() to tokens after which the logits are known."""
        self.truncate(count)
        if len(self._tokens) != count:
            raise expected("draft_model", "a cache that can forget its last tokens", "one that cannot")
        self._logits = np.array(logits)

    @locked
    def restore(self, state: LlamaState, accept: str = "same") -> None:
        """Replaces the cache by a saved one. The caller holds the cache."""
        self._replace(state.cache, state.input_ids, accept)
        self._logits = None if state.logits is None else state.logits.copy()

    def _replace(self, rows: bytes, tokens: Sequence[int], accept: str = "same") -> None:
        self._tokens, self._logits, self._mark = [], None, None
        try:
            self.session.set_state(rows, accept)
        except BaseException:
            self.session.clear()
            raise
        cached = self.session.seq_pos_max(SEQ) + 1
        if cached != len(tokens):
            self.session.clear()
            raise expected("state", f"a cache of {len(tokens)} tokens, as its token list has", cached)
        self._tokens = list(tokens)

    @locked
    def reset(self) -> None:
        """Empties the cache."""
        self.hold(None)
        self.truncate(0)

    @locked
    def forget_session(self) -> None:
        """Frees the cache and everything that belongs to it, streams left half-way too."""
        for stream in list(self._streams):
            stream.let_go()
        self._session = self._reopen = None
        self._holder = None
        self._set_aside.clear()
        self._logits = self._scores = self._mark = None


def _closed() -> NoAttribute:
    return absent("Llama", "an open model with weights", "a closed one, or vocab_only=True")
