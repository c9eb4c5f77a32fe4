"""OpenAI's parameters that no route reads: some have no effect and are accepted, others are refused. Null
always means left out."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator
from pydantic_core import PydanticCustomError


def unless_null(reason: str) -> BeforeValidator:
    """Refuses a parameter, for this reason, unless it is null."""

    def refuse(value: Any) -> Any:
        if value is not None:
            raise PydanticCustomError("refused", f"expected null, or no such parameter; got one: {reason}")

    return BeforeValidator(refuse)


class Ignored(BaseModel):
    """Parameters of OpenAI's service that change no answer."""

    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None


class ChatIgnored(Ignored):
    """The same for a chat call. No template reads verbosity."""

    verbosity: Literal["low", "medium", "high"] | None = None
    modalities: list[Literal["text"]] | None = None


class ChatRefused(BaseModel):
    audio: Annotated[Any, unless_null("models here write text")] = None
    prediction: Annotated[Any, unless_null("nothing is drafted from it")] = None
    moderation: Annotated[Any, unless_null("nothing is moderated")] = None
    web_search_options: Annotated[Any, unless_null("nothing here searches the web")] = None
