"""POST /v1/chat/completions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from fastapi import Request as HttpRequest
from starlette.concurrency import run_in_threadpool

from latentkv.chat.prompt import ChatPrompt, chat_request
from latentkv.chat.thoughts import ThoughtLimit, thinking_kwargs
from latentkv.engine.request import Request
from latentkv.generate.chat import ChatShape
from latentkv.server.answering import Answering, Inbox, unless_gone, wholes
from latentkv.server.body import Route
from latentkv.server.completions import timings_of, usage_of
from latentkv.server.events import EventStream, dumped
from latentkv.server.left_out import readable
from latentkv.server.schemas import ChatBody
from latentkv.server.serving import Serving, serving_of

router = APIRouter(route_class=Route)


@router.post("/v1/chat/completions")
@router.post("/chat/completions", include_in_schema=False)
async def chat(body: ChatBody, http: HttpRequest, serving: Annotated[Serving, Depends(serving_of)]) -> Any:
    serving.check_model(body.model)
    # a template and its tokens take seconds, of a chat of megabytes
    prompt, requests = await run_in_threadpool(asked, body, serving)
    inbox = Inbox()
    answers = serving.answering(requests, inbox)
    shapes = [
        ChatShape(serving.name, prompt.parser, body.rivals() is not None, index, body.use().as_function)
        for index in range(body.n)
    ]
    for shape, answer in zip(shapes, answers, strict=True):
        shape.head = shapes[0].head  # one answer has one id
        shape.on_message = partial(remember, prompt, answer)
    if body.stream:
        begin = [dumped(shape.first()) for shape in shapes]
        return EventStream(answers, shapes, inbox, begin, lambda: last(shapes, answers, body))
    pieces = await unless_gone(http, wholes(answers, inbox))
    parts = [
        shape.whole(each, answer.ticket.progress)
        for shape, each, answer in zip(shapes, pieces, answers, strict=True)
    ]
    return parts[0] | {
        "choices": [choice for part in parts for choice in part["choices"]],
        "usage": usage_of(answers, body.n),
        "timings": timings_of(answers),
    }


@router.post("/v1/chat/completions/input_tokens")
async def input_tokens(body: ChatBody, serving: Annotated[Serving, Depends(serving_of)]) -> dict[str, Any]:
    """The number of tokens of the prompt, in the shape of llama.cpp's server."""
    serving.check_model(body.model)
    prompt, _ = await run_in_threadpool(asked, body, serving)
    return {"object": "response.input_tokens", "input_tokens": len(prompt.tokens)}


def remember(prompt: ChatPrompt, answer: Answering, message: dict[str, Any]) -> None:
    """Remembers the tokens of an answer, for the request in which it comes back."""
    progress = answer.ticket.progress
    if prompt.remember is not None:
        prompt.remember(message, progress.tokens, progress.end)


def asked(body: ChatBody, serving: Serving) -> tuple[ChatPrompt, list[Request]]:
    """The prompt, and one request for each of n answers."""
    messages = readable(body.messages)
    serving.check_messages(messages)
    serving.check_length(len(json.dumps(body.tools or body.functions or ())))
    sampling = body.sampling(serving.sampling)
    budget = body.budget(serving.reasoning_budget)
    prompt = chat_request(
        serving.model,
        serving.template,
        messages,
        body.use(),
        sampling.grammar,
        body.response_format,
        serving.check_length,
        serving.memory,
        serving.salt(body.cache_salt),
        parallel_tool_calls=body.parallel_tool_calls,
        chat_template_kwargs=thinking_kwargs(body.template_kwargs(), budget),
        **body.ending(),
        reasoning_format=body.reasoning_format,
    )
    message = body.reasoning_budget_message
    message = serving.reasoning_budget_message if message is None else message
    return prompt, [
        Request(
            prompt.tokens,
            replace(body.sampling(serving.sampling, choice), grammar=prompt.grammar),
            max_tokens=body.limit(serving.n_predict),
            stop=body.stops() + prompt.stop,
            logprobs=body.rivals(),
            ignore_eos=body.ignore_eos,
            **body.manner(serving.salt),
            shown=prompt.shown,
            thoughts=ThoughtLimit.of(prompt.thoughts, budget, message),
        )
        for choice in range(body.n)
    ]


def last(shapes: Sequence[ChatShape], answers: Sequence[Answering], body: ChatBody) -> list[dict[str, Any]]:
    """The chunks after all others."""
    if body.stream_options is None or not body.stream_options.include_usage:
        return []
    counted = {"usage": usage_of(answers, body.n), "timings": timings_of(answers)}
    return [shapes[0].head | {"object": "chat.completion.chunk", "choices": []} | counted]
