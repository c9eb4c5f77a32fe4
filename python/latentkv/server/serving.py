"""State that the routes share: the model, its engine, and the defaults of answers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fastapi import Request as HttpRequest

from latentkv import _core
from latentkv.chat.memory import AnswerMemory
from latentkv.chat.messages import content_text
from latentkv.chat.template import ChatTemplate
from latentkv.engine.engine import Engine
from latentkv.engine.request import Request, TooLong
from latentkv.engine.scheduler import Scheduler
from latentkv.errors import LatentKVError
from latentkv.generate.completion import prompt_tokens
from latentkv.sampling.options import SamplingOptions
from latentkv.server import errors
from latentkv.server.access.guard import KEY
from latentkv.server.access.salts import Salts
from latentkv.server.answering import Answering, Inbox
from latentkv.server.responses.stored import StoredResponses
from latentkv.text import utf8


@dataclass(frozen=True)
class Serving:
    model: _core.Model
    engine: Engine
    template: ChatTemplate
    name: str  # name of the model in the API
    sampling: SamplingOptions
    about: dict[str, Any]  # description of model and cache for the page and /props
    n_predict: int = -1
    pooling: str | None = None  # of embeddings; None: the file's
    embd_normalize: int = 2
    memory: AnswerMemory = field(default_factory=AnswerMemory)
    path: str = ""  # path of the model's file
    created: int = field(default_factory=lambda: int(time.time()))
    strict_model: bool = False
    reasoning_budget: int = -1  # tokens of a thought, where a request does not say
    reasoning_budget_message: str | None = None
    salts: Salts = field(default_factory=Salts)
    responses: StoredResponses = field(default_factory=StoredResponses)
    key: str = ""  # of the caller, where each has its own beginnings
    _callers: dict[str, Serving] = field(default_factory=dict)

    def called_with(self, key: str) -> Serving:
        """The same for a caller with this API key."""
        if not self.salts.isolates or key == self.key:
            return self
        return self._callers.setdefault(key, replace(self, key=key))

    def salt(self, given: str | None) -> str:
        """Whose beginnings a request may go on from. given: its `cache_salt`."""
        return self.salts.of(self.key, given)

    def check_model(self, asked: str | None) -> None:
        """As in llama.cpp's server the one model answers to any name, unless it is strict."""
        if self.strict_model:
            self.check_name(asked)

    def check_name(self, asked: str | None) -> None:
        if asked not in (None, "", "default", self.name):
            message = f"[model] expected {self.name} or default; got {asked}; serve with --alias to rename it"
            raise errors.Refused(404, message, "model", "model_not_found")

    def tokens(self, prompt: str | Sequence[int], special: bool = True) -> list[int]:
        if isinstance(prompt, str):
            text = utf8(prompt, "prompt")
            self.check_length(len(text))
            return prompt_tokens(self.model, list(self.model.tokenize(text, True, special)))
        self.scheduler.check_length(len(prompt))
        try:
            return prompt_tokens(self.model, list(prompt)) if prompt else []
        except LatentKVError as error:
            raise errors.Refused(400, str(error), "prompt") from None

    def recall(self) -> None:
        """Loads the answers that an earlier server left in the folder of kept sequences."""
        if (path := self._answers) is not None:
            self.memory.load(path)

    def close(self) -> None:
        """Stops the engine, and saves the remembered answers for the next server."""
        if (path := self._answers) is not None and self.engine.is_open:
            self.memory.save(path)
        self.engine.close()

    @property
    def _answers(self) -> Path | None:
        store = self.scheduler.store
        return None if store is None or store.folder is None else store.folder / "answers.json"

    @property
    def scheduler(self) -> Scheduler:
        return self.engine.scheduler

    def check_length(self, n_bytes: int) -> None:
        """Raises LatentKVError for a text that no context can hold, before it is tokenized: that takes
        seconds for megabytes."""
        if n_bytes > self.scheduler.n_ctx_seq * self.longest_piece:
            raise self._too_long(-(-n_bytes // self.longest_piece), f"a text of {n_bytes} bytes")

    def check_messages(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """The same for a chat, before its template is rendered."""
        if len(messages) > self.scheduler.n_ctx_seq:
            raise self._too_long(len(messages), f"{len(messages)} messages")
        self.check_length(sum(len(content_text(message.get("content"))) for message in messages))

    def _too_long(self, n_tokens: int, got: str) -> TooLong:
        return TooLong(n_tokens, self.scheduler.n_ctx_seq, got)

    @cached_property
    def longest_piece(self) -> int:
        """The number of bytes of the longest token."""
        return max(len(self.model.token_to_piece(token, True)) for token in range(self.model.n_vocab))

    def text(self, tokens: Sequence[int]) -> str:
        """The tokens as text, including special tokens."""
        pieces = (self.model.token_to_piece(token, True) for token in tokens)
        return b"".join(pieces).decode("utf-8", errors="replace")

    def answering(self, requests: Sequence[Request], inbox: Inbox) -> list[Answering]:
        """Starts all requests or none: if one is refused, those before it are cancelled."""
        started: list[Answering] = []
        try:
            for index, request in enumerate(requests):
                started.append(Answering(self.engine, request, inbox, index))
        except Exception:
            for each in started:
                each.cancel()
            raise
        return started


def serving_of(request: HttpRequest) -> Serving:
    found: Serving = request.app.state.serving
    return found.called_with(request.scope.get(KEY, ""))
