"""Parameters that llama.cpp's server adds to OpenAI's, for every route that writes an answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from latentkv.engine.lines import LineLimits


class BudgetFields(BaseModel):
    """How long a model may think, for every route of chats; -1: as the command line says."""

    reasoning_budget_tokens: Annotated[int, Field(ge=-1)] = -1
    thinking_budget_tokens: Annotated[int, Field(ge=-1)] = -1  # the same
    reasoning_budget_message: Annotated[str, Field(max_length=4096)] | None = None

    def budget(self, default: int) -> int:
        """Tokens of a thought; -1: as many as the model likes."""
        asked = (self.reasoning_budget_tokens, self.thinking_budget_tokens)
        return next((each for each in asked if each >= 0), default)


class LlamaFields(BaseModel):
    cache_prompt: bool = True
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None  # vLLM's
    id_slot: Annotated[int, Field(ge=-1)] = -1
    samplers: str | list[str] | None = None
    min_keep: Annotated[int, Field(ge=0)] | None = None
    n_indent: Annotated[int, Field(ge=0)] = 0
    t_max_predict_ms: Annotated[int, Field(ge=-1)] = 0
    # fields that llama.cpp's server accepts without reading them, and fields with only one legal value here
    t_max_prompt_ms: int | None = None
    lora: Annotated[list[Any], Field(max_length=0)] | None = None  # adapters are merged before converting
    backend_sampling: Literal[False] = False
    adaptive_target: Annotated[float, Field(lt=0)] | None = None
    adaptive_decay: float | None = None  # has no effect: the target is off

    def manner(self, salt: Callable[[str | None], str]) -> dict[str, Any]:
        """Keywords of engine.request.Request: where an answer is written, for how long, and after whose
        beginnings. salt: Serving's."""
        limits = LineLimits(max(0, self.t_max_predict_ms) / 1e3, self.n_indent)
        return {
            "reuses": self.cache_prompt,
            "slot": self.id_slot,
            "lines": limits if limits != LineLimits() else None,
            "salt": salt(self.cache_salt),
        }
