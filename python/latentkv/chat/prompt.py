"""Turns the arguments of a chat call into the model's input: tokens, a grammar, and the parser of the
answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from latentkv.chat.memory import AnswerMemory
from latentkv.chat.messages import Message, plain_messages
from latentkv.chat.template import ChatTemplate
from latentkv.chat.thoughts import ThoughtTags
from latentkv.chat.tools import Tools, ToolUse, is_strict
from latentkv.chat.untagged import UntaggedParser
from latentkv.errors import expected
from latentkv.sampling.grammar import LlamaGrammar
from latentkv.text import utf8

if TYPE_CHECKING:
    from latentkv._core import ChatParser, Model


@dataclass(frozen=True)
class ChatPrompt:
    """`shown` are special tokens that the parser reads in the answer. `remember` takes the answer's message,
    its tokens, and the one by which the model ended it, if one did."""

    tokens: list[int]
    grammar: LlamaGrammar | None
    shown: frozenset[int]
    stop: list[str]
    parser: ChatParser
    thoughts: ThoughtTags | None = None
    text: str = ""  # text of the tokens, without those that the vocabulary adds
    remember: Callable[[Message, Sequence[int], int | None], None] | None = None


def chat_request(
    model: Model,
    template: ChatTemplate,
    messages: Sequence[Message],
    use: ToolUse | None = None,
    grammar: LlamaGrammar | None = None,
    response_format: Mapping[str, Any] | None = None,
    check_length: Callable[[int], None] | None = None,
    memory: AnswerMemory | None = None,
    salt: str = "",
    **options: Any,
) -> ChatPrompt:
    """The model's input for an answer to `messages`.

    check_length: may refuse a text of this many bytes before it is tokenized. memory: earlier answers, which
    keep the tokens that the model wrote; salt: whose of them count. options: those of
    ChatTemplates.apply that the calls pass on: parallel_tool_calls, chat_template_kwargs,
    continue_final_message, reasoning_format."""
    use = use or ToolUse()
    schema = response_schema(response_format)
    offered = use.tools
    if grammar is not None and (offered or schema is not None):
        raise expected("grammar", "no tools and no response_format beside it", "both")
    if options.get("parallel_tool_calls") is None and (use.is_named or not template.takes_tools):
        options["parallel_tool_calls"] = False
    written: dict[str, Any] = {
        "json_schema": schema,
        **options,
    }
    if use.shown:
        choice = use.choice if offered else "none"
        written |= {"tools": list(use.shown), "allowed": list(offered), "tool_choice": choice}
    seen = _seen(written) | ({"salt": salt} if salt else {})
    if memory is not None:
        messages = memory.with_thoughts(plain_messages(messages), seen)
    rendered = template.apply(messages, **written)
    grammar = grammar or _grammar(rendered.grammar, use, schema, options.get("parallel_tool_calls") is False)
    if grammar is not None:
        grammar.prepare(model)
    text = utf8(rendered.text, "prompt")
    if check_length is not None:
        check_length(len(text))
    tokens = _known(model, template, messages, written, seen, rendered.text, memory)
    if tokens is None:
        tokens = list(model.tokenize(text, True, True))
    asked = (messages, seen, rendered.text, tokens)
    return ChatPrompt(
        tokens=tokens,
        grammar=grammar,
        shown=_special_tokens(model, rendered.special),
        stop=list(rendered.stop),
        parser=_parser(rendered.parser, use, offered, schema, options),
        thoughts=rendered.thoughts,
        text=rendered.text,
        remember=None if memory is None else partial(memory.remember, model, asked),
    )


def _grammar(
    written: LlamaGrammar | None, use: ToolUse, schema: Mapping[str, Any] | None, is_single: bool
) -> LlamaGrammar | None:
    """What constrains the answer. written: the grammar that llama.cpp made for the template. is_single: an
    answer has one call at most.

    Raises:
        LatentKVError: the template's calls and the schema exclude each other, or llama.cpp knows no calls of
            the template and one is required.
    """
    if written is None and use.tools and use.choice == "required":
        raise expected(
            "tool_choice",
            "a chat template whose calls llama.cpp can read",
            "one whose calls it does not know",
            "pass chat_format='chatml-function-calling'",
        )
    if written is None:  # the template has no place for a schema
        return None if schema is None else LlamaGrammar.from_json_schema(schema)
    if schema is not None and not written.schemas:
        raise expected("response_format", "no tools beside it, with this chat template", "both")
    if use.tools and is_single:
        written = called_once(written)
    return called_at_once(written, use.tools) if use.choice == "required" else written


def _known(
    model: Model,
    template: ChatTemplate,
    messages: Sequence[Message],
    written: Mapping[str, Any],
    seen: Mapping[str, Any],
    text: str,
    memory: AnswerMemory | None,
) -> list[int] | None:
    """The tokens of the text if it continues a remembered answer."""
    if memory is None or written.get("continue_final_message"):
        return None

    def render(begun: Sequence[Message]) -> str:
        return template.apply(begun, **{**written, "add_generation_prompt": False}).text

    return memory.tokens(model, messages, seen, text, render)


def _seen(written: Mapping[str, Any]) -> dict[str, Any]:
    """The template options that stay the same while a conversation goes on."""
    return {key: value for key, value in written.items() if key in ("tools", "chat_template_kwargs")}


def _parser(
    native: ChatParser,
    use: ToolUse,
    offered: Tools,
    schema: Mapping[str, Any] | None,
    options: Mapping[str, Any],
) -> ChatParser:
    """The parser of the answer. It also reads calls without tags, if the model is free to write them."""
    if use.choice != "auto" or not offered or schema is not None or options.get("continue_final_message"):
        return native
    names = [str(tool.get("function", {}).get("name")) for tool in offered]
    functions = [tool["function"] for tool in offered if is_strict(tool)]
    strict = {each["name"]: {**each["parameters"], "type": "object"} for each in functions}
    several = options.get("parallel_tool_calls") is not False
    return UntaggedParser(native, names, several, strict)


def called_once(grammar: LlamaGrammar) -> LlamaGrammar:
    """llama.cpp's grammar of calls without those after the first. It allows them where a template marks each
    by itself."""
    rule = re.compile(r"^tool-calls ::= \(tool-call(\??) space\)\+$", re.MULTILINE)
    return _with(grammar, rule.sub(r"tool-calls ::= tool-call\1", grammar.text), grammar.json_schema)


def called_at_once(grammar: LlamaGrammar, tools: Tools) -> LlamaGrammar:
    """llama.cpp's grammar of a required call of one of the tools, without the text that it lets a model write
    before, which a small model never ends. Thoughts may still come first. A call is closed before it has no
    room left."""
    text = re.sub(r"^(root ::= .*?)until-\d+\? (?=tool-calls?$)", r"\1", grammar.text, flags=re.MULTILINE)
    return _with(grammar, text, {"anyOf": [_call_schema(tool["function"]) for tool in tools]})


def _with(grammar: LlamaGrammar, text: str, json_schema: Mapping[str, Any] | None) -> LlamaGrammar:
    return LlamaGrammar(
        text,
        grammar.root,
        lazy=grammar.lazy,
        triggers=grammar.triggers,
        prefix=grammar.prefix,
        schemas=grammar.schemas,
        json_schema=json_schema,
    )


def _call_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a call as most templates write it."""
    properties = {"name": {"const": function.get("name")}, "arguments": function.get("parameters")}
    return {"type": "object", "properties": properties, "required": list(properties)}


def response_schema(response_format: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The JSON schema that `response_format` asks for, in OpenAI's shapes or llama-cpp-python's
    ({"type": "json_object", "schema": …}); None for text."""
    asked = response_format or {}
    if not isinstance(asked, Mapping):
        raise expected("response_format", 'a dict such as {"type": "json_object"}', repr(asked))
    kind = asked.get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        schema = asked.get("schema")
    elif kind == "json_schema" and isinstance(asked.get("json_schema"), Mapping):
        schema = asked["json_schema"].get("schema")
    else:
        raise expected(
            "response_format",
            "text, json_object (with a schema or without), or json_schema with a json_schema",
            dict(asked),
        )
    if not isinstance(schema, Mapping | None):
        raise expected("response_format", "a schema that is a JSON object", repr(schema))
    return schema or {"type": "object"}


def _special_tokens(model: Model, texts: Sequence[str]) -> frozenset[int]:
    ids = (model.tokenize(text.encode(), False, True) for text in texts)
    return frozenset(tokens[0] for tokens in ids if len(tokens) == 1)
