"""The body of POST /v1/messages, and the equivalent chat call."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from latentkv.errors import expected
from latentkv.server.fields import unless_null
from latentkv.server.llama_fields import BudgetFields
from latentkv.server.messages.blocks import messages_of
from latentkv.server.messages.tools import functions
from latentkv.server.schemas import Body, ChatBody, Sampling


class Thinking(Body):
    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: Annotated[int, Field(ge=0)] | None = None
    block_binding: Any = None  # thoughts are not signed
    display: Literal["summarized", "omitted", "updates"] | None = None


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class OutputConfig(Body):
    effort: str | None = None
    format: dict[str, Any] | None = None
    task_budget: dict[str, Any] | None = None  # is not enforced


class MessagesIgnored(BaseModel):
    """Parameters of Anthropic's service that change no answer. No context is edited, and no other model
    answers."""

    billing_policy: str | None = None
    cache_control: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    diagnostics: dict[str, Any] | None = None
    fallback_credit_token: str | None = None
    fallbacks: list[dict[str, Any]] | str | None = None
    inference_geo: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    speed: str | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None


class MessagesRefused(BaseModel):
    container: Annotated[Any, unless_null("nothing here runs code")] = None
    mcp_servers: Annotated[Any, unless_null("nothing here calls other servers")] = None


class CountBody(Sampling, BudgetFields, MessagesIgnored, MessagesRefused):
    """The fields that make up a prompt."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # llama.cpp's server's

    def as_chat(self, **more: Any) -> ChatBody:
        """The equivalent chat call. As in Anthropic's interface, the answer continues a last message of the
        assistant."""
        fields = {name: getattr(self, name) for name in (*Sampling.model_fields, *BudgetFields.model_fields)}
        if self.budget(-1) < 0 and self.thinking is not None and self.thinking.type != "disabled":
            fields["reasoning_budget_tokens"] = (
                -1 if self.thinking.budget_tokens is None else self.thinking.budget_tokens
            )
        choice = self.tool_choice
        config = self.output_config or OutputConfig()
        return ChatBody(
            **fields,
            **more,
            messages=messages_of(self.messages, self.system),
            continue_final_message=self.messages[-1].get("role") == "assistant",
            tools=None if self.tools is None else functions(self.tools),
            tool_choice=None if choice is None else _tool_choice(choice),
            parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
            response_format=_response_format(config.format),
            reasoning_effort=config.effort,
            chat_template_kwargs=self._template_kwargs(),
        )

    def _template_kwargs(self) -> dict[str, Any] | None:
        if self.thinking is None:
            return self.chat_template_kwargs
        return {"enable_thinking": self.thinking.type != "disabled"} | (self.chat_template_kwargs or {})


class MessagesBody(CountBody):
    max_tokens: int | None = None  # optional, as in llama.cpp's server
    stop_sequences: list[str] | None = None
    stream: bool = False

    def as_chat(self, **more: Any) -> ChatBody:
        return super().as_chat(max_tokens=self.max_tokens, stop=self.stop_sequences, **more)

    @property
    def omits_thoughts(self) -> bool:
        return self.thinking is not None and self.thinking.display == "omitted"


def _tool_choice(choice: ToolChoice) -> str | dict[str, Any]:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type


def _response_format(asked: dict[str, Any] | None) -> dict[str, Any] | None:
    if asked is None:
        return None
    if asked.get("type") != "json_schema" or not isinstance(asked.get("schema"), dict):
        raise expected("output_config", "a format of the type json_schema with a schema", repr(asked))
    return {"type": "json_schema", "json_schema": {"schema": asked["schema"]}}
