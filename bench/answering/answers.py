"""Greedy answers of a model with a given cache, many sequences at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

UBATCH = (
    128  # a cache with an exact window takes no longer one, so all caches read a prompt in the same steps
)
SLACK = 64  # cells that a sequence may take beyond its tokens: rows go in whole tiles


@dataclass(frozen=True)
class Cache:
    """A model with Session's keywords, `kv_budget` among them."""

    model: Any
    options: dict[str, Any]

    def session(self, n_seq: int, n_tokens: int) -> Any:
        """Room for `n_seq` sequences that are `n_tokens` long together."""
        from latentkv import _core
        from latentkv.plan.master import planned

        return _core.Session(
            self.model,
            n_ctx=n_tokens + SLACK * n_seq,
            n_seq_max=n_seq,
            n_ubatch=UBATCH,
            **planned(self.model, self.options),
        )


class Chat:
    """A model's own chat template, or plain text where it has none."""

    def __init__(self, model: Any) -> None:
        from latentkv.chat.template import template_of

        self.model = model
        self._template = template_of(model) if model.chat_template else None

    def prompt(self, question: str, lead: str = "") -> list[int]:
        """Tokens that wait for an answer. lead: how it begins, for a model that only goes on."""
        if self._template is None:
            return list(self.model.tokenize(f"{question}\n\n{lead}".encode(), True, False))
        return self._tokens(self._template.render([{"role": "user", "content": question}]))

    def again(self, question: str, lead: str = "") -> list[int]:
        """The tokens of a further question, after an answer without its end token, and of how the answer to
        it begins."""
        if self._template is None:
            return list(self.model.tokenize(f"\n\n{question}\n\n{lead}".encode(), False, False))
        first = {"role": "user", "content": "?"}
        answer = {"role": "assistant", "content": "!"}
        begun = self._template.render([first]) + "!"
        whole = self._template.render([first, answer, {"role": "user", "content": question}])
        if not whole.startswith(begun):
            raise SystemExit("error: [chat] expected a template that repeats earlier turns; got another")
        return self._tokens(whole[len(begun) :] + lead)

    def text(self, tokens: Sequence[int]) -> str:
        return str(self.model.detokenize(list(tokens), False).decode("utf-8", errors="replace"))

    def _tokens(self, text: str) -> list[int]:
        return list(self.model.tokenize(text.encode(), False, True))


class Conversations:
    """`parts` sequences of one session: read() appends tokens to each, answer() lets each go on greedily."""

    def __init__(self, cache: Cache, parts: int, n_tokens: int) -> None:
        self.model = cache.model
        self.session = cache.session(parts, n_tokens)
        self._next: list[int] = [-1] * parts  # likeliest token after each sequence

    def read(self, prompts: Sequence[Sequence[int]]) -> None:
        for seq, tokens in enumerate(prompts):
            logits = self.session.decode(list(tokens), seq=[seq] * len(tokens), output="last")
            self._next[seq] = int(logits[-1].argmax())

    def answer(self, limit: int) -> list[list[int]]:
        """Up to `limit` tokens each, without end tokens. What is returned is in the cache."""
        answers: list[list[int]] = [[] for _ in self._next]
        live = [seq for seq, token in enumerate(self._next) if not self.model.is_eog(token)]
        for _ in range(limit):
            if not live:
                break
            tokens = [self._next[seq] for seq in live]
            best: NDArray[np.int64] = self.session.decode(tokens, seq=live, output="all").argmax(axis=1)
            for seq, token, following in zip(live, tokens, best.tolist(), strict=True):
                answers[seq].append(token)
                self._next[seq] = following
            live = [seq for seq in live if not self.model.is_eog(self._next[seq])]
        return answers
