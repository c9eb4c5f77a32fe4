"""What is asked of the engine, and the stream in which the answer comes back."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from latentkv.errors import LatentKVError
from latentkv.generate.answer import Piece
from latentkv.sampling.options import SamplingOptions
from latentkv.session.timings import Timings


class StepError(LatentKVError):
    """The model failed while it computed an answer: not the fault of who asked for it."""

    @staticmethod
    def of(error: Exception) -> StepError:
        said = " ".join(str(error).split())
        known = said if said.startswith("[") else f"{type(error).__name__}: {said}"
        found = StepError(f"[engine] expected a step that runs; got {known}")
        found.__cause__ = error
        return found


@dataclass(frozen=True)
class Request:
    """A prompt and how to go on from it. `max_tokens` -1: as many as there is room for; 0: none.

    scores_prompt: the first piece is the prompt with the log-probabilities of its tokens, at offsets below 0;
    all of it is computed.
    """

    prompt: Sequence[int]
    sampling: SamplingOptions
    max_tokens: int = -1
    stop: Sequence[str] = ()
    logprobs: int | None = None  # rivals reported per token; None: no log-probabilities
    ignore_eos: bool = False
    scores_prompt: bool = False
    shown: frozenset[int] = frozenset()  # special tokens whose text is part of the answer


@dataclass
class Progress:
    """Of one request, while it runs and when it has ended."""

    slot: int = -1
    prompt_tokens: int = 0
    completion_tokens: int = 0  # generated, the end token excluded
    timings: Timings = field(default_factory=Timings)


class Ticket:
    """The answer to one request: iterate for its pieces, from any thread. The last piece has a
    finish_reason; an error that ended the answer is raised.

    on_piece: is called, on the engine's thread, in place of the stream; with None after an error.
    """

    def __init__(self, request: Request, on_piece: Callable[[Piece | None], None] | None = None) -> None:
        self.request = request
        self.progress = Progress(prompt_tokens=len(request.prompt))
        self.error: Exception | None = None
        self.cancelled = False
        self._pieces: queue.SimpleQueue[Piece | None] = queue.SimpleQueue()
        self._put = on_piece or self._pieces.put

    def cancel(self) -> None:
        """The engine stops before its next step; what was asked for is forgotten."""
        self.cancelled = True

    def put(self, piece: Piece) -> None:
        self._hand_over(piece)

    def fail(self, error: Exception) -> None:
        self.error = error
        self._hand_over(None)

    def _hand_over(self, piece: Piece | None) -> None:
        try:
            self._put(piece)
        except Exception:  # who listened is gone, an event loop that has closed: no matter of other answers
            self.cancelled = True

    def __iter__(self) -> Iterator[Piece]:
        while True:
            piece = self._pieces.get()
            if piece is None:
                assert self.error is not None
                raise self.error
            yield piece
            if piece.finish_reason is not None:
                return
