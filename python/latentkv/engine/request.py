"""What is asked of the engine, and the stream in which the answer comes back."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from latentkv.chat.thoughts import ThoughtLimit
from latentkv.engine.lines import LineLimits
from latentkv.engine.outbox import Deliver, Outbox
from latentkv.errors import LatentKVError
from latentkv.generate.writer import Piece
from latentkv.sampling.options import SamplingOptions
from latentkv.session.timings import Timings


class StepError(LatentKVError):
    """The model failed while it computed an answer: not the fault of who asked for it, but for a grammar that
    is too much to follow."""

    is_asked_for = False

    @staticmethod
    def of(error: Exception) -> StepError:
        said = " ".join(str(error).split())
        if said.startswith(("[grammar]", "[json_schema]")):
            found = StepError(said)
            found.is_asked_for = True
            return found
        known = said if said.startswith("[") else f"{type(error).__name__}: {said}"
        found = StepError(f"[engine] expected a step that runs; got {known}")
        found.__cause__ = error
        return found


class TooLong(LatentKVError):
    """A prompt that leaves no token to answer. n_tokens: what it has, or has at least; n_ctx: the tokens that
    a prompt and its answer may have."""

    def __init__(self, n_tokens: int, n_ctx: int, got: str) -> None:
        hint = "shorten it, or raise -c / n_ctx"
        super().__init__(f"[context] expected a prompt of at most {n_ctx - 1} tokens; got {got}; {hint}")
        self.n_tokens, self.n_ctx, self.hint = n_tokens, n_ctx, hint
        self.is_counted = got == str(n_tokens)


@dataclass(frozen=True)
class Request:
    """A prompt and how to go on from it. `max_tokens` -1: as many as there is room for; 0: none.

    scores_prompt: the first piece is the prompt with the log-probabilities of its tokens, at offsets below 0;
    all of it is computed.
    pooling: the prompt is embedded, and nothing follows it. One of POOLINGS.
    thoughts: how long the model may think before it answers.
    salt: whose beginnings it may go on from, and who may go on from its own: requests with the same.
    """

    prompt: Sequence[int]
    sampling: SamplingOptions
    max_tokens: int = -1
    stop: Sequence[str] = ()
    logprobs: int | None = None  # rivals reported per token; None: no log-probabilities
    ignore_eos: bool = False
    scores_prompt: bool = False
    shown: frozenset[int] = frozenset()  # special tokens whose text is part of the answer
    with_tokens: bool = False  # pieces have their tokens without log-probabilities too
    behind_samplers: bool = False  # log-probabilities are of what was drawn from, not of the raw logits
    lines: LineLimits | None = None
    reuses: bool = True  # goes on from what is cached of its prompt
    slot: int = -1  # the sequence that it has to be in; -1: any
    pooling: str | None = None
    thoughts: ThoughtLimit | None = None
    salt: str = ""


@dataclass
class Progress:
    """How far a request is, while it runs and when it has ended."""

    slot: int = -1
    prompt_tokens: int = 0
    timings: Timings = field(default_factory=Timings)
    tokens: Sequence[int] = ()  # generated, the end token excluded
    end: int | None = None  # the token by which the model ended the answer
    embedding: NDArray[np.float32] | None = None  # [1, n_embd], [n_tokens, n_embd] where nothing was pooled

    @property
    def completion_tokens(self) -> int:
        return len(self.tokens)


class Ticket:
    """The answer to one request: iterate for its pieces, from any thread. The last piece has a
    finish_reason; an error that ended the answer is raised.

    on_piece: is called in place of the stream, by `deliver` and so on its thread; with None after an error.
    """

    def __init__(
        self,
        request: Request,
        on_piece: Callable[[Piece | None], None] | None = None,
        deliver: Deliver | None = None,
    ) -> None:
        self.request = request
        self.progress = Progress(prompt_tokens=len(request.prompt))
        self.error: Exception | None = None
        self.cancelled = False
        self.since = time.perf_counter()
        self.on_piece = on_piece
        self.deliver = deliver
        self._pieces: queue.SimpleQueue[Piece | None] = queue.SimpleQueue()

    def cancel(self) -> None:
        """The engine stops before its next step; what was asked for is forgotten."""
        self.cancelled = True

    def put(self, piece: Piece | None, outbox: Outbox) -> None:
        """Hands a piece over, now or when the outbox is flushed."""
        if self.deliver is not None:
            outbox.put(self.deliver, self, piece)
        else:
            self._pieces.put(piece)

    def fail(self, error: Exception, outbox: Outbox) -> None:
        self.error = error
        self.put(None, outbox)

    def __iter__(self) -> Iterator[Piece]:
        while True:
            piece = self._pieces.get()
            if piece is None:
                assert self.error is not None
                raise self.error
            yield piece
            if piece.finish_reason is not None:
                return
