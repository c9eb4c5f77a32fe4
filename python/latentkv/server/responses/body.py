"""The body of POST /v1/responses, and the equivalent chat call."""

from __future__ import annotations

import json
import uuid
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from latentkv.errors import expected
from latentkv.server.fields import Ignored, unless_null
from latentkv.server.llama_fields import BudgetFields
from latentkv.server.responses.items import messages_of, tools_in
from latentkv.server.responses.tools import Tools
from latentkv.server.schemas import Body, ChatBody, Sampling, StreamOptions, Text
from latentkv.text import utf8

LOGPROBS = "message.output_text.logprobs"
# all other values concern items that are never written here; reasoning is not encrypted
_INCLUDED = Literal[
    "message.output_text.logprobs",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class Reasoning(Body):
    effort: str | None = None
    summary: str | None = None  # thoughts come whole
    generate_summary: str | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None  # the template decides
    mode: Literal["standard"] | None = None


class TextConfig(Body):
    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None  # no template reads it


class ResponsesIgnored(Ignored):
    client_metadata: dict[str, Any] | None = None
    max_tool_calls: int | None = None  # concerns tools that the service runs
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None


class ResponsesRefused(BaseModel):
    conversation: Annotated[Any, unless_null("none is stored; send previous_response_id, or items")] = None
    prompt: Annotated[Any, unless_null("no prompts are stored; send instructions and input")] = None
    context_management: Annotated[Any, unless_null("nothing is compacted")] = None
    background_options: Annotated[Any, unless_null("answers come in the response")] = None
    access_programs: Annotated[Any, unless_null("it is for OpenAI's models")] = None
    moderation: Annotated[Any, unless_null("nothing is moderated")] = None
    image: Annotated[Any, unless_null("models here read text")] = None


class ResponsesBody(Sampling, BudgetFields, ResponsesIgnored, ResponsesRefused):
    input: Text | list[dict[str, Any]]
    previous_response_id: Annotated[str, Field(max_length=64)] | None = None
    model: str | None = None
    instructions: Text | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_output_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig = Field(default_factory=TextConfig)
    reasoning: Reasoning = Field(default_factory=Reasoning)
    include: list[_INCLUDED] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    # llama.cpp's server's
    stop: str | list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def items(self) -> list[dict[str, Any]]:
        """The input as items in their longest form, with ids."""
        given = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        return [{"id": f"msg_{uuid.uuid4().hex}", **_longer(item)} for item in given]

    def behind(self, items: list[dict[str, Any]]) -> ResponsesBody:
        """The same, with the conversation that it goes on from."""
        return self.model_copy(update={"input": [*items, *self.items()]}) if items else self

    def as_chat(self) -> ChatBody:
        """The equivalent chat call. A response repeats much of its request, which has to be JSON in UTF-8."""
        try:
            text = json.dumps(self.model_dump(exclude={"input"}), ensure_ascii=False, allow_nan=False)
        except ValueError:
            raise expected("body", "finite numbers", "NaN or infinity") from None
        utf8(text, "body")
        fields = {name: getattr(self, name) for name in (*Sampling.model_fields, *BudgetFields.model_fields)}
        return ChatBody(
            **fields,
            messages=messages_of(self.input, self.instructions),
            max_completion_tokens=self._limit(),
            stop=self.stop,
            tools=self.offered.functions if self.tools is not None or self.offered.functions else None,
            tool_choice=self.offered.choice(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=_response_format(self.text.format),
            reasoning_effort=self.reasoning.effort,
            chat_template_kwargs=self.chat_template_kwargs,
            logprobs=self.with_logprobs or None,
            top_logprobs=self.top_logprobs,
        )

    @cached_property
    def offered(self) -> Tools:
        return Tools.of([*(self.tools or ()), *tools_in(self.input)])

    @property
    def with_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ()) or self.top_logprobs is not None

    def _limit(self) -> int | None:
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            raise expected("max_output_tokens", "at least 1", self.max_output_tokens)
        return self.max_output_tokens


def _longer(item: dict[str, Any]) -> dict[str, Any]:
    if "role" not in item or not isinstance(item.get("content"), str):
        return item
    kind = "output_text" if item["role"] == "assistant" else "input_text"
    return item | {"type": "message", "content": [{"type": kind, "text": item["content"]}]}


def _response_format(asked: dict[str, Any] | None) -> dict[str, Any] | None:
    if asked is None or asked.get("type") != "json_schema":
        return asked
    return {"type": "json_schema", "json_schema": asked}
