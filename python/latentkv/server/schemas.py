"""Bodies of requests. Unknown fields and wrong types are refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from latentkv import ranges
from latentkv.chat.tools import ToolUse
from latentkv.errors import expected
from latentkv.sampling.grammar import LlamaGrammar
from latentkv.sampling.options import NAMES, RANDOM_SEED, SERVER_NAMES, SamplingOptions, token_bias
from latentkv.sampling.order import with_samplers
from latentkv.server.fields import ChatIgnored, ChatRefused, Ignored, unless_null
from latentkv.server.llama_fields import BudgetFields, LlamaFields
from latentkv.text import stop_list

Text = Annotated[str, Field(max_length=1 << 26)]
Gbnf = Annotated[str, Field(max_length=1 << 16)]
MAX_ANSWERS = 1024  # most answers of a request: prompts times n
MAX_STOPS = 64  # strings, each looked for after every token
MAX_STOP_LENGTH = 4096  # characters
MAX_TOOLS = 512  # a grammar of thousands takes minutes and gigabytes


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _null_is_left_out(cls, given: Any) -> Any:
        """Drops fields that are null: as in OpenAI's interface they take the default."""
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None or cls._takes_null(name)}

    @classmethod
    def _takes_null(cls, name: str) -> bool:
        field = cls.model_fields.get(name)
        if field is None:
            return name not in _names()
        if field.is_required() or field.annotation is None:
            return True  # required and unknown fields are refused if they are null
        return type(None) in get_args(field.annotation)


@cache
def _names() -> frozenset[str]:
    """Fields that every body may have. A client may send null for any field it knows, on any route."""

    def below(body: type[Body]) -> Iterator[str]:
        yield from body.model_fields
        for each in body.__subclasses__():
            yield from below(each)

    return frozenset(below(Body))


def _limit(name: str, value: int | None, least: int, default: int = -1) -> int:
    if value is not None and value < least and value != -1:
        raise expected(name, f"a number of at least {least}, or -1 (as many as there is room for)", value)
    return default if value is None else value


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool = False  # would pad chunks; False is all there is
    reasoning_summary_delivery: str | None = None  # thoughts come whole, without a summary


class Sampling(LlamaFields, Body):
    """Sampling options, with OpenAI's names, or llama.cpp's if OpenAI has none."""

    seed: int | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: Annotated[int, Field(ge=-1, le=ranges.PENALTY_WINDOW.high)] | None = None  # -1: all
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    mirostat: Annotated[int, Field(ge=0, le=2)] | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    top_n_sigma: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: list[str] | None = None
    logit_bias: dict[str, float] | None = None
    grammar: Gbnf | None = None
    ignore_eos: bool = False

    def sampling(self, defaults: SamplingOptions, choice: int = 0) -> SamplingOptions:
        """choice: each of n has a seed of its own."""
        names = {name: getattr(self, SERVER_NAMES.get(name, name), None) for name in NAMES}
        names |= {
            "logit_bias": token_bias(self.logit_bias) if self.logit_bias else None,
            "grammar": LlamaGrammar(self.grammar) if self.grammar else None,
            "seed": self._seed(defaults.seed, choice),
        }
        options = replace(defaults, **{name: value for name, value in names.items() if value is not None})
        return options if self.samplers is None else with_samplers(options, self.samplers)

    def _seed(self, default: int, choice: int) -> int:
        asked = default if self.seed is None else self.seed
        return RANDOM_SEED if asked in (-1, RANDOM_SEED) else (asked + choice) % RANDOM_SEED


class Sampled(Sampling, Ignored):
    """Fields that both completion calls take."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=64)] = 1
    max_tokens: int | None = None
    stop: str | list[str] | None = None

    def limit(self, default: int = -1) -> int:
        """The most tokens of an answer; -1: as many as fit. default: the command line's."""
        return _limit("max_tokens", self.max_tokens, 1, default)

    def stops(self) -> list[str]:
        found = stop_list(self.stop)
        if len(found) > MAX_STOPS:
            raise expected("stop", f"at most {MAX_STOPS} strings", len(found))
        if (longest := max(map(len, found), default=0)) > MAX_STOP_LENGTH:
            raise expected("stop", f"strings of at most {MAX_STOP_LENGTH} characters", longest)
        return found


class CompletionBody(Sampled):
    # each kind ends with its first item of another: the errors of millions take seconds
    prompt: Annotated[
        Text
        | Annotated[list[int], Field(fail_fast=True)]
        | Annotated[list[Text], Field(fail_fast=True)]
        | Annotated[list[Annotated[list[int], Field(fail_fast=True)]], Field(fail_fast=True)],
        Field(union_mode="left_to_right"),
    ]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool = False
    best_of: Literal[1] | None = None
    suffix: Annotated[Any, unless_null("/infill fills gaps")] = None

    def limit(self, default: int = -1) -> int:
        """The same, but 16 if the command line does not say, as in OpenAI's interface."""
        return _limit("max_tokens", self.max_tokens, 0 if self.echo else 1, 16 if default == -1 else default)

    def prompts(self) -> list[str | list[int]]:
        """One or several prompts, as text or tokens."""
        found = self._prompts()
        if len(found) * self.n > MAX_ANSWERS:
            raise expected("prompt", f"at most {MAX_ANSWERS} answers, prompts times n", len(found) * self.n)
        return found

    def _prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise expected("prompt", "a text, tokens, or a list of them", "an empty list")
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)  # type: ignore[arg-type]


class TokenizeBody(Body):
    content: Text | Annotated[list[int | Text], Field(fail_fast=True)]
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeBody(Body):
    tokens: Annotated[list[int], Field(fail_fast=True)]


class ChatBody(Sampled, BudgetFields, ChatIgnored, ChatRefused):
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    # llama.cpp's server's
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_format: str = "auto"
    continue_final_message: bool | str = False
    add_generation_prompt: bool | None = None

    def use(self) -> ToolUse:
        """The tools that the call offers, and which of them it wants."""
        name, offered = ("functions", self.functions) if self.tools is None else ("tools", self.tools)
        if offered is not None and len(offered) > MAX_TOOLS:
            raise expected(name, f"at most {MAX_TOOLS}", len(offered))
        return ToolUse.of(self.tools, self.tool_choice, self.functions, self.function_call)

    def limit(self, default: int = -1) -> int:
        if self.max_completion_tokens is None:
            return super().limit(default)
        if self.max_tokens is not None:
            raise expected("max_tokens", "max_tokens or max_completion_tokens", "both")
        return _limit("max_completion_tokens", self.max_completion_tokens, 1, default)

    def ending(self) -> dict[str, Any]:
        """How the template ends the prompt: with the beginning of a new message, with the last one open, or
        with neither."""
        if self.add_generation_prompt and self.continue_final_message:
            raise expected("add_generation_prompt", "false beside continue_final_message", "true")
        if self.continue_final_message:
            return {"continue_final_message": self.continue_final_message}
        return {"add_generation_prompt": False} if self.add_generation_prompt is False else {}

    def template_kwargs(self) -> dict[str, Any] | None:
        """Variables of the template. As in llama.cpp's server, the template interprets the effort, and none
        disables thinking."""
        given = self.chat_template_kwargs
        if self.reasoning_effort is None:
            return given
        without = {name: value for name, value in (given or {}).items() if name != "reasoning_effort"}
        if self.reasoning_effort == "none":
            return without | {"enable_thinking": False}
        return without | {"reasoning_effort": self.reasoning_effort}

    def rivals(self) -> int | None:
        """The number of alternatives that are reported per token; None: no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs or self.top_logprobs else None
