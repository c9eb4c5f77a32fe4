"""What a task is: problems, and a client that asks a server for answers."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

TIMEOUT = 900  # seconds of one answer


@dataclass(frozen=True)
class Problem:
    name: str
    group: str  # a column of the result
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """score: 0 to 1. said: what the model wrote, for a reader."""

    score: float
    read: int  # tokens, of the longest prompt
    written: int  # tokens
    said: Any
    why: str = ""  # it failed
    column: str = ""  # of the result, "": the problem's group


@dataclass(frozen=True)
class Task:
    """groups: name of each in a Problem, tokens that a problem of it may take together with its answer.
    solve: as many outcomes for a problem whatever the cache. columns: of the result, (): the groups."""

    name: str
    title: str
    groups: dict[str, int]
    problems: Sequence[Problem]
    solve: Callable[[Client, Problem], list[Outcome]]
    columns: tuple[str, ...] = ()


class Refused(RuntimeError):
    """The server's answer is no answer: its status and text."""


@dataclass(frozen=True)
class Client:
    """A server's routes. Every answer is greedy."""

    address: str

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            self.address + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
                answer: dict[str, Any] = json.load(response)
                return answer
        except urllib.error.HTTPError as error:
            said = error.read().decode("utf-8", "replace")[:500]
            raise Refused(f"error: [server] expected 200 of {path}; got {error.code}: {said}") from None
        except OSError as error:
            raise Refused(f"error: [server] expected an answer of {path}; got {error}") from None

    def chat(self, messages: list[dict[str, Any]], limit: int, **more: Any) -> dict[str, Any]:
        """OpenAI's object for an answer of at most `limit` tokens."""
        body = {"model": "default", "messages": messages, "max_tokens": limit, "temperature": 0}
        return self.post("/v1/chat/completions", body | more)

    def begun(self, message: str, lead: str, limit: int) -> dict[str, Any]:
        """OpenAI's object of a completion: how an answer to `message` goes on that begins with `lead`."""
        messages = [{"role": "user", "content": message}]
        prompt = self.post("/apply-template", {"messages": messages})["prompt"]
        body = {"model": "default", "prompt": prompt + lead, "max_tokens": limit, "temperature": 0}
        return self.post("/v1/completions", body)


def outcome(score: float, answer: dict[str, Any], said: Any, why: str = "") -> Outcome:
    """Of one answer."""
    usage = answer["usage"]
    return Outcome(score, usage["prompt_tokens"], usage["completion_tokens"], said, why)
