"""POST /v1/messages, and the token count of a message."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from fastapi import Request as HttpRequest
from starlette.concurrency import run_in_threadpool

from latentkv.server.answering import Inbox, unless_gone, wholes
from latentkv.server.blocks import Blocks
from latentkv.server.body import Route
from latentkv.server.chat import asked, remember
from latentkv.server.events import EventStream, Wire
from latentkv.server.messages.body import CountBody, MessagesBody
from latentkv.server.messages.shape import PING, MessageShape
from latentkv.server.serving import Serving, serving_of

router = APIRouter(route_class=Route)
Served = Annotated[Serving, Depends(serving_of)]


@router.post("/v1/messages")
async def messages(body: MessagesBody, http: HttpRequest, serving: Served) -> Any:
    serving.check_model(body.model)
    prompt, requests = await run_in_threadpool(lambda: asked(body.as_chat(), serving))
    inbox = Inbox()
    answers = serving.answering(requests, inbox)
    progress, stops = answers[0].ticket.progress, body.stop_sequences or ()
    blocks = Blocks(prompt.parser, partial(remember, prompt, answers[0]))
    shape = MessageShape(serving.name, blocks, progress, stops, body.omits_thoughts)
    if body.stream:
        wire = Wire("event: ", shape.failed, last=(), ping=PING)
        return EventStream(answers, [shape], inbox, wire=wire)
    (pieces,) = await unless_gone(http, wholes(answers, inbox))
    return shape.whole(pieces)


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountBody, serving: Served) -> dict[str, int]:
    serving.check_model(body.model)
    prompt, _ = await run_in_threadpool(lambda: asked(body.as_chat(), serving))
    return {"input_tokens": len(prompt.tokens)}
