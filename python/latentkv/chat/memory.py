"""The tokens that a model wrote, for the prompt in which they come back.

A model writes `{"name":"weather"}`, the client sends the call back, and the template writes
`{"name": "weather"}`: one blank more, and the cache is of no use after it. So answers are remembered. A
conversation that goes on with one of them is given the tokens that the cache holds.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latentkv import durable
from latentkv.chat.messages import Message, content_text

if TYPE_CHECKING:
    from latentkv._core import Model

Render = Callable[[Sequence[Message]], str]  # a conversation that waits for no answer


@dataclass(frozen=True)
class Remembered:
    """An answer and its prompt. `tokens`: of both. `text`: what the model wrote, and whether the model itself
    ended the answer. `prompt`: digest and length of the text that the template wrote before it. `ids`: of its
    calls, where the model does not write these itself."""

    prompt: tuple[str, int]
    tokens: array[int]
    text: str
    is_ended: bool
    reasoning: str
    ids: Sequence[str]


class AnswerMemory:
    """The latest answers, up to `n_tokens` with their prompts. Any thread may ask."""

    def __init__(self, n_tokens: int = 1 << 22) -> None:
        self._most = n_tokens
        self._known: OrderedDict[str, Remembered] = (
            OrderedDict()
        )  # by conversation; the least recently used first
        self._n_tokens = 0
        self._lock = threading.Lock()
        self._ends: list[str] | None = None  # texts of the tokens that end a turn

    def remember(
        self,
        model: Model,
        asked: tuple[Sequence[Message], Mapping[str, Any], str, Sequence[int]],
        message: Message,
        answer: Sequence[int],
        end: int | None,
    ) -> None:
        """An answer, and the token by which the model ended it. asked: messages, the options of their
        template, its text, and the tokens that the model was given for it."""
        messages, options, text, prompt = asked
        written = _text(model, answer)
        ids = [str(call.get("id")) for call in message.get("tool_calls") or ()]
        entry = Remembered(
            (_digest(text), len(text)),
            array("i", [*prompt, *answer]),
            written,
            end is not None,
            message.get("reasoning_content") or "",
            [each for each in ids if each not in written],
        )
        *_, key = _keys([*messages, message], options)
        self._keep(key, entry)

    def with_thoughts(self, messages: Sequence[Message], options: Mapping[str, Any]) -> list[Message]:
        """The messages, and in those with calls what the model thought before it called, where a client left
        it out: OpenAI's chat messages have no place for it. The template says which thoughts are shown."""
        whole = list(messages)
        for at, key in enumerate(_keys(messages, options)):
            message = messages[at]
            if message.get("role") != "assistant" or not message.get("tool_calls") or _thoughts(message):
                continue
            known = self._at(key)
            if known is not None and known.reasoning:
                whole[at] = {**message, "reasoning_content": known.reasoning}
        return whole

    def tokens(
        self, model: Model, messages: Sequence[Message], options: Mapping[str, Any], text: str, render: Render
    ) -> list[int] | None:
        """The tokens of `text`, which the template wrote for the messages. Up to the latest answer that is
        remembered they are those that the model was given and wrote. None if no answer is remembered.

        An answer counts if the conversation is the same, message by message, and the template writes the
        same text up to it. For the answer itself the template writes what the model wrote, or the same
        message in other words followed by a token that ends the turn, as the model did."""
        keys = list(_keys(messages, options))
        for at in reversed(range(len(messages))):
            known = self._at(keys[at])
            if known is None or known.reasoning != _thoughts(messages[at]):
                continue
            digest, length = known.prompt
            if _digest(text[:length]) != digest:
                continue
            rest = _behind(known, text, self._turn_ends(model), partial(_until, render, messages, at))
            tokens = [] if rest is None else list(model.tokenize(rest.encode(), False, True))
            if rest is None or _text(model, tokens) != rest:  # some vocabularies begin a text with a blank
                continue
            return [*known.tokens, *tokens]
        return None

    def save(self, path: Path) -> None:
        """Writes the answers to a file, for another process. A failure is a warning, and the answers are
        lost."""
        with self._lock:
            known = {
                key: asdict(each) | {"tokens": _packed(each.tokens)} for key, each in self._known.items()
            }
        try:
            with durable.writing(path) as file:
                file.write(json.dumps(known).encode())
        except OSError as error:
            print(f"warning: [--cache-dir] expected to write {path}; got {error.strerror}", file=sys.stderr)

    def load(self, path: Path) -> None:
        """Reads such a file if it exists. A damaged file is ignored."""
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            for key, each in json.loads(path.read_bytes()).items():
                prompt, tokens = tuple(each.pop("prompt")), array("i", base64.b64decode(each.pop("tokens")))
                self._keep(key, Remembered(prompt, tokens, **each))

    def _keep(self, key: str, entry: Remembered) -> None:
        with self._lock:
            if (old := self._known.pop(key, None)) is not None:
                self._n_tokens -= len(old.tokens)
            self._known[key] = entry
            self._n_tokens += len(entry.tokens)
            while self._n_tokens > self._most:
                self._n_tokens -= len(self._known.popitem(last=False)[1].tokens)

    def _turn_ends(self, model: Model) -> list[str]:
        if self._ends is None:
            ends = (token for token in range(model.n_vocab) if model.is_eog(token))
            self._ends = [found for token in ends if (found := _text(model, [token]))]
        return self._ends

    def _at(self, key: str) -> Remembered | None:
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
        return known


def _until(render: Render, messages: Sequence[Message], at: int) -> str:
    return render(messages[: at + 1])


def _behind(known: Remembered, text: str, ends: Sequence[str], begun: Callable[[], str]) -> str | None:
    """The part of `text` after the answer. begun: what the template writes for the conversation up to it."""
    _, length = known.prompt
    if text.startswith(known.text, length):
        return text[length + len(known.text) :]
    if not known.is_ended:
        return None
    turns = begun()
    end = max((turns.rfind(each, length) for each in ends), default=-1)
    if end < 0 or not text.startswith(turns):
        return None
    if any(each in turns[length:end] for each in known.ids):  # the model would miss them
        return None
    return text[end:]


def _text(model: Model, tokens: Sequence[int]) -> str:
    return b"".join(model.token_to_piece(token, True) for token in tokens).decode(errors="replace")


def _keys(messages: Sequence[Message], options: Mapping[str, Any]) -> Iterator[str]:
    """A key for each beginning of the conversation. Reasoning and empty fields do not count."""
    digest = hashlib.sha256(_dumped({key: value for key, value in options.items() if value is not None}))
    for message in messages:
        digest.update(_dumped(_plain(message)))
        yield digest.hexdigest()


def _plain(message: Message) -> dict[str, Any]:
    said = {key: value for key, value in message.items() if key not in ("reasoning_content", "content")}
    content = message.get("content")
    said["content"] = content_text(content) if content else ""
    calls = message.get("tool_calls")
    if isinstance(calls, Sequence) and all(isinstance(call, Mapping) for call in calls):
        said["tool_calls"] = [_plain_call(call) for call in calls]
    return {key: value for key, value in said.items() if value or key == "content"}


def _plain_call(call: Mapping[str, Any]) -> list[Any]:
    function = call.get("function") or {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):
            arguments = json.loads(arguments)
    return [call.get("id"), function.get("name"), arguments]


def _thoughts(message: Message) -> str:
    return str(message.get("reasoning_content") or "")


def _dumped(value: Any) -> bytes:
    return json.dumps(value, default=str).encode()


def _packed(tokens: array[int]) -> str:
    return base64.b64encode(tokens.tobytes()).decode()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()
