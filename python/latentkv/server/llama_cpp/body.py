"""Bodies of llama.cpp's own routes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from latentkv import _core
from latentkv.engine.shift import Shift
from latentkv.errors import expected
from latentkv.sampling.grammar import LlamaGrammar
from latentkv.sampling.options import SamplingOptions
from latentkv.server.llama_cpp.prompts import prompts_of
from latentkv.server.schemas import MAX_ANSWERS, Body, Sampled, Text
from latentkv.text import utf8

Number = bool | int | float
_NEVER = float("-inf")
MAX_RIVALS = 1 << 19  # alternatives of a whole answer: a kilobyte each


class NativeBody(Sampled):
    """A body of /completion. `n_predict` also has the names of OpenAI's limits, `n_cmpl` that of its
    choices."""

    prompt: Any
    n_predict: Annotated[int, Field(ge=-1)] | None = None
    max_tokens: Annotated[int, Field(ge=-1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=-1)] | None = None
    n_cmpl: Annotated[int, Field(ge=1, le=64)] | None = None
    n_probs: Annotated[int, Field(ge=0, le=1 << 16)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=1 << 16)] | None = None
    post_sampling_probs: bool = False
    json_schema: dict[str, Any] | bool | None = None
    logit_bias: Any = None
    stop: str | list[str] | None = None
    return_tokens: bool = False
    response_fields: list[str] | None = None
    timings_per_token: bool = False
    n_keep: Annotated[int, Field(ge=-1)] | None = None
    n_discard: Annotated[int, Field(ge=0)] | None = None
    n_cache_reuse: Annotated[int, Field(ge=0)] | None = None
    # fields with only one legal value here
    stream_options: None = None
    echo: Literal[False] = False
    verbose: Literal[False] = False
    return_progress: Literal[False] = False
    sse_ping_interval: Annotated[int, Field(ge=-1, le=-1)] | None = None
    image_data: Annotated[list[Any], Field(max_length=0)] | None = None
    grammar_lazy: Literal[False] = False
    grammar_triggers: Annotated[list[Any], Field(max_length=0)] | None = None
    preserved_tokens: Annotated[list[Any], Field(max_length=0)] | None = None

    def choices(self) -> int:
        return self.n if self.n_cmpl is None else self.n_cmpl

    def prompts(self) -> list[Any]:
        found = prompts_of(self.prompt)
        if len(found) * self.choices() > MAX_ANSWERS:
            answers = len(found) * self.choices()
            raise expected("prompt", f"at most {MAX_ANSWERS} answers, prompts times n_cmpl", answers)
        return found

    def limit(self, default: int = -1) -> int:
        """The most tokens of an answer; 0: the prompt is read and nothing written; -1: as many as there is
        room for."""
        asked = (self.n_predict, self.max_tokens, self.max_completion_tokens)
        return next((each for each in asked if each is not None), default)

    def rivals(self) -> int | None:
        """The number of alternatives that are reported per token; None: no probabilities."""
        return (self.logprobs if self.n_probs is None else self.n_probs) or None

    def check_rivals(self, n_prompts: int, n_predict: int, n_ctx: int) -> None:
        """Raises LatentKVError if the answer has too many alternatives to be kept until it is whole."""
        limit = self.limit(n_predict)
        n_tokens = n_ctx if limit < 0 else min(limit, n_ctx)
        count = n_prompts * self.choices() * n_tokens * (self.rivals() or 0)
        if count > MAX_RIVALS and not self.stream:
            wanted = f"n_probs times n_predict of at most {MAX_RIVALS}, or a stream"
            raise expected("n_probs", wanted, count)

    def drawn(self, model: _core.Model, defaults: SamplingOptions, choice: int = 0) -> SamplingOptions:
        """sampling() with llama.cpp's own options. A schema takes precedence over an empty grammar."""
        options = self.model_copy(update={"logit_bias": None}).sampling(defaults, choice)
        if self.logit_bias:
            options = replace(options, logit_bias=biases(model, self.logit_bias))
        if self.json_schema is None or self.json_schema is False:
            return options
        if self.grammar:
            raise expected("json_schema", "no grammar beside it", "both")
        schema = {} if self.json_schema is True else self.json_schema
        return replace(options, grammar=LlamaGrammar.from_json_schema(schema))

    def check_cache(self, shift: Shift | None, least_reused: int) -> None:
        """Raises LatentKVError if the body contradicts the command line. Without --context-shift nothing is
        dropped, so n_keep has no meaning."""
        if shift is not None and self.n_keep not in (None, shift.n_keep):
            raise expected("n_keep", f"{shift.n_keep}, as the server was started", self.n_keep, "use --keep")
        if shift is not None and self.n_discard:
            raise expected("n_discard", "0: half of the tokens", self.n_discard)
        if self.n_cache_reuse not in (None, least_reused):
            got, hint = self.n_cache_reuse, "start the server with --cache-reuse"
            raise expected("n_cache_reuse", f"{least_reused}, as the server was started", got, hint)


class InfillChunk(Body):
    text: Text
    filename: Text = "tmp"


class InfillBody(NativeBody):
    input_prefix: Text
    input_suffix: Text
    input_extra: list[InfillChunk] = Field(default_factory=list)
    prompt: Text = ""


def biases(model: _core.Model, given: Any) -> dict[int, float]:
    """llama.cpp's `logit_bias`: pairs [token id or text, bias], or a map from either, where a text of digits
    is an id. false bans a token; a text stands for each of its tokens."""
    is_map = isinstance(given, Mapping)
    pairs = list(given.items()) if is_map else given
    if not isinstance(pairs, list):
        raise expected("logit_bias", "a list of [token or text, bias], or a map", type(given).__name__)
    found: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise expected("logit_bias", "pairs [token or text, bias]", repr(pair))
        key, bias = pair
        if bias is True or not isinstance(bias, Number):
            raise expected("logit_bias", "a number, or false, as a bias", repr(bias))
        for token in [int(key)] if is_map and _is_number(key) else _tokens(model, key):
            if not 0 <= token < model.n_vocab:
                raise expected("logit_bias", f"token ids below {model.n_vocab}", token)
            found[token] = _NEVER if bias is False else found.get(token, 0.0) + float(bias)
    return found


def _is_number(key: str) -> bool:
    return key.removeprefix("-").isascii() and key.removeprefix("-").isdigit()


def _tokens(model: _core.Model, key: Any) -> list[int]:
    if isinstance(key, int) and not isinstance(key, bool):
        return [key]
    if not isinstance(key, str):
        raise expected("logit_bias", "a token id or a text", repr(key))
    return list(model.tokenize(utf8(key, "logit_bias"), False, False))
