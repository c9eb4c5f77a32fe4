"""create_chat_completion: messages in, an assistant message out, in the shapes of OpenAI's chat call."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from latentkv import _core
from latentkv.chat.messages import Message
from latentkv.chat.prompt import ChatPrompt, chat_request
from latentkv.chat.tools import ToolUse
from latentkv.errors import expected
from latentkv.generate.answer import Answer, AnswerOptions
from latentkv.generate.caller import Caller
from latentkv.generate.completion import Counted, framed, usage
from latentkv.generate.writer import Piece
from latentkv.sampling.logprobs import TokenScore, chat_shape
from latentkv.sampling.options import SamplingOptions

if TYPE_CHECKING:
    from latentkv._core import ChatParser


def chat_prompt(
    llama: Caller, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
) -> list[int]:
    """The tokens of a conversation that waits for an answer."""
    return chat_request(llama.model, llama.chat_template, messages, ToolUse.of(tools, None)).tokens


def chat(
    llama: Caller,
    prompt: ChatPrompt,
    sampling: SamplingOptions,
    options: AnswerOptions,
    *,
    as_function: bool = False,
    stream: bool = False,
    name: str | None = None,
) -> Any:
    """Answers a conversation. as_function: the first call is the message's `function_call` too; name: of the
    model, where the answer says it. Returns a dict, or with `stream` an iterator of chunks."""
    answer = Answer(llama, prompt.tokens, sampling, options)
    shape = ChatShape(
        name or llama.model_path,
        prompt.parser,
        with_logprobs=options.logprobs is not None,
        as_function=as_function,
    )
    if stream:
        return shape.stream(answer)
    with llama.evaluator.lock:
        return shape.whole(list(answer), answer)


def openai_objects(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a chat call returns, as the objects of the openai package."""
    try:
        from openai.types.chat import ChatCompletion, ChatCompletionChunk
    except ImportError:
        raise expected(
            "openai", "the package openai", "none", "pip install openai, or call create_chat_completion()"
        ) from None
    answer = call(*args, **kwargs)
    if isinstance(answer, Mapping):
        return ChatCompletion.model_validate(answer)
    return (ChatCompletionChunk.model_validate(chunk) for chunk in answer)


class MessageStream:
    """An answer's text as it grows, read as OpenAI's deltas."""

    def __init__(self, parser: ChatParser) -> None:
        self._native = parser.stream()

    def push(self, text: str) -> list[str]:
        """What `text` adds: {"content"}, {"reasoning_content"} or {"tool_calls"}, JSON each."""
        return self._native.push(text)

    def end(self, finish_reason: str) -> list[str]:
        """What was held back. Text that broke off, or that is no call although it began as one, stays as it
        was read so far."""
        try:
            return self._native.push("", finish_reason == "length")
        except _core.Error:
            return []

    @property
    def message(self) -> dict[str, Any]:
        """The whole message so far."""
        message: dict[str, Any] = json.loads(self._native.message)
        return message

    def finish_reason(self, reason: str) -> str:
        """`reason`, or that the answer ended with calls: whole ones, which no stop string cut."""
        if reason != "stop" or not self._native.has_tool_calls:
            return reason
        calls = self.message.get("tool_calls", ())
        return "tool_calls" if all(_is_json(call["function"]["arguments"]) for call in calls) else reason


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


class ChatShape:
    """One choice in the shapes of OpenAI's chat call. as_function: the first call as `function_call` too,
    for requests with functions."""

    def __init__(
        self,
        model: str,
        parser: ChatParser,
        with_logprobs: bool,
        index: int = 0,
        as_function: bool = False,
    ) -> None:
        self.on_message: Callable[[dict[str, Any]], None] | None = None  # takes the whole one, at its end
        self.head = {"id": f"chatcmpl-{uuid.uuid4()}", "model": model, "created": int(time.time())}
        self._logprobs, self._index = with_logprobs, index
        self._message = MessageStream(parser)
        self._as_function = as_function
        self._frame: tuple[str, str] | None = None  # of a chunk that is a delta and nothing else
        self._waiting: list[TokenScore] = []  # tokens whose text no delta has shown yet

    def stream(self, answer: Iterable[Piece]) -> Iterator[dict[str, Any]]:
        yield self.first()
        for piece in answer:
            yield from self.chunks(piece)

    def first(self) -> dict[str, Any]:
        return self._chunk({"role": "assistant"}, None)

    def chunks(self, piece: Piece) -> Iterator[dict[str, Any]]:
        self._waiting += piece.tokens
        deltas = self._message.push(piece.text) if piece.text else []
        if piece.finish_reason is not None:
            deltas += self._message.end(piece.finish_reason)
        for delta in deltas:
            yield self._chunk(self._older(json.loads(delta)), None)
        if piece.finish_reason is not None:
            if self.on_message is not None:
                self.on_message(self._message.message)
            yield self._chunk({}, self._finish_reason(piece.finish_reason))

    def lines(self, piece: Piece) -> list[str]:
        """chunks() as JSON."""
        if self._logprobs or self._as_function or piece.finish_reason is not None:
            return [json.dumps(chunk, ensure_ascii=False) for chunk in self.chunks(piece)]
        if self._frame is None:
            self._frame = framed(self._chunk({"": ""}, None), '{"": ""}')
        before, behind = self._frame
        deltas = self._message.push(piece.text) if piece.text else []
        return [f"{before}{delta}{behind}" for delta in deltas]

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
        tokens, self._waiting = self._waiting, []
        choice = {
            "index": self._index,
            "delta": delta,
            "logprobs": chat_shape(tokens) if self._logprobs and tokens else None,
            "finish_reason": finish_reason,
        }
        return {**self.head, "object": "chat.completion.chunk", "choices": [choice]}

    def whole(self, pieces: Sequence[Piece], counted: Counted) -> dict[str, Any]:
        reason = pieces[-1].finish_reason or "stop"
        self._message.push("".join(piece.text for piece in pieces))
        self._message.end(reason)
        if self.on_message is not None:
            self.on_message(self._message.message)
        tokens = [token for piece in pieces for token in piece.tokens]
        choice = {
            "index": self._index,
            "message": self._older(self._message.message),
            "logprobs": chat_shape(tokens) if self._logprobs else None,
            "finish_reason": self._finish_reason(reason),
        }
        return {**self.head, "object": "chat.completion", "choices": [choice], "usage": usage(counted)}

    def _older(self, message: dict[str, Any]) -> dict[str, Any]:
        if self._as_function and message.get("tool_calls"):
            message["function_call"] = message["tool_calls"][0]["function"]
        return message

    def _finish_reason(self, reason: str) -> str:
        read = self._message.finish_reason(reason)
        return "function_call" if self._as_function and read == "tool_calls" else read
