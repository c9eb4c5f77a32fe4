"""A `Llama`'s answer as a stream of pieces: the part that plain and chat completions share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from latentkv.chat.thoughts import ThoughtCloser, ThoughtLimit
from latentkv.errors import expected
from latentkv.generate.caller import Caller
from latentkv.generate.loop import TokenLoop, token_loop
from latentkv.generate.processors import LogitsProcessor, StoppingCriteria
from latentkv.generate.scores import PromptScores, token_score
from latentkv.generate.writer import AnswerWriter, Ends, Piece
from latentkv.ranges import TOKENS, integer
from latentkv.sampling.closing import closing_of
from latentkv.sampling.logprobs import TokenScore
from latentkv.sampling.options import SamplingOptions
from latentkv.session.lock import step_by_step

if TYPE_CHECKING:
    from latentkv import _core


@dataclass(frozen=True)
class AnswerOptions:
    """When to stop, and what to report. `max_tokens` below 1 means: until the context is full."""

    max_tokens: int | None = 16
    stop: Sequence[str] = ()
    logprobs: int | None = None  # rivals reported per token; None: no log-probabilities
    processor: LogitsProcessor | None = None
    stopping: StoppingCriteria | None = None
    shown: frozenset[int] = frozenset()  # special tokens whose text is part of the answer
    thoughts: ThoughtLimit | None = None
    echo: str | None = None  # the prompt's text, which the first piece repeats


class Answer:
    """Iterate for the pieces. `completion_tokens` counts what was generated so far, the end token
    excluded."""

    def __init__(
        self, llama: Caller, prompt: Sequence[int], sampling: SamplingOptions, options: AnswerOptions
    ) -> None:
        n_ctx = llama.n_ctx()
        if len(prompt) >= n_ctx:
            raise expected(
                "context", f"a prompt of at most {n_ctx - 1} tokens", len(prompt), "raise -c / n_ctx"
            )
        if options.logprobs is not None:
            TOKENS.check("logprobs", options.logprobs)
        room = n_ctx - len(prompt)
        asked = 0 if options.max_tokens is None else integer("max_tokens", options.max_tokens)
        limit = min(asked, room) if asked > 0 else room
        self.prompt_tokens = len(prompt)
        self._llama, self._cached = llama, llama.evaluator
        self._prompt = prompt
        self._options = options
        self._loop = token_loop(llama, sampling, options.processor)
        asked_to = None if options.stopping is None else partial(_stop_asked, self._loop, options.stopping)
        closing = closing_of(llama.model, sampling.grammar)
        shown = {token: llama.model.token_to_piece(token, True) for token in options.shown}
        score = partial(_score, llama, options)
        thought = None if options.thoughts is None else ThoughtCloser(llama.model, options.thoughts)
        ends = Ends(options.stop, asked=asked_to)
        self._writer = AnswerWriter(ends, limit, limit, score, closing, shown, thought)

    @property
    def completion_tokens(self) -> int:
        return len(self._writer.tokens)

    @property
    def _model(self) -> _core.Model:
        return self._llama.model

    def __iter__(self) -> Iterator[Piece]:
        return step_by_step(self._cached, self._pieces())

    def _pieces(self) -> Iterator[Piece]:
        try:
            self._loop.hold()
            if self._options.echo is not None:
                yield self._echo(self._options.echo)
            else:
                self._llama.recall(self._prompt)
            yield from self._until_the_end()
            self._loop.settle()
            self._llama.remember()
        finally:
            self._loop.finish()

    def _echo(self, text: str) -> Piece:
        """The prompt, at offsets below 0, and with `logprobs` what its tokens score."""
        if self._options.logprobs is None:
            return Piece(text)
        scores = PromptScores(self._model, self._prompt, self._options.logprobs, self._options.shown)
        self._cached.truncate(0)
        self._cached.compute_each(self._prompt, scores.add)
        return Piece(text, scores.before(len(text)))

    def _until_the_end(self) -> Iterator[Piece]:
        self._loop.start(self._prompt)
        while True:
            token = self._loop.next(self._writer.closed)
            drawn = token, self._model.token_to_piece(token), self._model.is_eog(token)
            shown = self._writer.step(drawn, self._loop.logits)
            if shown.text or shown.tokens or shown.finish_reason is not None:
                yield shown
            if shown.finish_reason is not None:
                return
            self._loop.push([token])


# No methods: a writer that held its answer would be part of a circle, which would keep the model open.
def _score(
    llama: Caller, options: AnswerOptions, token: int, offset: int, logits: NDArray[np.float32] | None
) -> TokenScore:
    return token_score(llama.model, token, offset, logits, options.logprobs, options.shown)


def _stop_asked(loop: TokenLoop, stopping: StoppingCriteria, token: int) -> bool:
    return stopping(np.append(loop.input_ids, np.intc(token)), loop.logits)
