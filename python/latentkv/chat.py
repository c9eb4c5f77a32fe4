"""create_chat_completion: messages in, an assistant message out, in the shapes of OpenAI's chat call."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from latentkv.answer import Answer, AnswerOptions, Piece
from latentkv.completion import Counted, usage
from latentkv.errors import expected
from latentkv.generation import LogitsProcessor
from latentkv.grammar import JSON_OBJECT, LlamaGrammar
from latentkv.logprobs import chat_shape
from latentkv.sampling import SamplingOptions, require_tfs_off, token_bias
from latentkv.template import Message, content_text
from latentkv.text import stop_list, utf8

if TYPE_CHECKING:
    from latentkv.llama import Llama


def create_chat_completion(
    self: Llama,
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
) -> Any:
    """Answers `messages` ({"role", "content"}), through the template in use.

    `max_tokens` None or below 1: until the context is full. `tools` are handed to the template; a call that
    the model writes comes back as text. `response_format` {"type": "json_object"} constrains the answer to a
    JSON object. Returns a dict, or with `stream` an iterator of chunks: the role first, then the text,
    `finish_reason` in the last.
    """
    require_tfs_off(tfs_z)
    if functions is not None or function_call is not None:
        raise expected("functions", "None", "a value", "pass tools")
    if tool_choice not in (None, "none", "auto"):
        raise expected(
            "tool_choice", "None, 'none' or 'auto'", repr(tool_choice), "constrain the answer with grammar"
        )
    prompt = chat_prompt(self, messages, tools if tool_choice != "none" else None)
    answer = Answer(
        self,
        prompt,
        SamplingOptions(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            typical_p=typical_p,
            repeat_penalty=repeat_penalty,
            frequency_penalty=frequency_penalty,
            presence_penalty=presence_penalty,
            penalty_last_n=self.last_n_tokens_size,
            mirostat_mode=mirostat_mode,
            mirostat_tau=mirostat_tau,
            mirostat_eta=mirostat_eta,
            seed=self.seed if seed is None else seed,
            logit_bias=token_bias(logit_bias),
            grammar=_grammar(grammar, response_format),
        ),
        AnswerOptions(
            max_tokens=max_tokens,
            stop=stop_list(stop) + self.chat_template.stop,
            logprobs=(top_logprobs or 0) if logprobs or top_logprobs else None,
            processor=logits_processor,
        ),
    )
    shape = ChatShape(model or self.model_path, with_logprobs=bool(logprobs or top_logprobs))
    if stream:
        return shape.stream(answer)
    with self.lock:
        return shape.whole(list(answer), answer)


def chat_prompt(
    llama: Llama, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
) -> list[int]:
    """The tokens of a conversation that waits for an answer. The template writes its own start token; none is
    added."""
    template = llama.chat_template
    if not messages:
        raise expected("messages", "at least one message", "none")
    for message in messages:
        if not isinstance(message, Mapping) or "role" not in message:
            raise expected("messages", 'dicts like {"role": "user", "content": "…"}', repr(message))
        utf8(content_text(message.get("content")), "prompt")
    if tools and "tools" not in template.source:
        raise expected(
            "tools", "a chat template that takes tools", "one that never mentions them", "pass chat_template"
        )
    text = utf8(template.render(messages, tools=tools), "prompt")
    return llama.tokenize(text, add_bos=False, special=True)


def _grammar(grammar: LlamaGrammar | None, response_format: Mapping[str, Any] | None) -> LlamaGrammar | None:
    kind = (response_format or {}).get("type", "text")
    if kind == "text":
        return grammar
    if kind != "json_object" or "schema" in (response_format or {}):
        raise expected(
            "response_format",
            "text, or json_object without a schema",
            dict(response_format or {}),
            "pass grammar",
        )
    if grammar is not None:
        raise expected("response_format", "either response_format or grammar", "both")
    return LlamaGrammar(JSON_OBJECT)


class ChatShape:
    """One choice in the shapes of OpenAI's chat call."""

    def __init__(self, model: str, with_logprobs: bool, index: int = 0) -> None:
        self.head = {"id": f"chatcmpl-{uuid.uuid4()}", "model": model, "created": int(time.time())}
        self._logprobs, self._index = with_logprobs, index

    def stream(self, answer: Iterable[Piece]) -> Iterator[dict[str, Any]]:
        yield self.first()
        for piece in answer:
            yield from self.chunks(piece)

    def first(self) -> dict[str, Any]:
        return self._chunk({"role": "assistant"}, Piece(""))

    def chunks(self, piece: Piece) -> Iterator[dict[str, Any]]:
        if piece.text or (piece.tokens and piece.finish_reason is None):
            yield self._chunk({"content": piece.text}, Piece(piece.text, piece.tokens))
        if piece.finish_reason is not None:
            rest = () if piece.text else piece.tokens
            yield self._chunk({}, Piece("", rest, piece.finish_reason))

    def _chunk(self, delta: dict[str, str], piece: Piece) -> dict[str, Any]:
        choice = {
            "index": self._index,
            "delta": delta,
            "logprobs": chat_shape(piece.tokens) if self._logprobs and piece.tokens else None,
            "finish_reason": piece.finish_reason,
        }
        return {**self.head, "object": "chat.completion.chunk", "choices": [choice]}

    def whole(self, pieces: Sequence[Piece], counted: Counted) -> dict[str, Any]:
        tokens = [token for piece in pieces for token in piece.tokens]
        choice = {
            "index": self._index,
            "message": {"role": "assistant", "content": "".join(piece.text for piece in pieces)},
            "logprobs": chat_shape(tokens) if self._logprobs else None,
            "finish_reason": pieces[-1].finish_reason,
        }
        return {**self.head, "object": "chat.completion", "choices": [choice], "usage": usage(counted)}
