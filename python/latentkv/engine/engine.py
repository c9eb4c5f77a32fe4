"""The scheduler on a thread of its own."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

from latentkv.engine.outbox import Deliver
from latentkv.engine.request import Request, StepError, Ticket
from latentkv.engine.scheduler import Scheduler
from latentkv.errors import LatentKVError
from latentkv.generate.writer import Piece

T = TypeVar("T")


class Closed(LatentKVError):
    """Nothing is answered any more: not the fault of who asks."""


_CLOSED = Closed("[engine] expected to go on; got closed")


class Engine:
    """Answers requests from any thread. The session belongs to the engine's thread from here on: what else
    wants it goes through call()."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._calls: list[Callable[[], None]] = []
        self._open = True
        self._thread = threading.Thread(target=self._run, name="latentkv-engine", daemon=True)
        self._thread.start()

    def submit(
        self,
        request: Request,
        on_piece: Callable[[Piece | None], None] | None = None,
        deliver: Deliver | None = None,
    ) -> Ticket:
        """on_piece, deliver: see Ticket. Raises LatentKVError for a prompt that cannot be answered."""
        ticket = Ticket(request, on_piece, deliver)
        self.scheduler.check(ticket)
        self._post(lambda: self.scheduler.submit(ticket))
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        ticket.cancel()
        self.scheduler.leave_off()
        with self._changed:
            self._changed.notify()

    def call(self, function: Callable[[Scheduler], T]) -> T:
        """What the function returns, run between two steps."""
        done = threading.Event()
        result: dict[str, Any] = {}

        def run() -> None:
            try:
                result["value"] = function(self.scheduler)
            except BaseException as error:
                result["error"] = error
            done.set()

        self._post(run)
        done.wait()
        if "error" in result:
            raise result["error"]
        value: T = result["value"]
        return value

    @property
    def is_open(self) -> bool:
        """Whether it takes requests. A closed one has left its folder to others."""
        return self._open

    def close(self) -> None:
        """Ends running answers with an error and waits for the thread."""
        if os.getpid() != self._process:
            return
        with self._changed:
            self._open = False
            self._changed.notify()
        self.scheduler.leave_off(_CLOSED)
        self._thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _post(self, call: Callable[[], None]) -> None:
        if os.getpid() != self._process:
            raise Closed(
                "[engine] expected the process that opened it; got a child forked from it, without its thread"
            )
        with self._changed:
            if not self._open:
                raise Closed("[engine] expected an open engine; got a closed one")
            self._calls.append(call)
            self._changed.notify()

    def _run(self) -> None:
        busy = False
        while True:
            with self._changed:
                while self._open and not busy and not self._calls:
                    self._changed.wait()
                calls, self._calls = self._calls, []
                is_open = self._open
            for call in calls:
                call()
            if not is_open:
                break
            busy = self._step()
            self.scheduler.outbox.flush()
        self.scheduler.close(_CLOSED)
        self.scheduler.outbox.flush()

    def _step(self) -> bool:
        try:
            return self.scheduler.step()
        except Exception as error:  # a bug: whoever waits is told, and later requests are answered
            traceback.print_exc()
            self.scheduler.abandon(StepError.of(error))
            return True
