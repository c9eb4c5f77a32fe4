"""create_chat_completion: messages in, an assistant message out, in the shapes of OpenAI's chat call."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from latentkv import _core
from latentkv.chat.messages import Message
from latentkv.chat.prompt import chat_request
from latentkv.chat.tools import ToolUse
from latentkv.errors import expected
from latentkv.generate.answer import Answer, AnswerOptions, Piece
from latentkv.generate.completion import Counted, framed, usage
from latentkv.generate.loop import LogitsProcessor
from latentkv.sampling.grammar import LlamaGrammar
from latentkv.sampling.logprobs import TokenScore, chat_shape
from latentkv.sampling.options import SamplingOptions, require_tfs_off, server_options, token_bias
from latentkv.text import stop_list

if TYPE_CHECKING:
    from latentkv._core import ChatParser
    from latentkv.open_model import OpenModel


def chat_prompt(
    llama: OpenModel, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
) -> list[int]:
    """The tokens of a conversation that waits for an answer."""
    return chat_request(llama.model, llama.chat_template, messages, ToolUse.of(tools, None)).tokens


def create_chat_completion(
    self: OpenModel,
    messages: Sequence[Message],
    functions: Sequence[Mapping[str, Any]] | None = None,
    function_call: str | Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: str | Mapping[str, Any] | None = None,
    temperature: float = 0.2,
    top_p: float = 0.95,
    top_k: int = 40,
    min_p: float = 0.05,
    typical_p: float = 1.0,
    stream: bool = False,
    stop: str | Sequence[str] | None = None,
    seed: int | None = None,
    response_format: Mapping[str, Any] | None = None,
    max_tokens: int | None = None,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    repeat_penalty: float = 1.0,
    tfs_z: float = 1.0,
    mirostat_mode: int = 0,
    mirostat_tau: float = 5.0,
    mirostat_eta: float = 0.1,
    model: str | None = None,
    logits_processor: LogitsProcessor | None = None,
    grammar: LlamaGrammar | None = None,
    logit_bias: Mapping[int, float] | Mapping[str, float] | None = None,
    logprobs: bool | None = None,
    top_logprobs: int | None = None,
    *,
    parallel_tool_calls: bool | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    continue_final_message: bool | str = False,
    reasoning_format: str = "auto",
    **server: Any,
) -> Any:
    """Answers `messages` ({"role", "content"}), through the template in use.

    `max_tokens` None or below 1: until the context is full. `tools` are handed to the template; a call that
    the model writes comes back as the message's `tool_calls`, with the finish_reason "tool_calls".
    `tool_choice` "auto" constrains a call once it has begun, "required" and a named function ({"type":
    "function", "function": {"name"}}) force one, "none" hides the tools; `functions` and `function_call`
    are the same in OpenAI's older shape. `response_format` constrains the answer to a JSON object or a
    schema. What a model thinks before it answers is the message's `reasoning_content` (`reasoning_format`
    "none" leaves it in the text); `chat_template_kwargs` are variables of the template, as
    {"enable_thinking": False}. `continue_final_message` goes on with a last assistant's message, which the
    answer does not repeat. `server` as in create_completion. Returns a dict, or with `stream` an iterator
    of chunks: the role first, then the deltas, `finish_reason` in the last.
    """
    require_tfs_off(tfs_z)
    use = ToolUse.of(tools, tool_choice, functions, function_call)
    prompt = chat_request(
        self.model,
        self.chat_template,
        messages,
        use,
        grammar,
        response_format,
        parallel_tool_calls=parallel_tool_calls,
        chat_template_kwargs=chat_template_kwargs,
        continue_final_message=continue_final_message or None,
        reasoning_format=reasoning_format,
    )
    answer = Answer(
        self,
        prompt.tokens,
        SamplingOptions(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            typical_p=typical_p,
            repeat_penalty=repeat_penalty,
            frequency_penalty=frequency_penalty,
            presence_penalty=presence_penalty,
            mirostat_mode=mirostat_mode,
            mirostat_tau=mirostat_tau,
            mirostat_eta=mirostat_eta,
            seed=self.seed if seed is None else seed,
            logit_bias=token_bias(logit_bias),
            grammar=prompt.grammar,
            **server_options("create_chat_completion", server, self.last_n_tokens_size, self.n_ctx()),
        ),
        AnswerOptions(
            max_tokens=max_tokens,
            stop=stop_list(stop) + prompt.stop,
            logprobs=(top_logprobs or 0) if logprobs or top_logprobs else None,
            processor=logits_processor,
            shown=prompt.shown,
        ),
    )
    shape = ChatShape(
        model or self.model_path,
        prompt.parser,
        with_logprobs=bool(logprobs or top_logprobs),
        as_function=use.as_function,
    )
    if stream:
        return shape.stream(answer)
    with self.lock:
        return shape.whole(list(answer), answer)


def create_chat_completion_openai_v1(self: OpenModel, *args: Any, **kwargs: Any) -> Any:
    """create_chat_completion() whose answers are the objects of the openai package: a ChatCompletion, or with
    `stream` an iterator of ChatCompletionChunk."""
    try:
        from openai.types.chat import ChatCompletion, ChatCompletionChunk
    except ImportError:
        raise expected(
            "openai", "the package openai", "none", "pip install openai, or call create_chat_completion()"
        ) from None
    answer = create_chat_completion(self, *args, **kwargs)
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
    for who asked with functions."""

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
