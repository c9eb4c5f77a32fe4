"""The loop that turns a prompt into tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from latentkv import ranges
from latentkv.errors import expected
from latentkv.generate.caller import Caller
from latentkv.generate.processors import LogitsProcessor, StoppingCriteria
from latentkv.sampling.options import SamplingOptions
from latentkv.sampling.speculative import DraftModel
from latentkv.session.timings import Timings

if TYPE_CHECKING:
    from latentkv import _core
    from latentkv.session.evaluator import Evaluator


class TokenLoop:
    """Prompt in, tokens out, one at a time; the caller decides when to end, and calls finish().

    Between its steps others may use the cache (Evaluator.hold). With a draft model the session runs ahead:
    it holds `_ahead`, guesses after the tokens so far, and `_rows` their logits. What is not sampled like
    that is forgotten."""

    def __init__(
        self,
        cached: Evaluator,
        sampler: _core.Sampler,
        processor: LogitsProcessor | None = None,
        draft: DraftModel | None = None,
        last_n: int = 64,
    ) -> None:
        """last_n: tokens of the prompt that the sampler's penalties see."""
        self.timings = Timings()
        self._cached, self._processor = cached, processor
        self._sampler: _core.Sampler | None = sampler  # None: the model is closed
        self._draft, self._last_n = draft, last_n
        self._ahead: list[int] = []
        self._rows: NDArray[np.float32] | None = None  # [1 + guesses, n_vocab]
        cached.add(self)

    @property
    def input_ids(self) -> NDArray[np.intc]:
        """The tokens so far, [n]."""
        ids = self._cached.input_ids
        return ids[: ids.size - len(self._ahead)]

    @property
    def logits(self) -> NDArray[np.float32]:
        """Logits after them, [n_vocab]."""
        rows = self._rows
        return self._cached.logits if rows is None else rows[len(rows) - 1 - len(self._ahead)]

    def hold(self) -> _core.Sampler:
        """Before every step: the cache as this loop left it. Raises where the model is closed."""
        self._cached.hold(self)
        self._cached.timings = self.timings
        assert self._sampler is not None
        return self._sampler

    def let_go(self) -> None:
        """The model is closed, which the sampler has open."""
        self._sampler, self._ahead, self._rows = None, [], None

    def start(self, prompt: Sequence[int], reset: bool = True) -> None:
        """Evaluates the prompt, after the part of it that is cached (`reset`) or after everything cached."""
        sampler, cached = self.hold(), self._cached
        if not len(prompt) and not (cached.n_tokens and cached.has_logits):
            raise expected("prompt", "at least one token", "none")
        n_kept = cached.keep_prefix(prompt) if reset and len(prompt) else 0
        self.timings.cached_n, self.timings.prompt_n = n_kept, len(prompt) - n_kept
        begin = time.perf_counter()
        cached.compute(prompt[n_kept:])
        self.timings.prompt_s = time.perf_counter() - begin
        cached.mark_prompt()
        for token in prompt[max(0, len(prompt) - self._last_n) :]:
            sampler.accept(token, in_grammar=False)

    def next(self, closed: Callable[[NDArray[np.float32]], NDArray[np.float32]] | None = None) -> int:
        """Samples after the last token. closed: changes logits where the answer has to end."""
        sampler = self.hold()
        begin = time.perf_counter()
        logits = self.logits
        if self._processor is not None:
            logits = np.ascontiguousarray(self._processor(self.input_ids, logits.copy()), dtype=np.float32)
            self.hold()  # a processor may have made calls of its own
        if closed is not None:
            logits = closed(logits)
        token = sampler.sample(logits)
        sampler.accept(token)
        self.timings.predicted_s += time.perf_counter() - begin
        return token

    def push(self, tokens: Sequence[int]) -> None:
        """Evaluates sampled (or given) tokens."""
        self.hold()
        begin = time.perf_counter()
        if self._ahead and list(tokens) == self._ahead[:1]:
            del self._ahead[0]
        else:
            self._forget_ahead()
            self._evaluate(tokens)
        self.timings.predicted_s += time.perf_counter() - begin
        self.timings.predicted_n += len(tokens)

    def settle(self) -> None:
        """The cache without guesses."""
        self.hold()
        self._forget_ahead()

    def finish(self) -> None:
        """The last step. The tokens stay in the cache, without the guesses, if no other call has it by
        now."""
        with self._cached.lock:
            try:
                if self._cached.is_held_by(self):
                    self._forget_ahead()
            finally:
                self._cached.leave(self)

    def _evaluate(self, tokens: Sequence[int]) -> None:
        cached = self._cached
        room = cached.session.n_ctx - cached.n_tokens - len(tokens)
        ahead = self._guesses(tokens)[:room] if self._draft is not None and room > 0 else []
        if not ahead:
            cached.compute(tokens)
            return
        self._rows = cached.compute_all([*tokens, *ahead], n_guesses=len(ahead))[len(tokens) - 1 :]
        self._ahead = ahead

    def _guesses(self, tokens: Sequence[int]) -> list[int]:
        assert self._draft is not None
        so_far = np.append(self._cached.input_ids, np.asarray(tokens, np.intc))
        guessed = [int(token) for token in self._draft(so_far)]
        self.hold()  # the draft model may have made calls of its own
        return guessed

    def _forget_ahead(self) -> None:
        if self._ahead:
            self._cached.rewind(self._cached.n_tokens - len(self._ahead), self.logits)
            self._ahead = []
        self._rows = None


def tokens_after(
    llama: Caller,
    tokens: Sequence[int],
    options: SamplingOptions,
    reset: bool = True,
    processor: LogitsProcessor | None = None,
    stopping: StoppingCriteria | None = None,
) -> Generator[int, Sequence[int] | None, None]:
    """Yields tokens after `tokens`, without end. `reset` replaces what is cached, keeping a common prefix.
    `send(more)` evaluates `more` tokens after the yielded one."""
    tokens = ranges.token_ids("generate", tokens)
    loop = token_loop(llama, options, processor)
    pending: Sequence[int] | None = None
    try:
        while True:
            with llama.evaluator.lock:
                if pending is None:
                    loop.start(tokens, reset)
                else:
                    loop.push(pending)
                token = loop.next()
                if stopping is not None:
                    so_far = np.append(loop.input_ids, np.intc(token))
                    if stopping(so_far, loop.logits):
                        return
            more = yield token
            pending = [token, *(more or ())]
    finally:
        loop.finish()


def token_loop(
    llama: Caller,
    options: SamplingOptions,
    processor: LogitsProcessor | None = None,
) -> TokenLoop:
    sampler = options.sampler(llama.model)
    return TokenLoop(llama.evaluator, sampler, processor, llama.draft_model, options.n_seen)


def next_token(
    llama: Caller, options: SamplingOptions, processor: LogitsProcessor | None, position: int | None
) -> int:
    """One token from the logits after the last cached token, or after the one at `position` (needs
    logits_all). For callers that hold the cache."""
    evaluator = llama.evaluator
    last = evaluator.n_tokens - 1
    if last < 0:
        raise expected("sample", "an evaluated token", "an empty cache", "call eval() first")
    position = last if position is None else position
    if not 0 <= position <= last:
        raise expected("idx", f"0 … {last}", position)
    logits = evaluator.logits if position == last else evaluator.scores[position]
    if processor is not None:
        so_far = evaluator.input_ids[: position + 1]
        logits = np.ascontiguousarray(processor(so_far, logits.copy()), np.float32)
    return options.sampler(llama.model).sample(logits)
