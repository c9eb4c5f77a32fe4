"""Chat templates: Jinja as Hugging Face writes it, rendered by llama.cpp's own code, which also reads the
answers."""

from __future__ import annotations

import datetime
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from latentkv import _core
from latentkv.chat import bare, borrowed
from latentkv.chat.formats import BUILT_IN
from latentkv.chat.forms import forms, n_lost
from latentkv.chat.holes import Holes
from latentkv.chat.messages import Message, plain_messages
from latentkv.chat.thoughts import ThoughtTags
from latentkv.chat.tools import is_strict, plain_tools, shown
from latentkv.chat.typed import typed
from latentkv.errors import expected
from latentkv.sampling.grammar import LlamaGrammar
from latentkv.sampling.schema import checked
from latentkv.text import utf8

if TYPE_CHECKING:
    from latentkv._core import ChatParser, Model


@dataclass(frozen=True)
class RenderedChat:
    """A conversation ready for the model. `text` is tokenized with special tokens parsed and those added
    that the vocabulary adds; `special` are texts of special tokens that the parser reads in the answer."""

    text: str
    grammar: LlamaGrammar | None
    special: Sequence[str]
    stop: Sequence[str]
    parser: ChatParser
    thoughts: ThoughtTags | None = None


class ChatTemplate:
    """One compiled template. `stop` are texts that end a turn and that the vocabulary may not know as end
    tokens."""

    def __init__(
        self,
        source: str = "",
        bos_token: str = "",
        eos_token: str = "",
        stop: Sequence[str] = (),
        model: Model | None = None,
        now: Callable[[], datetime.datetime] | None = None,
    ) -> None:
        """`source` "" is the model's own. With a `model` its vocabulary has the tokens. `now`, for a
        `source`: the date that it writes; None: the clock's."""
        self._dates: dict[str, str] = {}
        if now is not None:
            source, self._dates = _dated(source, now())
        self.stop = list(stop)
        self._native = _core.ChatTemplates(model, source, bos_token=bos_token, eos_token=eos_token)

    @property
    def source(self) -> str:
        return self._native.source

    @property
    def capabilities(self) -> Mapping[str, bool]:
        """supports_tools, supports_tool_calls, supports_system_role, supports_parallel_tool_calls, …"""
        return self._native.capabilities

    @property
    def thinks(self) -> bool:
        """Whether it tells thoughts from answers."""
        return self._native.supports_thinking

    def apply(self, messages: Sequence[Message], **options: Any) -> RenderedChat:
        """`options` are those of ChatTemplates.apply (_core.pyi): tools, tool_choice, json_schema,
        chat_template_kwargs, …; None leaves one out. `allowed` are the tools that may be called, by default
        all of `tools`. Template errors become LatentKVError."""
        if self._dates:
            options["chat_template_kwargs"] = self._dates | dict(options.get("chat_template_kwargs") or {})
        request = {key: value for key, value in options.items() if value is not None}
        request["messages"] = plain_messages(messages)
        tools = plain_tools(request.get("tools") or ())
        allowed = plain_tools(request.pop("allowed", tools))
        if tools:
            request["tools"] = [shown(tool) for tool in tools]
        holes = Holes()
        schema = request.get("json_schema")
        if schema is not None:
            request["json_schema"] = holes.mark(checked(schema))
        marked = request
        choice = request.get("tool_choice")
        if tools and choice != "none":
            marks = [holes.tool(shown(tool), choice == "required" or is_strict(tool)) for tool in allowed]
            marked = request | {"tools": marks}
        # without a choice the template shows the tools, and llama.cpp makes no grammar of them
        seen = request if marked is request else request | {"tool_choice": "none"}
        native = self._native
        if not self.takes_tools and (tools or borrowed.has_calls(request["messages"])):
            seen = {key: value for key, value in seen.items() if key not in ("tools", "tool_choice")}
            seen["messages"] = borrowed.as_text(request["messages"], request.get("tools") or ())
            native = borrowed.caller()
        text, seen = self._accepted(seen)
        if marked is not request and native is self._native:
            marked = {**marked, "messages": seen["messages"], "chat_template_kwargs": _with_tools(seen)}
        prompt = text if marked is request else native.apply(_json(marked))
        if marked is not request and not prompt["grammar"] and choice != "required":
            prompt = _bare(native, marked, prompt, text, holes.has_strict)
        grammar, schemas = holes.filled(prompt["grammar"])
        return RenderedChat(
            text=text["prompt"] if schema is None else holes.shown(text["prompt"], schema),
            grammar=LlamaGrammar(
                grammar,
                lazy=prompt["grammar_lazy"],
                triggers=prompt["grammar_triggers"],
                prefix=prompt["generation_prompt"] if prompt["grammar_from_generation_prompt"] else "",
                schemas=schemas,
                json_schema=schema,
            )
            if grammar
            else None,
            special=prompt["preserved_tokens"],
            stop=list(dict.fromkeys([*self.stop, *text["additional_stops"], *prompt["additional_stops"]])),
            parser=prompt["parser"],
            thoughts=ThoughtTags.of(text),
        )

    def _accepted(self, request: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """What the template writes, and the request in the form of which it writes all: as given wherever it
        can. Raises what the template says of the request as given, if it takes no form."""
        refused, least, found = None, len(request["messages"]) + 1, None
        given = request["messages"]
        tools = request.get("tools")
        for shape in [request, request | {"tools": typed(tools)}] if tools else [request]:
            for messages in forms(given):
                tried = {**shape, "messages": messages}
                try:
                    text = self._native.apply(_json(tried))
                except _core.Error as error:
                    if not str(error).startswith("[chat template]"):
                        raise
                    refused = refused or error
                    continue
                lost = n_lost(given, text["prompt"])
                if lost < least:
                    least, found = lost, (text, tried)
                if not lost:
                    break
            if found is not None:
                return found
        assert refused is not None
        raise refused

    @cached_property
    def takes_tools(self) -> bool:
        """Whether the template tells a model of tools, and llama.cpp knows how its calls are written."""
        return self.capabilities["supports_tools"] and self.capabilities["supports_tool_calls"]

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The rendered text only."""
        return self.apply(messages, add_generation_prompt=add_generation_prompt, tools=tools).text


def _with_tools(seen: Mapping[str, Any]) -> dict[str, Any]:
    """The template's variables, with the tools as the prompt shows them: in a request with marks, the
    template would read these."""
    tools = [{**tool, "function": {"description": "", **tool["function"]}} for tool in seen["tools"]]
    return {"tools": tools, **(seen.get("chat_template_kwargs") or {})}


def _bare(
    native: _core.ChatTemplates,
    marked: Mapping[str, Any],
    prompt: dict[str, Any],
    text: Mapping[str, Any],
    is_strict: bool,
) -> dict[str, Any]:
    """What an answer is whose calls have no mark. prompt, text: what ChatTemplates.apply() says of an answer
    that may call, and of one that may not."""
    required = native.apply(_json({**marked, "tool_choice": "required"}))
    grammar = bare.call_or_text(required["grammar"])
    if grammar is None and is_strict:
        raise expected(
            "tools",
            "a chat template whose calls llama.cpp can read, for a strict function",
            "one whose calls it does not know",
            "pass strict=False, or chat_format='chatml-function-calling'",
        )
    if grammar is None:
        return prompt
    names = [str(tool["function"]["name"]) for tool in marked["tools"]]
    parser = bare.BareParser(prompt["parser"], text["parser"], names, required["grammar"], not is_strict)
    return {**(required if is_strict else prompt), "grammar": grammar if is_strict else "", "parser": parser}


def _dated(source: str, now: datetime.datetime) -> tuple[str, dict[str, str]]:
    """The template with its calls of strftime_now answered, and the dates that llama.cpp hands to every
    one."""
    call = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")
    dates = {"datetime": now.strftime("%b %d %Y"), "date_string": now.strftime("%d %b %Y")}
    return call.sub(lambda found: json.dumps(now.strftime(found[2])), source), dates


def require_built_in(name: str | None) -> None:
    """Refuses a `chat_format` that is no built-in template's name."""
    if name is not None and name not in BUILT_IN:
        raise expected(
            "chat_format",
            f"None (the file's own) or one of {', '.join(BUILT_IN)}",
            repr(name),
            "pass chat_template",
        )


def template_of(model: Model, name: str | None = None, source: str | None = None) -> ChatTemplate:
    """The template to use: `source`, else the built-in `name`, else the file's, else ChatML with a
    warning."""
    require_built_in(name)
    if source is not None:
        return ChatTemplate(source, model=model)
    if name is None and model.chat_template is not None:
        return ChatTemplate(model=model)
    if name is None:
        model.token_bos()  # raises for a file without a vocabulary, where the warning would mislead
        print("warning: the file has no chat template; using ChatML", file=sys.stderr)
    source, stop = BUILT_IN[name or "chatml"]
    return ChatTemplate(source, stop=[stop], model=model)


def _json(request: Mapping[str, Any]) -> str:
    try:
        text = json.dumps(request, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise expected("messages", "values that JSON has", " ".join(str(error).split())) from None
    utf8(text, "prompt")
    return text
