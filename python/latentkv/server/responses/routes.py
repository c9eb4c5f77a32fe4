"""POST /v1/responses. Nothing is stored: every request contains its whole conversation."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool

from latentkv.engine.request import TooLong
from latentkv.server.answering import Inbox, unless_gone, wholes
from latentkv.server.blocks import Blocks
from latentkv.server.body import Route
from latentkv.server.chat import asked, remember
from latentkv.server.errors import Refused, of
from latentkv.server.events import EventStream, Wire, named
from latentkv.server.responses.body import ResponsesBody
from latentkv.server.responses.shape import Beginning, ResponseShape
from latentkv.server.serving import Serving, serving_of

router = APIRouter(route_class=Route)
Served = Annotated[Serving, Depends(serving_of)]


@router.post("/v1/responses")
@router.post("/responses", include_in_schema=False)
async def responses(body: ResponsesBody, http: HttpRequest, serving: Served) -> Any:
    serving.check_model(body.model)
    inbox = Inbox()
    try:
        prompt, requests = await run_in_threadpool(lambda: asked(body.as_chat(), serving))
        answers = serving.answering(requests, inbox)
    except TooLong as error:
        if not body.stream:
            raise
        return _too_long(body, serving, error)
    blocks = Blocks(prompt.parser, partial(remember, prompt, answers[0]))
    shape = ResponseShape(body, serving, blocks, answers[0].ticket.progress)
    if body.stream:
        begin = [named(event) for event in shape.first()]
        wire = Wire("event: ", shape.failed, last=())
        return EventStream(answers, [shape], inbox, begin, wire=wire)
    (pieces,) = await unless_gone(http, wholes(answers, inbox))
    return JSONResponse(shape.whole(pieces))


def _too_long(body: ResponsesBody, serving: Serving, error: TooLong) -> EventStream:
    """A stream that begins and fails, as OpenAI's service has it: there agents look for the code by which
    they shorten a conversation."""
    begun = Beginning(body, serving)
    begin = [*map(named, begun.first()), *begun.failed(of(error))]
    return EventStream((), (), Inbox(), begin, wire=Wire("event: ", last=()))


@router.post("/v1/responses/input_tokens")
async def input_tokens(body: ResponsesBody, serving: Served) -> dict[str, Any]:
    serving.check_model(body.model)
    prompt, _ = await run_in_threadpool(lambda: asked(body.as_chat(), serving))
    return {"object": "response.input_tokens", "input_tokens": len(prompt.tokens)}


@router.get("/v1/responses/{name}", include_in_schema=False)
@router.delete("/v1/responses/{name}", include_in_schema=False)
@router.post("/v1/responses/{name}/cancel", include_in_schema=False)
@router.get("/v1/responses/{name}/input_items", include_in_schema=False)
async def stored(name: str) -> None:
    raise Refused(404, f"[response_id] expected no stored response, as none is kept here; got {name}")
