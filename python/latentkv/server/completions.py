"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool

from latentkv.engine.request import Request
from latentkv.generate.completion import CompletionShape, usage
from latentkv.generate.writer import Piece
from latentkv.server.answering import Answering, Inbox, unless_gone, wholes
from latentkv.server.body import Route
from latentkv.server.events import EventStream
from latentkv.server.schemas import CompletionBody
from latentkv.server.serving import Serving, serving_of

router = APIRouter(route_class=Route)


@router.post("/v1/completions")
async def completions(
    body: CompletionBody, http: HttpRequest, serving: Annotated[Serving, Depends(serving_of)]
) -> Any:
    serving.check_model(body.model)
    requests, texts = await run_in_threadpool(asked, body, serving)
    inbox = Inbox()
    answers = serving.answering(requests, inbox)
    shapes = [
        CompletionShape(serving.name, len(text), body.logprobs is not None, index)
        for index, text in enumerate(texts)
    ]
    for shape in shapes:
        shape.head = shapes[0].head  # one answer has one id
    if body.echo and body.logprobs is None:
        for index, text in enumerate(texts):
            inbox.put(index, Piece(text))
    if not body.stream:
        pieces = await unless_gone(http, wholes(answers, inbox))
        # scores of a long prompt are megabytes of JSON
        return await run_in_threadpool(lambda: JSONResponse(whole(shapes, pieces, answers, body.n)))
    return EventStream(answers, shapes, inbox, end=lambda: last(shapes, answers, body))


def asked(body: CompletionBody, serving: Serving) -> tuple[list[Request], list[str]]:
    """One request for each of n answers to every prompt, and the text that an echo puts before it."""
    prompts = [serving.tokens(prompt) for prompt in body.prompts()]
    sampling = [body.sampling(serving.sampling, choice) for choice in range(body.n)]
    grammar = sampling[0].grammar
    if grammar is not None:
        grammar.prepare(serving.model)  # here, not in the step that all share
    requests = [
        Request(
            prompt,
            replace(sampling[choice], grammar=grammar),
            max_tokens=body.limit(serving.n_predict),
            stop=body.stops(),
            logprobs=body.logprobs,
            ignore_eos=body.ignore_eos,
            **body.manner(serving.salt),
            scores_prompt=body.echo and body.logprobs is not None,
        )
        for prompt in prompts
        for choice in range(body.n)
    ]
    texts = [serving.text(prompt) if body.echo else "" for prompt in prompts for _ in range(body.n)]
    return requests, texts


def whole(
    shapes: Sequence[CompletionShape], pieces: Sequence[list[Piece]], answers: Sequence[Answering], n: int
) -> dict[str, Any]:
    parts = [
        shape.whole(each, answer.ticket.progress)
        for shape, each, answer in zip(shapes, pieces, answers, strict=True)
    ]
    return parts[0] | {
        "choices": [choice for part in parts for choice in part["choices"]],
        "usage": usage_of(answers, n),
        "timings": timings_of(answers),
    }


def last(
    shapes: Sequence[CompletionShape], answers: Sequence[Answering], body: CompletionBody
) -> list[dict[str, Any]]:
    """The chunks after all others."""
    if body.stream_options is None or not body.stream_options.include_usage:
        return []
    counted = {"usage": usage_of(answers, body.n), "timings": timings_of(answers)}
    return [shapes[0].head | {"choices": []} | counted]


@dataclass
class _Sum:
    prompt_tokens: int
    completion_tokens: int


def usage_of(answers: Sequence[Answering], n: int) -> dict[str, Any]:
    """The usage. A prompt with n choices counts once."""
    progress = [answer.ticket.progress for answer in answers]
    prompts = sum(each.prompt_tokens for each in progress[::n])
    cached = sum(each.timings.cached_n for each in progress[::n])
    counted = usage(_Sum(prompts, sum(each.completion_tokens for each in progress)))
    return counted | {"prompt_tokens_details": {"cached_tokens": cached}}


def timings_of(answers: Sequence[Answering]) -> dict[str, float]:
    """The timings of the first answer, in the shape of llama.cpp's server."""
    return answers[0].ticket.progress.timings.as_dict()
