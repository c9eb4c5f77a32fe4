"""POST /v1/responses, which goes on from stored ones, and what else becomes of these."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Response
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool

from latentkv.chat.prompt import ChatPrompt
from latentkv.engine.request import Request, TooLong
from latentkv.errors import expected
from latentkv.server.answering import Inbox, unless_gone, wholes
from latentkv.server.blocks import Blocks
from latentkv.server.body import Route
from latentkv.server.chat import asked, remember
from latentkv.server.errors import Refused, of
from latentkv.server.events import EventStream, Wire, named
from latentkv.server.responses.body import ResponsesBody
from latentkv.server.responses.shape import Beginning, ResponseShape
from latentkv.server.responses.stored import Stored
from latentkv.server.serving import Serving, serving_of

router = APIRouter(route_class=Route)
Served = Annotated[Serving, Depends(serving_of)]
Keep = Callable[[dict[str, Any]], None]


@router.post("/v1/responses")
@router.post("/responses", include_in_schema=False)
async def responses(body: ResponsesBody, http: HttpRequest, serving: Served) -> Any:
    serving.check_model(body.model)
    inbox = Inbox()
    try:
        prompt, requests, keep = await run_in_threadpool(_asked, body, serving)
        answers = serving.answering(requests, inbox)
    except TooLong as error:
        if not body.stream:
            raise
        return _too_long(body, serving, error)
    blocks = Blocks(prompt.parser, partial(remember, prompt, answers[0]))
    shape = ResponseShape(body, serving, blocks, answers[0].ticket.progress, keep)
    if body.stream:
        begin = [named(event) for event in shape.first()]
        wire = Wire("event: ", shape.failed, last=())
        return EventStream(answers, [shape], inbox, begin, wire=wire)
    (pieces,) = await unless_gone(http, wholes(answers, inbox))
    return JSONResponse(shape.whole(pieces))


def _asked(body: ResponsesBody, serving: Serving) -> tuple[ChatPrompt, list[Request], Keep]:
    """What the engine is asked, and what keeps the answer."""
    salt, previous = serving.salt(body.cache_salt), body.previous_response_id or ""
    whole = body.behind(serving.responses.conversation(previous, salt))
    if body.store is False or not serving.responses.keeps:
        return *asked(whole.as_chat(), serving), lambda response: None
    try:
        given = json.dumps(body.items(), allow_nan=False).encode()
    except ValueError:
        raise expected("input", "finite numbers", "NaN or infinity") from None

    def keep(response: dict[str, Any]) -> None:
        stored = Stored(json.dumps(response).encode(), given, previous, salt)
        serving.responses.put(response["id"], stored)

    return *asked(whole.as_chat(), serving), keep


def _too_long(body: ResponsesBody, serving: Serving, error: TooLong) -> EventStream:
    """A stream that begins and fails, as OpenAI's service has it: there agents look for the code by which
    they shorten a conversation."""
    begun = Beginning(body, serving)
    begin = [*map(named, begun.first()), *begun.failed(of(error))]
    return EventStream((), (), Inbox(), begin, wire=Wire("event: ", last=()))


@router.post("/v1/responses/input_tokens")
async def input_tokens(body: ResponsesBody, serving: Served) -> dict[str, Any]:
    serving.check_model(body.model)
    prompt, _, _ = await run_in_threadpool(_asked, body, serving)
    return {"object": "response.input_tokens", "input_tokens": len(prompt.tokens)}


@router.get("/v1/responses/{name}")
def stored(name: str, serving: Served, stream: bool = False, cache_salt: str | None = None) -> Response:
    if stream:
        raise Refused(501, "[stream] expected false, as what is stored is whole; got true")
    found = serving.responses.get(name, serving.salt(cache_salt))
    return Response(found.response, media_type="application/json")


@router.delete("/v1/responses/{name}")
def delete(name: str, serving: Served, cache_salt: str | None = None) -> dict[str, Any]:
    serving.responses.delete(name, serving.salt(cache_salt))
    return {"id": name, "object": "response", "deleted": True}


@router.get("/v1/responses/{name}/input_items")
def input_items(
    name: str,
    serving: Served,
    order: Literal["asc", "desc"] = "desc",
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: str | None = None,
    cache_salt: str | None = None,
) -> dict[str, Any]:
    """What a response was asked, in pages as OpenAI's."""
    items = json.loads(serving.responses.get(name, serving.salt(cache_salt)).asked)
    items = items[::-1] if order == "desc" else items
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise expected("after", "an item of this response", after)
    begin = 0 if after is None else ids.index(after) + 1
    end = begin + limit
    shown = {"first_id": next(iter(ids[begin:end]), None), "last_id": next(iter(ids[begin:end][::-1]), None)}
    return {"object": "list", "data": items[begin:end], "has_more": end < len(items), **shown}


@router.post("/v1/responses/{name}/cancel", include_in_schema=False)
def cancel(name: str, serving: Served, cache_salt: str | None = None) -> None:
    serving.responses.get(name, serving.salt(cache_salt))
    raise Refused(400, f"[response_id] expected a response that runs in the background; got {name}")
