"""POST /completion, /completions, /infill and /apply-template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool

from latentkv.engine.request import Request
from latentkv.server import chat
from latentkv.server.answering import Inbox, unless_gone, wholes
from latentkv.server.body import Route
from latentkv.server.events import EventStream, Wire
from latentkv.server.llama_cpp.body import InfillBody, NativeBody
from latentkv.server.llama_cpp.infill import infill_prompt
from latentkv.server.llama_cpp.prompts import mixed_tokens
from latentkv.server.llama_cpp.shape import NativeShape
from latentkv.server.schemas import ChatBody
from latentkv.server.serving import Serving, serving_of

router = APIRouter(route_class=Route)
Served = Annotated[Serving, Depends(serving_of)]


@router.post("/completion")
@router.post("/completions", include_in_schema=False)
async def completion(body: NativeBody, http: HttpRequest, serving: Served) -> Any:
    prompts = await run_in_threadpool(_tokens, body, serving)
    return await _answer(prompts, body, http, serving)


@router.post("/infill")
async def infill(body: InfillBody, http: HttpRequest, serving: Served) -> Any:
    prompt = await run_in_threadpool(infill_prompt, serving, body)
    return await _answer([prompt], body, http, serving)


@router.post("/apply-template")
async def apply_template(body: ChatBody, serving: Served) -> dict[str, str]:
    serving.check_model(body.model)
    prompt, _ = await run_in_threadpool(chat.asked, body, serving)
    return {"prompt": prompt.text}


def _tokens(body: NativeBody, serving: Serving) -> list[list[int]]:
    found = [mixed_tokens(serving, each, special=True, start=True) for each in body.prompts()]
    # an empty text in a vocabulary without a start token
    return [tokens or serving.tokens("") for tokens in found]


async def _answer(prompts: list[list[int]], body: NativeBody, http: HttpRequest, serving: Serving) -> Any:
    serving.check_model(body.model)
    requests = await run_in_threadpool(_asked, prompts, body, serving)
    inbox = Inbox()
    answers = serving.answering(requests, inbox)
    shapes = [NativeShape(answer, body, serving, index) for index, answer in enumerate(answers)]
    if body.stream:
        return EventStream(answers, shapes, inbox, wire=Wire(last=()))
    pieces = await unless_gone(http, wholes(answers, inbox))

    def told() -> JSONResponse:
        each = [shape.whole(its) for shape, its in zip(shapes, pieces, strict=True)]
        return JSONResponse(each[0] if len(each) == 1 else each)

    return await run_in_threadpool(told)


def _asked(prompts: Sequence[list[int]], body: NativeBody, serving: Serving) -> list[Request]:
    reuse = serving.scheduler.sequences.reuse
    body.check_cache(serving.scheduler.sequences.shift, 0 if reuse is None else reuse.least)
    body.check_rivals(len(prompts), serving.n_predict, serving.scheduler.n_ctx_seq)
    return [
        Request(
            prompt,
            body.drawn(serving.model, serving.sampling, choice),
            max_tokens=body.limit(serving.n_predict),
            stop=body.stops(),
            logprobs=body.rivals(),
            ignore_eos=body.ignore_eos,
            with_tokens=body.stream or body.return_tokens,
            behind_samplers=body.post_sampling_probs,
            **body.manner(serving.salt),
        )
        for prompt in prompts
        for choice in range(body.choices())
    ]
