"""Bodies of requests. A field that nobody reads is refused by name, not ignored; wrong types are too."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from latentkv.errors import expected
from latentkv.grammar import LlamaGrammar
from latentkv.sampling import SamplingOptions, token_bias
from latentkv.text import stop_list

Text = Annotated[str, Field(max_length=1 << 26)]


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())


def _limit(name: str, value: int | None, least: int) -> int:
    if value is not None and value < least and value != -1:
        raise expected(name, f"a number of at least {least}, or -1 (as many as there is room for)", value)
    return -1 if value is None else value


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool = False  # would pad chunks; False is all there is


class Sampled(Body):
    """What both completion calls take: OpenAI's names, and llama.cpp's where OpenAI has none."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=64)] = 1
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    logit_bias: dict[str, float] | None = None
    grammar: Text | None = None
    ignore_eos: bool = False
    cache_prompt: Literal[True] = True
    # of OpenAI's service, without a meaning here
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None

    def limit(self) -> int:
        """Of tokens; -1: as many as there is room for."""
        return _limit("max_tokens", self.max_tokens, least=1)

    def stops(self) -> list[str]:
        found = stop_list(self.stop)
        if any(not each for each in found):
            raise expected("stop", "strings of at least one character", "''")
        return found

    def sampling(self, defaults: SamplingOptions, choice: int = 0) -> SamplingOptions:
        """choice: each of n has a seed of its own."""
        names: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "typical_p": self.typical_p,
            "repeat_penalty": self.repeat_penalty,
            "penalty_last_n": self.repeat_last_n,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "mirostat_mode": self.mirostat,
            "mirostat_tau": self.mirostat_tau,
            "mirostat_eta": self.mirostat_eta,
            "logit_bias": token_bias(self.logit_bias) if self.logit_bias else None,
            "grammar": LlamaGrammar(self.grammar) if self.grammar else None,
            "seed": None if self.seed is None or self.seed == -1 else (self.seed + choice) % 2**32,
        }
        return replace(defaults, **{name: value for name, value in names.items() if value is not None})


class CompletionBody(Sampled):
    prompt: Text | list[Text] | list[int] | list[list[int]]
    max_tokens: int | None = 16
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool = False
    best_of: Literal[1] | None = None
    suffix: None = None

    def limit(self) -> int:
        return _limit("max_tokens", self.max_tokens, least=0 if self.echo else 1)

    def prompts(self) -> list[str | list[int]]:
        """One or several, as text or tokens."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise expected("prompt", "a text, tokens, or a list of them", "an empty list")
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)  # type: ignore[arg-type]


class TokenizeBody(Body):
    content: Text
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeBody(Body):
    tokens: list[int]


class ChatBody(Sampled):
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    def limit(self) -> int:
        if self.max_completion_tokens is None:
            return super().limit()
        if self.max_tokens is not None:
            raise expected("max_tokens", "max_tokens or max_completion_tokens", "both")
        return _limit("max_completion_tokens", self.max_completion_tokens, least=1)

    def rivals(self) -> int | None:
        """Reported per token; None: no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs or self.top_logprobs else None
