"""Names of llama-cpp-python's module: the shapes of OpenAI's API as Llama takes and returns them. They are
for annotations; plain dicts do."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

JsonType = None | int | str | bool | list[Any] | dict[str, Any]


class ChatCompletionRequestSystemMessage(TypedDict):
    role: Literal["system"]
    content: str | None


class ChatCompletionRequestMessageContentPartText(TypedDict):
    type: Literal["text"]
    text: str


class ChatCompletionRequestUserMessage(TypedDict):
    role: Literal["user"]
    content: str | list[ChatCompletionRequestMessageContentPartText] | None


class ChatCompletionFunctionCall(TypedDict):
    name: str
    arguments: str  # JSON


class ChatCompletionMessageToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: ChatCompletionFunctionCall


ChatCompletionMessageToolCalls = list[ChatCompletionMessageToolCall]


class _ChatCompletionRequestAssistantMessage(TypedDict, total=False):
    content: str | None
    reasoning_content: str
    tool_calls: ChatCompletionMessageToolCalls
    function_call: ChatCompletionFunctionCall


class ChatCompletionRequestAssistantMessage(_ChatCompletionRequestAssistantMessage):
    role: Literal["assistant"]


class ChatCompletionRequestToolMessage(TypedDict):
    role: Literal["tool"]
    content: str | None
    tool_call_id: str


class ChatCompletionRequestFunctionMessage(TypedDict):
    role: Literal["function"]
    content: str | None
    name: str


ChatCompletionRequestMessage = (
    ChatCompletionRequestSystemMessage
    | ChatCompletionRequestUserMessage
    | ChatCompletionRequestAssistantMessage
    | ChatCompletionRequestToolMessage
    | ChatCompletionRequestFunctionMessage
)


class _ChatCompletionFunction(TypedDict, total=False):
    description: str


class ChatCompletionFunction(_ChatCompletionFunction):
    name: str
    parameters: dict[str, Any]  # a JSON schema


class ChatCompletionTool(TypedDict):
    type: Literal["function"]
    function: ChatCompletionFunction


class ChatCompletionNamedToolChoiceFunction(TypedDict):
    name: str


class ChatCompletionNamedToolChoice(TypedDict):
    type: Literal["function"]
    function: ChatCompletionNamedToolChoiceFunction


ChatCompletionToolChoiceOption = Literal["none", "auto", "required"] | ChatCompletionNamedToolChoice


class _ChatCompletionRequestResponseFormat(TypedDict, total=False):
    schema: JsonType


class ChatCompletionRequestResponseFormat(_ChatCompletionRequestResponseFormat):
    type: Literal["text", "json_object"]


class CompletionUsage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionLogprobs(TypedDict):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(TypedDict):
    text: str
    index: int
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class _CreateCompletionResponse(TypedDict, total=False):
    usage: CompletionUsage


class CreateCompletionResponse(_CreateCompletionResponse):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]


CreateCompletionStreamResponse = CreateCompletionResponse
Completion = CreateCompletionResponse
CompletionChunk = CreateCompletionResponse


class _ChatCompletionResponseMessage(TypedDict, total=False):
    reasoning_content: str
    tool_calls: ChatCompletionMessageToolCalls
    function_call: ChatCompletionFunctionCall


class ChatCompletionResponseMessage(_ChatCompletionResponseMessage):
    role: Literal["assistant"]
    content: str | None


class ChatCompletionResponseChoice(TypedDict):
    index: int
    message: ChatCompletionResponseMessage
    logprobs: dict[str, Any] | None
    finish_reason: str | None


class CreateChatCompletionResponse(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatCompletionResponseChoice]
    usage: CompletionUsage


ChatCompletion = CreateChatCompletionResponse


class ChatCompletionStreamResponseChoice(TypedDict):
    index: int
    delta: dict[str, Any]
    logprobs: dict[str, Any] | None
    finish_reason: str | None


class CreateChatCompletionStreamResponse(TypedDict):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatCompletionStreamResponseChoice]


ChatCompletionChunk = CreateChatCompletionStreamResponse


class Embedding(TypedDict):
    index: int
    object: Literal["embedding"]
    embedding: list[float] | list[list[float]]


class EmbeddingUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class CreateEmbeddingResponse(TypedDict):
    object: Literal["list"]
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage
