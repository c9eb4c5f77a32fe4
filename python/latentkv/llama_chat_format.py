"""Names of llama-cpp-python's module: formatters, which write a conversation as a prompt. A Llama needs none:
its file has a template, or `chat_format` and `chat_template` choose one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from latentkv.chat.formats import BUILT_IN
from latentkv.chat.messages import Message
from latentkv.chat.template import ChatTemplate
from latentkv.errors import expected, no_name
from latentkv.generate.processors import StoppingCriteriaList

__all__ = ["ChatFormatter", "ChatFormatterResponse", "Jinja2ChatFormatter"]

_FORMAT = "format_"  # names of BUILT_IN behind it: format_llama2, format_chatml


@dataclass
class ChatFormatterResponse:
    """prompt: text, with special tokens as their texts. added_special: the start token is among them."""

    prompt: str
    stop: str | list[str] | None = None
    stopping_criteria: StoppingCriteriaList | None = None
    added_special: bool = False


class ChatFormatter(Protocol):
    def __call__(self, *, messages: Sequence[Message], **kwargs: Any) -> ChatFormatterResponse: ...


class Jinja2ChatFormatter:
    """A chat template as Hugging Face writes it."""

    def __init__(
        self,
        template: str,
        eos_token: str,
        bos_token: str,
        add_generation_prompt: bool = True,
        stop_token_ids: Sequence[int] | None = None,
    ) -> None:
        self._template = ChatTemplate(template, bos_token=bos_token, eos_token=eos_token)
        self._eos_token, self._add_generation_prompt = eos_token, add_generation_prompt
        self._ends = frozenset(stop_token_ids or ())

    def __call__(
        self,
        *,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        functions: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> ChatFormatterResponse:
        """kwargs: variables of the template, as enable_thinking."""
        if functions:
            raise expected("functions", "tools in their place", "functions")
        text = self._template.apply(
            messages,
            add_generation_prompt=self._add_generation_prompt,
            tools=tools,
            tool_choice="none" if tools else None,
            chat_template_kwargs=kwargs or None,
        ).text
        return ChatFormatterResponse(text, [self._eos_token], self._criteria(), True)

    def _criteria(self) -> StoppingCriteriaList | None:
        ends = self._ends
        return StoppingCriteriaList([lambda ids, logits: int(ids[-1]) in ends]) if ends else None

    def to_chat_handler(self) -> NoReturn:
        raise expected(
            "chat_handler",
            "chat_template, the text of the template",
            "a handler",
            "Llama(…, chat_template=…)",
        )


_HANDLER = "images are not run here; of a model's text Llama(…, chat_format=…) or chat_template= decides"
_INSTEAD = {
    "LlamaChatCompletionHandler": "pass chat_template, the text of a Jinja template",
    "LlamaChatCompletionHandlerRegistry": "pass chat_template, the text of a Jinja template",
    "register_chat_format": "pass chat_template, the text of a Jinja template",
    "register_chat_completion_handler": "pass chat_template, the text of a Jinja template",
    "get_chat_completion_handler": "call Llama.create_chat_completion",
    "chat_formatter_to_chat_completion_handler": "pass chat_template, the text of a Jinja template",
    "hf_autotokenizer_to_chat_formatter": "use Jinja2ChatFormatter with the tokenizer's chat_template",
    "hf_autotokenizer_to_chat_completion_handler": "pass chat_template, the tokenizer's",
    "hf_tokenizer_config_to_chat_formatter": "use Jinja2ChatFormatter with the configuration's chat_template",
    "hf_tokenizer_config_to_chat_completion_handler": "pass chat_template, the configuration's",
    "functionary_chat_handler": "pass tools to Llama.create_chat_completion",
    "chatml_function_calling": 'pass chat_format="chatml-function-calling"',
}


def __getattr__(name: str) -> Callable[..., ChatFormatterResponse]:
    found = {_plain(each): each for each in BUILT_IN}.get(_plain(name.removeprefix(_FORMAT)))
    if name.startswith(_FORMAT) and found is not None:
        return _formatter(*BUILT_IN[found])
    if name.startswith(_FORMAT):
        known = ", ".join(f"{_FORMAT}{each.replace('-', '_')}" for each in BUILT_IN)
        raise no_name(__name__, name, {name: f"{known} are here, and Jinja2ChatFormatter takes any template"})
    raise no_name(__name__, name, {name: _HANDLER} if name.endswith("ChatHandler") else _INSTEAD)


def _plain(name: str) -> str:
    return name.replace("-", "").replace("_", "")


def _formatter(template: str, end: str) -> Callable[..., ChatFormatterResponse]:
    def formatted(messages: Sequence[Message], **kwargs: Any) -> ChatFormatterResponse:
        text = ChatTemplate(template, eos_token=end, stop=[end]).render(messages)
        return ChatFormatterResponse(text, end)

    return formatted
